"""Finds why a plan leaves devices out, and from which line, memory or speed on one of them would help.

It puts the device into every place of the plan (`allocate/at_once.py`, `joins`), unchanged and improved, and evaluates
the step time with the search's objective. The necessary improvement is found by bisection. Equal devices are examined
once. Pure.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
"""A device helps if it shortens a step by this share."""
LINE_MAX_MBPS: Final = 10_000.0
MEMORY_MAX_GB: Final = 192.0
SPEED_MAX_TFLOPS: Final = 1_000.0
"""The largest values to try: a fast data centre's line, the largest cards of 2026."""
_HALVINGS = 7
"""Bisection steps towards the largest value: from 20 Mbit/s to 10 Gbit/s they give a resolution of 5 %."""
_GROUPS_MAX = 12
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
    """The least values that together make one of the devices helpful; None: the value is unchanged."""

    line_mbps: float | None = None
    """The line's rate in each direction."""
    memory_gb: float | None = None
    tflops: float | None = None


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A group of equal devices without a place."""

    name: str
    """The region, or a device's name where there are no regions."""
    devices: tuple[int, ...]
    tflops: float
    memory_gb: float
    up_mbps: float | None
    down_mbps: float | None
    """The network card's rate; None: only paths limit it."""
    step_with_one_s: float | None
    """The best step with one of them, unchanged; None: no place fits."""
    why: str
    needs: tuple[Need, ...]
    """Alternatives, single resources first; empty: even the largest values do not help."""


def left_out(topology: Topology, workload: Workload, placement: Placement) -> Iterator[LeftOut]:
    """Yield an explanation for every kind of device without a place, the largest group first (seconds each)."""
    objective = ThroughputObjective(topology, workload)
    goal_s = objective.cost(placement).seconds * (1.0 - GAIN_MIN)
    for devices in _groups(topology, placement.spares(topology.num_devices))[:_GROUPS_MAX]:
        yield _asked(topology, workload, placement, devices, goal_s)


def _asked(
    topology: Topology, workload: Workload, placement: Placement, devices: tuple[int, ...], goal_s: float
) -> LeftOut:
    device = devices[0]
    best = _best(topology, workload, placement, device, goal_s)
    needs: list[Need] = []
    if not best.seconds <= goal_s:
        for resources in _RESOURCES:
            if needs and len(resources) > 1:
                break
            if (need := _need(topology, workload, placement, device, goal_s, resources)) is not None:
                needs.append(need)
    up, down = float(topology.up_bytes_per_s[device]), float(topology.down_bytes_per_s[device])
    return LeftOut(
        name=topology.regions[device] or topology.names[device],
        devices=devices,
        tflops=float(topology.flop_per_s[device]) / 1e12,
        memory_gb=float(topology.memory_bytes[device]) / 1e9,
        up_mbps=up / MBIT if math.isfinite(up) else None,
        down_mbps=down / MBIT if math.isfinite(down) else None,
        step_with_one_s=best.seconds if math.isfinite(best.seconds) else None,
        why=_why(topology, device, best, goal_s, needs),
        needs=tuple(needs),
    )


def _why(topology: Topology, device: int, best: Cost, goal_s: float, needs: Sequence[Need]) -> str:
    now_s = goal_s / (1.0 - GAIN_MIN)
    if not math.isfinite(best.seconds):
        return f"no place in the plan fits into its {float(topology.memory_bytes[device]) / 1e9:.0f} GB"
    if best.seconds <= goal_s:
        return f"the search has missed it: with one of them a step takes {best.seconds:,.1f} s, not {now_s:,.1f} s"
    longer = best.seconds / now_s
    if longer < 1.0 + GAIN_MIN:
        return f"one of them makes a step less than {GAIN_MIN:.1%} shorter"
    said = f"{longer:.1f} times as long" if longer >= 1.5 else f"{longer - 1.0:.1%} longer"
    return f"{_lacking(needs)}with one of them a step takes {said}"


def _lacking(needs: Sequence[Need]) -> str:
    """Return the resources that every need has in common, in words."""
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


def _need(
    topology: Topology,
    workload: Workload,
    placement: Placement,
    device: int,
    goal_s: float,
    resources: tuple[Resource, ...],
) -> Need | None:
    """Return the least values of `resources` that help, each at the same fraction of its range; None: none do."""

    def helps(part: float) -> bool:
        better = _improved(topology, device, _values(topology, device, resources, part))
        return _best(better, workload, placement, device, goal_s).seconds <= goal_s

    if all(value <= has for value, has in _ranges(topology, device, resources, part=1.0)) or not helps(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if helps(middle) else (middle, high)
    values = _values(topology, device, resources, high)
    return Need(line_mbps=values.get("line"), memory_gb=values.get("memory"), tflops=values.get("speed"))


def _best(topology: Topology, workload: Workload, placement: Placement, device: int, goal_s: float) -> Cost:
    """Return the cost with `device` in its best place, or in the first place that meets the goal."""
    objective = ThroughputObjective(topology, workload)
    best = Cost.impossible("it has no place")
    for tried in joins(topology, workload, placement, device):
        cost = objective.cost(tried)
        if cost.seconds < best.seconds:
            best = cost
        if best.seconds <= goal_s:
            break
    return best


# --- better devices ---


def _has(topology: Topology, device: int) -> dict[Resource, float]:
    """Return the device's present values: Mbit/s of the slower direction, GB, TFLOP/s."""
    card = min(float(topology.up_bytes_per_s[device]), float(topology.down_bytes_per_s[device]))
    if not math.isfinite(card):
        others = np.arange(topology.num_devices) != device
        card = float(np.minimum(topology.bytes_per_s[device], topology.bytes_per_s[:, device])[others].max())
    return {
        "line": card / MBIT,
        "memory": float(topology.memory_bytes[device]) / 1e9,
        "speed": float(topology.flop_per_s[device]) / 1e12,
    }


_MOST: Final[dict[Resource, float]] = {"line": LINE_MAX_MBPS, "memory": MEMORY_MAX_GB, "speed": SPEED_MAX_TFLOPS}


def _ranges(
    topology: Topology, device: int, resources: Sequence[Resource], *, part: float
) -> Iterator[tuple[float, float]]:
    has = _has(topology, device)
    for resource in resources:
        most = max(_MOST[resource], has[resource])
        yield has[resource] ** (1.0 - part) * most**part, has[resource]


def _values(topology: Topology, device: int, resources: Sequence[Resource], part: float) -> dict[Resource, float]:
    """Return the values of a need, rounded up to two digits as printed."""
    values = (_rounded_up(value) for value, _ in _ranges(topology, device, resources, part=part))
    return dict(zip(resources, values, strict=True))


def _improved(topology: Topology, device: int, values: dict[Resource, float]) -> Topology:
    """Return the network with improved values of `device`; the line is its card's, or its paths' without a card."""

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
            better = replace(
                better,
                up_bytes_per_s=at(better.up_bytes_per_s, card, rate),
                down_bytes_per_s=at(better.down_bytes_per_s, card, rate),
            )
        else:
            paths = np.zeros_like(topology.bytes_per_s, dtype=np.bool_)
            paths[device, :] = paths[:, device] = True
            paths &= topology.bytes_per_s > 0.0
            better = replace(better, bytes_per_s=at(better.bytes_per_s, paths, rate))
    return better


def _rounded_up(value: float) -> float:
    """Round up to two digits: 413 -> 420."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit * (1.0 - 1e-12)) * unit


def _groups(topology: Topology, devices: Sequence[int]) -> list[tuple[int, ...]]:
    """Return groups of equal devices, without comparing paths."""
    found: dict[object, list[int]] = {}
    key: Callable[[int], object] = lambda d: (  # noqa: E731
        topology.regions[d] or topology.names[d],
        float(topology.flop_per_s[d]),
        float(topology.memory_bytes[d]),
        float(topology.up_bytes_per_s[d]),
        float(topology.down_bytes_per_s[d]),
        bool(topology.may_feed[d]),
    )
    for device in devices:
        found.setdefault(key(device), []).append(device)
    return sorted((tuple(group) for group in found.values()), key=lambda group: (-len(group), group))


# --- in words ---


def said_of_needs(group: LeftOut) -> str:
    """Return the needs in words: `one would help from 410 Mbit/s both ways, or from 48 GB of memory`."""
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
