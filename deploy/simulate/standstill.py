"""Explains in a sentence why a simulated run has committed no step, or no further step. Pure.

It gives the first reason that applies, and uses only facts that are visible from outside: the present devices, the last
plan, and the planner's estimate for that plan.
"""

import math
from collections.abc import Mapping

from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import Topology


def why_no_step(
    topology: Topology,
    spec: RunSpec,
    plan: Plan | None,
    devices: Mapping[PeerID, int],
    *,
    present: set[int],
    left_at_s: Mapping[int, float],
    waited_s: float,
) -> str:
    """Return the reason as one sentence without a full stop.

    Args:
        plan: the last plan that any node obeyed; None: there was none.
        devices: peer -> its index in the topology.
        present: the devices that are up at the end of the run.
        left_at_s: device -> the time of its last removal.
        waited_s: the seconds since the last commit, or since the beginning if there was none.
    """
    if not present:
        return "no device was present any more"
    if plan is None:
        return _why_no_plan(topology, spec.swarm.min_peers, present)
    members = [{devices[peer] for peer in stage.peers} for stage in plan.stages]
    minority = _minority({devices[peer] for peer in plan.members}, present)
    for k, stage in enumerate(members):
        if not stage & present:
            last = max(stage, key=lambda device: (left_at_s.get(device, 0.0), device))
            since_s = left_at_s.get(last, 0.0)
            said = f"stage {k} had no member since {since_s:,.0f} s, when {topology.names[last]} left"
            return f"{said}; {minority}" if minority else said
    if minority:
        return minority
    placement = Placement(
        stages=tuple(tuple(sorted(stage)) for stage in members), bounds=(0, *(s.last_layer for s in plan.stages))
    )
    step_s = ThroughputObjective(topology, Workload.of(spec)).cost(placement).parts.get("foreseen_s")
    if step_s is not None and math.isfinite(step_s) and step_s > waited_s:
        return f"a step takes {step_s:,.0f} s by the planner's arithmetic, and {waited_s:,.0f} s were left"
    return f"all {len(members)} stages were held, and the step in flight was not over"


def _why_no_plan(topology: Topology, wanted: int, present: set[int]) -> str:
    if len(present) < wanted:
        return f"the run begins with {wanted} peers, and {len(present)} were present"
    if not any(topology.may_feed[device] for device in present):
        return "no device that was present has the run's text, which stage 0 needs"
    return f"no plan was made for the {len(present)} peers that were present"


def _minority(planned: set[int], present: set[int]) -> str:
    """Return a clause that too few members of the last plan are present to vote for a new one; "" if enough are."""
    alive = len(planned & present)
    if 2 * alive > len(planned):
        return ""
    return (
        f"only {alive} of the {len(planned)} members of the last plan were present, and a new plan needs the votes "
        "of more than half"
    )
