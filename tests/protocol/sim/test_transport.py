import asyncio
from typing import Any

import pytest

from shoal.protocol.errors import LocalError, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import (
    CONTROL_BYTES_MAX,
    FRAME_META_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    STREAM_CREDIT_BYTES,
)
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.phantom import Phantom
from shoal.protocol.sim.world import World

NEAR = pytest.approx


async def outcome_of(task: "asyncio.Task[Any]") -> str:
    try:
        await task
    except Unreachable as error:
        return error.why
    return "sent"


# Calls and frames ---------------------------------------------------------------------------------------------------


def test_a_call_takes_a_round_trip_and_its_bytes(listen: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        await listen(world)
        assert await a.transport.call(b.peer_id, bytes(10_000), timeout_s=5.0) == bytes(10_000)
        assert world.now_s() == NEAR(2 * 0.06)

    run(main())


def test_calls_are_handled_at_the_same_time() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")

        async def slow(source: PeerID, request: bytes) -> bytes:
            await asyncio.sleep(1.0)
            return source.encode() + request

        b.transport.serve(on_call=slow, on_frame=never)
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        calls = [a.transport.call(b.peer_id, b"%d" % i, timeout_s=5.0) for i in range(3)]
        assert await asyncio.gather(*calls) == [a.peer_id.encode() + b"%d" % i for i in range(3)]
        assert world.now_s() == NEAR(1.1)

    run(main())


def test_the_sender_may_change_its_buffer_and_the_receiver_its_payload(listen: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        buffer = bytearray(b"before")
        await a.transport.send(b.peer_id, b"", memoryview(buffer), priority=Priority.BULK)
        buffer[:] = b"after!"
        await asyncio.sleep(1.0)
        (payload,) = ear.payloads
        assert payload == b"before"
        payload[:1] = b"B"
        assert buffer == b"after!"

    run(main())


def test_a_phantom_has_a_size_and_arrives_as_itself(listen: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        await a.transport.send(b.peer_id, b"", Phantom(10**6), priority=Priority.BULK)
        assert world.now_s() == NEAR(1.0, abs=1e-3)
        await asyncio.sleep(1.0)
        assert ear.payloads == [Phantom(10**6)]

    run(main())


def test_frames_of_one_source_are_handled_one_at_a_time_and_of_two_together(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.0))
        a, b, c = (world.add_peer(name) for name in "abc")
        *_, ear = await listen(world, handle_s=1.0)
        await asyncio.gather(*(send(source, c, f"{source.name}{i}", 100) for i in range(2) for source in (a, b)))
        await asyncio.sleep(5.0)
        assert ear.frames == [(0.0, "a0"), (0.0, "b0"), (1.0, "a1"), (1.0, "b1")]

    run(main())


def test_what_no_receiver_accepts_is_refused_at_the_sender(listen: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        await listen(world)
        with pytest.raises(ValueError, match="larger than any"):
            await a.transport.call(b.peer_id, bytes(CONTROL_BYTES_MAX + 1), timeout_s=1.0)
        with pytest.raises(ValueError, match="larger than any"):
            await a.transport.send(b.peer_id, bytes(FRAME_META_BYTES_MAX + 1), b"", priority=Priority.BULK)
        with pytest.raises(ValueError, match="larger than any"):
            await a.transport.send(b.peer_id, b"", Phantom(FRAME_PAYLOAD_BYTES_MAX + 1), priority=Priority.BULK)
        await a.transport.send(b.peer_id, b"", Phantom(FRAME_PAYLOAD_BYTES_MAX), priority=Priority.BULK)

    run(main())


def test_a_call_before_serve_is_answered_after_it() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        call = asyncio.create_task(a.transport.call(b.peer_id, b"?", timeout_s=5.0))
        frame = asyncio.create_task(a.transport.send(b.peer_id, b"", b"x", priority=Priority.BULK))
        await asyncio.sleep(2.0)
        assert not call.done()
        assert not frame.done()
        b.transport.serve(on_call=echo, on_frame=never)
        assert await call == b"?"
        assert world.now_s() == NEAR(2.05)
        await frame

    run(main())


def test_serving_twice_is_refused(listen: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a")
        await listen(world)
        with pytest.raises(LocalError):
            a.transport.serve(on_call=echo, on_frame=never)

    run(main())


# Who is reachable ---------------------------------------------------------------------------------------------------


def test_only_an_address_that_holds_or_an_earlier_visit_makes_a_peer_reachable() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        for peer in (a, b):
            peer.transport.serve(on_call=echo, on_frame=never)
        for addresses in ((), a.transport.addresses(), ("nonsense",)):
            await a.transport.introduce(b.peer_id, addresses)
            with pytest.raises(Unreachable, match="no valid address"):
                await a.transport.call(b.peer_id, b"?", timeout_s=2.0)
        assert world.now_s() == NEAR(6.0)
        with pytest.raises(Unreachable, match="no valid address"):
            await a.transport.send(b.peer_id, b"", b"", priority=Priority.BULK)
        await b.transport.introduce(a.peer_id, a.transport.addresses())
        assert await b.transport.call(a.peer_id, b"hello", timeout_s=2.0) == b"hello"
        assert await a.transport.call(b.peer_id, b"hello yourself", timeout_s=2.0) == b"hello yourself"

    run(main())


def test_a_peer_that_nobody_is_and_oneself_are_unreachable(listen: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a")
        await listen(world)
        with pytest.raises(Unreachable):
            await a.transport.call(PeerID("12D3KooWNobody"), b"?", timeout_s=2.0)
        assert world.now_s() == NEAR(2.0)
        with pytest.raises(Unreachable):
            await a.transport.call(a.peer_id, b"?", timeout_s=2.0)

    run(main())


# Handlers that fail -------------------------------------------------------------------------------------------------


def test_a_call_whose_handler_fails_is_unreachable_and_the_failure_is_kept() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        b.transport.serve(on_call=fail, on_frame=never)
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        with pytest.raises(Unreachable, match="failed"):
            await a.transport.call(b.peer_id, b"?", timeout_s=5.0)
        assert world.now_s() == NEAR(0.1)
        ((name, error),) = world.failures
        assert name == "b"
        assert isinstance(error, ZeroDivisionError)

    run(main())


@pytest.mark.parametrize("error", [RemoteError("12D3KooWSomebody", "sent rubbish"), ZeroDivisionError()])
def test_a_frame_whose_handler_fails_breaks_the_stream_and_nothing_behind_it_is_handled(error: Exception) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        seen: list[bytes] = []

        async def picky(source: PeerID, meta: bytes, payload: Payload) -> None:
            seen.append(meta)
            if meta == b"bad":
                await asyncio.sleep(0.08)
                raise error

        b.transport.serve(on_call=echo, on_frame=picky)
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        half = Phantom(STREAM_CREDIT_BYTES // 2 - 1000)
        metas = (b"good", b"bad", b"behind", b"waiting")
        tasks = [asyncio.create_task(a.transport.send(b.peer_id, meta, half, priority=Priority.BULK)) for meta in metas]
        # "behind" leaves at 0.10 with the credit of "good" and flies while "bad" fails, at 0.13.
        assert [await outcome_of(task) for task in tasks] == ["sent", "sent", "sent", "it refused a frame"]
        await asyncio.sleep(1.0)
        assert seen == [b"good", b"bad"]
        await a.transport.send(b.peer_id, b"anew", half, priority=Priority.BULK)
        await asyncio.sleep(1.0)
        assert seen == [b"good", b"bad", b"anew"]
        assert [type(failure) for _, failure in world.failures] == (
            [] if isinstance(error, RemoteError) else [type(error)]
        )

    run(main())


async def echo(source: PeerID, request: bytes) -> bytes:
    return request


async def fail(source: PeerID, request: bytes) -> bytes:
    raise ZeroDivisionError


async def never(source: PeerID, meta: bytes, payload: Payload) -> None:
    return None
