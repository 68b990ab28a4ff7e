"""Explain why a simulated run has committed nothing, or nothing more: the first reason that applies, in a sentence.
Pure.

Only facts visible from outside are used: the present devices, the last plan, and the planner's estimate for it.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import Topology


@dataclass(frozen=True, kw_only=True)
class EndFacts:
    """The facts known at the end of a run. Devices are indexes of the topology."""

    topology: Topology
    spec: RunSpec
    plan: Plan | None
    """The last plan that any node obeyed."""
    devices: Mapping[PeerID, int]
    present: Collection[int]
    left_at_s: Mapping[int, float]
    """Device -> time of its last removal."""
    ended_at_s: float
    last_step_at_s: float | None
    """The time of the last commit; None: there was none."""


def why_no_step(seen: EndFacts) -> str:
    """Return the reason as one sentence without a full stop; it does not repeat the run's results."""
    present, names = set(seen.present), seen.topology.names
    if not present:
        return "no device was present any more"
    if seen.plan is None:
        return _why_no_plan(seen, present)
    members = [{seen.devices[peer] for peer in stage.peers} for stage in seen.plan.stages]
    planned = {seen.devices[peer] for peer in seen.plan.members}
    for k, stage in enumerate(members):
        if not stage & present:
            last = max(stage, key=lambda device: (seen.left_at_s.get(device, 0.0), device))
            since_s = seen.left_at_s.get(last, 0.0)
            return f"stage {k} had no member since {since_s:,.0f} s, when {names[last]} left" + _majority(
                seen, planned, present
            )
    if why := _majority(seen, planned, present):
        return why.removeprefix("; ")
    cost = _cost(seen)
    since_s = seen.last_step_at_s or 0.0
    if cost is not None and math.isfinite(cost) and cost > seen.ended_at_s - since_s:
        left_s = seen.ended_at_s - since_s
        return f"a step takes {cost:,.0f} s by the planner's arithmetic, and {left_s:,.0f} s were left"
    return f"all {len(members)} stages were held, and the step in flight was not over"


def _why_no_plan(seen: EndFacts, present: set[int]) -> str:
    wanted = seen.spec.swarm.min_peers
    if len(present) < wanted:
        return f"the run begins with {wanted} peers, and {len(present)} were present"
    if not any(seen.topology.may_feed[device] for device in present):
        return "no device that was present has the run's text, which stage 0 needs"
    return f"no plan was made for the {len(present)} peers that were present"


def _majority(seen: EndFacts, planned: set[int], present: set[int]) -> str:
    """Return a clause if too few members of the last plan are present to vote for a new one."""
    alive = len(planned & present)
    if 2 * alive > len(planned):
        return ""
    return (
        f"; only {alive} of the {len(planned)} members of the last plan were present, and a new plan needs the votes "
        "of more than half"
    )


def _cost(seen: EndFacts) -> float | None:
    """Return the estimated seconds of a step of the last plan; None: the planner finds it impossible."""
    assert seen.plan is not None
    stages = seen.plan.stages
    placement = Placement(
        stages=tuple(tuple(sorted(seen.devices[peer] for peer in stage.peers)) for stage in stages),
        bounds=(0, *(stage.last_layer for stage in stages)),
    )
    cost = ThroughputObjective(seen.topology, Workload.of(seen.spec)).cost(placement)
    return cost.parts.get("foreseen_s")
