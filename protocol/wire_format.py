"""How the numbers of a tensor may travel, and the bytes that they take. Pure.

"int8" and "hadamard6" to "hadamard3" are formats of `kernels/codec`, which knows nothing of ours: tiles of 64 numbers,
each with a scale of two bytes.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

WireFormat = Literal["fp32", "bf16", "int8", "hadamard6", "hadamard5", "hadamard4", "hadamard3"]


class Formats(NamedTuple):
    """How tensors travel under a plan of K stages."""

    activations: tuple[WireFormat, ...]
    """[K - 1], what each stage but the last sends to the next; `WireSpec.backward_of` says how its gradients come
    back."""
    sums: tuple[WireFormat, ...]
    """[K], the parameter gradients in each stage's reduction."""

    @classmethod
    def same(cls, activations: WireFormat, sums: WireFormat, num_stages: int) -> "Formats":
        """All cuts have one format, and all reductions."""
        return cls((activations,) * (num_stages - 1), (sums,) * num_stages)

    @property
    def sentence(self) -> str:
        """Both for people, as "activations travel in bf16 (int8 after stage 2), reductions in int8"."""
        sums = _said(self.sums, "in stage")
        if not self.activations:
            return f"reductions travel in {sums}"
        return f"activations travel in {_said(self.activations, 'after stage')}, reductions in {sums}"


AUTO_ACTIVATIONS: Final[tuple[WireFormat, ...]] = ("bf16", "int8")
"""The formats among which plans choose where a run leaves to them how activations travel, the widest first. Thinner
ones cost more learning than they save time (`kernels/codec/MEASURED.md`)."""
AUTO_SUMS: Final[tuple[WireFormat, ...]] = ("int8", "hadamard4")
"""The formats among which plans choose where a run leaves to them how reductions travel, the widest first: of what they
cost in learning `kernels/codec/MEASURED.md` has figures."""

_PLAIN_BYTES: Final = {"fp32": 4, "bf16": 2}
_TILE: Final = 64
_TILE_BYTES: Final = {"int8": 66, "hadamard6": 50, "hadamard5": 42, "hadamard4": 34, "hadamard3": 26}


def is_in_few_bits(form: WireFormat) -> bool:
    """Whether it has tiles: then what is read of a tensor, written once more, is rounded once more."""
    return form in _TILE_BYTES


def tensor_bytes(form: WireFormat, numel: int) -> int:
    """The bytes of a tensor of `numel` elements."""
    if form in _PLAIN_BYTES:
        return _PLAIN_BYTES[form] * numel
    return _TILE_BYTES[form] * -(-numel // _TILE)


def _said(forms: Sequence[WireFormat], where: str) -> str:
    """The format of most, and behind it where others are. Stages count from 0, as they do in a status."""
    counts = Counter(forms)
    most = max(counts, key=lambda form: counts[form], default="nothing")
    others = [
        f"{form} {where} {_ranges([index for index, its in enumerate(forms) if its == form])}"
        for form in counts
        if form != most
    ]
    return f"{most} ({', '.join(others)})" if others else most


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers, as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
