"""Trains a run in one process with torch's own autograd and optimizers: the reference that a swarm must equal.

This file is deliberately plain and independent of the swarm's arithmetic. It shares the model's functions, the data,
the initial weights and the schedule, but not the optimizer kernels, the clipping or the flat state.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from shoal.peer.data.corpus import Corpus
from shoal.peer.data.labels import Labels
from shoal.peer.data.microbatch import microbatch
from shoal.peer.model.documents import Documents
from shoal.peer.model.frozen import AdaptedLayer, FrozenLayer, seed_base
from shoal.peer.model.layout import (
    EMBED,
    HEAD,
    all_layer_keys,
    init_layer,
    initial_parameters,
    layer_layout,
    state_layout,
    unit_keys,
)
from shoal.peer.model.llama import Params, loss, rotary_tables, run_layers
from shoal.peer.model.mixture import Mixture
from shoal.peer.model.schedule import rate_of
from shoal.peer.model.subspace import constants_of
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.spec import OptimizerSpec, RunSpec
from shoal.protocol.tensors import EMBEDDING_MATRIX, HEAD_MATRIX


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """Loss and gradient norm of one optimizer step."""

    step: int
    loss: float
    """Mean over the step's microbatches, in nats a token, with the weights before the step."""
    grad_norm: float
    """Norm of the whole model's gradient, before clipping."""
    seconds: float


OnStep = Callable[[StepLoss, Mapping[str, Params]], None]
"""Called after each step with its figures and layer key -> parameters, which the next step changes in place."""

Between = Callable[[Tensor, Microbatch, int], Tensor]
"""Called between two decoder layers: (output of the first, microbatch, number of the second) -> input of the second."""

OnBackward = Callable[[Microbatch, Mapping[str, Params]], None]
"""Called after the backward of a microbatch with (the microbatch, all parameters by layer key and tensor name). The
microbatch's gradient, divided by the M microbatches of a step, has been added to the `grad` of the parameters."""


def train(
    spec: RunSpec,
    corpus: Corpus,
    *,
    steps: int,
    base: Mapping[str, Tensor] | None = None,
    on_step: OnStep | None = None,
    between: Between | None = None,
    on_backward: OnBackward | None = None,
) -> Iterator[StepLoss]:
    """Train from the run's initial weights for `steps` steps of its schedule. With `compute = "bf16"` the weights and a
    microbatch's gradient are bfloat16 and all else is float32, as in swarms.
    Args: base: the frozen weights of a run with adapters, by layer key, as `stored_base` returns them; None: they are
        made from the run's seed."""
    if base is None and spec.adapter is not None:
        base = {key: seed_base(spec, key) for key in all_layer_keys(spec.model)}
    params_by_key = _initial(spec, base)
    optimizers = _optimizers(spec, params_by_key)
    rotary = rotary_tables(spec.model)
    M = spec.training.microbatches_per_step
    for step in range(steps):
        started_s = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        total = 0.0
        for index in range(M):
            tokens_BT, labels = microbatch(corpus, spec, step, index)
            documents, here = Documents.of(labels.begins_BT, rotary)
            used = _narrowed(spec, params_by_key, base) if spec.training.compute == "bf16" else params_by_key
            balances: list[Tensor] = []
            mixture, logits = Mixture(balances=balances), tokens_BT
            for layer in range(spec.model.num_layers):
                part = stage_layer_keys(spec.model, layer, layer + 1)
                if layer and between is not None:
                    logits = between(logits, Microbatch(step, index), layer)
                logits = run_layers(spec.model, part, used, logits, here, mixture=mixture, documents=documents)
            value = weighed_loss(logits, labels)
            entire = value + spec.model.router_aux_loss * torch.stack(balances).sum() if balances else value
            if used is params_by_key:
                torch.autograd.backward(entire / M)
            else:
                torch.autograd.backward(entire)
                _add_gradients(used, params_by_key, M)
            if on_backward is not None:
                on_backward(Microbatch(step, index), params_by_key)
            total += value.item()
        norms = [
            float(clip_grad_norm_([params_by_key[key][name] for name in names], spec.optimizer.clip_norm or math.inf))
            for key, names in _units(spec)
        ]
        for optimizer in optimizers:
            _step(spec.optimizer, optimizer, rate_of(spec, step))
        record = StepLoss(
            step=step, loss=total / M, grad_norm=math.hypot(*norms), seconds=time.perf_counter() - started_s
        )
        if on_step is not None:
            on_step(record, params_by_key)
        yield record


def _units(spec: RunSpec) -> list[tuple[str, tuple[str, ...]]]:
    """Return (layer, tensor names) of each unit: the tensors that are clipped by one norm. A tied matrix counts only in
    the embedding's unit."""
    units = [(key, unit) for key in all_layer_keys(spec.model) for unit in unit_keys(spec.model, key)]
    names = [(key, state_layout(spec, unit).names) for key, unit in units]
    return [(key, tuple(n for n in some if not (spec.trains_tied and n == HEAD_MATRIX))) for key, some in names]


def _narrowed(
    spec: RunSpec, params_by_key: Mapping[str, Params], base: Mapping[str, Tensor] | None
) -> dict[str, dict[str, Tensor]]:
    leaves = {
        key: {name: params[name].detach().to(torch.bfloat16).requires_grad_() for name in state_layout(spec, key).names}
        for key, params in params_by_key.items()
    }
    return _beside(spec, base, leaves, torch.bfloat16)


def _beside(
    spec: RunSpec, base: Mapping[str, Tensor] | None, leaves: dict[str, dict[str, Tensor]], dtype: torch.dtype
) -> dict[str, dict[str, Tensor]]:
    """Join the trained tensors of each layer with its fixed ones: the frozen base of adapters, or the constants of a
    subspace model."""
    if spec.adapter is None or base is None:
        cpu = torch.device("cpu")
        return {key: named | constants_of(spec, key, device=cpu, dtype=dtype) for key, named in leaves.items()}
    frozen = {key: FrozenLayer.of(spec, key, base[key], device=torch.device("cpu"), dtype=dtype) for key in leaves}
    return {key: AdaptedLayer(frozen[key], leaves[key], scale=spec.adapter.scale) for key in leaves}


def _add_gradients(narrow: Mapping[str, Params], wide: Mapping[str, Params], num: int) -> None:
    for key, params in wide.items():
        for name, param in params.items():
            gradient = narrow[key][name].grad if param.requires_grad else None
            if gradient is not None:
                part = gradient.float() / num
                param.grad = part if param.grad is None else param.grad + part


def weighed_loss(logits_BTV: Tensor, labels: Labels) -> Tensor:
    """Return the loss in nats a token, weighted so that a step's mean over microbatches is its mean over tokens."""
    if labels.counted == 0:
        return 0.0 * logits_BTV.sum()
    return labels.weight * loss(logits_BTV, labels.targets_BT)


def _initial(spec: RunSpec, base: Mapping[str, Tensor] | None) -> dict[str, dict[str, Tensor]]:
    keys = all_layer_keys(spec.model)
    if spec.adapter is None:
        made = {key: layer_layout(spec.model, key).leaves(init_layer(spec.model, key, spec.seed)) for key in keys}
        if spec.trains_tied:
            made[HEAD][HEAD_MATRIX] = made[EMBED][EMBEDDING_MATRIX]
        return _beside(spec, base, made, torch.float32)
    leaves = {key: state_layout(spec, key).leaves(initial_parameters(spec, key)) for key in keys}
    return _beside(spec, base, leaves, torch.float32)


def _optimizers(run: RunSpec, params_by_key: Mapping[str, Params]) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers: with Muon, one for hidden matrices and AdamW for all else; otherwise a single one."""
    tensors = [tensor for params in params_by_key.values() for tensor in params.values() if tensor.requires_grad]
    tensors = list({id(tensor): tensor for tensor in tensors}.values())  # a tied matrix occurs twice
    if run.optimizer.name != "muon":
        return [_optimizer(run.optimizer, tensors)]
    of_layers = [params.values() for key, params in params_by_key.items() if key not in (EMBED, HEAD)]
    hidden = [tensor for values in of_layers for tensor in values if tensor.ndim == 2 and tensor.requires_grad]
    rest = [tensor for tensor in tensors if not any(tensor is one for one in hidden)]
    muon = torch.optim.Muon(
        hidden, weight_decay=run.optimizer.weight_decay, momentum=run.optimizer.beta1, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, _optimizer(run.optimizer, rest)]


def _optimizer(spec: OptimizerSpec, tensors: list[Tensor]) -> torch.optim.Optimizer:
    groups = [
        {"params": [tensor for tensor in tensors if tensor.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [tensor for tensor in tensors if tensor.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (spec.beta1, spec.beta2)
    match spec.name:
        case "adamw" | "muon":
            return torch.optim.AdamW(groups, betas=betas, eps=spec.epsilon)
        case "nadam":
            return torch.optim.NAdam(
                groups, betas=betas, eps=spec.epsilon, decoupled_weight_decay=True, momentum_decay=math.inf
            )
        case "sgd":
            return torch.optim.SGD([group | {"weight_decay": 0.0} for group in groups], momentum=spec.beta1)


def _step(spec: OptimizerSpec, optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    if spec.name == "sgd":  # torch's SGD adds weight decay only to the gradient
        with torch.no_grad():
            for tensor in optimizer.param_groups[0]["params"]:
                tensor.mul_(1 - rate * spec.weight_decay)
    optimizer.step()
