import asyncio

import pytest
import uvloop

from shoal.protocol.errors import RemoteError
from shoal.protocol.frames import FrameType, decode_credit, encode_credit, encode_frame, wire_bytes
from shoal.protocol.identity import Identity
from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.live import handshake
from shoal.protocol.live.handshake import NONCE_BYTES
from shoal.protocol.live.throttle import Throttle
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.token_bucket import RateLimits

LOOPS = [asyncio.run, uvloop.run]


async def both(caller, listener):
    return await asyncio.gather(
        caller.open(listener.identity.peer_id, calls=True), listener.open(caller.identity.peer_id, calls=False)
    )


@pytest.mark.parametrize("run", LOOPS, ids=["asyncio", "uvloop"])
def test_frames_go_one_way_and_credit_the_other(socket_pair, run, eventually):
    async def main():
        async with socket_pair() as (caller, listener):
            sending, receiving = await both(caller, listener)
            for size in (0, 1, 100_000, 3_000_000):
                await sending.write_frame(b"%d" % size, bytes(size), Priority.BULK)
            await eventually(lambda: len(listener.frames) == 4)
            assert [(frame.meta, len(frame.payload)) for frame in listener.frames] == [
                (b"%d" % size, size) for size in (0, 1, 100_000, 3_000_000)
            ]
            assert receiving.window.outstanding_bytes == sum(frame.wire_bytes for frame in listener.frames)
            for frame in listener.frames:
                receiving.give_back(frame.wire_bytes)
            handled = sum(frame.wire_bytes for frame in listener.frames)
            await eventually(lambda: sum(decode_credit(frame, receiving.peer) for frame in caller.frames) == handled)
            assert receiving.window.outstanding_bytes == 0

    run(main())


def test_credit_of_small_frames_goes_back_together_and_of_large_ones_at_once(socket_pair, eventually):
    async def main():
        async with socket_pair() as (caller, listener):
            sending, receiving = await both(caller, listener)
            for size in (1_000, 1_000, 1_000, 5_000_000):
                await sending.write_frame(b"", bytes(size), Priority.BULK)
            await eventually(lambda: len(listener.frames) == 4)
            small, large = wire_bytes(0, 1_000), wire_bytes(0, 5_000_000)
            for _ in range(2):
                receiving.give_back(small)
            assert receiving.window.outstanding_bytes == 3 * small + large, "not counted before it is sent"
            await eventually(lambda: len(caller.frames) == 1)
            assert decode_credit(caller.frames[0], receiving.peer) == 2 * small
            receiving.give_back(small)
            receiving.give_back(large)
            assert receiving.window.outstanding_bytes == 0
            await eventually(lambda: len(caller.frames) == 2)
            assert decode_credit(caller.frames[1], receiving.peer) == small + large

    uvloop.run(main())


@pytest.mark.parametrize("run", LOOPS, ids=["asyncio", "uvloop"])
def test_each_side_learns_where_the_other_is(socket_pair, run):
    async def main():
        async with socket_pair() as (caller, listener):
            await both(caller, listener)
            assert listener.hello.addresses == (f"/of/{caller.identity.peer_id}",)
            assert caller.hello.addresses == (f"/of/{listener.identity.peer_id}",)

    run(main())


@pytest.mark.parametrize("run", LOOPS, ids=["asyncio", "uvloop"])
def test_a_frame_has_left_only_when_the_kernel_has_all_of_it(socket_pair, run, eventually):
    async def main():
        async with socket_pair() as (caller, listener):
            sending, receiving = await both(caller, listener)
            receiving._transport.pause_reading()
            payload = bytearray(8_000_000)
            write = asyncio.create_task(sending.write_frame(b"", payload, Priority.BULK))
            await asyncio.sleep(0.05)
            assert not write.done()
            receiving._transport.resume_reading()
            await write
            payload[:] = b"\xff" * len(payload)  # ours again: nothing may read it any more
            await eventually(lambda: len(listener.frames) == 1)
            assert not any(listener.frames[0].payload)

    run(main())


def test_another_run_is_refused(socket_pair):
    async def main():
        async with socket_pair() as (caller, listener):
            ours, theirs = await asyncio.gather(
                caller.open(listener.identity.peer_id, calls=True, run="another run"),
                listener.open(caller.identity.peer_id, calls=False),
                return_exceptions=True,
            )
            assert isinstance(theirs, RemoteError)
            assert "speaks for run" in str(theirs)
            assert isinstance(ours, EOFError)

    asyncio.run(main())


def test_another_version_is_refused(socket_pair, monkeypatch):
    async def main():
        async with socket_pair() as (caller, listener):
            monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 999)
            caller.writer.write(caller.greeter().hello(listener.identity.peer_id, nonce=bytes(NONCE_BYTES)))
            monkeypatch.undo()
            with pytest.raises(RemoteError, match="speaks protocol 999"):
                await listener.open(caller.identity.peer_id, calls=False)

    asyncio.run(main())


def test_a_hello_cannot_be_shown_to_someone_else(socket_pair):
    async def main():
        async with socket_pair() as (caller, listener):
            caller.writer.write(caller.greeter().hello(Identity.generate().peer_id, nonce=bytes(NONCE_BYTES)))
            with pytest.raises(RemoteError, match="meant for another peer"):
                await listener.open(caller.identity.peer_id, calls=False)

    asyncio.run(main())


def test_nobody_says_hello_in_the_name_of_another(socket_pair):
    async def main():
        async with socket_pair() as (caller, listener):
            caller.writer.write(caller.greeter().hello(listener.identity.peer_id, nonce=bytes(NONCE_BYTES)))
            with pytest.raises(RemoteError, match="in the name of"):
                await listener.open(Identity.generate().peer_id, calls=False)

    asyncio.run(main())


def test_a_silent_peer_does_not_hold_us_for_ever(socket_pair, monkeypatch):
    monkeypatch.setattr("shoal.protocol.live.link._HANDSHAKE_TIMEOUT_S", 0.05)

    async def main():
        async with socket_pair() as (caller, listener):
            with pytest.raises(TimeoutError):
                await listener.open(caller.identity.peer_id, calls=False)
            assert listener.writer.transport.is_closing()

    asyncio.run(main())


def data(sequence: int, payload: Payload = b"payload") -> bytearray:
    return bytearray(b"".join(encode_frame(FrameType.DATA, sequence, b"meta", payload)))


def damaged() -> bytes:
    frame = data(1)
    frame[-14] ^= 4
    return bytes(frame)


def beyond_credit() -> bytes:
    half = bytes(STREAM_CREDIT_BYTES // 2)
    return bytes(data(1, half) + data(2, half)[:1000])


@pytest.mark.parametrize(
    ("wire", "why"),
    [
        (damaged(), "damaged"),
        (bytes(data(2)), "where 1 comes next"),
        (bytes(data(1) + data(1)), "where 2 comes next"),
        (beyond_credit(), "beyond its credit"),
        (b"GET / HTTP/1.1\r\nAccept: everything that you have got\r\n\r\n", "not a frame"),
    ],
    ids=["damaged", "skipped", "repeated", "beyond credit", "no frame"],
)
def test_what_no_honest_sender_sends_ends_the_stream(socket_pair, wire, why):
    async def main():
        async with socket_pair() as (caller, listener):
            sending, receiving = await both(caller, listener)
            sending._transport.write(wire)
            await receiving.lost.wait()
            assert why in receiving.why_lost
            await sending.lost.wait()
            with pytest.raises(EOFError):
                await sending.write_frame(b"", b"", Priority.BULK)

    asyncio.run(main())


def test_credit_that_was_never_taken_is_the_receivers_fault(socket_pair, eventually):
    async def main():
        async with socket_pair() as (caller, listener):
            sending, receiving = await both(caller, listener)
            sending.window.take(wire_bytes(0, 10))
            receiving._transport.write(encode_credit(1, wire_bytes(0, 10)))
            await eventually(lambda: len(caller.frames) == 1)
            sending.window.give_back(wire_bytes(0, 10), sending.peer)
            with pytest.raises(RemoteError, match="gave back"):
                sending.window.give_back(1, sending.peer)

    asyncio.run(main())


def test_a_stream_that_ends_inside_a_frame_says_so(socket_pair):
    async def main():
        async with socket_pair() as (caller, listener):
            sending, receiving = await both(caller, listener)
            sending._transport.write(bytes(data(1)[:40]))
            sending._transport.close()
            await receiving.lost.wait()
            assert receiving.why_lost == "the stream ended inside a frame"

    asyncio.run(main())


def test_a_slice_that_waits_in_line_ends_with_its_stream(socket_pair, eventually):
    """Over a carrier the stream may be given up while the connection below it still stands, and takes nothing."""

    async def main():
        async with socket_pair() as (caller, listener):
            sending, _ = await both(caller, listener)
            throttle = Throttle(RateLimits(upload_bytes_per_s=1_000.0))
            sending._line = line = throttle.line
            line.limiter.charge(1e9)
            writing = asyncio.create_task(sending.write_frame(b"", b"x", Priority.BULK))
            await eventually(lambda: bool(line._waiting))
            sending.abort("given up")
            with pytest.raises(EOFError, match="given up"):
                await writing
            owed_s = line.limiter.wait_s()
            line._serve()
            assert not line._waiting
            assert line.limiter.wait_s() <= owed_s, "nothing has passed"

    asyncio.run(main())
