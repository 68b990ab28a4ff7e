"""Give a place to devices that a search has left out, where no step becomes slower by it. Pure.

The objective uses means, by which only the longest stage gains from one more member, so a search may leave a useful
device out. But microbatches arrive unevenly, and where several stages take about as long as the longest, each waits for
the others. A stage with spare time catches up after such a wait.
"""

import math
from dataclasses import replace

from shoal.coordinator.allocate.single_failure import TRIED, with_device
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective

ROUNDING = 1e-6
"""Costs with a smaller relative difference count as equal."""


def with_idle_devices(objective: ThroughputObjective, placement: Placement) -> Placement:
    """Return `placement` with left-out devices added where neither T nor the foreseen step time grows. The fastest
    device is tried first; it joins the longest-computing stage where it costs nothing."""
    topology, workload = objective.topology, objective.workload
    cost = objective.cost(placement)
    left_out = sorted(placement.spares(topology.num_devices), key=lambda d: (-topology.flop_per_s[d], d))

    def computes_s(index: int) -> float:
        flop = workload.job_flop(placement.bounds[index], placement.bounds[index + 1])
        return flop / float(topology.flop_per_s[list(placement.stages[index])].sum())

    for device in left_out[:TRIED]:
        for index in sorted(range(len(placement.stages)), key=computes_s, reverse=True):
            joined = replace(placement, stages=with_device(placement.stages, index, device))
            tried = objective.cost(joined)
            if _is_no_slower(tried, cost):
                placement, cost = joined, tried
                break
    return placement


def _is_no_slower(tried: Cost, cost: Cost) -> bool:
    most = 1.0 + ROUNDING
    if not math.isfinite(tried.seconds) or not tried.seconds <= most * cost.seconds:
        return False
    return tried.parts["foreseen_s"] <= most * cost.parts["foreseen_s"]
