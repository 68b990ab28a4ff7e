"""Activations and their gradients as bytes. Their shape follows from the run spec, never from the sender, and so does
the format, unless the run has several: then the plan says in which ones a sender writes, and the number of bytes which
of them a payload is in (bf16 and int8 take the same for 66 numbers, and for no tensor of a real model). So a payload
can be read whichever plan its sender has heard of, and goes again as it was.

In few bits (`kernels/codec`) activations are rounded to the nearest and their gradients by chance, so that they are
right in the mean: by numbers of the microbatch and the layer, so that whoever computes them again gets the same bytes.

With an activation go its labels: of each token what it is to predict, and where the run says that documents are apart
or that some targets are not learnt, in the same four bytes whether a document begins at it, and behind all of them the
microbatch's weight.

B samples   T tokens   D width
"""

import math
from collections.abc import Collection
from typing import Final

import torch
from blake3 import blake3
from torch import Tensor

from shoal.kernels import codec
from shoal.peer.data.labels import IGNORED, Labels
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec
from shoal.protocol.wire_format import WireFormat, tensor_bytes

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
_BEGINS: Final = 1 << 30
"""The bit of a label that says that a document begins; the target is in the bits below."""
_NOTHING: Final = _BEGINS - 1
"""In the place of a target that is not learnt. No vocabulary has so many tokens (`VOCABULARY_MAX`)."""


class ActivationWire:
    """Both directions of the traffic between two stages of one run.

    It writes the widest of the run's formats until `travel_as` says another one.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._shape_BTD = (spec.training.microbatch_size, spec.model.context, spec.model.dim)
        self._shape_BT = self._shape_BTD[:2]
        self._numel = spec.training.microbatch_size * spec.model.context * spec.model.dim
        self._seed = spec.seed
        self._backward_of = spec.wire.backward_of
        self._activations = {tensor_bytes(form, self._numel): form for form in spec.wire.forward}
        """By the bytes of a payload without its targets, as the next one."""
        gradients = map(spec.wire.backward_of, spec.wire.forward)
        self._gradients = {tensor_bytes(form, self._numel): form for form in gradients}
        self.travel_as(spec.wire.forward[0])
        self._leaves_out, self._masks = spec.data.leaves_out_targets, spec.data.masks_documents
        words = spec.training.microbatch_size * spec.model.context + self._leaves_out
        self.targets_bytes = 4 * words

    def travel_as(self, activations: WireFormat) -> None:
        """From now on activations leave in this format, one of the run's, and gradients in what goes with it."""
        self._forward, self._backward = activations, self._backward_of(activations)

    @property
    def activation_bytes(self) -> int:
        """Of what leaves now, without the targets."""
        return tensor_bytes(self._forward, self._numel)

    @property
    def gradient_bytes(self) -> int:
        return tensor_bytes(self._backward, self._numel)

    def check_activation(self, payload: Payload, source: PeerID) -> None:
        """Raises: RemoteError: `source` sent another number of bytes than this run's activations have."""
        _check(len(payload), [each + self.targets_bytes for each in self._activations], source)

    def check_gradient(self, payload: Payload, source: PeerID) -> None:
        """Raises: RemoteError."""
        _check(len(payload), [*self._gradients], source)

    def encode_activation(self, x_BTD: Tensor, labels: Labels) -> bytearray:
        form = self._forward  # a plan may change it while this job runs
        at, num = tensor_bytes(form, self._numel), math.prod(self._shape_BT)
        payload = bytearray(at + self.targets_bytes)
        self._write(x_BTD, payload, form)
        word_BT, weight_1 = self._words(payload, at, num)
        targets_BT = labels.targets_BT
        if not self._leaves_out:
            word_BT.copy_(targets_BT)
            return payload
        word_BT.copy_(torch.where(targets_BT == IGNORED, _NOTHING, targets_BT))
        if labels.begins_BT is not None:
            word_BT += _BEGINS * labels.begins_BT.to(word_BT.device, torch.int32)
        weight_1.fill_(labels.weight)
        assert at + 4 * (num + 1) == len(payload)
        return payload

    def decode_activation(self, payload: Payload, device: torch.device) -> tuple[Tensor, Labels]:
        """Returns: (float32 [B, T, D] on `device`, nobody else's; its labels there)."""
        at = len(payload) - self.targets_bytes
        x_BTD = self._read(payload, at, self._activations[at], device)
        word_BT, weight_1 = self._words(payload, at, math.prod(self._shape_BT))
        if not self._leaves_out:
            return x_BTD, Labels(targets_BT=word_BT.to(device, torch.int64))
        targets_BT = word_BT.to(torch.int64) & _NOTHING
        targets_BT.masked_fill_(targets_BT == _NOTHING, IGNORED)
        labels = Labels(
            targets_BT=targets_BT,
            begins_BT=(word_BT & _BEGINS) != 0 if self._masks else None,
            counted=int((targets_BT != IGNORED).sum()),
            weight=float(weight_1),
        )
        return x_BTD, labels.to(device)

    def _words(self, payload: Payload, at: int, num: int) -> tuple[Tensor, Tensor]:
        """The labels in a payload, int32 [B, T], and the place of the weight behind them, float32 [1] or [0].

        Args: at: the bytes before them.
        """
        word_BT = torch.frombuffer(payload, dtype=torch.int32, offset=at, count=num).view(self._shape_BT)
        if not self._leaves_out:
            return word_BT, torch.empty(0)
        return word_BT, torch.frombuffer(payload, dtype=torch.float32, offset=at + 4 * num, count=1)

    def encode_gradient(self, grad_BTD: Tensor, microbatch: Microbatch, layer: int) -> bytearray:
        """Args: grad_BTD: of the input of decoder layer `layer`, float32 [B, T, D]."""
        form = self._backward
        payload = bytearray(tensor_bytes(form, self._numel))
        self._write(grad_BTD, payload, form, key=self._key(microbatch, layer))
        return payload

    def decode_gradient(self, payload: Payload, device: torch.device) -> Tensor:
        """Returns: float32 [B, T, D] on `device`, nobody else's."""
        return self._read(payload, len(payload), self._gradients[len(payload)], device)

    def _write(self, x_BTD: Tensor, into: bytearray, form: WireFormat, *, key: tuple[int, int] | None = None) -> None:
        """Write the tensor's bytes to the beginning of `into`."""
        if form in _DTYPES:
            torch.frombuffer(into, dtype=_DTYPES[form], count=self._numel).view(self._shape_BTD).copy_(x_BTD)
        else:
            payload_B = codec.encode(x_BTD.to(torch.float32), codec.FORMATS[form], key=key)
            torch.frombuffer(into, dtype=torch.uint8, count=payload_B.numel()).copy_(payload_B)

    def _read(self, payload: Payload, nbytes: int, form: WireFormat, device: torch.device) -> Tensor:
        if form in _DTYPES:
            x_BTD = torch.frombuffer(payload, dtype=_DTYPES[form], count=self._numel).view(self._shape_BTD)
            return x_BTD.to(device, torch.float32, copy=True)
        payload_B = torch.frombuffer(payload, dtype=torch.uint8, count=nbytes).to(device)
        return codec.decode(payload_B, self._numel, codec.FORMATS[form]).view(self._shape_BTD)

    def _key(self, microbatch: Microbatch, layer: int) -> tuple[int, int]:
        words = f"{self._seed} {microbatch.step} {microbatch.index} {layer}"
        digest = blake3(words.encode()).digest(length=8)
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _check(num_bytes: int, wanted: Collection[int], source: PeerID) -> None:
    if num_bytes not in wanted:
        its = " or ".join(map(str, wanted))
        raise RemoteError(source, f"sent a tensor of {num_bytes} bytes, this run's have {its}")
