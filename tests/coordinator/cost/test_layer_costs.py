import pytest

from shoal.coordinator.cost.layer_costs import layer_costs, trunk_costs
from shoal.peer.model.flop import forward_flop, trunk_flop
from shoal.peer.model.layout import EMBED, HEAD, all_layer_keys
from shoal.protocol.spec import ModelSpec


@pytest.mark.parametrize("model", [ModelSpec(num_layers=3), ModelSpec(num_layers=3, num_experts=8)])
def test_a_layer_costs_what_the_peer_counts_for_it(model):
    costs = layer_costs(model)
    middle = [key for key in all_layer_keys(model) if key not in (EMBED, HEAD)]
    assert middle
    assert costs[1] == pytest.approx(forward_flop(model, middle[0], 1))
    assert costs[2] - costs[1] == pytest.approx(forward_flop(model, HEAD, 1))
    assert 0 < costs[0] - costs[1] < 0.01 * costs[1]


def test_the_trunk_costs_what_the_peer_counts_for_it():
    model = ModelSpec(num_layers=3, num_experts=8)
    middle = [key for key in all_layer_keys(model) if key not in (EMBED, HEAD)]
    assert trunk_costs(model)[1] == pytest.approx(trunk_flop(model, middle[0], 1))
