"""Token shares: the busiest node is as little busy as a linear program says it can be."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from shoal.coordinator.experts.recovery import ExpertPlacement
from shoal.coordinator.experts.token_shares import busiest_node_load_ratio, token_shares


def least_busy(placement: ExpertPlacement, loads: list[float], speeds: list[float]) -> float:
    """min t: the shares of each expert sum to 1, each node's work <= t * speed."""
    pairs = [(expert, node) for node, held in enumerate(placement) for expert in sorted(set(held))]
    work = np.zeros((len(placement), len(pairs) + 1))
    whole = np.zeros((len(loads), len(pairs) + 1))
    for i, (expert, node) in enumerate(pairs):
        work[node, i] = loads[expert]
        whole[expert, i] = 1.0
    work[:, -1] = [-speed for speed in speeds]
    objective = np.zeros(len(pairs) + 1)
    objective[-1] = 1.0
    solved = linprog(objective, A_ub=work, b_ub=np.zeros(len(placement)), A_eq=whole, b_eq=np.ones(len(loads)))
    return float(solved.fun)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_the_busiest_node_is_as_little_busy_as_can_be(seed: int) -> None:
    rng = random.Random(seed)
    size, num_experts = rng.randint(1, 6), rng.randint(1, 6)
    placement = tuple(tuple(rng.choices(range(num_experts), k=3)) for _ in range(size))
    held = sorted({expert for experts in placement for expert in experts})
    placement = tuple(tuple(held.index(expert) for expert in experts) for experts in placement)
    loads = [rng.choice([0.0, 1.0, 2.0, 10.0]) for _ in held]
    speeds = [rng.choice([0.5, 1.0, 4.0]) for _ in range(size)]
    shares = token_shares(placement, loads, speeds)
    for expert, share in enumerate(shares):
        assert sum(share.values()) == pytest.approx(1.0)
        assert all(expert in placement[node] for node in share)
    if sum(loads):
        ours = busiest_node_load_ratio(placement, loads, speeds, shares) * sum(loads) / sum(speeds)
        assert ours == pytest.approx(least_busy(placement, loads, speeds), rel=3e-3)


def test_a_node_that_computes_twice_as_fast_gets_twice_as_much() -> None:
    (share,) = token_shares(((0,), (0,)), [6.0], [2.0, 1.0])
    assert share == pytest.approx({0: 2 / 3, 1: 1 / 3})


def test_nobody_holds_it_and_nobody_wants_it() -> None:
    assert token_shares(((0,), (0,)), [0.0, 3.0], [1.0, 1.0]) == ({0: 0.5, 1: 0.5}, {})
