"""Cuts of the model into contiguous stages, with the most expensive one as cheap as possible."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate


def partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return boundaries 0 = b[0] < b[1] < … < b[num_stages] = len(costs), exact, by dynamic programming in O(K · L²).

    Minimises the largest stage's cost; among those cuts the sum of squares, which keeps the other stages even; among
    those the earlier boundaries. Two passes are needed: the prefix with the cheaper largest stage need not be the
    better beginning once a later stage is the most expensive.
    """
    total = [0.0, *accumulate(costs)]
    largest, _ = _cut(total, num_stages, max, lambda cost: cost)
    _, bounds = _cut(total, num_stages, lambda a, b: a + b, lambda cost: cost * cost if cost <= largest else math.inf)
    return bounds


def _cut(
    total: Sequence[float], num_stages: int, join: Callable[[float, float], float], price: Callable[[float], float]
) -> tuple[float, tuple[int, ...]]:
    """Return the cheapest cut: `join` combines the prices of the stages' costs."""
    num_layers = len(total) - 1
    assert 0 < num_stages <= num_layers
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}  # of the first j layers in k stages
    for k in range(1, num_stages + 1):
        best = {
            j: min(
                (join(before, price(total[j] - total[i])), (*bounds, j))
                for i, (before, bounds) in best.items()
                if i < j
            )
            for j in range(k, num_layers - (num_stages - k) + 1)
        }
    return best[num_layers]
