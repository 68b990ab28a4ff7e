"""The formats and their sizes in bytes. Pure.

A tensor is cut into tiles of `TILE` consecutive numbers; zeros fill up the last tile. A payload of T tiles with b bits
a number has T scales in bfloat16, little-endian, and then 8 b bytes of codes for each tile. A code c is a whole number
from 0 to 2 L and stands for the number c - L, where L = 2^(b-1) - 1. A code's bits are cut into parts of 4, 2 and 1
bits, low bits first (8 bits are one part). A tile's parts of w bits take 8 w bytes. Byte e of these holds the parts of
the codes e, e + 8 w, e + 16 w ..., the part of code e in the lowest bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

TILE: Final = 64
SCALE_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Format:
    """The number of bits of a code, and whether tiles are rotated (multiplied by a Hadamard matrix) before rounding."""

    bits: int
    is_rotated: bool

    @property
    def levels(self) -> int:
        """The number L: a code stands for a whole number from -L to L."""
        return (1 << (self.bits - 1)) - 1

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Return for each part of a code (its width, how many bits of the code are below it), low bits first."""
        widths = (8,) if self.bits == 8 else tuple(width for width in (4, 2, 1) if self.bits & width)
        return tuple((width, sum(widths[:index])) for index, width in enumerate(widths))

    @property
    def tile_bytes(self) -> int:
        """The bytes of a tile's codes, without the tile's scale."""
        return TILE * self.bits // 8

    def payload_bytes(self, numel: int) -> int:
        """Return the size of the payload of a tensor with `numel` elements."""
        return num_tiles(numel) * (SCALE_BYTES + self.tile_bytes)


FORMATS: Final[Mapping[str, Format]] = {
    "int8": Format(8, is_rotated=False),
    "hadamard6": Format(6, is_rotated=True),
    "hadamard5": Format(5, is_rotated=True),
    "hadamard4": Format(4, is_rotated=True),
    "hadamard3": Format(3, is_rotated=True),
}
"""Format by its name in a run file. With scales: 8.25, 6.25, 5.25, 4.25 and 3.25 bits a number, in this order."""


def num_tiles(numel: int) -> int:
    return -(-numel // TILE)
