"""Formats in which tensors travel, and their sizes in bytes. Pure.

`kernels/codec` defines "int8" and "hadamard6" to "hadamard3": tiles of 64 numbers share a scale of two bytes.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

WireFormat = Literal["fp32", "bf16", "int8", "hadamard6", "hadamard5", "hadamard4", "hadamard3"]


class Formats(NamedTuple):
    """The tensor formats that a plan of K stages chooses."""

    activations: tuple[WireFormat, ...]
    """[K - 1], format of activations from each stage to the next; the gradients' format follows (`backward_of`)."""
    sums: tuple[WireFormat, ...]
    """[K], format of parameter gradients in each stage's reduction."""

    @classmethod
    def same(cls, activations: WireFormat, sums: WireFormat, num_stages: int) -> "Formats":
        """Return formats that are the same for all stages."""
        return cls((activations,) * (num_stages - 1), (sums,) * num_stages)

    @property
    def sentence(self) -> str:
        """The formats in words, such as "activations travel in bf16 (int8 after stage 2), reductions in int8"."""
        sums = _said(self.sums, "in stage")
        if not self.activations:
            return f"reductions travel in {sums}"
        return f"activations travel in {_said(self.activations, 'after stage')}, reductions in {sums}"


AUTO_ACTIVATIONS: Final[tuple[WireFormat, ...]] = ("bf16", "int8")
"""Formats of activations among which a plan chooses under "auto", widest first. With fewer bits, worse learning costs
more than the time saved (`kernels/codec/MEASURED.md`)."""
AUTO_SUMS: Final[tuple[WireFormat, ...]] = ("int8", "hadamard4")
"""Formats of reductions among which a plan chooses under "auto", widest first (`kernels/codec/MEASURED.md`)."""

_PLAIN_BYTES: Final = {"fp32": 4, "bf16": 2}
TILE: Final = 64
"""Consecutive numbers of a tensor that share one scale, in "int8" and the hadamard formats."""
_TILE_BYTES: Final = {"int8": 66, "hadamard6": 50, "hadamard5": 42, "hadamard4": 34, "hadamard3": 26, "nf4": 34}


def is_in_few_bits(form: WireFormat) -> bool:
    """True if the format has tiles (numbers with a common scale): decoding and encoding again then rounds again."""
    return form in _TILE_BYTES


def tensor_bytes(form: WireFormat | Literal["nf4"], numel: int) -> int:
    """Return the size in bytes of a tensor of `numel` elements. Only stored weights may have the format "nf4"."""
    if form in _PLAIN_BYTES:
        return _PLAIN_BYTES[form] * numel
    return _TILE_BYTES[form] * -(-numel // TILE)


def _said(forms: Sequence[WireFormat], where: str) -> str:
    """Return in words the most common format, then in brackets the exceptions with their stages, counted from 0."""
    counts = Counter(forms)
    most = max(counts, key=lambda form: counts[form], default="nothing")
    others = [
        f"{form} {where} {_ranges([index for index, its in enumerate(forms) if its == form])}"
        for form in counts
        if form != most
    ]
    return f"{most} ({', '.join(others)})" if others else most


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, with consecutive ones joined, such as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
