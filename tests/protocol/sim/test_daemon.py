"""The network daemon of a peer dies and comes back; the peer's process lives."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.trace import Event, Kind
from shoal.protocol.sim.world import World

NEAR = pytest.approx

Speak = Callable[..., Any]


async def why(work: Any) -> str:
    """Why it fails; `done` if it does not."""
    try:
        await work
    except Unreachable as error:
        return error.why
    return "done"


def test_what_waits_for_the_dead_daemons_own_peer_fails_at_once(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        a, _ = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        voice_b.answers_in_s = 3.0
        work = [
            asyncio.create_task(why(voice_a.ping(voice_b))),
            asyncio.create_task(why(voice_a.send(voice_b, 0, bytes(10_000_000)))),
        ]
        await asyncio.sleep(1.0)
        world.kill_daemon(a)
        assert await asyncio.gather(*work) == ["our own network daemon died"] * 2
        assert world.now_s() == 1.0

    run(main())


def test_what_others_have_under_way_to_it_fails_one_latency_later(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        _, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        voice_b.answers_in_s = 3.0
        work = [
            asyncio.create_task(why(voice_a.ping(voice_b))),
            asyncio.create_task(why(voice_a.send(voice_b, 0, bytes(10_000_000)))),
        ]
        await asyncio.sleep(1.0)
        world.kill_daemon(b)
        assert await asyncio.gather(*work) == ["its connection broke", "its network daemon died"]
        assert world.now_s() == NEAR(1.05)

    run(main())


def test_nobody_answers_at_its_address_until_it_is_back(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        _, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        await voice_a.send(voice_b, 0)
        await asyncio.sleep(1.0)
        world.kill_daemon(b, restarts_in_s=4.0)
        await asyncio.sleep(1.0)
        for work in (voice_a.ping(voice_b), voice_a.send(voice_b, 1)):
            began_s = world.now_s()
            assert await why(work) == "none of its addresses answers"
            assert world.now_s() - began_s == NEAR(0.1)
        await asyncio.sleep(4.0)
        assert await voice_a.ping(voice_b, b"back") == b"back"
        await voice_a.send(voice_b, 2)
        await asyncio.sleep(1.0)
        assert voice_b.nonces == [0, 2]

    run(main())


def test_the_peer_itself_waits_for_its_daemon_and_goes_on(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        await b.directory.store("key", "b", b"record", expires_in_s=60.0)
        ticks: list[float] = []

        async def tick() -> None:
            for _ in range(3):
                await asyncio.sleep(1.0)
                ticks.append(world.now_s())

        began_s = world.now_s()
        a.spawn(tick())
        world.kill_daemon(a, restarts_in_s=3.5)
        world.kill_daemon(a, restarts_in_s=100.0)  # it is dead already
        short = asyncio.create_task(why(voice_a.ping(voice_b, timeout_s=1.0)))
        patient = [
            asyncio.create_task(why(voice_a.ping(voice_b, timeout_s=5.0))),
            asyncio.create_task(why(voice_a.send(voice_b, 7))),
        ]
        records = asyncio.create_task(a.directory.get("key"))
        stored = asyncio.create_task(a.directory.store("key", "a", b"late", expires_in_s=1.0))
        assert "did not restart within 1 s" in await short
        assert world.now_s() - began_s == 1.0
        assert await asyncio.gather(*patient) == ["done", "done"]
        assert world.now_s() - began_s == NEAR(3.6)
        assert await records == {"b": b"record"}
        assert await stored  # its life begins when it can be published
        assert ticks == NEAR([began_s + 1.0, began_s + 2.0, began_s + 3.0])
        await asyncio.sleep(1.0)
        assert voice_b.nonces == [7]

    run(main())


def test_a_call_that_is_being_answered_is_given_up_and_frames_that_arrived_are_not(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        ended: list[str] = []

        async def on_call(source: PeerID, request: bytes) -> bytes:
            try:
                await asyncio.sleep(1.0)
                ended.append("call")
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            return b""

        async def on_frame(source: PeerID, meta: bytes, payload: object) -> None:
            await asyncio.sleep(1.0)
            ended.append(meta.decode())

        b.transport.serve(on_call=on_call, on_frame=on_frame)
        await speak(world, "a")
        call = asyncio.create_task(why(a.transport.call(b.peer_id, b"", timeout_s=5.0)))
        for meta in (b"first frame", b"second frame"):
            await a.transport.send(b.peer_id, meta, b"", priority=0)
        await asyncio.sleep(0.5)
        world.kill_daemon(b)
        assert await call == "its connection broke"
        await asyncio.sleep(5.0)
        assert ended == ["cancelled", "first frame", "second frame"]
        assert world.failures == []

    run(main())


def test_calls_and_frames_on_the_way_are_lost_even_if_it_is_back_before_they_arrive(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(1.0))
        _, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        call = asyncio.create_task(why(voice_a.ping(voice_b)))
        await voice_a.send(voice_b, 0)
        await asyncio.sleep(0.5)
        world.kill_daemon(b, restarts_in_s=0.1)
        assert await call == "its connection broke"
        assert world.now_s() == NEAR(1.5)
        await asyncio.sleep(5.0)
        assert voice_b.pings == []
        assert voice_b.nonces == []
        assert await voice_a.ping(voice_b, b"again") == b"again"

    run(main())


def test_behind_a_cut_nobody_hears_that_it_died(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6), stall_s=6.0)
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        voice_b.answers_in_s = 3.0
        call = asyncio.create_task(why(voice_a.ping(voice_b, timeout_s=4.0)))
        frame = asyncio.create_task(why(voice_a.send(voice_b, 0, bytes(10_000_000))))
        await asyncio.sleep(1.0)
        world.partition([a], [b])
        world.kill_daemon(b)
        assert await call == "no answer within 4 s"
        assert await frame == "nothing got through for 6 s"
        assert world.now_s() == NEAR(7.0)

    run(main())


def test_a_store_that_the_death_interrupts_did_not_happen(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        await speak(world)
        assert await b.directory.store("key", "b", b"", expires_in_s=60.0)
        stored = asyncio.create_task(a.directory.store("key", "a", b"", expires_in_s=60.0))
        read = asyncio.create_task(a.directory.get("key"))
        await asyncio.sleep(0.1)
        world.kill_daemon(a, restarts_in_s=0.05)
        assert not await stored
        assert await read == {}
        assert await a.directory.get("key") == {"b": b""}

    run(main())


def test_a_paused_peer_restarts_its_daemon_late_and_a_crashed_one_never(speak: Speak) -> None:
    events: list[Event] = []

    async def main() -> None:
        world = World(0, uniform(0.05), watch=events.append)
        _, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        world.kill_daemon(b)
        world.pause(b)
        await asyncio.sleep(10.0)
        assert await why(voice_a.ping(voice_b)) == "none of its addresses answers"
        world.resume(b)
        await asyncio.sleep(0.1)
        assert await voice_a.ping(voice_b, b"?") == b"?"
        world.kill_daemon(b)
        world.crash(b)
        await asyncio.sleep(10.0)
        (voice_b,) = await speak(world, world.add_peer("b").name)
        assert await voice_a.ping(voice_b, b"new") == b"new"

    run(main())
    daemons = [event.kind for event in events if event.kind in (Kind.DAEMON_DIED, Kind.DAEMON_RESTARTED)]
    assert daemons == [Kind.DAEMON_DIED, Kind.DAEMON_RESTARTED, Kind.DAEMON_DIED]


def test_two_peers_whose_daemons_die_together_find_each_other_again(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        voice_a, voice_b = await speak(world)
        work = [
            asyncio.create_task(why(one.send(other, 0, bytes(5_000_000))))
            for one, other in ((voice_a, voice_b), (voice_b, voice_a))
        ]
        await asyncio.sleep(1.0)
        world.kill_daemon(a)
        world.kill_daemon(b)
        assert await asyncio.gather(*work) == ["our own network daemon died"] * 2
        assert await why(voice_a.send(voice_b, 1)) == "done"
        await voice_b.send(voice_a, 2)
        await asyncio.sleep(1.0)
        assert (voice_b.nonces, voice_a.nonces) == ([1], [2])
        await a.transport.close()
        assert world.failures == []

    run(main())
