"""Two ends of a stream with lanes beside it, over loopback and without daemons."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import socket
import time

import pytest
import uvloop

from shoal.protocol.frames import encode_frame
from shoal.protocol.identity import Identity
from shoal.protocol.limits import LANES_MAX
from shoal.protocol.live import lane_door
from shoal.protocol.live.lane import Lane
from shoal.protocol.live.lane_door import LaneDoor
from shoal.protocol.live.lane_supply import LANES_FIRST, LaneSupply
from shoal.protocol.live.link import Link
from shoal.protocol.live.secure_channel import Handshake
from shoal.protocol.live.throttle import WIRE_FACTOR, Throttle
from shoal.protocol.ports import Priority
from shoal.protocol.token_bucket import RateLimits

LOOPS = [asyncio.run, uvloop.run]
HOSTS = ("127.0.0.1",)
SIZES = (0, 1, 70_000, 3_000_000, 20, 300_000)


@dataclasses.dataclass
class Side:
    """One end: its identity, link and door."""

    identity: Identity
    door: LaneDoor
    link: Link
    frames: list

    @property
    def got(self):
        return [(frame.meta, bytes(frame.payload)) for frame in self.frames]


@pytest.fixture
def sides(socket_pair):
    """An async context manager of a stream's sender and receiver, whose doors know the stream."""

    @contextlib.asynccontextmanager
    async def sides(*, sender_listens=True, receiver_listens=True, **throttles):
        async with socket_pair() as ends:
            made = []
            for end, other, name, listens in (
                (ends[0], ends[1], "sender", sender_listens),
                (ends[1], ends[0], "receiver", receiver_listens),
            ):
                throttle = throttles.get(name) or Throttle()
                door = LaneDoor(end.identity, run="run", throttle=throttle)
                if listens:
                    door.listen(("/ip4/127.0.0.1/tcp/0",))
                made.append(Side(end.identity, door, await _link(end, other, door, throttle), end.frames))
            sender, receiver = made
            await asyncio.gather(
                _open(sender, ends[0], calls=True),
                _open(receiver, ends[1], calls=False),
            )
            for side in made:
                side.door.expect(side.link)
            try:
                yield sender, receiver
            finally:
                for side in made:
                    side.link.abort("the test is over")
                    await side.door.close()
                await asyncio.gather(*(side.link.lost.wait() for side in made))

    return sides


async def _link(end, other, door, throttle) -> Link:
    async def hosts():
        return HOSTS

    return Link(
        other.identity.peer_id,
        on_frame=lambda _, frame: end.frames.append(frame),
        on_lost=lambda *_: None,
        throttle=throttle,
        on_lane=lambda link, lane, is_more: door.counted(is_more),
        on_lanes_asked=lambda link, count: door.dial_back(link, hosts, count),
    )


async def _open(side, end, *, calls) -> None:
    await side.link.open(
        end.reader, end.writer, end.greeter(), calls=calls, on_open=lambda *_: None, lane_port=side.door.port
    )


async def send_all(sender, sizes=SIZES, seed=0):
    payloads = [random.Random(seed + at).randbytes(size) for at, size in enumerate(sizes)]
    for at, payload in enumerate(payloads):
        await sender.link.write_frame(b"%d" % at, bytearray(payload), Priority.BULK)
    return [(b"%d" % at, payload) for at, payload in enumerate(payloads)]


def stream_bytes(link) -> int:
    """What has gone over the stream itself since the count began."""
    return link.counted_bytes


def count_stream(link):
    link.counted_bytes = 0
    write = link._transport.write

    class Counted:
        def __getattr__(self, name):
            return getattr(transport, name)

        def write(self, data):
            link.counted_bytes += len(data)
            write(data)

    transport, link._transport = link._transport, Counted()


@pytest.mark.parametrize("run", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_frames_go_over_lanes_whole_and_in_order(sides, run, count, eventually):
    async def main():
        async with sides() as (sender, receiver):
            assert await sender.door.dial(sender.link, HOSTS, count) == count
            await eventually(lambda: receiver.link.num_lanes == count)
            count_stream(sender.link)
            sent = await send_all(sender)
            await eventually(lambda: len(receiver.frames) == len(sent))
            assert receiver.got == sent
            assert stream_bytes(sender.link) == 0

    run(main())


def test_frames_keep_their_order_when_lanes_come_while_they_are_sent(sides, eventually):
    async def main():
        async with sides() as (sender, receiver):
            dialling = asyncio.create_task(sender.door.dial(sender.link, HOSTS, 4))
            sent = []
            for seed in range(40):
                sent += await send_all(sender, (200_000, 10), seed)
                await asyncio.sleep(0)
            assert await dialling == 4
            sent += await send_all(sender)
            await eventually(lambda: len(receiver.frames) == len(sent))
            assert receiver.got == sent

    uvloop.run(main())


def test_a_frame_larger_than_all_credit_goes_over_the_stream_and_in_its_turn(sides, eventually):
    async def main():
        async with sides() as (sender, receiver):
            assert await sender.door.dial(sender.link, HOSTS, 3) == 3
            sender.link.window.limit_bytes = 100_000
            count_stream(sender.link)
            sent = await send_all(sender, (50_000, 400_000, 10, 500_000, 20))
            await eventually(lambda: len(receiver.frames) == len(sent))
            assert receiver.got == sent
            assert 900_000 < stream_bytes(sender.link) < 950_000

    uvloop.run(main())


def test_a_lane_that_dies_in_the_middle_of_a_frame_ends_the_stream_for_both(sides, eventually):
    async def main():
        async with sides() as (sender, receiver):
            assert await sender.door.dial(sender.link, HOSTS, 3) == 3
            await eventually(lambda: receiver.link.num_lanes == 3)
            for lane in receiver.link._lanes._lanes:
                lane._transport.pause_reading()
            sender.link.window.take(8_000_100)
            writing = asyncio.create_task(sender.link.write_frame(b"", bytes(8_000_000), Priority.BULK))
            await asyncio.sleep(0.05)
            assert not writing.done()
            receiver.link._lanes._lanes[1]._transport.abort()
            with pytest.raises(EOFError):
                await writing
            await receiver.link.lost.wait()
            assert "a lane of the stream was lost" in sender.link.why_lost
            assert receiver.frames == []
            assert sender.link.num_lanes == receiver.link.num_lanes == 0

    uvloop.run(main())


def test_a_lane_that_dies_when_all_is_handled_costs_nothing(sides, eventually):
    async def main():
        async with sides() as (sender, receiver):
            assert await sender.door.dial(sender.link, HOSTS, 2) == 2
            await eventually(lambda: receiver.link.num_lanes == 2)
            sent = await send_all(sender)
            await eventually(lambda: len(receiver.frames) == len(sent))
            receiver.link._lanes._lanes[0]._transport.abort()
            await eventually(lambda: sender.link.num_lanes == 1)
            sent += await send_all(sender)
            assert sender.link.close_lanes()
            await eventually(lambda: receiver.link.num_lanes == 0)
            sent += await send_all(sender)
            await eventually(lambda: len(receiver.frames) == len(sent))
            assert receiver.got == sent
            assert not sender.link.lost.is_set()

    uvloop.run(main())


def test_lanes_are_kept_while_something_is_not_handled(sides):
    async def main():
        async with sides() as (sender, _):
            assert await sender.door.dial(sender.link, HOSTS, 2) == 2
            sender.link.window.take(100)
            assert not sender.link.close_lanes()
            assert sender.link.num_lanes == 2

    uvloop.run(main())


# Who cannot be dialled


def test_the_receiver_dials_back_where_it_cannot_be_dialled(sides, eventually):
    async def main():
        async with sides(receiver_listens=False) as (sender, receiver):
            supply = supplied(sender)
            sent = await send_all(sender, (10,))
            await eventually(lambda: sender.link._asks_for > 0)
            sent += await send_all(sender, (10, 20))
            await eventually(lambda: sender.link.num_lanes == LANES_FIRST)
            count_stream(sender.link)
            sent += await send_all(sender)
            await eventually(lambda: len(receiver.frames) == len(sent))
            assert receiver.got == sent
            assert stream_bytes(sender.link) == 0
            supply.close()

    uvloop.run(main())


def test_two_that_cannot_dial_each_other_go_on_over_the_stream_and_try_again_later(sides, eventually):
    async def main():
        async with sides(receiver_listens=False, sender_listens=False) as (sender, receiver):
            supply, dials = supplied(sender), []
            sent = await send_all(sender)
            await eventually(lambda: supply._dialling is None)
            dial, sender.door.dial = sender.door.dial, lambda *args: dials.append(args) or dial(*args)
            sent += await send_all(sender)
            await eventually(lambda: len(receiver.frames) == len(sent))
            assert receiver.got == sent
            assert dials == [], "it tried again at once"
            supply._looks_s = 0.0
            await send_all(sender, (10,))
            await eventually(lambda: len(dials) == 1)
            await eventually(lambda: supply._dialling is None)
            assert supply._patience_s == 40.0
            supply.close()

    uvloop.run(main())


def test_who_asks_for_any_number_of_lanes_again_and_again_gets_what_a_stream_may_have(sides, eventually):
    async def main():
        async with sides(receiver_listens=False) as (sender, receiver):
            for _ in range(50):
                sender.link.ask_for_lanes(255)
                await send_all(sender, (10,))
            await eventually(lambda: sender.link.num_lanes == LANES_MAX)
            assert len(receiver.door._tasks) <= 1, "one such request at a time"
            assert len(receiver.door._dialling_back) == 1

    uvloop.run(main())


def supplied(side, hosts=HOSTS) -> LaneSupply:
    async def found():
        return hosts

    supply = LaneSupply(side.link, side.door, found)
    side.link.before_frame = supply.used
    return supply


def test_unused_lanes_are_closed_and_opened_again_when_they_are_needed(sides, eventually, monkeypatch):
    monkeypatch.setattr("shoal.protocol.live.lane_supply._IDLE_S", 0.1)
    monkeypatch.setattr("shoal.protocol.live.lane_supply._LOOK_S", 0.0)

    async def main():
        async with sides() as (sender, receiver):
            supply = supplied(sender)
            for _ in range(2):
                await send_all(sender, (10,))
                await eventually(lambda: sender.link.num_lanes == LANES_FIRST)
                await eventually(lambda: sender.link.num_lanes == receiver.link.num_lanes == 0)
            supply.close()
            assert not sender.link.lost.is_set()

    uvloop.run(main())


# Who should not get in


async def connected(port) -> Lane:
    own = socket.create_connection(("127.0.0.1", port))
    own.setblocking(False)
    return await Lane.over(own, Throttle(), accepted=False)


def knock(side, identity, *, stream, part_of=None, run="run") -> Handshake:
    return Handshake(identity, side.identity.peer_id, run=run, purpose="lane", opens=True, part_of=part_of or stream)


@pytest.mark.parametrize("case", ["another key", "another stream", "another run", "another purpose"])
def test_a_lane_of_somebody_else_or_for_something_else_is_refused(sides, case, eventually, caplog):
    async def main():
        async with sides() as (sender, receiver):
            stream, identity = receiver.link.stream, sender.identity
            handshake = knock(receiver, identity, stream=stream)
            if case == "another key":
                handshake = knock(receiver, Identity.generate(), stream=stream)
            elif case == "another stream":
                handshake = knock(receiver, identity, stream=stream, part_of=bytes(16))
            elif case == "another run":
                handshake = knock(receiver, identity, stream=stream, run="another")
            else:
                handshake = Handshake(
                    identity, receiver.identity.peer_id, run="run", purpose="frames", opens=True, part_of=stream
                )
            lane = await connected(receiver.door.port)
            lane._transport.write(stream + handshake.key)
            other = await lane._read(32)
            await lane._read(64)
            lane._transport.write(handshake.sign(other))
            await eventually(lambda: lane.is_lost)
            assert receiver.link.num_lanes == 0
            assert not receiver.link.lost.is_set()

    with caplog.at_level(logging.WARNING):
        uvloop.run(main())
    assert len(caplog.records) == 1
    assert "is not at the other end of a sealed stream" in caplog.records[0].getMessage()


def test_what_somebody_has_recorded_opens_no_lane(sides, eventually, caplog):
    async def main():
        async with sides() as (sender, receiver):
            handshake, lane = knock(receiver, sender.identity, stream=sender.link.stream), None
            lane = await connected(receiver.door.port)
            said = [sender.link.stream + handshake.key]
            lane._transport.write(said[0])
            other = await lane._read(32)
            await lane._read(64)
            said.append(handshake.sign(other))
            lane._transport.write(said[1])
            await eventually(lambda: receiver.link.num_lanes == 1)
            again = await connected(receiver.door.port)
            again._transport.write(b"".join(said))
            await eventually(lambda: again.is_lost)
            assert receiver.link.num_lanes == 1
            lane.close()

    uvloop.run(main())
    assert ["is not at the other end" in record.getMessage() for record in caplog.records] == [True]


def test_who_names_no_stream_is_sent_away_without_an_answer(sides, eventually):
    async def main():
        async with sides() as (_, receiver):
            lane = await connected(receiver.door.port)
            lane._transport.write(os.urandom(16 + 32))
            await eventually(lambda: lane.is_lost)
            assert not lane._received

    uvloop.run(main())


def test_who_says_nothing_is_sent_away_and_so_are_too_many(sides, eventually, monkeypatch):
    monkeypatch.setattr(lane_door, "_HANDSHAKE_S", 0.5)

    async def main():
        async with sides() as (sender, receiver):
            silent = [await connected(receiver.door.port) for _ in range(40)]
            await eventually(lambda: sum(lane.is_lost for lane in silent) >= 40 - 16)
            assert await sender.door.dial(sender.link, HOSTS, 2) == 2, "others get in meanwhile"
            await eventually(lambda: all(lane.is_lost for lane in silent))
            assert receiver.link.num_lanes == 2

    uvloop.run(main())


def test_a_stream_has_so_many_lanes_and_a_peer_so_many_in_all(sides, eventually, monkeypatch):
    async def main():
        async with sides() as (sender, receiver):
            assert await sender.door.dial(sender.link, HOSTS, 20) == LANES_MAX
            await eventually(lambda: receiver.link.num_lanes == LANES_MAX)
            assert await sender.door.dial(sender.link, HOSTS, 1) == 0
        async with sides() as (sender, receiver):
            monkeypatch.setattr(lane_door, "LANES_OF_ALL_MAX", 3)
            assert await sender.door.dial(sender.link, HOSTS, 8) == 3

    uvloop.run(main())


def frame(sequence, payload=b"payload") -> memoryview:
    return memoryview(b"".join(encode_frame(1, sequence, b"meta", payload)))


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([(0, frame(1)), (0, frame(1))], "sent a part of a frame twice"),
        ([(0, frame(1)), (20, frame(1)[20:])], "sent a part of a frame twice"),
        ([(10, frame(1)[10:20]), (15, frame(1)[15:])], "sent a part of a frame twice"),
        ([(1 << 27, frame(1))], "beyond its credit"),
        ([(0, memoryview(b""))], "nothing in it"),
        ([(0, memoryview(bytes(100)))], "not a frame"),
        ([(0, frame(1)), (len(frame(1)), frame(1))], "sent frame 1 where 2 comes next"),
    ],
    ids=["again", "overlap", "overlap ahead", "far ahead", "empty", "no frame", "number again"],
)
def test_pieces_that_no_honest_sender_sends_end_the_stream(sides, pieces, why, eventually):
    async def main():
        async with sides() as (sender, receiver):
            assert await sender.door.dial(sender.link, HOSTS, 1) == 1
            await eventually(lambda: receiver.link.num_lanes == 1)
            for start, piece in pieces:
                sender.link._lanes.lanes[0].send(start, piece)
            await receiver.link.lost.wait()
            assert why in receiver.link.why_lost
            assert sender.identity.peer_id[-8:] in receiver.link.why_lost
            await eventually(lambda: receiver.link.num_lanes == 0)

    uvloop.run(main())


def test_a_frame_that_came_over_the_stream_does_not_come_over_a_lane_again(sides, eventually):
    async def main():
        async with sides() as (sender, receiver):
            assert await sender.door.dial(sender.link, HOSTS, 1) == 1
            await eventually(lambda: receiver.link.num_lanes == 1)
            sender.link._transport.write(bytes(frame(1)))
            await eventually(lambda: len(receiver.frames) == 1)
            sender.link._lanes.lanes[0].send(0, frame(1))
            await receiver.link.lost.wait()
            assert "sent frame 1 twice" in receiver.link.why_lost

    uvloop.run(main())


def test_a_record_that_was_changed_ends_the_lane_and_so_the_stream(sides, eventually):
    async def main():
        async with sides() as (sender, receiver):
            assert await sender.door.dial(sender.link, HOSTS, 1) == 1
            await eventually(lambda: receiver.link.num_lanes == 1)
            lane = sender.link._lanes.lanes[0]
            (record,) = lane._channel.seal(bytes(8) + bytes(frame(1)))
            sender.link.window.take(100)
            lane._transport.write(record[:-1] + bytes([record[-1] ^ 1]))
            await sender.link.lost.wait()
            assert "a lane of the stream was lost" in sender.link.why_lost
            assert receiver.frames == []

    uvloop.run(main())


def test_a_receiver_that_sends_pieces_loses_the_lane(sides, eventually):
    async def main():
        async with sides() as (sender, receiver):
            assert await sender.door.dial(sender.link, HOSTS, 1) == 1
            await eventually(lambda: receiver.link.num_lanes == 1)
            receiver.link._lanes._lanes[0].send(0, frame(1))
            await eventually(lambda: sender.link.num_lanes == 0)
            assert sender.frames == []

    uvloop.run(main())


# Limits and ends


@pytest.mark.parametrize("limited", ["sender", "receiver"])
def test_a_volunteers_limit_holds_for_lanes(sides, limited, eventually):
    rate, size = 1_000_000.0, 600_000

    async def main():
        limits = {"sender": RateLimits(upload_bytes_per_s=rate), "receiver": RateLimits(download_bytes_per_s=rate)}
        async with sides(**{limited: Throttle(limits[limited])}) as (sender, receiver):
            assert await sender.door.dial(sender.link, HOSTS, 4) == 4
            await eventually(lambda: receiver.link.num_lanes == 4)
            began_s = time.monotonic()
            await send_all(sender, (size,))
            await eventually(lambda: len(receiver.frames) == 1)
            assert time.monotonic() - began_s > 0.7 * size * WIRE_FACTOR / rate

    uvloop.run(main())


def test_nothing_is_left_of_lanes_when_the_stream_and_the_doors_are_closed(sides, eventually):
    async def main():
        files = len(os.listdir("/proc/self/fd"))
        async with sides() as (sender, receiver):
            assert await sender.door.dial(sender.link, HOSTS, 8) == 8
            assert await receiver.door.dial(receiver.link, HOSTS, 8) == 0, "there are eight"
            waiting = [await connected(receiver.door.port) for _ in range(3)]
            port = receiver.door.port
            await send_all(sender)
        await eventually(lambda: all(lane.is_lost for lane in waiting))
        assert sender.door._num_lanes == receiver.door._num_lanes == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= files)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_lanes_end_with_their_stream(sides, eventually):
    async def main():
        async with sides() as (sender, receiver):
            assert await sender.door.dial(sender.link, HOSTS, 3) == 3
            await eventually(lambda: receiver.link.num_lanes == 3)
            lanes = [*sender.link._lanes.lanes, *receiver.link._lanes._lanes]
            receiver.link.abort("excluded from the run")
            await eventually(lambda: all(lane._socket.fileno() < 0 for lane in lanes))
            assert await sender.door.dial(sender.link, HOSTS, 1) == 0

    uvloop.run(main())


def test_where_no_port_can_be_had_nobody_is_told_of_one():
    async def main():
        door = LaneDoor(Identity.generate(), run="run", throttle=Throttle())
        door.listen(("/ip4/192.0.2.1/tcp/0",))
        assert door.port == 0
        door.listen(("/ip4/127.0.0.1/tcp/0",))
        assert door.port > 0
        await door.close()

    asyncio.run(main())
