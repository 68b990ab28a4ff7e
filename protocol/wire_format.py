"""How the numbers of a tensor may travel, and the bytes that they take. Pure.

"int8" and "hadamard6" to "hadamard3" are formats of `kernels/codec`, which knows nothing of ours: tiles of 64 numbers,
each with a scale of two bytes.
"""

from typing import Final, Literal, NamedTuple

WireFormat = Literal["fp32", "bf16", "int8", "hadamard6", "hadamard5", "hadamard4", "hadamard3"]


class Formats(NamedTuple):
    """How tensors travel under one plan."""

    activations: WireFormat
    """What goes from each stage to the next; `WireSpec.backward_of` says how its gradients come back."""
    sums: WireFormat
    """Parameter gradients in a reduction."""


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
