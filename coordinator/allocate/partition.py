"""Where to cut the model: contiguous stages whose most expensive one is as cheap as can be."""

from collections.abc import Sequence
from itertools import accumulate


def partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Boundaries 0 = b[0] < b[1] < … < b[num_stages] = len(costs), exact, by dynamic programming in O(K · L²).

    Minimises the largest stage's cost; among those the sum of squares, which keeps the others even; among those the
    earlier boundaries.
    """
    num_layers = len(costs)
    assert 0 < num_stages <= num_layers
    total = [0.0, *accumulate(costs)]
    # best[j] = (largest, sum of squares, boundaries) of the first j layers in k stages
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for k in range(1, num_stages + 1):
        best = {
            j: min(
                (max(largest, cost), squares + cost * cost, (*bounds, j))
                for i, (largest, squares, bounds) in best.items()
                if i < j
                for cost in [total[j] - total[i]]
            )
            for j in range(k, num_layers - (num_stages - k) + 1)
        }
    return best[num_layers][2]
