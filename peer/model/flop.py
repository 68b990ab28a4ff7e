"""The arithmetic of a layer, for cost models and the simulated device."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.peer.model.layout import EMBED, HEAD, layer_index
from shoal.protocol.spec import ModelSpec, RunSpec
from shoal.protocol.tensors import (
    ADAPTED_BACKWARD_PER_FORWARD,
    BACKWARD_PER_FORWARD,
    basis_elements,
    expert_elements,
    num_elements,
    tokens_seen,
    trunk_elements,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFlop:
    """FLOP of one microbatch's jobs at a stage, or of their parts if the experts are on other peers."""

    forward: float
    backward: float
    loss: float
    """The last stage's one job. With `keep = "layers"` it repeats the forward of each layer but the head."""


def stage_flop(spec: RunSpec, keys: Sequence[str]) -> JobFlop:
    """Return the FLOP of a microbatch's jobs at a stage with the layers `keys`. With adapters a backward is one
    product: only a matrix's input has a gradient."""
    tokens = spec.training.microbatch_size * spec.model.context
    forward = sum(forward_flop(spec.model, key, tokens) for key in keys)
    backward = BACKWARD_PER_FORWARD if spec.adapter is None else ADAPTED_BACKWARD_PER_FORWARD
    again = forward - sum(forward_flop(spec.model, key, tokens) for key in keys if key == HEAD)
    return job_flop(
        forward,
        recomputes=spec.training.recomputes,
        backward_per_forward=backward,
        again_at_loss=again if spec.recomputes_by_layer else 0.0,
    )


def job_flop(
    forward: float,
    *,
    recomputes: bool,
    backward_per_forward: float = BACKWARD_PER_FORWARD,
    again_at_loss: float = 0.0,
) -> JobFlop:
    """Return the FLOP of the jobs of a stage, given those of its `forward`.

    Args:
        recomputes: a backward first repeats the forward.
        again_at_loss: FLOP of the forwards that the last stage's job repeats.
    """
    backward = backward_per_forward * forward
    return JobFlop(
        forward=forward,
        backward=forward + backward if recomputes else backward,
        loss=forward + backward + again_at_loss,
    )


def expert_flop(model: ModelSpec, num_tokens: int) -> float:
    """Return the matmul FLOP of one expert's forward on the `num_tokens` tokens sent to it."""
    return 2.0 * num_tokens * expert_elements(model)


def part_flop(keys: Sequence[str], flop: float) -> float:
    """Return the FLOP of one part of a stage's forward of `flop`, cut at each decoder layer of `keys` by its
    experts."""
    return flop / (1 + sum(key not in (EMBED, HEAD) for key in keys))


def trunk_flop(model: ModelSpec, key: str, num_tokens: int) -> float:
    """Return `forward_flop` without the layer's experts."""
    if not model.num_experts or key in (EMBED, HEAD):
        return forward_flop(model, key, num_tokens)
    return forward_flop(model, key, num_tokens) - expert_flop(model, num_tokens * model.experts_per_token)


def forward_flop(model: ModelSpec, key: str, num_tokens: int) -> float:
    """Return the matmul FLOP (a multiply-add is 2) of one layer's forward on `num_tokens` tokens in samples of
    `context`.

    Attention is causal: a token attends to (context + 1) / 2 others on average, fewer with a window. The embedding is a
    gather, 0. Counted are also the router, the K experts of each token, and the products with a subspace's basis.
    """
    if key == EMBED:
        return 2.0 * num_tokens * model.dim * model.subspace
    if key == HEAD:
        return 2.0 * num_tokens * num_elements(model, HEAD)[0]
    index = layer_index(key)
    matrices = trunk_elements(model, index)[0] + model.experts_computed * expert_elements(model)
    scores_and_values = 2 * model.num_heads * model.head_dim * tokens_seen(model, index)
    return 2.0 * num_tokens * (matrices + basis_elements(model) + scores_and_values)


def backward_flop(model: ModelSpec, key: str, num_tokens: int) -> float:
    """Return the matmul FLOP of one layer's backward, without a repeated forward."""
    return BACKWARD_PER_FORWARD * forward_flop(model, key, num_tokens)
