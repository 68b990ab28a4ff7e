"""Outboxes between simulated peers, in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from open_gate import OpenGate

from shoal.peer.base.outbox import Outbox
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CALL_TIMEOUT_S
from shoal.protocol.messages import Done, ValidationResult
from shoal.protocol.sim.loop import VirtualTimeLoop, run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import SimPeer, World

LATENCY_S = 0.1


def word(key: int, value: float) -> ValidationResult:
    return ValidationResult(step=0, index=key, loss=value)


@dataclass
class Ears:
    """What one peer has heard, as (key, value); `refuses` keys it declines."""

    peer: SimPeer
    endpoint: Endpoint
    heard: list[tuple[int, float]] = field(default_factory=list)
    refuses: set[int] = field(default_factory=set)
    slow_s: float = 0.0
    at_once: int = 0

    async def on_word(self, source: PeerID, message: ValidationResult) -> Done:
        self.at_once += 1
        assert self.at_once == 1, "one call at a time"
        await asyncio.sleep(self.slow_s)
        self.at_once -= 1
        self.heard.append((message.index, message.loss))
        if message.index in self.refuses:
            raise Refused(self.endpoint.peer_id, "no")
        return Done()


@dataclass
class Street:
    """One mouth, some ears."""

    world: World
    mouth: SimPeer
    endpoint: Endpoint
    ears: list[Ears]
    replies: list[PeerID] = field(default_factory=list)
    troubles: list[PeerID] = field(default_factory=list)

    def outbox(self, **arguments: Any) -> Outbox:
        return Outbox(
            self.endpoint,
            on_reply=lambda peer, _: self.replies.append(peer),
            on_trouble=self.troubles.append,
            **arguments,
        )


Scene = Callable[[Street], Coroutine[Any, Any, None]]


def play(scene: Scene, *, num_ears: int = 1) -> Street:
    async def main() -> Street:
        world = World(0, uniform(LATENCY_S))
        peers = [world.add_peer(f"peer {i}") for i in range(1 + num_ears)]
        endpoints = [Endpoint(peer.identity, peer.transport, run="test", gate=OpenGate()) for peer in peers]
        for peer in peers:
            for other in peers:
                await peer.transport.introduce(other.peer_id, other.transport.addresses())
        ears = [Ears(peer, endpoint) for peer, endpoint in zip(peers[1:], endpoints[1:], strict=True)]
        for ear in ears:
            ear.endpoint.on(ValidationResult, ear.on_word)
        street = Street(world, peers[0], endpoints[0], ears)
        await scene(street)
        assert not world.failures
        return street

    return run(main())


def test_different_words_arrive_in_the_order_in_which_they_were_posted() -> None:
    async def scene(street: Street) -> None:
        box, peer = street.outbox(), street.ears[0].peer.peer_id
        for key in (3, 1, 2):
            box.post(peer, key, word(key, 0.0))
        await box.flush(10.0)

    street = play(scene)
    assert street.ears[0].heard == [(3, 0.0), (1, 0.0), (2, 0.0)]
    assert len(street.replies) == 3


def test_of_one_key_only_the_latest_word_is_sent() -> None:
    async def scene(street: Street) -> None:
        box, peer = street.outbox(), street.ears[0].peer.peer_id
        box.post(peer, 1, word(1, 0.0))
        await asyncio.sleep(LATENCY_S / 2)  # it is on its way
        for value in (1.0, 2.0, 3.0):
            box.post(peer, 1, word(1, value))
        await box.flush(10.0)

    assert play(scene).ears[0].heard == [(1, 0.0), (1, 3.0)]


def test_a_slow_peer_holds_up_nobody_else() -> None:
    async def scene(street: Street) -> None:
        slow, quick = street.ears
        slow.slow_s = 5.0
        box = street.outbox()
        for ear in (slow, quick):
            for key in range(3):
                box.post(ear.peer.peer_id, key, word(key, 0.0))
        await asyncio.sleep(1.0)
        assert (len(slow.heard), len(quick.heard)) == (0, 3)
        await box.flush(60.0)
        assert len(slow.heard) == 3

    play(scene, num_ears=2)


def test_an_unreachable_peer_is_tried_until_it_can_be_reached_and_gets_the_latest_words_in_order() -> None:
    async def scene(street: Street) -> None:
        ear = street.ears[0]
        box, peer = street.outbox(), ear.peer.peer_id
        cut = street.world.partition([street.mouth], [ear.peer])
        for key in (1, 2):
            box.post(peer, key, word(key, 0.0))
        await asyncio.sleep(3 * CALL_TIMEOUT_S)
        assert len(street.troubles) >= 2
        assert ear.heard == []
        box.post(peer, 1, word(1, 1.0))
        street.world.heal(cut)
        await box.flush(60.0)
        # A call from before may come through late, so what counts is how it ends.
        assert ear.heard[-2:] == [(2, 0.0), (1, 1.0)]  # the newer word is said last

    play(scene)


def test_a_forgotten_peer_is_tried_no_more() -> None:
    async def scene(street: Street) -> None:
        ear = street.ears[0]
        box, peer = street.outbox(), ear.peer.peer_id
        street.world.crash(ear.peer)
        box.post(peer, 1, word(1, 0.0))
        box.post(peer, 2, word(2, 0.0))
        await asyncio.sleep(5.0)
        box.forget(peer)
        await box.flush(2 * CALL_TIMEOUT_S)
        troubles = len(street.troubles)
        await asyncio.sleep(60.0)
        assert len(street.troubles) == troubles
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        assert not [task.get_name() for task in loop.tasks() if "outbox" in task.get_name()]

    play(scene)


def test_what_was_forgotten_on_its_way_is_not_sent_again_with_later_words() -> None:
    """The peer left the group and came back: what was said in its first time there is not true any more."""

    async def scene(street: Street) -> None:
        ear = street.ears[0]
        box, peer = street.outbox(), ear.peer.peer_id
        cut = street.world.partition([street.mouth], [ear.peer])
        box.post(peer, 1, word(1, 0.0))
        await asyncio.sleep(CALL_TIMEOUT_S / 2)
        box.forget(peer)
        box.post(peer, 2, word(2, 0.0))
        await asyncio.sleep(4 * CALL_TIMEOUT_S)  # so long that the first call itself is lost
        street.world.heal(cut)
        await box.flush(60.0)
        assert {key for key, _ in ear.heard} == {2}
        assert box._queues == {}

    play(scene)


def test_a_refused_word_is_not_repeated_and_the_next_one_follows() -> None:
    async def scene(street: Street) -> None:
        ear = street.ears[0]
        ear.refuses = {1}
        box, peer = street.outbox(), ear.peer.peer_id
        for key in (1, 2):
            box.post(peer, key, word(key, 0.0))
        await box.flush(10.0)

    street = play(scene)
    assert street.ears[0].heard == [(1, 0.0), (2, 0.0)]
    assert len(street.replies) == 1
    assert street.troubles == []


def test_an_answer_of_another_kind_is_no_answer() -> None:
    async def scene(street: Street) -> None:
        box, peer = street.outbox(expect=ValidationResult), street.ears[0].peer.peer_id
        box.post(peer, 1, word(1, 0.0))
        await box.flush(10.0)

    street = play(scene)
    assert street.replies == street.troubles == []
    assert street.ears[0].heard == [(1, 0.0)]


def test_what_an_answer_makes_us_say_is_said() -> None:
    async def scene(street: Street) -> None:
        peer = street.ears[0].peer.peer_id

        def answer(source: PeerID, reply: msgspec.Struct) -> None:
            if len(street.replies) < 3:
                street.replies.append(source)
                box.post(source, 1, word(1, float(len(street.replies))))

        box = Outbox(street.endpoint, on_reply=answer)
        box.post(peer, 1, word(1, 0.0))
        await box.flush(10.0)

    assert play(scene).ears[0].heard == [(1, 0.0), (1, 1.0), (1, 2.0), (1, 3.0)]


def test_flush_gives_up_in_time() -> None:
    async def scene(street: Street) -> None:
        box = street.outbox()
        street.world.crash(street.ears[0].peer)
        box.post(street.ears[0].peer.peer_id, 1, word(1, 0.0))
        started_s = asyncio.get_running_loop().time()
        await box.flush(3.0)
        assert asyncio.get_running_loop().time() - started_s <= 3.0
        await box.close()

    play(scene)


@pytest.mark.parametrize("reachable", [True, False])
def test_after_close_nothing_is_sent_and_nothing_is_left_running(reachable: bool) -> None:
    async def scene(street: Street) -> None:
        ear = street.ears[0]
        box, peer = street.outbox(), ear.peer.peer_id
        if not reachable:
            street.world.crash(ear.peer)
        for key in range(3):
            box.post(peer, key, word(key, 0.0))
        await asyncio.sleep(LATENCY_S / 2)
        await box.close()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        assert not [task.get_name() for task in loop.tasks() if "outbox" in task.get_name()]
        await asyncio.sleep(60.0)
        assert len(ear.heard) <= 1
        assert box._queues == {}

    play(scene)
