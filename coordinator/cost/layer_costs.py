"""What each layer costs, relative to the others. Balancing stages needs to know no more of the model."""

from shoal.protocol.layers import HEAD
from shoal.protocol.spec import ModelSpec
from shoal.protocol.tensors import basis_elements, expert_elements, num_elements, tokens_seen, trunk_elements


def layer_costs(model: ModelSpec) -> tuple[float, ...]:
    """Forward FLOP a token of each decoder layer; embedding and head are on top of the first and the last.

    Matmuls only, attention causal over (context + 1) / 2 tokens on average, or a window's. A backward is twice a
    forward everywhere, so it changes no balance. The embedding is a gather: its cost is counted as the D values it
    moves. Of experts those count that a token is sent to, and the router. In a subspace model the products with its
    basis count as well.
    """
    return _costs(model, in_experts=model.experts_computed * expert_elements(model))


def trunk_costs(model: ModelSpec) -> tuple[float, ...]:
    """Forward FLOP a token of what is left of each layer where its experts are placed."""
    return _costs(model, in_experts=0)


def _costs(model: ModelSpec, *, in_experts: int) -> tuple[float, ...]:
    width, in_experts = model.num_heads * model.head_dim, in_experts + basis_elements(model)
    costs = [
        2.0 * (trunk_elements(model, index)[0] + in_experts + 2 * width * tokens_seen(model, index))
        for index in range(model.num_layers)
    ]
    costs[0] += float(model.dim) + 2.0 * model.dim * model.subspace
    costs[-1] += 2.0 * num_elements(model, HEAD)[0]
    return tuple(costs)
