"""Flat float32 vectors (gradient sums, layer states): where they live between the device and the wire, in what pieces
they travel, and how they become bytes and numbers again.

One of the places where a peer without tensors differs from a real one; the others are `arithmetic.py` and, for tokens
on their way to experts, `experts/wire.py`.
"""

from typing import Final, Literal

import torch
from torch import Tensor

from shoal.peer.pipeline.state import LayerState
from shoal.peer.recycling import Recycling
from shoal.protocol.limits import BULK_CHUNK_BYTES
from shoal.protocol.ports import Payload

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Vectors:
    """Args:
    host: the device that vectors are on while they are summed and sent.
    chunk_bytes: the largest piece.
    gradients: as `WireSpec` has it.
    """

    def __init__(
        self,
        host: torch.device,
        *,
        chunk_bytes: int = BULK_CHUNK_BYTES,
        gradients: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        self.host = host
        self._recycling = Recycling()
        self.gradient_bytes = _DTYPES[gradients].itemsize
        """Of one number of a gradient on the wire."""
        self._gradient_dtype = _DTYPES[gradients]
        self.narrows = gradients != "fp32"
        """Whether a gradient's bytes on the wire are made, and not only looked at."""
        self.chunk = chunk_bytes // 4
        """Elements."""

    def empty(self, size: int) -> Tensor:
        """float32 [size], of any values."""
        return self._recycling.vector(size)

    def zeros(self, size: int) -> Tensor:
        return self.empty(size).zero_()

    def on_host(self, values_N: Tensor) -> Tensor:
        """`values_N` itself if it is there already."""
        return values_N.to(self.host)

    def copied(self, values_N: Tensor) -> Tensor:
        """On the host, and nobody else's."""
        return self.empty(values_N.numel()).copy_(values_N)

    def payload_of(self, values_C: Tensor) -> Payload:
        """The bytes of a float32 tensor, without copying."""
        return memoryview(values_C.detach().contiguous().numpy().data).cast("B")

    def values_of(self, payload: Payload) -> Tensor:
        """float32 [bytes / 4], without copying."""
        return torch.frombuffer(payload, dtype=torch.float32)

    def gradient_payload(self, values_C: Tensor) -> Payload:
        """A float32 piece of a gradient as bytes, rounded to nearest if the wire is narrower."""
        if self._gradient_dtype == torch.float32:
            return self.payload_of(values_C)
        narrow_C = values_C.detach().to(self._gradient_dtype)
        return memoryview(narrow_C.view(torch.uint8).numpy().data)

    def gradient_of(self, payload: Payload) -> Tensor:
        """float32 [bytes / `gradient_bytes`]."""
        return torch.frombuffer(payload, dtype=self._gradient_dtype).to(torch.float32)

    def round_gradient(self, values_C: Tensor) -> None:
        """In place, to what others will read of it: once rounded it goes over the wire as often as one likes."""
        if self._gradient_dtype != torch.float32:
            values_C.copy_(values_C.to(self._gradient_dtype))

    def layer_state(self, param_N: Tensor, moment1_N: Tensor, moment2_N: Tensor) -> LayerState:
        return LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)


VECTORS = Vectors(torch.device("cpu"))
"""Of every peer that computes."""
