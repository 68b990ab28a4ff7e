"""Where to cut the model for given groups of unequal speed, memory and network: exact.

`partition.py` cuts for equal groups; here a stage's seconds are those of `cost/throughput.py`, T_stage, with its own
members. The dynamic program itself is compiled (`throughput_kernels.cut`), as every assignment of a search is cut anew.
"""

from collections.abc import Sequence

from shoal.coordinator.allocate.throughput_search import ThroughputEvaluator
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.topology import Topology


def best_bounds(topology: Topology, workload: Workload, stages: Sequence[Sequence[int]]) -> Placement:
    """The groups `stages` in that order, cut so that the slowest stage is as fast as can be, O(K L^2) stage times.

    On cards shared by several stages the parts of each are taken as they are with stages of equal length.
    """
    evaluator = ThroughputEvaluator(topology, workload, len(stages))
    even = (*range(len(stages)), workload.num_layers)
    groups = tuple(tuple(sorted(stage)) for stage in stages)
    return evaluator.placement_of(evaluator.assignment_of(Placement(stages=groups, bounds=even)))
