"""Finds why a plan leaves devices out, and the least line rate, memory or speed that would make one useful. Pure.

It tries a left-out device, as it is and improved, in every place of the plan (`joins` of `allocate/at_once.py`), and
computes the seconds of a step by the search's objective. Bisection finds the least improvement that helps.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec
import numpy as np

from shoal.coordinator.allocate.at_once import joins
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.base.words import digits
from shoal.deploy.manners.limits import MBIT
from shoal.protocol.topology import Floats, Topology

Resource = Literal["line", "memory", "speed"]

GAIN_MIN: Final = 0.005
"""A left-out device helps if the plan's step with it is shorter by at least this part (0.5 %)."""
LINE_MAX_MBPS: Final = 10_000.0
MEMORY_MAX_GB: Final = 192.0
SPEED_MAX_TFLOPS: Final = 1_000.0
"""These three are the largest values to try: a fast data centre's line, the largest GPUs' memory and speed (2026)."""
_MOST: Final = {"line": LINE_MAX_MBPS, "memory": MEMORY_MAX_GB, "speed": SPEED_MAX_TFLOPS}
_RESOURCES: Final[tuple[tuple[Resource, ...], ...]] = (
    ("line",),
    ("memory",),
    ("speed",),
    ("line", "memory"),
    ("line", "speed"),
    ("memory", "speed"),
    ("line", "memory", "speed"),
)


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The least values that together make a device helpful; None: the device's present value is enough."""

    line_mbps: float | None = None
    """The rate of the device's line in each direction, in Mbit/s."""
    memory_gb: float | None = None
    tflops: float | None = None


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A group of equal devices that the plan leaves out, and why."""

    name: str
    """The region, or a device's name where there are no regions."""
    devices: tuple[int, ...]
    tflops: float
    memory_gb: float
    up_mbps: float | None
    down_mbps: float | None
    """The download rate of the network card; None: only paths limit it."""
    step_with_one_s: float | None
    """Seconds of a step with one such device, as it is, in its best place in the plan; None: it fits nowhere."""
    why: str
    needs: tuple[Need, ...]
    """Each one suffices: improvements of one resource, or else one of several. Empty: none needed, or none helps."""


def left_out(topology: Topology, workload: Workload, placement: Placement) -> Iterator[LeftOut]:
    """Yield an explanation for each kind of device that the plan leaves out, the largest group first, at most twelve.
    Each explanation takes seconds of computing."""
    goal_s = ThroughputObjective(topology, workload).cost(placement).seconds * (1.0 - GAIN_MIN)
    for devices in _groups(topology, placement.spares(topology.num_devices))[:12]:
        yield _Examined(topology, workload, placement, devices, goal_s).explained()


@dataclass(frozen=True, slots=True)
class _Examined:
    """Examines a group of equal devices that a plan leaves out."""

    topology: Topology
    workload: Workload
    placement: Placement
    devices: tuple[int, ...]
    goal_s: float
    """The device helps if it brings a step down to at most this many seconds."""

    @property
    def device(self) -> int:
        return self.devices[0]

    def explained(self) -> LeftOut:
        topology, device, has = self.topology, self.device, self.has()
        best = self.best(topology)
        needs: list[Need] = []
        if not best.seconds <= self.goal_s:
            for resources in _RESOURCES:
                if needs and len(resources) > 1:
                    break
                if (need := self.need(resources)) is not None:
                    needs.append(need)
        up, down = float(topology.up_bytes_per_s[device]), float(topology.down_bytes_per_s[device])
        return LeftOut(
            name=topology.regions[device] or topology.names[device],
            devices=self.devices,
            tflops=has["speed"],
            memory_gb=has["memory"],
            up_mbps=up / MBIT if math.isfinite(up) else None,
            down_mbps=down / MBIT if math.isfinite(down) else None,
            step_with_one_s=best.seconds if math.isfinite(best.seconds) else None,
            why=self.why(best, needs),
            needs=tuple(needs),
        )

    def why(self, best: Cost, needs: Sequence[Need]) -> str:
        now_s = self.goal_s / (1.0 - GAIN_MIN)
        if not math.isfinite(best.seconds):
            return f"no place in the plan fits into its {self.has()['memory']:.0f} GB"
        if best.seconds <= self.goal_s:
            return f"the search has missed it: with one of them a step takes {best.seconds:,.1f} s, not {now_s:,.1f} s"
        longer = best.seconds / now_s
        if longer < 1.0 + GAIN_MIN:
            return f"one of them makes a step less than {GAIN_MIN:.1%} shorter"
        said = f"{longer:.1f} times as long" if longer >= 1.5 else f"{longer - 1.0:.1%} longer"
        return f"{_lacking(needs)}with one of them a step takes {said}"

    def need(self, resources: tuple[Resource, ...]) -> Need | None:
        """Return the least values of `resources` with which the device helps. They rise together, by equal parts of the
        way from the present to the largest values (logarithmic). None: even the largest do not suffice."""
        has = self.has()

        def helps(part: float) -> bool:
            return self.best(self.improved(self.values(resources, part))).seconds <= self.goal_s

        if all(_MOST[resource] <= has[resource] for resource in resources) or not helps(1.0):
            return None
        low, high = 0.0, 1.0
        for _ in range(7):  # from 20 Mbit/s to 10 Gbit/s that is a resolution of 5 %
            middle = (low + high) / 2.0
            low, high = (low, middle) if helps(middle) else (middle, high)
        values = self.values(resources, high)
        return Need(line_mbps=values.get("line"), memory_gb=values.get("memory"), tflops=values.get("speed"))

    def best(self, topology: Topology) -> Cost:
        """Return the plan's cost with the device in the first place that meets `goal_s`, or else in the best place."""
        objective = ThroughputObjective(topology, self.workload)
        best = Cost.impossible("it has no place")
        for tried in joins(topology, self.workload, self.placement, self.device):
            cost = objective.cost(tried)
            if cost.seconds < best.seconds:
                best = cost
            if best.seconds <= self.goal_s:
                break
        return best

    def has(self) -> dict[Resource, float]:
        """Return the device's present values: Mbit/s in the slower direction of its line, GB of memory, TFLOP/s."""
        topology, device = self.topology, self.device
        card = min(float(topology.up_bytes_per_s[device]), float(topology.down_bytes_per_s[device]))
        if not math.isfinite(card):
            others = np.arange(topology.num_devices) != device
            card = float(np.minimum(topology.bytes_per_s[device], topology.bytes_per_s[:, device])[others].max())
        return {
            "line": card / MBIT,
            "memory": float(topology.memory_bytes[device]) / 1e9,
            "speed": float(topology.flop_per_s[device]) / 1e12,
        }

    def values(self, resources: Sequence[Resource], part: float) -> dict[Resource, float]:
        """Return resource -> a value between the device's present one (`part` 0) and the largest (`part` 1), on a
        logarithmic scale. It is rounded up to the two digits that are printed."""
        has = self.has()
        most = {resource: max(_MOST[resource], has[resource]) for resource in resources}
        return {each: _rounded_up(has[each] ** (1.0 - part) * most[each] ** part) for each in resources}

    def improved(self, values: dict[Resource, float]) -> Topology:
        """Return the network with the device improved to `values`. The line rate goes to its network card or, if the
        card has no limit, to its paths."""
        topology, device = self.topology, self.device

        def at(array: Floats, where: Any, value: float) -> Floats:
            changed = array.copy()
            changed[where] = np.maximum(changed[where], value)
            return changed

        better = topology
        if "memory" in values:
            better = replace(better, memory_bytes=at(better.memory_bytes, device, values["memory"] * 1e9))
        if "speed" in values:
            better = replace(better, flop_per_s=at(better.flop_per_s, device, values["speed"] * 1e12))
        if "line" in values:
            rate = values["line"] * MBIT
            if math.isfinite(float(topology.up_bytes_per_s[device] + topology.down_bytes_per_s[device])):
                card = topology.card == topology.card[device]
                up, down = at(better.up_bytes_per_s, card, rate), at(better.down_bytes_per_s, card, rate)
                better = replace(better, up_bytes_per_s=up, down_bytes_per_s=down)
            else:
                paths = np.zeros_like(topology.bytes_per_s, dtype=np.bool_)
                paths[device, :] = paths[:, device] = True
                paths &= topology.bytes_per_s > 0.0
                better = replace(better, bytes_per_s=at(better.bytes_per_s, paths, rate))
        return better


def _lacking(needs: Sequence[Need]) -> str:
    """Return a phrase on the resources that each of `needs` improves (`its line is too slow: `); empty: none."""
    lacks = [
        what
        for what, values in (
            ("its line is too slow", [need.line_mbps for need in needs]),
            ("its memory is too small", [need.memory_gb for need in needs]),
            ("it computes too slowly", [need.tflops for need in needs]),
        )
        if values and None not in values
    ]
    return f"{' and '.join(lacks)}: " if lacks else ""


def _rounded_up(value: float) -> float:
    """Round up to two digits: 413 -> 420."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit * (1.0 - 1e-12)) * unit


def _groups(topology: Topology, devices: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the groups of devices with equal region and values (paths may differ), the largest group first."""
    found: dict[object, list[int]] = {}
    for d in devices:
        place = topology.regions[d] or topology.names[d]
        speeds = topology.flop_per_s[d], topology.up_bytes_per_s[d], topology.down_bytes_per_s[d]
        key = place, *map(float, speeds), float(topology.memory_bytes[d]), bool(topology.may_feed[d])
        found.setdefault(key, []).append(d)
    return sorted((tuple(group) for group in found.values()), key=lambda group: (-len(group), group))


# --- in words ---


def said_of_needs(group: LeftOut) -> str:
    """Return the group's needs in words: `one would help from 410 Mbit/s both ways, or from 48 GB of memory`."""
    if group.why.startswith("the search has missed it"):
        return "it helps as it is: search longer with --seconds"
    if not group.needs:
        return (
            f"nothing helps, up to {LINE_MAX_MBPS / 1e3:g} Gbit/s, {MEMORY_MAX_GB:g} GB and {SPEED_MAX_TFLOPS:,g} "
            "TFLOP/s together"
        )
    return "one would help from " + ", or from ".join(_need_said(need) for need in group.needs)


def _need_said(need: Need) -> str:
    parts = []
    if need.line_mbps is not None:
        parts.append(f"{need.line_mbps:,.0f} Mbit/s both ways")
    if need.memory_gb is not None:
        parts.append(f"{need.memory_gb:,.0f} GB of memory")
    if need.tflops is not None:
        parts.append(f"{digits(need.tflops)} TFLOP/s")
    return " with ".join(parts)
