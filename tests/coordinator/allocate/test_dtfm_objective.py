"""The DT-FM objective against the paper's figures and against trying everything."""

import itertools
import math

import numpy as np
import pytest
from dtfm_formula import bottleneck, shortest_open_path
from hypothesis import given
from hypothesis import strategies as st
from sample_networks import PAPER_STAGES, PAPER_WORKLOAD, paper_network, random_network

from shoal.coordinator.allocate import dtfm_kernels
from shoal.coordinator.allocate.dtfm_search import DtfmObjective
from shoal.coordinator.cost.placement import Placement
from shoal.protocol.errors import LocalError
from shoal.protocol.topology import make_topology

MOD = tuple(tuple(range(k, 64, PAPER_STAGES)) for k in range(PAPER_STAGES))


def placement(stages):
    return Placement(stages=stages, bounds=tuple(range(len(stages) + 1)))


@pytest.mark.parametrize(("case", "seconds"), [(1, 3.440), (2, 49.504), (3, 16.087), (4, 34.802), (5, 49.218)])
def test_index_mod_8_costs_what_the_papers_code_says(case, seconds):
    cost = DtfmObjective(paper_network(case), PAPER_WORKLOAD).cost(placement(MOD))
    assert round(cost.seconds, 3) == seconds
    assert math.fsum(cost.parts.values()) == pytest.approx(cost.seconds, rel=1e-12)


def test_one_gpu_of_each_box_in_the_first_four_stages_is_better_in_the_spot_fleet():
    boxes = [tuple(range(k, 32, 4)) for k in range(4)]
    singles = [tuple(range(32 + 8 * k, 40 + 8 * k)) for k in range(4)]
    cost = DtfmObjective(paper_network(2), PAPER_WORKLOAD).cost(placement((*boxes, *singles)))
    assert round(cost.seconds, 3) == 31.634


def test_the_order_of_stages_is_the_best_one_whatever_the_placement_says():
    objective = DtfmObjective(paper_network(5), PAPER_WORKLOAD)
    given_order = tuple(tuple(range(8 * k, 8 * k + 8)) for k in range(8))
    shuffled = tuple(given_order[k] for k in (3, 7, 0, 5, 1, 6, 2, 4))
    assert objective.cost(placement(given_order)).seconds == pytest.approx(objective.cost(placement(shuffled)).seconds)


def test_asymmetric_links_cost_the_sum_of_both_ways():
    topology = make_topology([[0, 0.1], [0.3, 0]], [[0, 1e9], [0.25e9, 0]])
    objective = DtfmObjective(topology, PAPER_WORKLOAD)
    in_one_stage = objective.cost(placement(((0, 1),))).parts
    assert in_one_stage["dp_s"] == pytest.approx(0.1 + 0.3 + (0.65 / 2) * (1 + 4))
    in_two = objective.cost(placement(((0,), (1,)))).parts
    assert in_two["pp_s"] == pytest.approx(0.1 + 0.3 + PAPER_WORKLOAD.activation_gigabytes_per_replica * (1 + 4))


def test_a_placement_whose_members_have_no_path_cannot_be():
    rate = np.full((4, 4), 1e9)
    rate[0, 1] = 0.0
    objective = DtfmObjective(make_topology(np.zeros((4, 4)), rate), PAPER_WORKLOAD)
    assert objective.cost(placement(((0, 1), (2, 3)))).why
    assert objective.cost(placement(((0,), (1,)))).why
    assert objective.cost(placement(((0, 2), (1,)))).why
    assert not objective.cost(placement(((0, 2), (1, 3)))).why
    assert objective.cost(placement(((0, 1, 2), ()))).why == "a stage has no device"


def matrix(data, rows, columns):
    values = data.draw(st.lists(st.integers(0, 9), min_size=rows * columns, max_size=rows * columns))
    return np.array(values, dtype=np.float64).reshape(rows, columns)


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_no_other_handover_has_a_shorter_longest_hop(rows, columns, data):
    """Devices 0 to rows - 1 hand over to the devices after them."""
    hop = matrix(data, rows, columns)
    small = hop if rows <= columns else hop.T
    best = min(
        max(max(small[i, j] for i, j in enumerate(choice)), small.min(axis=0).max())
        for choice in itertools.permutations(range(small.shape[1]), small.shape[0])
    )
    both = np.zeros((rows + columns, rows + columns))
    both[:rows, rows:], both[rows:, :rows] = hop, hop.T
    above, under = np.arange(rows), np.arange(rows, rows + columns)
    longest, partner = dtfm_kernels.handover(both, above, under)
    assert longest == best == bottleneck(hop)
    assert sorted(partner[partner >= 0]) == list(range(min(rows, columns)))


@given(st.integers(1, 6), st.data())
def test_no_other_order_is_shorter(stages, data):
    distances = matrix(data, stages, stages)
    distances += distances.T
    order = np.zeros(stages, dtype=np.int64)
    length = dtfm_kernels.open_path(distances, order)
    assert sorted(order) == list(range(stages))
    assert length == sum(distances[a, b] for a, b in itertools.pairwise(order))
    best = min(sum(distances[a, b] for a, b in itertools.pairwise(p)) for p in itertools.permutations(range(stages)))
    assert length == best == shortest_open_path(distances)


def test_the_paper_has_five_cases():
    with pytest.raises(LocalError, match="no 6"):
        paper_network(6)


@pytest.mark.parametrize("seed", range(5))
def test_a_random_network_is_of_its_seed_uneven_and_whole(seed):
    topology, again = random_network(30 + seed, seed), random_network(30 + seed, seed)
    assert topology.num_devices == 30 + seed
    assert (topology.latency_s == again.latency_s).all()
    assert (topology.bytes_per_s == again.bytes_per_s).all()
    off = ~np.eye(topology.num_devices, dtype=bool)
    assert topology.bytes_per_s[off].min() > 0.0
    assert topology.bytes_per_s[off].max() > 10.0 * topology.bytes_per_s[off].min()
    assert (topology.bytes_per_s != topology.bytes_per_s.T).any()
    assert len(np.unique(topology.card)) < topology.num_devices
