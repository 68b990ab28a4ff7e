"""Defines a placement, its cost, and the interface of every objective."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from shoal.protocol.plan import Bound

Bottleneck = tuple[Bound, int]
"""(kind, stage): what limits a step, and at which stage. The kind `paths` means the paths from the stage to the next
one or, at the last stage, to the previous one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The assignment of layers to devices, which are given by their indexes in one `Topology`."""

    stages: tuple[tuple[int, ...], ...]
    """The members of each stage, in ascending order; stages are in pipeline order."""
    bounds: tuple[int, ...]
    """Stage k holds layers [bounds[k], bounds[k + 1])."""

    def __post_init__(self) -> None:
        assert len(self.bounds) == len(self.stages) + 1
        assert all(list(stage) == sorted(set(stage)) for stage in self.stages)

    def spares(self, num_devices: int) -> tuple[int, ...]:
        placed = {device for stage in self.stages for device in stage}
        return tuple(device for device in range(num_devices) if device not in placed)

    def with_moves(self, stage_of: Mapping[int, int]) -> "Placement":
        """Return a copy with each device of `stage_of` in the stage that the mapping gives it, placed before or not."""
        stages = [[device for device in stage if device not in stage_of] for stage in self.stages]
        for device, stage in stage_of.items():
            stages[stage].append(device)
        return replace(self, stages=tuple(tuple(sorted(stage)) for stage in stages))

    def stage_of(self) -> dict[int, int]:
        """Return {device: its stage} of all placed devices."""
        return {device: index for index, stage in enumerate(self.stages) for device in stage}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a placement; lower is better."""

    seconds: float
    """Seconds a step; inf: this placement is impossible, and `why` gives the reason."""
    parts: dict[str, float] = field(default_factory=dict)
    """The parts of the cost, by name; units are in the objective's docstring."""
    bound: Bottleneck | None = None
    """The bottleneck of a step; None: the objective does not say, or the placement is impossible."""
    why: str = ""

    @classmethod
    def impossible(cls, why: str) -> "Cost":
        return cls(seconds=math.inf, why=why)


class Objective(Protocol):
    """A formula for the cost of placements on one topology. Pure: equal placements cost the same, bit for bit."""

    def cost(self, placement: Placement) -> Cost:
        """Return the exact cost of a placement. Searches compute costs incrementally, to be faster; tests compare
        both."""
