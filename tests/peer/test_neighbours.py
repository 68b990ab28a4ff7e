"""Hellos between two simulated peers and a third that nobody can reach, in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from open_gate import OpenGate

from shoal.peer.presence.neighbours import Neighbours
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PresenceUpdate
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import SimPeer, World

SILENCE_S = 30.0


def presence(count: int, *, incarnation: int = 1, version: int = 0) -> PresenceUpdate:
    return PresenceUpdate(
        incarnation=incarnation, count=count, plan_sequence=1, stage=0, version=version, ready=True, is_open=True
    )


@dataclass
class Ear:
    """One peer, and what its Neighbours told it, in order."""

    peer: SimPeer
    endpoint: Endpoint
    neighbours: Neighbours
    told: list[tuple[str, PeerID, int]] = field(default_factory=list)
    strangers: set[PeerID] = field(default_factory=set)
    """Whom no plan of late names."""


def ear(world: World, name: str) -> Ear:
    peer = world.add_peer(name, device_flop_per_s=1e12)
    endpoint = Endpoint(peer.identity, peer.transport, run="run", gate=OpenGate())
    told: list[tuple[str, PeerID, int]] = []
    strangers: set[PeerID] = set()
    parts = SimpleNamespace(
        stage=None,
        audience=[],
        heard=lambda source, said: told.append(("state", source, said.version)),
        reborn=lambda source, incarnation: told.append(("reborn", source, incarnation)),
        silent=lambda source: told.append(("silence", source, -1)),
    )
    neighbours = Neighbours(
        endpoint,
        peer.clock,
        cast(Any, SimpleNamespace(newest=None, knows=lambda source: source not in strangers)),
        cast(Any, parts),
        cast(Any, SimpleNamespace(presence=lambda: presence(0))),
        silence_s=SILENCE_S,
    )
    return Ear(peer, endpoint, neighbours, told, strangers)


def play(scene: Callable[[Ear, Ear], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        world = World(0, uniform(0.01))
        ears = [ear(world, name) for name in ("listener", "speaker")]
        for one in ears:
            for other in ears:
                await one.peer.transport.introduce(other.peer.peer_id, other.peer.transport.addresses())
        await scene(*ears)
        for one in ears:
            await one.neighbours.close()

    run(main())


async def tell(speaker: Ear, listener: Ear, *words: PresenceUpdate) -> None:
    for word in words:
        await speaker.endpoint.ask(listener.peer.peer_id, word, PresenceUpdate)


def test_a_word_that_a_later_one_has_overtaken_changes_nothing() -> None:
    async def scene(listener: Ear, speaker: Ear) -> None:
        await tell(speaker, listener, presence(3, version=3), presence(2, version=2), presence(3, version=3))
        assert listener.told == [("state", speaker.peer.peer_id, 3)]
        last = dict(listener.neighbours.words()).get(speaker.peer.peer_id)
        assert last is not None
        assert last.version == 3

    play(scene)


def test_a_new_incarnation_is_told_before_its_state_however_low_it_counts() -> None:
    async def scene(listener: Ear, speaker: Ear) -> None:
        source = speaker.peer.peer_id
        await tell(speaker, listener, presence(9, version=5), presence(1, incarnation=2, version=0))
        assert listener.told == [("state", source, 5), ("reborn", source, 2), ("state", source, 0)]

    play(scene)


def test_the_first_word_of_anyone_is_no_rebirth_and_the_dead_are_not_heard() -> None:
    async def scene(listener: Ear, speaker: Ear) -> None:
        await tell(speaker, listener, presence(1, incarnation=7, version=1), presence(99, incarnation=6, version=9))
        assert listener.told == [("state", speaker.peer.peer_id, 1)]

    play(scene)


def test_who_is_forgotten_begins_as_a_stranger() -> None:
    async def scene(listener: Ear, speaker: Ear) -> None:
        await tell(speaker, listener, presence(5, version=5))
        listener.neighbours.forget(speaker.peer.peer_id)
        assert listener.neighbours.words() == []
        await tell(speaker, listener, presence(1, incarnation=2, version=6))
        assert [kind for kind, _, _ in listener.told] == ["state", "state"]

    play(scene)


def test_each_of_our_words_has_a_higher_number_also_the_answers() -> None:
    async def scene(listener: Ear, speaker: Ear) -> None:
        counts = []
        for count in range(3):
            answer = await speaker.endpoint.ask(listener.peer.peer_id, presence(count + 1), PresenceUpdate)
            counts.append(answer.count)
        assert counts == sorted(set(counts))

    play(scene)


def test_who_cannot_be_reached_is_silent_until_it_is_heard_or_long_enough_ago() -> None:
    async def scene(listener: Ear, speaker: Ear) -> None:
        source = speaker.peer.peer_id
        listener.neighbours.unreachable(source)
        assert listener.neighbours.silent == (source,)
        assert listener.told == [("silence", source, -1)]
        await tell(speaker, listener, presence(1))
        assert listener.neighbours.silent == ()
        listener.neighbours.unreachable(source)
        await asyncio.sleep(SILENCE_S - 1.0)
        assert listener.neighbours.silent == (source,)
        await asyncio.sleep(2.0)
        assert listener.neighbours.silent == ()

    play(scene)


def test_saying_something_brings_the_answer_home() -> None:
    async def scene(listener: Ear, speaker: Ear) -> None:
        speaker.neighbours.say([listener.peer.peer_id])
        await speaker.neighbours.flush(10.0)
        assert listener.told == [("state", speaker.peer.peer_id, 0)]
        assert speaker.told == [("state", listener.peer.peer_id, 0)]

    play(scene)


def test_who_has_answered_hears_only_news() -> None:
    async def scene(listener: Ear, speaker: Ear) -> None:
        there = [listener.peer.peer_id]
        for _ in range(2):
            speaker.neighbours.say_news(there)
            await speaker.neighbours.flush(10.0)
        assert len(listener.told) == 1
        speaker.neighbours.say(there)
        await speaker.neighbours.flush(10.0)
        assert len(listener.told) == 2

    play(scene)


def test_a_newborn_hears_again_what_the_one_before_had_answered_to() -> None:
    async def scene(listener: Ear, speaker: Ear) -> None:
        there = [listener.peer.peer_id]
        speaker.neighbours.say_news(there)
        await speaker.neighbours.flush(10.0)
        await tell(listener, speaker, presence(1, incarnation=2))
        await speaker.neighbours.flush(10.0)
        assert len(listener.told) == 2
        speaker.neighbours.forget(listener.peer.peer_id)
        speaker.neighbours.say_news(there)
        await speaker.neighbours.flush(10.0)
        assert len(listener.told) == 3

    play(scene)


def test_whom_no_plan_names_is_refused_and_forgotten_once_none_does() -> None:
    async def scene(listener: Ear, speaker: Ear) -> None:
        source = speaker.peer.peer_id
        await tell(speaker, listener, presence(1))
        listener.strangers.add(source)
        listener.neighbours.forget_strangers()
        assert listener.neighbours.words() == []
        with pytest.raises(Refused):
            await tell(speaker, listener, presence(2))
        assert listener.neighbours.words() == []

    play(scene)
