"""Computes one expert in all layers of a stage: its output for tokens, and the gradients of tokens and weights.

A backward brings its tokens again, so any holder can take over in the middle of a microbatch. Between calls a holder
keeps only the gradient of each run of a microbatch; a run stays *open* until its sender reports the run's end.

N tokens   D width
"""

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional

from shoal.peer.model.backward import backward
from shoal.peer.model.finite import finite
from shoal.peer.model.layout import expert_key, expert_keys, layer_layout
from shoal.peer.model.state import StageState
from shoal.peer.pipeline.expert_runs import OpenRuns, Run
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.shard import How, Shard
from shoal.peer.pipeline.weight_set import WeightSet
from shoal.protocol.spec import RunSpec
from shoal.protocol.tensors import EXPERT_MATRICES, expert_name


class ExpertShard(Shard):
    """Expert `expert` of the decoder layers [first_layer, last_layer)."""

    def __init__(self, spec: RunSpec, first_layer: int, last_layer: int, expert: int, **how: Unpack[How]) -> None:
        super().__init__(spec, expert_keys(first_layer, last_layer, expert), **how)
        self.expert = expert
        self.layers = range(first_layer, last_layer)
        self.open_runs = OpenRuns(self._contributions)

    # --- jobs ---

    @torch.no_grad()
    def forward(self, microbatch: Microbatch, layer: int, x_ND: Tensor) -> Tensor:
        """Run the expert of layer `layer` with the weights of the microbatch's step: float32 [N, D] -> [N, D]."""
        flat_N = self._wanted(microbatch).computed_in(self.dtype, self._key(layer))
        return self._swiglu(layer, layer_layout(self.spec.model, self._key(layer)).views(flat_N), x_ND)

    def backward(self, run: Run, layer: int, x_ND: Tensor, grad_ND: Tensor, *, wanted: bool) -> Tensor:
        """Return the tokens' gradient, float32 [N, D]. Add the weights' gradient to the run's gradient, once per layer.

        Args: wanted: the group has no gradient of the microbatch yet; only the value in the first backward counts.
        """
        weights = self._wanted(run.microbatch)
        opened = self.open_runs.get(run)
        if opened is None:
            gradient_N = self._zero_gradient() if wanted else None
            staleness_steps = max(0, run.microbatch.step - self.version)
            opened = self.open_runs.begin(run, gradient_N=gradient_N, weights=weights, staleness_steps=staleness_steps)
        if not bool(finite(grad_ND)):
            opened.layers.add(layer)
            return torch.zeros_like(x_ND)
        key = self._key(layer)
        layout = layer_layout(self.spec.model, key)
        flat_N = weights.computed_in(self.dtype, key)
        if opened.gradient_N is not None and layer not in opened.layers:
            leaves = layout.leaves(flat_N, opened.gradient_N[self._spans[key]])
        else:
            leaves = layout.views(flat_N)
        x_ND = x_ND.detach().requires_grad_()
        with torch.enable_grad():
            backward([self._swiglu(layer, leaves, x_ND)], [grad_ND])
        opened.layers.add(layer)
        assert x_ND.grad is not None
        return x_ND.grad

    # --- between jobs ---

    def close(self, run: Run, *, wanted: bool) -> int | None:
        """End a run, so that its gradient can be contributed. A run that brought no token contributes zeros if `wanted`
        (the group has no gradient of it yet). Returns: staleness in steps; None: the run adds nothing to the sum."""
        zero_N = None
        if wanted and self.open_runs.get(run) is None:
            zero_N = self._zero_gradient()
        return self.open_runs.close(run, version=self.version, zero_N=zero_N, keeps_weights=self._weights.keeps_places)

    def step(self, mean_gradient_N: Tensor) -> tuple[StageState, str, int]:
        stepped = super().step(mean_gradient_N)
        self.open_runs.forget_before(stepped[0].version)
        return stepped

    # --- inside ---

    def _wanted(self, microbatch: Microbatch) -> WeightSet:
        self._contributions.settle()
        return self._wanted_by(microbatch)

    def _key(self, layer: int) -> str:
        return expert_key(f"layers.{layer}", self.expert)

    def _swiglu(self, layer: int, params: dict[str, Tensor], x_ND: Tensor) -> Tensor:
        w1_FD, w2_DF, w3_FD = (params[expert_name(self.spec.model, layer, self.expert, w)] for w in EXPERT_MATRICES)
        rows_ND = x_ND.to(self.dtype)
        hidden_NF = functional.silu(functional.linear(rows_ND, w1_FD)) * functional.linear(rows_ND, w3_FD)
        return functional.linear(hidden_NF, w2_DF).to(x_ND.dtype)
