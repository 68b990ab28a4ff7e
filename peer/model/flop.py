"""Arithmetic of a layer, for cost models and for the simulated device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shoal.peer.model.layout import EMBED, HEAD, layer_index
from shoal.protocol.spec import ModelSpec, RunSpec
from shoal.protocol.tensors import basis_elements, expert_elements, num_elements, tokens_seen, trunk_elements

BACKWARD_PER_FORWARD: Final = 2.0
"""A matmul's backward is two matmuls of its size: one for the input's gradient, one for the weight's."""
ADAPTED_BACKWARD_PER_FORWARD: Final = 1.0
"""Where only adapters train. What these take themselves is a few hundredths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFlop:
    """Floating-point operations of one microbatch's jobs at a stage, or of their parts where experts are elsewhere."""

    forward: float
    backward: float
    loss: float
    """The last stage's one job for a microbatch, which is forward, loss and backward. With `keep = "layers"` the
    forward of each layer runs twice, that of the head once; otherwise no forward runs a second time."""


def stage_flop(spec: RunSpec, keys: Sequence[str]) -> JobFlop:
    """Of a microbatch's jobs at a stage that has all of these layers. Beside a base that is not trained a backward is
    one product: what the matrix reads has a gradient, and the matrix none."""
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
    """Args:
    forward: FLOP of it.
    recomputes: a backward runs the forward again before it.
    again_at_loss: FLOP that the last stage's job runs again.
    """
    backward = backward_per_forward * forward
    return JobFlop(
        forward=forward,
        backward=forward + backward if recomputes else backward,
        loss=forward + backward + again_at_loss,
    )


def expert_flop(model: ModelSpec, num_tokens: int) -> float:
    """Matmul FLOP of one expert's forward on `num_tokens` tokens that were sent to it."""
    return 2.0 * num_tokens * expert_elements(model)


def part_flop(keys: Sequence[str], flop: float) -> float:
    """FLOP of one of the parts into which a stage's `flop` are cut where its experts are elsewhere: each decoder layer
    of `keys` is one cut."""
    return flop / (1 + sum(key not in (EMBED, HEAD) for key in keys))


def trunk_flop(model: ModelSpec, key: str, num_tokens: int) -> float:
    """As `forward_flop`, without what the experts of the layer do."""
    if not model.num_experts or key in (EMBED, HEAD):
        return forward_flop(model, key, num_tokens)
    return forward_flop(model, key, num_tokens) - expert_flop(model, num_tokens * model.experts_per_token)


def forward_flop(model: ModelSpec, key: str, num_tokens: int) -> float:
    """Matmul FLOP (a multiply-add is 2) of one layer's forward on `num_tokens` tokens in samples of `context`.

    Attention is counted causal: a token looks at (context + 1) / 2 others on average, and at fewer through a window.
    The embedding is a gather, 0. Of experts those count that a token is sent to, and the router. In a subspace model
    the products with its basis count as well.
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
    """Matmul FLOP of one layer's backward, without recomputing the forward."""
    return BACKWARD_PER_FORWARD * forward_flop(model, key, num_tokens)
