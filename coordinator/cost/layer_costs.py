"""What each layer costs, relative to the others. Balancing stages needs to know no more of the model."""

from shoal.protocol.spec import ModelSpec


def layer_costs(model: ModelSpec) -> tuple[float, ...]:
    """Forward FLOP a token of each decoder layer; embedding and head are on top of the first and the last.

    Matmuls only, attention causal over (context + 1) / 2 tokens on average. A backward is twice a forward everywhere,
    so it changes no balance. The embedding is a gather: its cost is counted as the D values it moves. Of experts those
    count that a token is sent to, and the router.
    """
    return _costs(model, in_experts=model.experts_computed * 3 * model.dim * model.ffn_dim)


def trunk_costs(model: ModelSpec) -> tuple[float, ...]:
    """Forward FLOP a token of what is left of each layer where its experts are placed."""
    return _costs(model, in_experts=0)


def _costs(model: ModelSpec, *, in_experts: int) -> tuple[float, ...]:
    D = model.dim
    projections = 2 * D * D + 2 * D * model.num_kv_heads * model.head_dim + in_experts + D * model.num_experts
    attention = D * (model.context + 1)
    costs = [2.0 * (projections + attention)] * model.num_layers
    costs[0] += float(D)
    costs[-1] += 2.0 * D * model.vocab_size
    return tuple(costs)
