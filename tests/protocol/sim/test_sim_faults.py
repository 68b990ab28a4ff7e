import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_faults import Fault, FaultKind, draw_schedule, play

from shoal.protocol.errors import LocalError, Unreachable
from shoal.protocol.sim.clock import WALL_AT_ZERO_S
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.trace import Event, Kind
from shoal.protocol.sim.world import World

NAMES = tuple("abcdef")
_DOWN = {FaultKind.CRASH, FaultKind.PAUSE, FaultKind.DEAD_DAEMON, FaultKind.POWER_CUT}


@given(seed=st.integers(0, 10_000), down_max=st.integers(0, 3))
def test_a_drawn_schedule_keeps_what_it_promises(seed: int, down_max: int) -> None:
    def draw() -> tuple[Fault, ...]:
        return draw_schedule(
            random.Random(seed),
            NAMES,
            duration_s=600.0,
            mean_gap_s=5.0,
            spared={"a"},
            down_at_once_max=down_max,
            recovers_s=10.0,
        )

    schedule = draw()
    assert draw() == schedule
    assert [fault.at_s for fault in schedule] == sorted(fault.at_s for fault in schedule)
    assert all(fault.ends_s <= 600.0 for fault in schedule)
    taking_down = [fault for fault in schedule if fault.kind in _DOWN]
    assert all(fault.whom != ("a",) for fault in taking_down)
    for fault in taking_down:
        others = [o for o in taking_down if o is not fault and o.at_s <= fault.at_s < o.ends_s + 10.0]
        assert len(others) < down_max
        assert fault.whom not in [other.whom for other in others]


def test_every_kind_is_drawn_and_one_can_be_asked_for_alone() -> None:
    schedule = draw_schedule(random.Random(1), NAMES, duration_s=5000.0, mean_gap_s=5.0)
    assert {fault.kind for fault in schedule} == set(FaultKind)
    alone = draw_schedule(random.Random(1), NAMES, duration_s=600.0, kinds=[FaultKind.CUT])
    assert {fault.kind for fault in alone} == {FaultKind.CUT}
    assert draw_schedule(random.Random(1), NAMES, duration_s=600.0, kinds=[]) == ()


def test_a_schedule_happens_when_it_says_and_a_crashed_peer_returns(listen: Callable[..., Any]) -> None:
    events: list[Event] = []
    returned: list[tuple[float, str]] = []

    async def main() -> None:
        world = World(0, uniform(0.05), watch=events.append)
        a, b, c = (world.add_peer(name) for name in "abc")
        await listen(world)
        await asyncio.sleep(1.0)

        def on_return(name: str) -> None:
            returned.append((world.now_s(), name))
            world.add_peer(name)

        await play(
            world,
            (
                Fault(kind=FaultKind.CRASH, at_s=1.0, lasts_s=2.0, whom=("b",)),
                Fault(kind=FaultKind.PAUSE, at_s=2.0, lasts_s=1.0, whom=("b",)),  # it is dead: nothing happens
                Fault(kind=FaultKind.CUT, at_s=4.0, lasts_s=1.0, whom=("a",), others=("c",)),
                Fault(kind=FaultKind.CRASH, at_s=5.0, lasts_s=None, whom=("c",)),
            ),
            on_return=on_return,
        )
        assert world.now_s() == 6.0
        assert world.peers["b"].is_alive
        assert world.peers["b"] is not b
        assert not c.is_alive
        with pytest.raises(Unreachable):
            await a.transport.call(c.peer_id, b"?", timeout_s=1.0)

    run(main())
    assert returned == [(4.0, "b")]
    faults = [(e.at_s, e.kind) for e in events if e.kind in (Kind.CRASHED, Kind.PAUSED, Kind.CUT, Kind.HEALED)]
    assert faults == [(2.0, Kind.CRASHED), (5.0, Kind.CUT), (6.0, Kind.HEALED), (6.0, Kind.CRASHED)]


def test_a_power_cut_comes_with_the_next_disk_operation_or_not_at_all() -> None:
    async def main(writes: bool) -> tuple[list[str], bool]:
        world = World(0, uniform(0.05))
        a = world.add_peer("a")
        returned: list[str] = []

        async def work() -> None:
            await asyncio.sleep(5.0)
            if writes:
                a.disk.write(PurePosixPath("file"), b"content")
                returned.append("never")

        a.spawn(work())
        fault = Fault(kind=FaultKind.POWER_CUT, at_s=1.0, lasts_s=9.0, whom=("a",))
        await play(world, (fault,), on_return=returned.append)
        assert world.now_s() == 10.0
        if a.is_alive:
            a.disk.write(PurePosixPath("file"), b"content")
        return returned, a.is_alive

    assert run(main(writes=True)) == (["a"], False)
    assert run(main(writes=False)) == ([], True)


def test_a_fault_of_a_peer_that_never_was_is_a_mistake() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        with pytest.raises(LocalError, match="no 'x'"):
            await play(world, (Fault(kind=FaultKind.CRASH, at_s=0.0, lasts_s=None, whom=("x",)),), on_return=str)

    run(main())


def test_every_kind_of_fault_can_be_played_and_leaves_nothing_behind(speak: Callable[..., Any]) -> None:
    """A schedule of each kind, over a world in which everybody talks: the same twice, and all is well afterwards."""

    async def main(seed: int) -> tuple[str, set[Kind]]:
        kinds: set[Kind] = set()
        world = World(seed, uniform(0.02, 1e6), watch=lambda event: kinds.add(event.kind))
        for name in NAMES:
            world.add_peer(name)
        voices = {voice.peer.name: voice for voice in await speak(world)}

        async def join(name: str) -> None:
            (voices[name],) = await speak(world, name)
            world.peers[name].spawn(talk(name))

        async def talk(name: str) -> None:
            rng = world.rng(f"talk {name} {world.now_s()}")
            while True:
                voice, other = voices[name], voices[rng.choice(NAMES)]
                if other is not voice:
                    work = (voice.ping(other, timeout_s=2.0), voice.send(other, 0, rng.randbytes(20_000)))
                    await asyncio.gather(*work, return_exceptions=True)
                await voice.peer.directory.store("key", name, b"", expires_in_s=20.0)
                await voice.peer.compute.run("probe", lambda: None, flop=1e11)
                with suppress(OSError):
                    voice.peer.disk.write(PurePosixPath("file"), rng.randbytes(1000))
                await asyncio.sleep(rng.random())

        def on_return(name: str) -> None:
            world.add_peer(name)
            returning.append(asyncio.create_task(join(name)))

        returning: list[asyncio.Task[None]] = []
        for name in NAMES:
            world.peers[name].spawn(talk(name))
        schedule = draw_schedule(world.rng("chaos"), NAMES, duration_s=400.0, mean_gap_s=3.0, down_at_once_max=2)
        assert {fault.kind for fault in schedule} == set(FaultKind)
        await play(world, schedule, on_return=on_return)
        await asyncio.gather(*returning)
        await asyncio.sleep(60.0)
        assert world.failures == []
        for voice in voices.values():
            assert voice.peer.is_alive
            assert voice.peer.clock.wall_s() == pytest.approx(WALL_AT_ZERO_S + world.now_s(), abs=1e-6)
            voice.peer.disk.write(PurePosixPath("file"), bytes(10**6))
            timed = await voice.peer.compute.run("probe", lambda: None, flop=1e12)
            assert timed.ended_s - timed.started_s == pytest.approx(1.0)
            for other in voices.values():
                if other is not voice:
                    began_s = world.now_s()
                    assert await voice.ping(other, b"well?") == b"well?"
                    assert world.now_s() - began_s == pytest.approx(0.04, abs=0.005)
        return world.trace_hash(), kinds

    trace_hash, kinds = run(main(3))
    assert kinds >= {kind for kind in Kind if Kind.CRASHED <= kind <= Kind.HEALED or kind >= Kind.DISTURBED}
    assert run(main(3))[0] == trace_hash
