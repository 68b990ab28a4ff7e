import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.live import lanes
from shoal.protocol.live.lanes import Reassembly

SENDER = PeerID("12D3KooWSender")
FAR = 1 << 40


def put(pieces: Reassembly, start: int, piece: bytes, reach_bytes: int = FAR) -> bytes:
    return b"".join(pieces.put(start, memoryview(piece), reach_bytes=reach_bytes))


@given(data=st.binary(min_size=1, max_size=400), cuts=st.sets(st.integers(1, 399)), seed=st.integers(0, 999))
def test_pieces_of_any_cut_in_any_order_are_the_stream_again(data, cuts, seed):
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [(start, data[start:end]) for start, end in itertools.pairwise(bounds)]
    random.Random(seed).shuffle(pieces)
    together, came, out = Reassembly(SENDER), set(), b""
    for start, piece in pieces:
        came |= set(range(start, start + len(piece)))
        out += put(together, start, piece)
        missing = next((at for at in range(len(data)) if at not in came), len(data))
        assert out == data[:missing], "everything before the first missing byte has been handed on, and nothing else"
    assert out == data
    assert len(together._starts) == 0


@given(start=st.integers(0, 60), length=st.integers(1, 40))
def test_no_byte_comes_twice(start, length):
    together = Reassembly(SENDER)
    put(together, 0, bytes(10))
    put(together, 20, bytes(10))
    put(together, 40, bytes(10))
    known = {*range(10), *range(20, 30), *range(40, 50)}
    if known & set(range(start, start + length)):
        with pytest.raises(RemoteError, match="sent a part of a frame twice"):
            put(together, start, bytes(length))
    else:
        put(together, start, bytes(length))


def test_a_piece_beyond_what_may_be_ahead_is_refused_and_one_just_within_it_is_not():
    together = Reassembly(SENDER)
    put(together, 0, bytes(10))
    put(together, 50, bytes(50), reach_bytes=90)
    with pytest.raises(RemoteError, match="beyond its credit"):
        put(together, 100, b"x", reach_bytes=90)


def test_an_empty_piece_is_refused():
    with pytest.raises(RemoteError, match="nothing in it"):
        put(Reassembly(SENDER), 7, b"")


def test_only_so_many_pieces_are_held(monkeypatch):
    monkeypatch.setattr(lanes, "LANE_PIECES_HELD_MAX", 3)
    together = Reassembly(SENDER)
    for start in (2, 4, 6):
        put(together, start, b"x")
    with pytest.raises(RemoteError, match="sent 3 pieces of frames ahead of a missing one"):
        put(together, 8, b"x")
    assert put(together, 0, b"ab") == b"abx"
    assert len(together._starts) == 2
