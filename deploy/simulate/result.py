"""Holds what a modelled run has shown: the vocabulary between the engine and whoever draws tables and pictures."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

JobKind = Literal["forward", "backward", "step", "validate", "probe"]
"""Kinds of job as `Compute` has them; a last stage's whole loss job counts as a forward."""
Change = Literal["joined", "left", "plan", "era"]


STEPS_MIN = 2
"""How many commits a figure needs: the time between two of them is a step's."""
WARM_UP_STEPS = 2
"""What `step_s` and `tokens_per_s` leave out at the beginning: joining, the pipeline's fill, windows that grow."""


class StepCommitted(NamedTuple):
    """A step that every group has committed: stages, and the experts' holders where experts are placed."""

    step: int
    committed_at_s: float


class Span(NamedTuple):
    """One job of one device."""

    kind: JobKind
    started_s: float
    ended_s: float


class Happened(NamedTuple):
    """`device` is -1 for what concerns all; `text` is for people."""

    at_s: float
    change: Change
    device: int
    text: str


class Ending(NamedTuple):
    """When a run ended, and why it did before its time."""

    at_s: float
    wall_s: float
    num_events: int
    """How many events the trace has."""
    cut_off: str = ""
    """The reason why the run ended before its steps and its time were over; empty: it did not."""
    standstill: str = ""
    """The reason why there are too few steps for a figure; empty: there are enough."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SimResult:
    """Seconds are virtual, from the start of the world; devices are indexes of the run's topology."""

    steps: tuple[StepCommitted, ...]
    tokens_per_step: int
    timeline: tuple[tuple[Span, ...], ...]
    """[N], the jobs of each device in order of time; empty unless asked for."""
    busy_s: tuple[float, ...]
    """[N], how long each device has worked in all, probes not counted."""
    traffic_bytes: npt.NDArray[np.int64]
    """[N, N], all frames that began to leave, row = from; calls are not counted."""
    events: tuple[Happened, ...]
    duplicates: int
    """How many microbatches were counted twice, over all commits and stages."""
    given_up: int
    """How many microbatches commits went without."""
    failures: tuple[str, ...]
    """What nodes could not go on from, and what handlers raised: bugs, or a run that nobody could finish."""
    ending: Ending
    trace_hash: str
    first_step_bytes: npt.NDArray[np.int64] | None = None
    """[N, N], what of `traffic_bytes` had begun to leave at the first commit; None: it was not looked at."""

    @property
    def bytes_per_step(self) -> npt.NDArray[np.float64]:
        """[N, N], from the first commit on, so that what a beginning takes and the step in flight at the end do not
        count; of a run with one step all of it. There must be a step."""
        if self.first_step_bytes is None or len(self.steps) < STEPS_MIN:
            return self.traffic_bytes / len(self.steps)
        per_step: npt.NDArray[np.float64] = (self.traffic_bytes - self.first_step_bytes) / (len(self.steps) - 1)
        return per_step

    @property
    def left_out_steps(self) -> int:
        """How many of the first steps are left out as warm-up; fewer where nothing would be left to measure."""
        return max(0, min(WARM_UP_STEPS, len(self.steps) - STEPS_MIN))

    @property
    def step_s(self) -> float:
        """Median seconds from one commit to the next, once it goes steadily; NaN if there are too few."""
        at_s = np.array([step.committed_at_s for step in self.steps[self.left_out_steps :]])
        return float(np.median(np.diff(at_s))) if len(at_s) > 1 else float("nan")

    @property
    def tokens_per_s(self) -> float:
        """The rate at the median step."""
        return self.tokens_per_step / self.step_s
