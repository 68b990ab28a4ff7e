"""The FLOP (floating-point operations) of a layer's and a stage's jobs, for cost models and the simulated device."""

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
    """FLOP of a stage's jobs for one microbatch; of one part of a job if calls to experts elsewhere cut it."""

    forward: float
    backward: float
    loss: float
    """The job of the last stage: forward, loss and backward in one. With `keep = "layers"` it runs the forward of each
    layer but the head twice."""


def stage_flop(spec: RunSpec, keys: Sequence[str]) -> JobFlop:
    """Return the FLOP of the forward, backward and loss jobs of a stage with the layers `keys`, for one microbatch."""
    tokens = spec.training.microbatch_size * spec.model.context
    forward = sum(forward_flop(spec.model, key, tokens) for key in keys)
    again = forward - sum(forward_flop(spec.model, key, tokens) for key in keys if key == HEAD)
    return job_flop(spec, forward, again_at_loss=again if spec.recomputes_by_layer else 0.0)


def trunk_stage_flop(spec: RunSpec, keys: Sequence[str]) -> JobFlop:
    """Return the average FLOP of a part of each job of a stage, for one microbatch. The stage's experts are on other
    peers: each decoder layer of `keys` calls its experts, and each call cuts the job into parts."""
    tokens = spec.training.microbatch_size * spec.model.context
    forward = sum(trunk_flop(spec.model, key, tokens) for key in keys)
    return job_flop(spec, forward / (1 + sum(key not in (EMBED, HEAD) for key in keys)))


def job_flop(spec: RunSpec, forward: float, *, again_at_loss: float = 0.0) -> JobFlop:
    """Return the FLOP of a stage's forward, backward and loss jobs for one microbatch.

    Args: forward: FLOP of the stage's forward; again_at_loss: FLOP of the forwards that the loss job repeats.
    """
    backward = (BACKWARD_PER_FORWARD if spec.adapter is None else ADAPTED_BACKWARD_PER_FORWARD) * forward
    return JobFlop(
        forward=forward,
        backward=forward + backward if spec.training.recomputes else backward,
        loss=forward + backward + again_at_loss,
    )


def expert_flop(model: ModelSpec, num_tokens: int) -> float:
    """Return the matmul FLOP of one expert's forward on the `num_tokens` tokens sent to it."""
    return 2.0 * num_tokens * expert_elements(model)


def trunk_flop(model: ModelSpec, key: str, num_tokens: int) -> float:
    """Return the matmul FLOP of one layer's forward on `num_tokens` tokens, without its experts."""
    if not model.num_experts or key in (EMBED, HEAD):
        return forward_flop(model, key, num_tokens)
    return forward_flop(model, key, num_tokens) - expert_flop(model, num_tokens * model.experts_per_token)


def forward_flop(model: ModelSpec, key: str, num_tokens: int) -> float:
    """Return the matmul FLOP (a multiply-add is 2) of one layer's forward on `num_tokens` tokens.

    Attention is causal: a token attends to (context + 1) / 2 tokens on average, to fewer with a window. Looking up an
    embedding costs 0. The router, each token's K experts and the products with a subspace's basis count, too.
    """
    if key == EMBED:
        return 2.0 * num_tokens * model.dim * model.subspace
    if key == HEAD:
        return 2.0 * num_tokens * num_elements(model, HEAD)[0]
    index = layer_index(key)
    matrices = trunk_elements(model, index)[0] + model.experts_computed * expert_elements(model)
    scores_and_values = 2 * model.num_heads * model.head_dim * tokens_seen(model, index)
    return 2.0 * num_tokens * (matrices + basis_elements(model) + scores_and_values)
