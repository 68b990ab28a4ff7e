"""Defines stand-ins for tensors and payloads, with a size but no contents, and layer states made of stand-ins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec
import torch
from torch import Tensor

from shoal.peer.encoding.vectors import Vectors
from shoal.peer.model.frozen import base_numel
from shoal.peer.model.state import LayerState
from shoal.protocol.layers import all_layer_keys
from shoal.protocol.ports import Payload
from shoal.protocol.sim.phantom import Phantom
from shoal.protocol.spec import InitialSpec, RunSpec
from shoal.protocol.wire_format import WireFormat, is_in_few_bits, tensor_bytes

NOWHERE: Final = torch.device("meta")


class Extent:
    """A flat tensor that has a size but no numbers; operations on its numbers do nothing.

    A tensor on torch's `meta` device would do the same, but each addition of such tensors takes 100 us."""

    __slots__ = ("_size",)
    device: Final = NOWHERE

    def __init__(self, size: int) -> None:
        self._size = size

    def numel(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> "Extent":
        return Extent(len(range(*part.indices(self._size))))

    def __setitem__(self, part: slice, values: object) -> None:
        pass

    def __iadd__(self, other: object) -> "Extent":
        return self

    def __imul__(self, other: object) -> "Extent":
        return self

    def zero_(self) -> "Extent":
        return self

    def to(self, *where: object, **how: object) -> "Extent":
        return self

    def float(self) -> "Extent":
        return self


def _digest_of(numel: int) -> str:
    return f"modelled-{numel}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledLayerState(LayerState):
    def digest(self) -> str:
        """Return a digest of the layer's size: without numbers, all replicas and all versions have the same digest."""
        return _digest_of(self.param_N.numel())

    def secure_digest(self) -> str:
        return self.digest()


class ModelledVectors(Vectors):
    """Operations on vectors that have only a size."""

    def __init__(self, *, chunk_bytes: int, sums: Sequence[WireFormat] = ("fp32",)) -> None:
        super().__init__(NOWHERE, chunk_bytes=chunk_bytes, sums=sums)
        self.background_chunk = self.chunk

    def empty(self, size: int) -> Tensor:
        return cast(Tensor, cast(Any, Extent(size)))

    def zeros(self, size: int) -> Tensor:
        return self.empty(size)

    def copied(self, values_N: Tensor) -> Tensor:
        return values_N

    def payload_of(self, values_C: Tensor) -> Payload:
        return phantom(4 * values_C.numel())

    def values_of(self, payload: Payload) -> Tensor:
        return self.empty(len(payload) // 4)

    def piece_payload(self, values_C: Tensor, form: WireFormat, key: tuple[int, int]) -> Payload:
        return phantom(tensor_bytes(form, values_C.numel()))

    def piece_of(self, payload: Payload, form: WireFormat, size: int) -> Tensor:
        return self.empty(size)

    def is_within(self, values_C: Tensor, largest: float) -> bool:
        """Return True, since there is no number that could be too large."""
        return True

    def round_mean(self, mean_C: Tensor, form: WireFormat, key: tuple[int, int]) -> Payload | None:
        """Return a payload of the mean's size if `form` has few bits (real peers then round the mean); else None."""
        return self.piece_payload(mean_C, form, key) if is_in_few_bits(form) else None

    def mean_payload(self, mean_C: Tensor) -> Payload:
        return phantom(self.mean_bytes * mean_C.numel())

    def mean_of(self, payload: Payload) -> Tensor:
        return self.empty(len(payload) // self.mean_bytes)

    def meet(self, mean_N: Tensor, spans: Sequence[slice], others_n: Sequence[Tensor]) -> None:
        """Do nothing, since there is nothing to add."""

    def rounded(self, values_N: Tensor) -> Tensor:
        return values_N

    def empty_rounded(self, size: int) -> Tensor:
        return self.empty(size)

    def rounded_payload(self, values_C: Tensor) -> Payload:
        return phantom(2 * values_C.numel())

    def difference_payload(self, before_C: Tensor, after_C: Tensor) -> Payload:
        return phantom(after_C.numel())

    def changed(self, before_C: Tensor, payload: Payload) -> Tensor:
        return before_C

    def rounded_of(self, payload: Payload) -> Tensor:
        return self.empty(len(payload) // 2)

    def layer_state(self, param_N: Tensor, moment1_N: Tensor, moment2_N: Tensor) -> LayerState:
        return ModelledLayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)


class ModelledBase:
    """Implements `InitialWeights` for the frozen base model of adapters: layers with a size but no numbers."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec

    async def read(self, keys: Sequence[str]) -> Mapping[str, Tensor]:
        return {key: cast(Tensor, cast(Any, Extent(base_numel(self._spec, key)))) for key in keys}


def with_modelled_base(spec: RunSpec) -> RunSpec:
    """Return `spec` with digests of a modelled base, so that peers download the adapters' base model from the host and
    do not make it from the seed. A spec without adapters is returned unchanged."""
    if spec.adapter is None:
        return spec
    digests = tuple(_digest_of(base_numel(spec, key)) for key in all_layer_keys(spec.model))
    return msgspec.structs.replace(spec, initial=InitialSpec(source="the host's", digests=digests))


def phantom(nbytes: int) -> Payload:
    """Return a payload that has only a length: modelled peers use nothing else."""
    return cast(Payload, cast(Any, Phantom(nbytes)))
