"""Wire format of tensor frames, from bytes to frames and back. Pure.

    header   magic 4 B | type 1 B | sequence 8 B | meta length 4 B | payload length 8 B | header checksum 4 B
    meta     msgpack of one frame header (DATA), a sealed envelope (HELLO), credit (CREDIT), or a number (LANES)
    payload  one tensor's bytes
    trailer  xxh3-64 of all of the above 8 B | end marker 4 B

The header has its own checksum: otherwise a flipped bit in a length would make the receiver wait for gigabytes that
never come. The frame's own checksum stands at its end: so both sides can hash a frame piece by piece, while a piece is
in the cache, and the event loop can run between pieces.

Each direction of a stream numbers its frames from 0. Only frame 0 is a HELLO. Credit, the number of bytes that a sender
may still send, counts whole frames. If a direction also uses lanes (further TCP connections, `live/lane.py`), its
frames arrive in two byte streams, and `FrameOrder` merges these.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import (
    BULK_CHUNK_BYTES,
    FRAME_META_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    STREAM_CREDIT_BYTES,
)
from shoal.protocol.ports import Payload

_MAGIC: Final = b"SHL1"
_END_MARKER: Final = b"1LHS"
_FIELDS: Final = struct.Struct(">4sBQIQ")
_HEADER_CHECKSUM: Final = struct.Struct(">I")
_TRAILER: Final = struct.Struct(">Q4s")
_CREDIT: Final = struct.Struct(">Q")
_LANES: Final = struct.Struct(">B")

HEADER_BYTES: Final = _FIELDS.size + _HEADER_CHECKSUM.size
FRAME_OVERHEAD_BYTES: Final = HEADER_BYTES + _TRAILER.size
PIECE_BYTES: Final = 512 * 1024
"""Bytes hashed and written at a time: a piece fits into a second-level cache and takes 50 us to hash."""


class FrameType(IntEnum):
    HELLO = 0
    DATA = 1
    CREDIT = 2
    LANES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One complete frame. The holder of the frame owns `payload` and may write to it."""

    type: FrameType
    sequence: int
    meta: bytes
    payload: bytearray | memoryview

    @property
    def wire_bytes(self) -> int:
        return wire_bytes(len(self.meta), len(self.payload))


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    type: FrameType
    sequence: int
    meta_bytes: int
    payload_bytes: int


def wire_bytes(meta_bytes: int, payload_bytes: int) -> int:
    """Return the length of a whole frame in bytes; the frame costs this much credit."""
    return FRAME_OVERHEAD_BYTES + meta_bytes + payload_bytes


def encode_frame(kind: FrameType, sequence: int, meta: bytes, payload: Payload) -> Iterator[bytes | memoryview]:
    """Yield a frame in pieces: header and meta, views of `payload`, trailer.

    The payload is not copied, and each piece is hashed when it is requested: do not change `payload` before the last
    piece was yielded.

    Raises: ValueError: `meta` or `payload` is larger than a receiver accepts.
    """
    view = memoryview(payload).cast("B")
    if len(meta) > FRAME_META_BYTES_MAX or len(view) > FRAME_PAYLOAD_BYTES_MAX:
        raise ValueError(f"a frame of {len(meta)} + {len(view)} bytes is larger than any receiver accepts")
    fields = _FIELDS.pack(_MAGIC, kind, sequence, len(meta), len(view))
    head = fields + _HEADER_CHECKSUM.pack(_short_hash(fields)) + meta
    checksum = xxh3_64(head)
    yield head
    for at in range(0, len(view), PIECE_BYTES):
        piece = view[at : at + PIECE_BYTES]
        checksum.update(piece)
        yield piece
    yield _TRAILER.pack(checksum.intdigest(), _END_MARKER)


def encode_credit(sequence: int, given_back_bytes: int) -> bytes:
    """Return a complete CREDIT frame, which returns `given_back_bytes` of credit to the sender of DATA frames."""
    return b"".join(encode_frame(FrameType.CREDIT, sequence, _CREDIT.pack(given_back_bytes), b""))


def decode_credit(frame: Frame, source: PeerID) -> int:
    """Return the number of bytes of credit that `source` returns. Raises: RemoteError: `frame` is no valid CREDIT."""
    if frame.type is not FrameType.CREDIT or len(frame.meta) != _CREDIT.size or frame.payload:
        raise RemoteError(source, "sent another frame where only credits are allowed")
    (given_back_bytes,) = _CREDIT.unpack(frame.meta)
    return int(given_back_bytes)


def encode_lanes(sequence: int, count: int) -> bytes:
    """Return a complete LANES frame, which asks the receiver to dial `count` lanes (TCP connections)."""
    return b"".join(encode_frame(FrameType.LANES, sequence, _LANES.pack(count), b""))


def decode_lanes(frame: Frame, source: PeerID) -> int:
    """Return the number of lanes (TCP connections) that `source` requests. Raises: RemoteError: `frame` is invalid."""
    if frame.type is not FrameType.LANES or len(frame.meta) != _LANES.size or frame.payload:
        raise RemoteError(source, "sent a malformed request for lanes")
    (count,) = _LANES.unpack(frame.meta)
    return int(count)


def decode_header(
    raw: bytes | bytearray | memoryview, *, source: PeerID, sequence: int, may_skip: bool = False
) -> Header:
    """Check a header against every limit before allocating memory for its frame.

    Args:
        sequence: the expected sequence number; with `may_skip` the lowest allowed one.
        may_skip: True if the stream has lanes: frames with lower numbers may then arrive later over another connection.
    Raises: RemoteError: no honest peer sends this header at this point of the stream.
    """
    magic, kind, got_sequence, meta_bytes, payload_bytes = _FIELDS.unpack_from(raw)
    (checksum,) = _HEADER_CHECKSUM.unpack_from(raw, _FIELDS.size)
    if magic != _MAGIC:
        raise RemoteError(source, "sent bytes that are not a frame")
    if checksum != _short_hash(memoryview(raw)[: _FIELDS.size]):
        raise RemoteError(source, "sent a frame header that was damaged on the way")
    if got_sequence != sequence and not (may_skip and got_sequence > sequence):
        raise RemoteError(source, f"sent frame {got_sequence} where {sequence} comes next")
    if kind > max(FrameType) or (kind == FrameType.HELLO) != (got_sequence == 0):
        raise RemoteError(source, f"sent a frame of type {kind} as number {got_sequence}")
    if meta_bytes > FRAME_META_BYTES_MAX:
        raise RemoteError(
            source, f"announced {meta_bytes} bytes of frame meta where {FRAME_META_BYTES_MAX} are allowed"
        )
    if payload_bytes > (FRAME_PAYLOAD_BYTES_MAX if kind == FrameType.DATA else 0):
        raise RemoteError(source, f"announced {payload_bytes} bytes of payload, more than is allowed")
    return Header(type=FrameType(kind), sequence=got_sequence, meta_bytes=meta_bytes, payload_bytes=payload_bytes)


def _short_hash(fields: bytes | memoryview) -> int:
    return xxh3_64_intdigest(fields) & 0xFFFFFFFF


class CreditWindow:
    """Counts the bytes of one direction's DATA frames that are sent and not yet handled. Each end counts."""

    def __init__(self, limit_bytes: int = STREAM_CREDIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.outstanding_bytes = 0

    def admits(self, frame_bytes: int) -> bool:
        """True if a frame may be sent now. A frame larger than the window is sent only if no other one is in flight."""
        return self.outstanding_bytes == 0 or self.outstanding_bytes + frame_bytes <= self.limit_bytes

    def take(self, frame_bytes: int) -> None:
        self.outstanding_bytes += frame_bytes

    def give_back(self, frame_bytes: int, source: PeerID) -> None:
        """Count `frame_bytes` as handled. Raises: RemoteError: `source` returns more credit than is outstanding."""
        if frame_bytes > self.outstanding_bytes:
            raise RemoteError(source, f"gave back {frame_bytes} bytes where {self.outstanding_bytes} are outstanding")
        self.outstanding_bytes -= frame_bytes


def _room_for(payload_bytes: int) -> bytearray | memoryview:
    """Allocate a payload buffer; a large one takes memory only as it is written.

    A `bytearray` is zeroed: a header of 29 bytes could then make its receiver commit 256 MiB and block the loop for a
    third of a second. Rejected: `mmap`, which maps new pages each time (16 ms for 16 MiB; numpy takes 0.4 ms).
    """
    if payload_bytes <= BULK_CHUNK_BYTES:
        return bytearray(payload_bytes)
    return np.empty(payload_bytes, np.uint8).data


class FrameAssembler:
    """Assembles the frames of one direction of a stream, in the manner of `asyncio.BufferedProtocol`.

    The caller writes the next bytes into `buffer()` and reports their number with `advance()`. The payload is received
    in place: the kernel and the checksum touch each byte once.

    Args:
        window: the credit of DATA frames: a frame's header takes credit, and the frame's consumer returns the credit.
        sequence: the sequence number of the first frame.

    Attributes:
        may_skip: True if the stream has lanes: this byte stream may then skip frames that arrive over lanes.
    """

    def __init__(
        self, source: PeerID, *, window: CreditWindow | None = None, sequence: int = 0, may_skip: bool = False
    ) -> None:
        self.may_skip = may_skip
        self._source = source
        self._window = window
        self._sequence = sequence
        self._begin()

    @property
    def at_boundary(self) -> bool:
        """True between two frames, where the stream may end."""
        return self._part is self._header_part and self._filled == 0

    @property
    def left_bytes(self) -> int:
        """Bytes still missing of the frame that is arriving; 0 until its header is complete."""
        if self._header is None:
            return 0
        return len(self._part) - self._filled + sum(len(part) for part, _ in self._parts)

    def buffer(self) -> memoryview:
        """Return the buffer for the stream's next bytes; never empty."""
        return self._part[self._filled :]

    def advance(self, count: int) -> Frame | None:
        """Process `count` bytes that were written into `buffer()`.

        Returns: the frame, if these bytes complete it.
        Raises: RemoteError: no honest peer sends these bytes; do not use the assembler afterwards.
        """
        if self._hashed:
            self._checksum.update(self._part[self._filled : self._filled + count])
        self._filled += count
        while self._filled == len(self._part):
            frame = self._next_part()
            if frame is not None:
                return frame
        return None

    def _begin(self) -> None:
        self._header: Header | None = None
        self._payload: bytearray | memoryview = bytearray()
        self._checksum = xxh3_64()
        self._header_part = memoryview(bytearray(HEADER_BYTES))
        self._parts: list[tuple[memoryview, bool]] = []
        self._use(self._header_part, hashed=True)

    def _use(self, part: memoryview, *, hashed: bool) -> None:
        self._part = part
        self._hashed = hashed
        self._filled = 0

    def _next_part(self) -> Frame | None:
        if self._header is None:
            header = decode_header(self._part, source=self._source, sequence=self._sequence, may_skip=self.may_skip)
            self._open(header)
        if self._parts:
            part, hashed = self._parts.pop(0)
            self._use(part, hashed=hashed)
            return None
        return self._finish()

    def _open(self, header: Header) -> None:
        self._header = header
        if self._window is not None and header.type is FrameType.DATA:
            frame_bytes = wire_bytes(header.meta_bytes, header.payload_bytes)
            if not self._window.admits(frame_bytes):
                raise RemoteError(self._source, f"sent {frame_bytes} bytes beyond its credit")
            self._window.take(frame_bytes)
        self._meta_part = bytearray(header.meta_bytes)
        self._payload = _room_for(header.payload_bytes)
        self._parts = [
            (memoryview(self._meta_part), True),
            (memoryview(self._payload), True),
            (memoryview(bytearray(_TRAILER.size)), False),
        ]

    def _finish(self) -> Frame:
        assert self._header is not None
        checksum, marker = _TRAILER.unpack(self._part)
        if marker != _END_MARKER or checksum != self._checksum.intdigest():
            raise RemoteError(self._source, f"sent frame {self._header.sequence} damaged")
        frame = Frame(
            type=self._header.type, sequence=self._header.sequence, meta=bytes(self._meta_part), payload=self._payload
        )
        self._sequence = frame.sequence + 1
        self._begin()
        return frame


class FrameOrder:
    """Restores the order of one sender's DATA and LANES frames, which arrive over the daemon's stream and over lanes.

    A frame that waits for an earlier frame still occupies its sender's credit, so credit bounds the waiting bytes.
    """

    def __init__(self, source: PeerID) -> None:
        self._source = source
        self._next = 1  # HELLO was 0
        self._early: dict[int, Frame] = {}

    def put(self, frame: Frame) -> Iterator[Frame]:
        """Add a received frame; yield the frames that are now next in order. Raises: RemoteError: a repeated number."""
        if frame.sequence < self._next or frame.sequence in self._early:
            raise RemoteError(self._source, f"sent frame {frame.sequence} twice")
        self._early[frame.sequence] = frame
        while self._next in self._early:
            self._next += 1
            yield self._early.pop(self._next - 1)
