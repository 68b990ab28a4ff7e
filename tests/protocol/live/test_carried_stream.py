"""Streams over somebody who carries them, on sockets: what he does to them never passes for what was sent."""

import asyncio

import pytest
import uvloop
from open_gate import everybody

from carried_wires import carried_pair
from shoal.protocol.errors import RemoteError
from shoal.protocol.frames import wire_bytes
from shoal.protocol.identity import Identity
from shoal.protocol.live import carried_stream
from shoal.protocol.live.carried_stream import secure
from shoal.protocol.live.handshake import Greeter
from shoal.protocol.live.link import Link
from shoal.protocol.ports import Priority

HERE, THERE, ELSE = Identity.generate(), Identity.generate(), Identity.generate()


async def secured(here, there, *, expects=HERE):
    return await asyncio.gather(
        secure(here[1], HERE, THERE.peer_id, run="run", purpose="frames", opens=True),
        secure(there[1], THERE, expects.peer_id, run="run", purpose="frames", opens=False),
        return_exceptions=True,
    )


class Heard:
    def __init__(self):
        self.frames, self.whys = [], []

    def link(self, peer: Identity) -> Link:
        return Link(
            peer.peer_id,
            on_frame=lambda _, frame: self.frames.append(frame),
            on_lost=lambda _, why: self.whys.append(why),
        )


async def linked(here, there):
    """A link from HERE to THERE over carried streams: (sending, receiving, what each heard)."""
    a, b = await secured(here, there)
    heard_a, heard_b = Heard(), Heard()
    sending, receiving = heard_a.link(THERE), heard_b.link(HERE)

    def greeter(identity):
        return Greeter(identity=identity, members=everybody("run"), addresses=lambda: ())

    await asyncio.gather(
        sending.open(*a, greeter(HERE), calls=True, on_open=lambda *_: None),
        receiving.open(*b, greeter(THERE), calls=False, on_open=lambda *_: None),
    )
    return sending, receiving, heard_a, heard_b


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_frames_pass_whole_and_in_order_and_credit_comes_back(run, eventually):
    async def main():
        async with carried_pair() as (here, there, _):
            sending, receiving, heard_a, heard_b = await linked(here, there)
            sizes = [0, 1, 65_536, 4 * 2**20, 100_000]
            for size in sizes:
                await sending.write_frame(b"%d" % size, b"\x5a" * size, Priority.BULK)
            await eventually(lambda: len(heard_b.frames) == len(sizes))
            assert [(frame.meta, bytes(frame.payload)) for frame in heard_b.frames] == [
                (b"%d" % size, b"\x5a" * size) for size in sizes
            ]
            for size in sizes:
                receiving.give_back(wire_bytes(len(b"%d" % size), size))
            await eventually(lambda: len(heard_a.frames) >= 1)

    run(main())


def test_a_receiver_that_reads_no_more_holds_the_sender(eventually):
    async def main():
        async with carried_pair() as (here, there, middle):
            sending, receiving, _, heard_b = await linked(here, there)
            receiving._transport.pause_reading()
            writing = asyncio.create_task(sending.write_frame(b"", bytes(32 * 2**20), Priority.BULK))
            before = -1
            while middle.passed_bytes != before:  # until nothing moves any more
                before = middle.passed_bytes
                await asyncio.sleep(0.3)
            assert not writing.done()
            assert middle.passed_bytes < 8 * 2**20
            receiving._transport.resume_reading()
            await writing
            await eventually(lambda: len(heard_b.frames) == 1)

    asyncio.run(main())


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "change", [flip, lambda data: data + data, lambda data: data[100:]], ids=["flipped", "repeated", "cut short"]
)
def test_what_was_changed_on_the_way_ends_the_stream_and_is_no_frame(change, eventually):
    async def main():
        async with carried_pair() as (here, there, middle):
            sending, _, heard_a, heard_b = await linked(here, there)
            await sending.write_frame(b"before", b"x", Priority.BULK)
            await eventually(lambda: len(heard_b.frames) == 1)
            middle.there = change
            await sending.write_frame(b"changed", bytes(1_000), Priority.BULK)
            await eventually(lambda: bool(heard_b.whys))
            assert "changed on the way" in heard_b.whys[0]
            assert [frame.meta for frame in heard_b.frames][1:] in ([], [b"changed"])  # repeated: the first was true
            await eventually(lambda: bool(heard_a.whys))

    asyncio.run(main())


def test_a_stream_that_is_cut_is_lost_at_both_ends(eventually):
    async def main():
        async with carried_pair() as (here, there, middle):
            _, _, heard_a, heard_b = await linked(here, there)
            middle.cut()
            await eventually(lambda: bool(heard_a.whys) and bool(heard_b.whys))

    asyncio.run(main())


def test_a_carrier_that_passes_nothing_more_is_given_up_and_a_quiet_one_is_not(eventually, monkeypatch):
    monkeypatch.setattr(carried_stream, "_SAYS_S", 0.1)
    monkeypatch.setattr(carried_stream, "_SILENT_S", 1.0)

    async def main():
        async with carried_pair() as (here, there, middle):
            _, _, heard_a, heard_b = await linked(here, there)
            passed = middle.passed_bytes
            await asyncio.sleep(2.0)
            assert not heard_a.whys
            assert not heard_b.whys
            assert middle.passed_bytes > passed
            middle.there = middle.back = lambda data: None
            await eventually(lambda: bool(heard_a.whys) and bool(heard_b.whys))
            first_whys = (heard_a.whys[0], heard_b.whys[0])  # the end that gives up first ends the stream of the other
            assert any("nothing has come over its carrier" in why for why in first_whys)

    asyncio.run(main())


def test_somebody_else_at_the_other_end_is_found_out():
    async def main():
        async with carried_pair() as (here, there, _):
            a, b = await secured(here, there, expects=ELSE)
            assert isinstance(a, RemoteError)
            assert "is not at the other end" in str(a)
            assert isinstance(b, RemoteError | EOFError)

    asyncio.run(main())


def test_a_key_that_the_carrier_changes_is_found_out():
    async def main():
        async with carried_pair() as (here, there, middle):
            middle.there = flip
            a, b = await secured(here, there)
            assert isinstance(a, RemoteError)
            assert isinstance(b, RemoteError | EOFError)

    asyncio.run(main())


def test_nothing_that_was_said_shows_on_the_way(eventually):
    async def main():
        async with carried_pair() as (here, there, middle):
            seen = bytearray()

            def note(data):
                seen.extend(data)
                return data

            middle.there = middle.back = note
            sending, _, _, heard_b = await linked(here, there)
            await sending.write_frame(b"meta in clear", b"payload in clear" * 100, Priority.BULK)
            await eventually(lambda: len(heard_b.frames) == 1)
            assert b"in clear" not in seen
            assert b"SHL1" not in seen

    asyncio.run(main())
