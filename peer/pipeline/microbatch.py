"""The unit of work that passes through the stages: microbatch `(t, i)`, the `i`-th group of samples of step `t`."""

from typing import NamedTuple


class Microbatch(NamedTuple):
    """One microbatch. `index` >= 0: a training microbatch, which needs the weights of version `step`; `index` < 0: the
    validation microbatch number `-1 - index` at version `step`.

    Microbatches run in the order (step, index), so validation runs before the training of the same step.
    """

    step: int
    index: int  # type: ignore[assignment]  # not the method of tuple

    @property
    def validates(self) -> bool:
        return self.index < 0


Microbatch.__str__ = tuple.__repr__  # type: ignore[method-assign]
# A microbatch is printed as "(3, 1)" in the names of jobs and frames. (mypy would take this line in the class for a
# field.)

Indices = int
"""A set of microbatch indices of one step, as the bits of a number: bit i stands for microbatch i. `|` is the union,
`& ~` the difference, `bit_count()` the size. The set travels as a bitmap (bit i % 8 of byte i // 8)."""


def indices_from(bitmap: bytes, *, count: int) -> Indices:
    """Read a bitmap. Bits at or above `count` are ignored, because the step has no such microbatches."""
    return int.from_bytes(bitmap, "little") & ((1 << count) - 1)


def bitmap_of(indices: Indices) -> bytes:
    """Return `indices` as the bitmap that `indices_from` reads."""
    return indices.to_bytes((indices.bit_length() + 7) // 8, "little")


def has_index(indices: Indices, index: int) -> bool:
    """True if `index` is in the set. An index below 0, which another peer may send, is in no set."""
    return index >= 0 and bool(indices >> index & 1)
