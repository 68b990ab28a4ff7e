"""Reorder pieces of a byte stream that arrive over several connections. Pure.

Each piece has its offset in the stream. An honest sender sends each byte once, and no further ahead of the first
missing byte than its credit allows; anything else is an error.
"""

from bisect import bisect_right

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LANE_PIECES_HELD_MAX


class Reassembly:
    """One byte stream. Args: source: the sender of the pieces."""

    def __init__(self, source: PeerID) -> None:
        self._source = source
        self._next = 0
        """Offset of the first missing byte."""
        self._starts: list[int] = []
        """Offsets of the held pieces, ascending."""
        self._held: dict[int, memoryview] = {}

    def put(self, start: int, piece: memoryview, *, reach_bytes: int) -> list[memoryview]:
        """Take one piece.

        Args:
            reach_bytes: how far beyond the first missing byte a piece may end.
        Returns: the pieces that are next in the stream now, in order.
        Raises: RemoteError: no honest sender sends this piece.
        """
        end = start + len(piece)
        if not piece:
            raise RemoteError(self._source, "sent a piece of a frame with nothing in it")
        if end > self._next + reach_bytes:
            raise RemoteError(self._source, "sent a piece of a frame beyond its credit")
        at = bisect_right(self._starts, start)
        overlaps_before = at > 0 and self._starts[at - 1] + len(self._held[self._starts[at - 1]]) > start
        overlaps_after = at < len(self._starts) and self._starts[at] < end
        if start < self._next or overlaps_before or overlaps_after:
            raise RemoteError(self._source, "sent a part of a frame twice")
        if start > self._next:
            if len(self._starts) >= LANE_PIECES_HELD_MAX:
                raise RemoteError(self._source, f"sent {LANE_PIECES_HELD_MAX} pieces of frames ahead of a missing one")
            self._starts.insert(at, start)
            self._held[start] = piece
            return []
        return [piece, *self._advance(end)]

    def _advance(self, end: int) -> list[memoryview]:
        """Everything before `end` is here: return the held pieces that follow."""
        ready: list[memoryview] = []
        for start in self._starts:
            if start != end:
                break
            ready.append(self._held.pop(start))
            end += len(ready[-1])
        del self._starts[: len(ready)]
        self._next = end
        return ready
