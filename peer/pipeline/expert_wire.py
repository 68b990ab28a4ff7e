"""Encodes tokens for experts as bytes.

Shapes follow from the run spec, and from counts that are checked against the spec. Tokens that a holder sends to itself
are rounded, too, so that results do not depend on which peer holds an expert. A simulated peer replaces this class.

P rows, sorted by expert   D width
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shoal.peer.encoding.vectors import DTYPES
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ExpertTokens
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec


class TokenWire:
    """Encodes, decodes and checks the tokens of one run."""

    def __init__(self, spec: RunSpec) -> None:
        self._width = spec.model.dim
        self._dtype = DTYPES[spec.wire.tokens]
        self._training = spec.training
        self._num_experts = spec.model.num_experts
        self.tokens = spec.training.microbatch_size * spec.model.context
        """The number of tokens in a microbatch, the most that one expert can get."""
        self.row_bytes = self._dtype.itemsize * self._width

    def encode(self, x_PD: Tensor) -> bytearray:
        payload = bytearray(self.row_bytes * len(x_PD))
        if payload:
            torch.frombuffer(payload, dtype=self._dtype).view(-1, self._width).copy_(x_PD.detach())
        return payload

    def decode(self, payload: Payload, device: torch.device) -> Tensor:
        """Decode tokens. Return a new float32 [P, D] on `device`."""
        if not len(payload):
            return torch.zeros(0, self._width, device=device)
        rows_PD = torch.frombuffer(payload, dtype=self._dtype).view(-1, self._width)
        return rows_PD.to(device, torch.float32, copy=True)

    def rows(self, counts: Mapping[int, int]) -> dict[int, slice]:
        """Return expert -> the slice of a payload's bytes that has its rows. Args: counts: expert -> number of its
        rows, in the payload's order."""
        spans, at = {}, 0
        for expert, count in counts.items():
            spans[expert] = slice(at, at + count * self.row_bytes)
            at += count * self.row_bytes
        return spans

    def room(self, nbytes: int) -> Payload:
        return bytearray(nbytes)

    def part(self, payload: Payload, span: slice) -> Payload:
        """Return a part of a payload without copying."""
        return memoryview(payload)[span]

    def write(self, into: Payload, span: slice, part: Payload) -> None:
        memoryview(into)[span] = part

    def joined(self, parts: Iterable[Payload]) -> Payload:
        return bytearray().join(parts)

    def check_tokens(self, meta: ExpertTokens, payload: Payload, source: PeerID) -> None:
        """Check a frame. Raises: RemoteError: no honest peer of this run sends such tokens."""
        self.check_microbatch(meta.step, meta.index, source)
        experts = [expert for expert, _ in meta.counts]
        if not experts or experts != sorted(set(experts)) or not 0 <= experts[0] <= experts[-1] < self._num_experts:
            raise RemoteError(source, "sent tokens for unknown experts, or twice for one")
        if not all(0 < count <= self.tokens for _, count in meta.counts):
            raise RemoteError(source, f"sent an expert no tokens, or more than {self.tokens}")
        wanted = sum(count for _, count in meta.counts) * self.row_bytes * (2 if meta.backward else 1)
        if len(payload) != wanted:
            raise RemoteError(source, f"sent {len(payload)} bytes of tokens, but announced {wanted}")
        if meta.backward and meta.index < 0:
            raise RemoteError(source, "sent gradients of a validation")

    def check_microbatch(self, step: int, index: int, source: PeerID) -> None:
        """Check that microbatch (step, index) exists. Raises: RemoteError: this run has no such microbatch."""
        training = self._training
        known = -training.validation_microbatches <= index < training.microbatches_per_step
        if not (0 <= step <= training.steps and known):
            raise RemoteError(source, f"sent microbatch ({step}, {index}), which this run does not have")
