"""Computes each layer's cost relative to the others, which is all that balancing stages needs to know of the model."""

from shoal.protocol.layers import HEAD
from shoal.protocol.spec import ModelSpec
from shoal.protocol.tensors import basis_elements, expert_elements, num_elements, tokens_seen, trunk_elements


def layer_costs(model: ModelSpec) -> tuple[float, ...]:
    """Return the forward FLOP a token of each decoder layer; the first includes the embedding, the last the head.
    Matmuls only; causal attention sees (context + 1) / 2 tokens on average, or a window. A backward is twice a forward
    everywhere, so it changes no balance. The embedding is a gather, counted as the D values it moves. Counted experts
    are those that a token is sent to, and the router. A subspace model includes the products with its basis."""
    return _costs(model, in_experts=model.experts_computed * expert_elements(model))


def trunk_costs(model: ModelSpec) -> tuple[float, ...]:
    """Return the forward FLOP a token of each layer without its experts, for runs that place experts separately."""
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
