"""Decisions that are read from bytes, so that an engine that mutates bytes mutates decisions."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """The same bytes decide alike. Past their end every decision is the first of its options."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, options: int) -> int:
        """A number in [0, options)."""
        if options <= 1:
            return 0
        return int.from_bytes(self.take(((options - 1).bit_length() + 7) // 8), "little") % options

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1

    def take(self, count: int) -> bytes:
        """The next bytes, fewer than `count` at the end."""
        part = self._data[self._at : self._at + count]
        self._at += len(part)
        return part

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def flip(self, data: bytes) -> bytes:
        """`data`, mostly as it is; else with a few bytes changed, cut off, repeated or put in."""
        while data and self.chance(8):
            at = self.below(len(data))
            part = self.take(1 + self.below(8))
            match self.below(4):
                case 0:
                    data = data[:at] + part + data[at + len(part) :]
                case 1:
                    data = data[:at] + part + data[at:]
                case 2:
                    data = data[:at]
                case _:
                    data = data[:at] + data[at : at + 64] + data[at:]
        return data
