from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.allocate.greedy import partition


def stage_costs(costs, bounds):
    return [sum(costs[first:last]) for first, last in pairwise(bounds)]


@given(st.lists(st.integers(1, 50).map(float), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_cheaper_most_expensive_stage(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    bounds = partition(costs, num_stages)
    assert bounds[0] == 0
    assert bounds[-1] == len(costs)
    assert all(first < last for first, last in pairwise(bounds))
    every = ((0, *cut, len(costs)) for cut in combinations(range(1, len(costs)), num_stages - 1))
    best = min((max(stage_costs(costs, cut)), sum(c * c for c in stage_costs(costs, cut))) for cut in every)
    mine = stage_costs(costs, bounds)
    assert (max(mine), sum(c * c for c in mine)) == best


def test_equal_layers_are_cut_evenly():
    assert partition([1.0] * 6, 3) == (0, 2, 4, 6)


def test_an_expensive_head_gets_company_last():
    assert partition([1.0] * 5 + [4.0], 3) == (0, 2, 5, 6)


def test_a_hundred_layers_in_sixteen_stages_is_quick():
    assert len(partition([float(1 + index % 3) for index in range(100)], 16)) == 17
