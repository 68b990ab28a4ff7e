"""Encodes activations and their gradients as bytes, and decodes them.

The shape follows from the run spec, never from the sender. If the run has several formats, the plan chooses the
sender's format, and the receiver tells the format by the number of bytes (bf16 and int8 have equal sizes only for 66
numbers, which no real model has). So a payload can be read under any plan, and can be sent again unchanged.

In formats of few bits (`kernels/codec`) activations are rounded to nearest, and gradients stochastically, so that they
are unbiased. The microbatch and the layer seed the rounding, so a repeated backward gives the same bytes.

An activation is followed by its labels: the target of each token. If the run masks documents or leaves out targets
in the loss, the microbatch's weight follows, too, and one bit of each target marks the beginnings of documents.

In a subspace model (`peer/model/subspace.py`) the k coordinates of a token travel instead of its D numbers, and the
receiver needs the tokens to restore the D numbers. If no target is left out, each is the next token, so only the
first token of each sample is sent as well; otherwise all tokens are sent.

B samples   T tokens   D width   W numbers sent for a token: D, or the k of a subspace
"""

import math
from collections.abc import Collection
from typing import Final

import torch
from blake3 import blake3
from torch import Tensor

from shoal.kernels import codec
from shoal.peer.data.labels import IGNORED, Labels
from shoal.peer.encoding.vectors import DTYPES
from shoal.peer.model.subspace import Subspace
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec
from shoal.protocol.wire_format import WireFormat, tensor_bytes

_BEGINS: Final = 1 << 30
"""The bit of a token's label that marks the beginning of a document; lower bits hold the token's target."""
_NOTHING: Final = _BEGINS - 1
"""Stands in place of a target that does not count in the loss. It is above all tokens (`VOCABULARY_MAX`)."""


class ActivationWire:
    """Encodes and decodes traffic with both adjacent stages, in the run's widest format until `travel_as` is called."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._shape_BTW = (spec.training.microbatch_size, spec.model.context, spec.model.written_width)
        self._shape_BT = self._shape_BTW[:2]
        self._numel = math.prod(self._shape_BTW)
        self._activations = {tensor_bytes(form, self._numel): form for form in spec.wire.forward}
        """Bytes of an encoded activation, without labels -> its format. `_gradients` is the same for gradients."""
        gradients = map(spec.wire.backward_of, spec.wire.forward)
        self._gradients = {tensor_bytes(form, self._numel): form for form in gradients}
        self.travel_as(spec.wire.forward[0], spec.wire.forward[0])
        self._leaves_out, self._masks = spec.data.leaves_out_targets, spec.data.masks_documents
        self.targets_bytes = spec.labels_bytes
        """The bytes of an activation's labels: targets, in some runs a weight, and in a subspace model tokens."""

    def travel_as(self, leaving: WireFormat, coming: WireFormat) -> None:
        """Send activations in the format `leaving`, and gradients in the format that the run pairs with `coming`, in
        which activations arrive. Both arguments are formats of `WireSpec.forward`."""
        self._forward, self._backward = leaving, self._spec.wire.backward_of(coming)

    @property
    def activation_bytes(self) -> int:
        return tensor_bytes(self._forward, self._numel)

    @property
    def gradient_bytes(self) -> int:
        return tensor_bytes(self._backward, self._numel)

    def check_activation(self, payload: Payload, source: PeerID) -> None:
        """Check a payload's size. Raises: RemoteError: the number of bytes fits none of this run's activations."""
        _check(len(payload), [each + self.targets_bytes for each in self._activations], source)

    def check_gradient(self, payload: Payload, source: PeerID) -> None:
        """Check a payload's size. Raises: RemoteError: the number of bytes fits none of this run's gradients."""
        _check(len(payload), [*self._gradients], source)

    def encode_activation(self, x_BTD: Tensor, labels: Labels) -> bytearray:
        form = self._forward  # a plan may change it during this job
        at = tensor_bytes(form, self._numel)
        payload = bytearray(at + self.targets_bytes)
        word_BT, weight_1, token_BN = self._words(payload, at)
        if self._spec.model.subspace:
            assert labels.tokens_BT is not None, "an activation of a subspace model without its tokens"
            x_BTD = self._subspace(x_BTD.device).coordinates(x_BTD, labels.tokens_BT.to(x_BTD.device))
        self._write(x_BTD, payload, form)
        if labels.tokens_BT is not None:  # copied last, since this copy waits for the device
            token_BN.copy_(labels.tokens_BT[:, : token_BN.shape[1]])
        targets_BT = labels.targets_BT
        if not self._leaves_out:
            word_BT.copy_(targets_BT)
            return payload
        word_BT.copy_(torch.where(targets_BT == IGNORED, _NOTHING, targets_BT))
        if labels.begins_BT is not None:
            word_BT += _BEGINS * labels.begins_BT.to(word_BT.device, torch.int32)
        weight_1.fill_(labels.weight)
        return payload

    def decode_activation(self, payload: Payload, device: torch.device) -> tuple[Tensor, Labels]:
        """Decode an activation. Return (a new float32 [B, T, D], its labels), both on `device`."""
        at = len(payload) - self.targets_bytes
        x_BTD = self._read(payload, at, self._activations[at], device)
        word_BT, weight_1, token_BN = self._words(payload, at)
        tokens_BT = None
        if self._spec.model.subspace:
            # If only first tokens were sent, the others are the sample's targets, all but the last. If all tokens were
            # sent, no target is used here.
            followed_BT = word_BT[:, : word_BT.shape[1] - token_BN.shape[1]]
            tokens_BT = torch.cat([token_BN, followed_BT], dim=1).to(device, torch.int64)
            x_BTD = self._subspace(device).restored(x_BTD, tokens_BT)
        if not self._leaves_out:
            return x_BTD, Labels(targets_BT=word_BT.to(device, torch.int64), tokens_BT=tokens_BT)
        targets_BT = word_BT.to(torch.int64) & _NOTHING
        targets_BT.masked_fill_(targets_BT == _NOTHING, IGNORED)
        labels = Labels(
            targets_BT=targets_BT,
            begins_BT=(word_BT & _BEGINS) != 0 if self._masks else None,
            counted=int((targets_BT != IGNORED).sum()),
            weight=float(weight_1),
            tokens_BT=tokens_BT,
        )
        return x_BTD, labels.to(device)

    def _words(self, payload: Payload, at: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return three views of a payload's labels: the targets with their document bits, int32 [B, T]; the weight,
        float32 [1], or [0] if none is sent; the first N tokens of each sample, int32 [B, N], with N = T, 1 or 0.

        Args: at: the offset of the labels, in bytes.
        """
        num, (B, T) = math.prod(self._shape_BT), self._shape_BT
        word_BT = torch.frombuffer(payload, dtype=torch.int32, offset=at, count=num).view(B, T)
        weight_1, at = torch.empty(0), at + 4 * num
        if self._leaves_out:
            weight_1, at = torch.frombuffer(payload, dtype=torch.float32, offset=at, count=1), at + 4
        if not self._spec.model.subspace:
            return word_BT, weight_1, torch.empty(B, 0, dtype=torch.int32)
        return word_BT, weight_1, torch.frombuffer(payload, dtype=torch.int32, offset=at).view(B, -1)

    def _subspace(self, device: torch.device) -> Subspace:
        """Return the subspace, which is made at its first use, because a modelled (simulated) peer has no tensors."""
        return Subspace.of(self._spec, device)

    def encode_gradient(self, grad_BTD: Tensor, microbatch: Microbatch, layer: int) -> bytearray:
        """Encode a gradient. Args: grad_BTD: the gradient of decoder layer `layer`'s input, float32 [B, T, D]."""
        form = self._backward
        payload = bytearray(tensor_bytes(form, self._numel))
        if self._spec.model.subspace:
            grad_BTD = self._subspace(grad_BTD.device).gradient_of_coordinates(grad_BTD)
        self._write(grad_BTD, payload, form, key=self._key(microbatch, layer))
        return payload

    def decode_gradient(self, payload: Payload, device: torch.device) -> Tensor:
        """Decode a gradient. Return a new float32 [B, T, D] on `device`."""
        grad_BTW = self._read(payload, len(payload), self._gradients[len(payload)], device)
        return self._subspace(device).gradient_restored(grad_BTW) if self._spec.model.subspace else grad_BTW

    def _write(self, x_BTW: Tensor, into: bytearray, form: WireFormat, *, key: tuple[int, int] | None = None) -> None:
        if form in DTYPES:
            torch.frombuffer(into, dtype=DTYPES[form], count=self._numel).view(self._shape_BTW).copy_(x_BTW)
        else:
            payload_B = codec.encode(x_BTW.to(torch.float32), codec.FORMATS[form], key=key)
            torch.frombuffer(into, dtype=torch.uint8, count=payload_B.numel()).copy_(payload_B)

    def _read(self, payload: Payload, nbytes: int, form: WireFormat, device: torch.device) -> Tensor:
        if form in DTYPES:
            x_BTW = torch.frombuffer(payload, dtype=DTYPES[form], count=self._numel).view(self._shape_BTW)
            return x_BTW.to(device, torch.float32, copy=True)
        payload_B = torch.frombuffer(payload, dtype=torch.uint8, count=nbytes).to(device)
        return codec.decode(payload_B, self._numel, codec.FORMATS[form]).view(self._shape_BTW)

    def _key(self, microbatch: Microbatch, layer: int) -> tuple[int, int]:
        words = f"{self._spec.seed} {microbatch.step} {microbatch.index} {layer}"
        digest = blake3(words.encode()).digest(length=8)
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _check(num_bytes: int, wanted: Collection[int], source: PeerID) -> None:
    if num_bytes not in wanted:
        its = " or ".join(map(str, wanted))
        raise RemoteError(source, f"sent a tensor of {num_bytes} bytes; this run's have {its}")
