"""The unit that flows through stages: microbatch `(t, i)`, sample range `i` of step `t`."""

from collections.abc import Iterable
from typing import NamedTuple


class Microbatch(NamedTuple):
    """`index` >= 0: training, wants weights `w_step`; below 0: validation microbatch `-1 - index` at version `step`.

    The order (step, index) is the order in which work is done, so validation comes first in its step. A tuple, because
    it is the key of most tables of a peer.
    """

    step: int
    index: int  # type: ignore[assignment]  # and no tuple's method of that name

    @property
    def validates(self) -> bool:
        return self.index < 0

    def __str__(self) -> str:
        return f"({self.step}, {self.index})"


class IndexSet:
    """A set of microbatch indices of one step; travels as a bitmap (bit i of byte i // 8)."""

    __slots__ = ("_bits",)

    def __init__(self, bits: int = 0) -> None:
        self._bits = bits

    @classmethod
    def from_bytes(cls, data: bytes, *, count: int) -> "IndexSet":
        """Bits at or above `count` are ignored: a peer cannot contribute what the step does not have."""
        return cls(int.from_bytes(data, "little") & ((1 << count) - 1))

    def to_bytes(self) -> bytes:
        return self._bits.to_bytes((self._bits.bit_length() + 7) // 8, "little")

    def add(self, index: int) -> None:
        self._bits |= 1 << index

    def without(self, indices: Iterable[int]) -> "IndexSet":
        bits = self._bits
        for index in indices:
            bits &= ~(1 << index)
        return IndexSet(bits)

    def missing(self, count: int) -> list[int]:
        """What it lacks of the first `count` indices, in order."""
        bits = self._bits
        return [index for index in range(count) if not bits >> index & 1]

    def __contains__(self, index: int) -> bool:
        return index >= 0 and bool(self._bits >> index & 1)  # others name indices, too

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __or__(self, other: "IndexSet") -> "IndexSet":
        return IndexSet(self._bits | other._bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IndexSet) and self._bits == other._bits

    __hash__ = None  # type: ignore[assignment]
