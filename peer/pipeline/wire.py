"""Activations and their gradients as bytes. Shape and dtype follow from the run spec, never from the sender.

B samples   T tokens   D width
"""

from typing import Final

import torch
from torch import Tensor

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ActivationWire:
    """Both directions of the traffic between two stages of one run."""

    def __init__(self, spec: RunSpec) -> None:
        self._shape_BTD = (spec.training.microbatch_size, spec.model.context, spec.model.dim)
        self._shape_BT = self._shape_BTD[:2]
        self._dtype = _DTYPES[spec.wire.activations]
        self.tensor_bytes = self._dtype.itemsize * spec.training.microbatch_size * spec.model.context * spec.model.dim
        self.targets_bytes = 4 * spec.training.microbatch_size * spec.model.context

    def check_activation(self, payload: Payload, source: PeerID) -> None:
        """Raises: RemoteError: `source` sent another number of bytes than this run's activations have."""
        self._check(payload, self.tensor_bytes + self.targets_bytes, source)

    def check_gradient(self, payload: Payload, source: PeerID) -> None:
        """Raises: RemoteError."""
        self._check(payload, self.tensor_bytes, source)

    def encode_activation(self, x_BTD: Tensor, targets_BT: Tensor) -> bytearray:
        payload = bytearray(self.tensor_bytes + self.targets_bytes)
        torch.frombuffer(payload, dtype=self._dtype, count=x_BTD.numel()).view(self._shape_BTD).copy_(x_BTD)
        at = self.tensor_bytes
        torch.frombuffer(payload, dtype=torch.int32, offset=at).view(self._shape_BT).copy_(targets_BT)
        return payload

    def decode_activation(self, payload: Payload, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns: (float32 [B, T, D] on `device`, int64 targets [B, T] there)."""
        count = self.tensor_bytes // self._dtype.itemsize
        x_BTD = torch.frombuffer(payload, dtype=self._dtype, count=count).view(self._shape_BTD)
        targets_BT = torch.frombuffer(payload, dtype=torch.int32, offset=self.tensor_bytes).view(self._shape_BT)
        return x_BTD.to(device, torch.float32, copy=True), targets_BT.to(device, torch.int64)

    def encode_gradient(self, grad_BTD: Tensor) -> bytearray:
        payload = bytearray(self.tensor_bytes)
        torch.frombuffer(payload, dtype=self._dtype).view(self._shape_BTD).copy_(grad_BTD)
        return payload

    def decode_gradient(self, payload: Payload, device: torch.device) -> Tensor:
        """Returns: float32 [B, T, D] on `device`."""
        grad_BTD = torch.frombuffer(payload, dtype=self._dtype).view(self._shape_BTD)
        return grad_BTD.to(device, torch.float32)

    def _check(self, payload: Payload, wanted: int, source: PeerID) -> None:
        if len(payload) != wanted:
            raise RemoteError(source, f"sent a tensor of {len(payload)} bytes, this run's have {wanted}")
