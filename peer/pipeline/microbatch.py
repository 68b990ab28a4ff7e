"""The unit that flows through stages: microbatch `(t, i)`, sample range `i` of step `t`."""

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


Microbatch.__str__ = tuple.__repr__  # type: ignore[method-assign]
# It is written "(3, 1)": every job and frame names its task so. In the class mypy would take this for a field.

Indices = int
"""A set of microbatch indices of one step, as the bits of a number: bit i stands for microbatch i. It is a plain number
because every event works with such sets: `|`, `& ~` and `bit_count()` do what a set's methods would. It travels as a
bitmap (bit i of byte i // 8)."""


def indices_from(bitmap: bytes, *, count: int) -> Indices:
    """Read a bitmap. Bits at or above `count` are ignored: a peer cannot contribute what the step does not have."""
    return int.from_bytes(bitmap, "little") & ((1 << count) - 1)


def bitmap_of(indices: Indices) -> bytes:
    """Write what `indices_from` reads."""
    return indices.to_bytes((indices.bit_length() + 7) // 8, "little")


def has_index(indices: Indices, index: int) -> bool:
    """Whether `index` is one of them. Other peers name indices, too: one below 0 is in no set."""
    return index >= 0 and bool(indices >> index & 1)
