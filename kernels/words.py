"""Words of 32 bits without a sign, as int32 tensors have them: hashes of these are the same on every device.

Source of the hashes that are made of them: Wellons, "Prospecting for Hash Functions", 2018: triple32.
"""

from torch import Tensor


def signed(word: int) -> int:
    """Return the int32 with the low 32 bits of `word`."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def shifted(x: Tensor, bits: int) -> Tensor:
    """Shift each word to the right and fill up with zeros. Args: x: int32, of any shape; bits: from 1 to 31."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
