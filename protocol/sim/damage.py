"""Flips bits in frames and feeds the frames to the decoder of real peers.

A frame is encoded as in `live/link.py`, damaged, and decoded by a `FrameAssembler`, so the simulation detects exactly
the damage that real peers detect. The checksums are xxh3: 32 bits over the header, 64 bits over the frame. With a good
hash of b bits, one damaged frame in 2^b passes undetected: for 64 bits 5e-20 of the damaged frames. A damaged length
passes the header's check once in 4e9; the frame then fails its own check, or the stream ends before the frame is
complete and nothing is delivered.
"""

import random

from shoal.protocol.errors import RemoteError
from shoal.protocol.frames import Frame, FrameAssembler, FrameType, encode_credit, encode_frame
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Payload
from shoal.protocol.sim.phantom import Phantom

_HELLO = b"".join(encode_frame(FrameType.HELLO, 0, b"", b""))
_FIRST_SEQUENCE = 1
"""The sequence number of the damaged frame, which is the first after the stream's HELLO frame."""


def flip_bits(data: bytearray, rng: random.Random) -> None:
    """Flip 1 to 8 different bits of `data` in place. Empty data stays empty."""
    num_bits = 8 * len(data)
    for bit in rng.sample(range(num_bits), min(num_bits, rng.randint(1, 8))):
        data[bit >> 3] ^= 1 << (bit & 7)


def damaged_data(meta: bytes, payload: Payload | Phantom, *, source: PeerID, rng: random.Random) -> Frame | str:
    """Flip bits in a frame of `source` and decode it (a phantom payload counts as zeros).

    Returns: the decoded frame if the damage is not detected, else the reason for which the stream breaks.
    """
    content = bytes(payload.nbytes) if isinstance(payload, Phantom) else payload
    wire = bytearray().join(encode_frame(FrameType.DATA, _FIRST_SEQUENCE, meta, content))
    return _receive(wire, source, rng)


def damaged_credit(given_back_bytes: int, *, source: PeerID, rng: random.Random) -> Frame | str:
    """Flip bits in a credit frame of `source`, and decode it. Returns: the decoded frame, or why the stream breaks."""
    return _receive(bytearray(encode_credit(_FIRST_SEQUENCE, given_back_bytes)), source, rng)


def _receive(wire: bytearray, source: PeerID, rng: random.Random) -> Frame | str:
    flip_bits(wire, rng)
    assembler = FrameAssembler(source)
    _take(assembler, _HELLO)
    try:
        frame = _take(assembler, wire)
    except RemoteError as error:
        return str(error)
    return frame if frame is not None else "it waits for the rest of a frame"


def _take(assembler: FrameAssembler, wire: bytes | bytearray) -> Frame | None:
    """Feed the bytes `wire` to the assembler. Returns: the frame that they complete, or None."""
    view, frame = memoryview(wire), None
    while view:
        room = assembler.buffer()
        count = min(len(room), len(view))
        room[:count] = view[:count]
        frame = assembler.advance(count)
        view = view[count:]
    return frame
