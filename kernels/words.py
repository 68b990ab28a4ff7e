"""Unsigned 32-bit words in int32 tensors, for hashes that are the same on every device.

The modules that hash contain the constants. Source: Wellons, "Prospecting for Hash Functions", 2018: triple32.
"""

from torch import Tensor


def signed(word: int) -> int:
    """Return the low 32 bits of `word` as an int32 with the same bits."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def shifted(x: Tensor, bits: int) -> Tensor:
    """Shift each word to the right, with zeros from the left. Args: x: int32, of any shape; bits: from 1 to 31."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
