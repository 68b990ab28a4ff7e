"""What crosses a wire, in one process: a cut between two stages, and sums among the members of one (`between` and
`on_backward` of `single_process.py`)."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from single_process import Between
from torch import Tensor

from shoal.peer.data.corpus import Corpus
from shoal.peer.data.labels import Labels
from shoal.peer.data.microbatch import microbatch as training_microbatch
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.group.reduce import Outgoing, Reduction
from shoal.peer.pipeline.microbatch import Microbatch, bitmap_of
from shoal.peer.pipeline.wire import ActivationWire
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import RoundMember, RoundStart
from shoal.protocol.spec import RunSpec

CPU = torch.device("cpu")


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, wire: ActivationWire, labels: Labels, microbatch: Microbatch, layer: int
    ) -> Tensor:
        ctx.at = wire, microbatch, layer
        return wire.decode_activation(wire.encode_activation(x_BTD, labels), CPU)[0]

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None, None, None, None]:
        wire, microbatch, layer = ctx.at
        return wire.decode_gradient(wire.encode_gradient(grad_BTD, microbatch, layer), CPU), None, None, None, None


def cuts(spec: RunSpec, corpus: Corpus) -> Between:
    """Every layer gets, and gives back, what the run's wire makes of it."""
    wire = ActivationWire(spec)

    @lru_cache(maxsize=1)
    def labels_of(microbatch: Microbatch) -> Labels:
        tokens_BT, labels = training_microbatch(corpus, spec, microbatch.step, microbatch.index)
        return replace(labels, tokens_BT=tokens_BT)

    def between(x_BTD: Tensor, microbatch: Microbatch, layer: int) -> Tensor:
        cut: Tensor = _Cut.apply(x_BTD, wire, labels_of(microbatch), microbatch, layer)
        return cut

    return between


class Sums:
    """Has a step's gradient added up by `members`, as one stage that holds the whole model would: each has its share of
    the microbatches, and what they send each other is as the run's wire makes it, in the thinnest format of several."""

    def __init__(self, spec: RunSpec, members: int) -> None:
        self._form = spec.wire.sums[-1]
        self._vectors = Vectors(CPU, sums=spec.wire.sums)
        self._count, self._members = spec.training.microbatches_per_step, members
        self._sums: list[Tensor] = []

    def __call__(self, microbatch: Microbatch, params_by_key: Mapping[str, Mapping[str, Tensor]]) -> None:
        per_member = self._count // self._members
        if (microbatch.index + 1) % per_member:
            return
        gradients = [param.grad for params in params_by_key.values() for param in params.values()]
        whole = [gradient for gradient in gradients if gradient is not None]
        self._sums.append(torch.cat([gradient.reshape(-1) for gradient in whole]) * self._count)
        for gradient in whole:
            gradient.zero_()
        if len(self._sums) == self._members:
            mean_N, at = self._mean(microbatch.step), 0
            for gradient in whole:
                gradient.copy_(mean_N[at : at + gradient.numel()].view_as(gradient))
                at += gradient.numel()
            self._sums = []

    def _mean(self, step: int) -> Tensor:
        names = [PeerID(str(rank)) for rank in range(self._members)]
        share = bitmap_of((1 << (self._count // self._members)) - 1)
        start = RoundStart(
            stage=0,
            step=step,
            attempt=1,
            members=tuple(RoundMember(peer=name, bandwidth=1.0, indices=share) for name in names),
            duplicates=0,
            given_up=0,
            loss_sum=0.0,
            staleness_sum=0,
            form=self._form,
        )
        numel, first = self._sums[0].numel(), names[0]
        rounds = {
            name: Reduction(name, start, numel, microbatches=self._count, vectors=self._vectors) for name in names
        }
        vectors, results = self._vectors, []
        for name, sum_N in zip(names, self._sums, strict=True):
            rounds[name].begin(sum_N)
        for name in names:
            for out in scatter(rounds[name]):
                owner, payload = rounds[out.target], vectors.piece_payload(out.values_C, out.form, out.key)
                if owner.part_arrived(name, out.start, payload):
                    owner.adding([out.start])()
                    results += [(out.target, made) for made in owner.added([out.start]) if made.target == first]
        for name, out in results:
            payload = vectors.piece_payload(out.values_C, out.form, out.key) if out.payload is None else out.payload
            take = rounds[first].result_arrived(name, out.start, payload)
            assert take is not None
            take()
            rounds[first].taken(out.start)
        assert rounds[first].is_complete
        return rounds[first].mean_N


def scatter(reduction: Reduction) -> list[Outgoing]:
    """A member's contributions to all parts of others."""
    return [out for peer in reduction.others for out in reduction.scatter_to(peer)]
