"""Jobs: the units of work that the device runs one at a time."""

from dataclasses import dataclass
from typing import Literal

from shoal.peer.pipeline.microbatch import Microbatch

JobKind = Literal["forward", "backward", "loss", "validate", "step"]


@dataclass(frozen=True, slots=True)
class Job:
    """One job. `microbatch` is None for an optimizer step; `version` is the stage's version at which the job runs."""

    kind: JobKind
    microbatch: Microbatch | None
    version: int

    def __str__(self) -> str:
        letter = {"forward": "F", "backward": "B", "loss": "L", "validate": "V", "step": "S"}[self.kind]
        return f"{letter}{self.microbatch or self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """The time, by this peer's clock, in which the device ran one job or a part of one. `F(3, 1)`: forward of
    microbatch (3, 1)."""

    job: Job
    started_s: float
    ended_s: float
