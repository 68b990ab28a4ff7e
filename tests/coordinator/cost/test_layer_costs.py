import pytest

from shoal.coordinator.cost.workload import Workload, layer_costs
from shoal.peer.model.flop import forward_flop, trunk_flop
from shoal.peer.model.layout import EMBED, HEAD, all_layer_keys, layer_layout
from shoal.protocol.decoder import DecoderSpec
from shoal.protocol.spec import ModelSpec, RunSpec

GEMMA = DecoderSpec(
    norms="both", norm_plus_one=True, activation="gelu_tanh", scale_embedding=True, window=40, full_layers=(0,)
)
MODELS = [
    ModelSpec(num_layers=3),
    ModelSpec(num_layers=3, num_experts=8),
    ModelSpec(num_layers=3, head_size=96, decoder=GEMMA),
    ModelSpec(num_layers=3, head_size=96, num_experts=8, decoder=DecoderSpec(qk_norm="head", attention_bias="all")),
    ModelSpec(num_layers=3, subspace=16),
    ModelSpec(num_layers=3, num_experts=8, subspace=16),
]


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_costs_what_the_peer_counts_for_it(model):
    costs = layer_costs(model)
    assert costs[1] == pytest.approx(forward_flop(model, "layers.1", 1))
    assert costs[2] - costs[1] == pytest.approx(forward_flop(model, HEAD, 1))
    first = sum(forward_flop(model, key, 1) for key in (EMBED, "layers.0"))
    assert 0 < costs[0] - first < 0.01 * costs[1]


@pytest.mark.parametrize("model", MODELS)
def test_the_plan_counts_the_parameters_that_a_peer_holds(model):
    counts = Workload.of(RunSpec(model=model)).layer_parameters
    held = [layer_layout(model, key).numel for key in all_layer_keys(model)]
    assert counts == (held[0] + held[1], held[2], held[3] + held[4])


def test_the_trunk_costs_what_the_peer_counts_for_it():
    model = ModelSpec(num_layers=3, num_experts=8)
    middle = [key for key in all_layer_keys(model) if key not in (EMBED, HEAD)]
    assert layer_costs(model, with_experts=False)[1] == pytest.approx(trunk_flop(model, middle[0], 1))


def test_in_a_subspace_a_layer_costs_its_smaller_products_and_those_with_the_basis():
    whole, reduced = ModelSpec(), ModelSpec(subspace=16)
    D, F, k = whole.dim, whole.ffn_dim, 16
    spared = (D - k) * (D + F)  # rows of o_proj and down_proj
    added = 2 * D * k
    assert layer_costs(whole)[1] - layer_costs(reduced)[1] == 2 * (spared - added)
