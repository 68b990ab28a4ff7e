import mmap
import random

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.errors import RemoteError
from shoal.protocol.frames import (
    FRAME_OVERHEAD_BYTES,
    HEADER_BYTES,
    PIECE_BYTES,
    CreditWindow,
    Frame,
    FrameAssembler,
    FrameOrder,
    FrameType,
    decode_credit,
    decode_lanes,
    encode_credit,
    encode_frame,
    encode_lanes,
    wire_bytes,
)
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import BULK_CHUNK_BYTES, FRAME_META_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX

SOURCE = PeerID("12D3KooWNoisyNeighbour")
HELLO = b"".join(encode_frame(FrameType.HELLO, 0, b"hello", b""))


def data(sequence: int, meta: bytes, payload: bytes | bytearray | memoryview) -> bytes:
    return b"".join(encode_frame(FrameType.DATA, sequence, meta, payload))


def feed(assembler: FrameAssembler, wire: bytes, *, step: int = 1 << 30) -> list[Frame]:
    """Hand `wire` over as a socket would: at most `step` bytes at a time, never more than there is room for."""
    frames = []
    while wire:
        room = assembler.buffer()
        count = min(len(room), len(wire), step)
        room[:count] = wire[:count]
        wire = wire[count:]
        frame = assembler.advance(count)
        if frame is not None:
            frames.append(frame)
    return frames


@given(
    parts=st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=300)), max_size=5),
    step=st.integers(1, 80),
)
def test_frames_survive_any_fragmentation(parts, step):
    wire = HELLO + b"".join(data(number, *part) for number, part in enumerate(parts, start=1))
    hello, *frames = feed(FrameAssembler(SOURCE), wire, step=step)
    assert (hello.type, hello.meta) == (FrameType.HELLO, b"hello")
    assert [(frame.meta, bytes(frame.payload)) for frame in frames] == parts
    assert [frame.sequence for frame in frames] == list(range(1, len(parts) + 1))


@given(payload=st.binary(max_size=60), meta=st.binary(max_size=20), position=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_detected(payload, meta, position, bit):
    wire = bytearray(data(1, meta, payload))
    wire[position % len(wire)] ^= 1 << bit
    assembler = FrameAssembler(SOURCE)
    feed(assembler, HELLO)
    with pytest.raises(RemoteError) as caught:
        feed(assembler, bytes(wire))
    assert caught.value.peer_id == SOURCE


def test_every_single_bit_of_one_frame_is_covered():
    good = data(1, b"meta", b"payload")
    for position in range(8 * len(good)):
        wire = bytearray(good)
        wire[position // 8] ^= 1 << position % 8
        assembler = FrameAssembler(SOURCE)
        feed(assembler, HELLO)
        with pytest.raises(RemoteError):
            feed(assembler, bytes(wire))


def test_a_damaged_length_is_refused_before_a_byte_of_it_is_awaited():
    wire = bytearray(data(1, b"", b"x"))
    wire[17] ^= 0x01  # in the payload length, which would now be 2^56 bytes
    assembler = FrameAssembler(SOURCE)
    feed(assembler, HELLO)
    with pytest.raises(RemoteError, match="header that was damaged"):
        feed(assembler, bytes(wire[:HEADER_BYTES]))


def test_the_payload_is_never_copied_on_the_way_out():
    payload = bytearray(3 * PIECE_BYTES + 5)
    head, *pieces, trailer = encode_frame(FrameType.DATA, 1, b"m", payload)
    assert all(piece.obj is payload for piece in pieces)
    assert [len(piece) for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, 5]
    assert len(head) + len(trailer) == FRAME_OVERHEAD_BYTES + 1


def test_a_payload_of_any_item_size_counts_in_bytes():
    floats = memoryview(bytearray(16)).cast("d")
    wire = data(1, b"", floats)
    assert len(wire) == wire_bytes(0, 16)
    assert len(feed(FrameAssembler(SOURCE), HELLO + wire)[1].payload) == 16


@pytest.mark.parametrize("size", [3, BULK_CHUNK_BYTES, BULK_CHUNK_BYTES + 1, 3_000_000])
def test_the_receiver_may_write_to_a_payload(size):
    payload = random.Random(size).randbytes(size)
    frame = feed(FrameAssembler(SOURCE), HELLO + data(1, b"", payload), step=PIECE_BYTES)[1]
    assert (frame.payload, frame.wire_bytes) == (payload, wire_bytes(0, size))
    frame.payload[0] = payload[0] ^ 1
    assert frame.payload[0] != payload[0]
    assert frame.payload[1:] == payload[1:]


def test_a_payload_that_is_only_announced_takes_no_memory():
    header = encode_frame(FrameType.DATA, 1, b"", memoryview(mmap.mmap(-1, FRAME_PAYLOAD_BYTES_MAX)))
    assembler = FrameAssembler(SOURCE)
    feed(assembler, HELLO)
    before_bytes = psutil.Process().memory_info().rss
    feed(assembler, bytes(next(header)))
    assert len(assembler.buffer()) == FRAME_PAYLOAD_BYTES_MAX
    assert psutil.Process().memory_info().rss - before_bytes < 100_000_000


@pytest.mark.parametrize("sequence", [0, 2, 7, 2**64 - 1])
def test_a_sequence_that_is_not_the_next_is_refused(sequence):
    kind = FrameType.HELLO if sequence == 0 else FrameType.DATA
    with pytest.raises(RemoteError, match="comes next"):
        feed(FrameAssembler(SOURCE), HELLO + b"".join(encode_frame(kind, sequence, b"", b"")))


@pytest.mark.parametrize(("kind", "sequence"), [(FrameType.DATA, 0), (FrameType.CREDIT, 0), (FrameType.HELLO, 1)])
def test_hello_comes_first_and_only_first(kind, sequence):
    wire = b"".join(encode_frame(kind, sequence, b"", b""))
    with pytest.raises(RemoteError, match=f"frame of type {int(kind)} as number {sequence}"):
        feed(FrameAssembler(SOURCE), HELLO * sequence + wire)


@pytest.mark.parametrize(
    ("meta_bytes", "payload_bytes"),
    [(FRAME_META_BYTES_MAX + 1, 0), (0, FRAME_PAYLOAD_BYTES_MAX + 1)],
)
def test_more_than_the_limits_is_neither_sent_nor_accepted(monkeypatch, meta_bytes, payload_bytes):
    with pytest.raises(ValueError, match="larger than any receiver accepts"):
        list(encode_frame(FrameType.DATA, 1, bytes(meta_bytes), bytes(payload_bytes)))
    monkeypatch.setattr("shoal.protocol.frames.FRAME_META_BYTES_MAX", 2**31)
    monkeypatch.setattr("shoal.protocol.frames.FRAME_PAYLOAD_BYTES_MAX", 2**31)
    header = next(encode_frame(FrameType.DATA, 1, bytes(meta_bytes), bytes(payload_bytes)))[:HEADER_BYTES]
    monkeypatch.undo()
    with pytest.raises(RemoteError, match=f"announced {max(meta_bytes, payload_bytes)} bytes"):
        feed(FrameAssembler(SOURCE), HELLO + bytes(header))


def test_only_data_carries_a_payload():
    with pytest.raises(RemoteError, match="more than is allowed"):
        feed(FrameAssembler(SOURCE), HELLO + b"".join(encode_frame(FrameType.CREDIT, 1, b"", b"x")))


def test_bytes_that_are_no_frame_are_refused():
    with pytest.raises(RemoteError, match="not a frame"):
        feed(FrameAssembler(SOURCE), b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")


def test_a_stream_may_end_between_frames_only():
    assembler = FrameAssembler(SOURCE)
    assert assembler.at_boundary
    feed(assembler, HELLO + data(1, b"", b"x"))
    assert assembler.at_boundary
    feed(assembler, data(2, b"", b"x")[:5])
    assert not assembler.at_boundary


def test_credit_says_how_many_bytes_come_back():
    _, frame = feed(FrameAssembler(SOURCE), HELLO + encode_credit(1, 12345))
    assert decode_credit(frame, SOURCE) == 12345


def test_data_where_credit_belongs_is_refused():
    _, frame = feed(FrameAssembler(SOURCE), HELLO + data(1, bytes(8), b""))
    with pytest.raises(RemoteError, match="only credits"):
        decode_credit(frame, SOURCE)


def test_a_window_admits_up_to_its_limit_and_a_larger_frame_alone():
    window = CreditWindow(100)
    assert window.admits(1000)
    window.take(60)
    assert window.admits(40)
    assert not window.admits(41)
    window.give_back(60, SOURCE)
    assert window.admits(1000)


def test_nobody_gives_back_more_than_is_outstanding():
    window = CreditWindow(100)
    window.take(60)
    with pytest.raises(RemoteError, match="gave back 61 bytes"):
        window.give_back(61, SOURCE)


def test_a_sender_beyond_its_credit_is_refused_at_the_header():
    window = CreditWindow(wire_bytes(0, 10))
    assembler = FrameAssembler(SOURCE, window=window)
    feed(assembler, HELLO + data(1, b"", bytes(10)))
    with pytest.raises(RemoteError, match="beyond its credit"):
        feed(assembler, data(2, b"", b"")[:HEADER_BYTES])


def test_hello_costs_no_credit():
    window = CreditWindow(10)
    feed(FrameAssembler(SOURCE, window=window), HELLO)
    assert window.outstanding_bytes == 0


@given(count=st.integers(0, 40), seed=st.integers(0, 999))
def test_frames_that_come_two_ways_are_handed_on_in_their_order(count, seed):
    frames = [Frame(type=FrameType.DATA, sequence=number, meta=b"", payload=b"") for number in range(1, count + 1)]
    mixed, order, out = random.Random(seed).sample(frames, count), FrameOrder(SOURCE), []
    for number, frame in enumerate(mixed):
        out += order.put(frame)
        came = {frame.sequence for frame in mixed[: number + 1]}
        assert [frame.sequence for frame in out] == list(range(1, next(n for n in range(1, 99) if n not in came)))
    assert out == frames


@pytest.mark.parametrize("again", [1, 2, 4])
def test_a_number_comes_once_whichever_way(again):
    order = FrameOrder(SOURCE)
    for number in (1, 2, 4):
        list(order.put(Frame(type=FrameType.DATA, sequence=number, meta=b"", payload=b"")))
    with pytest.raises(RemoteError, match=f"sent frame {again} twice"):
        list(order.put(Frame(type=FrameType.DATA, sequence=again, meta=b"", payload=b"")))


def test_numbers_are_skipped_only_where_frames_may_come_another_way_and_never_come_back():
    wire = data(1, b"", b"x"), data(3, b"", b"x")
    with pytest.raises(RemoteError, match="sent frame 3 where 2 comes next"):
        feed(FrameAssembler(SOURCE), HELLO + b"".join(wire))
    assembler = FrameAssembler(SOURCE, sequence=1, may_skip=True)
    assert [frame.sequence for frame in feed(assembler, b"".join(wire))] == [1, 3]
    with pytest.raises(RemoteError, match="sent frame 2 where 4 comes next"):
        feed(assembler, data(2, b"", b"x"))


def test_a_number_of_lanes_is_asked_for_in_one_way():
    (frame,) = feed(FrameAssembler(SOURCE, sequence=7), encode_lanes(7, 4))
    assert decode_lanes(frame, SOURCE) == 4
    for other in (encode_frame(FrameType.LANES, 7, b"", b""), encode_frame(FrameType.LANES, 7, b"12", b"")):
        (frame,) = feed(FrameAssembler(SOURCE, sequence=7), b"".join(other))
        with pytest.raises(RemoteError, match="sent a malformed request for lanes"):
            decode_lanes(frame, SOURCE)


@pytest.mark.parametrize("filled", [0, HEADER_BYTES, HEADER_BYTES + 3, HEADER_BYTES + 50])
def test_what_is_to_come_of_a_frame_is_known_from_its_header_on(filled):
    wire, assembler = data(1, b"meta", bytes(100)), FrameAssembler(SOURCE, sequence=1)
    feed(assembler, wire[:filled])
    assert assembler.left_bytes == (len(wire) - filled if filled >= HEADER_BYTES else 0)
