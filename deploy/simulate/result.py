"""The result of a modelled run, for tables and pictures."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

JobKind = Literal["forward", "backward", "step", "validate", "probe"]
"""The kinds of `Compute` jobs; a last stage's whole loss job counts as a forward."""
Change = Literal["joined", "left", "plan", "era", "division"]
"""`era`: the run returned to an earlier version; `division`: other stages continued at the version of the last ones."""


STEPS_MIN = 2
"""The commits that a figure needs: the time between two of them is a step's."""
WARM_UP_STEPS = 2
"""The first steps that `step_s` and `tokens_per_s` leave out: joining, filling the pipeline, growing windows."""
PACE_STEPS = 2
"""The number of steps over which the pace is measured. With a staleness of one step, commits come in pairs, one late
and the next soon after, and a median of single steps would be either of the two."""
SETTLED_S = 300.0
"""The virtual time from which a self-deciding swarm is compared with its planned layout: by then it has had time to
measure, to search and to move. A convention, which every published figure keeps."""
NEIGHBOURS = 5
"""The number of steps on either side that define the usual pace."""
STANDSTILL_TIMES = 2.0
"""A step that takes more than this multiple of its neighbours' pace, the slower of both sides, stood still."""


class StepCommitted(NamedTuple):
    """A step committed by every group: stages, and expert holders if experts are placed."""

    step: int
    committed_at_s: float


class JobSpan(NamedTuple):
    """One job of one device."""

    kind: JobKind
    started_s: float
    ended_s: float


class Happened(NamedTuple):
    """An event. `device` is -1 for events of the whole swarm; `text` is for people."""

    at_s: float
    change: Change
    device: int
    text: str


class Ending(NamedTuple):
    """The end of a run."""

    at_s: float
    wall_s: float
    num_events: int
    cut_off: str = ""
    """Why the run ended before its steps and its time; empty: it did not."""
    standstill: str = ""
    """Why there are too few steps for a figure; empty: there are enough."""
    undone: tuple[StepCommitted, ...] = ()
    """The committed steps that a return to an earlier version undid."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SimResult:
    """The result of a run. Seconds are virtual, from the start of the world; devices are indexes of its topology."""

    steps: tuple[StepCommitted, ...]
    tokens_per_step: int
    timeline: tuple[tuple[JobSpan, ...], ...]
    """[N], the jobs of each device by time; empty unless asked for."""
    busy_s: tuple[float, ...]
    """[N], the total working time of each device, probes not included."""
    traffic_bytes: npt.NDArray[np.int64]
    """[N, N], all sent frames, row = from; calls are not counted."""
    events: tuple[Happened, ...]
    duplicates: int
    """The microbatches counted twice, over all commits and stages."""
    given_up: int
    """The microbatches missing from commits."""
    failures: tuple[str, ...]
    """Errors that ended a node and exceptions of handlers: bugs, or a run that could not finish."""
    ending: Ending
    trace_hash: str
    first_step_bytes: npt.NDArray[np.int64] | None = None
    """[N, N], `traffic_bytes` at the first commit; None: not recorded."""

    @property
    def bytes_per_step(self) -> npt.NDArray[np.float64]:
        """[N, N], after the first commit, without the start and the last step in flight; all bytes of a one-step
        run."""
        if self.first_step_bytes is None or len(self.steps) < STEPS_MIN:
            return self.traffic_bytes / len(self.steps)
        per_step: npt.NDArray[np.float64] = (self.traffic_bytes - self.first_step_bytes) / (len(self.steps) - 1)
        return per_step

    @property
    def left_out_steps(self) -> int:
        """The number of first steps left out as warm-up; fewer if nothing else would be left to measure."""
        return max(0, min(WARM_UP_STEPS, len(self.steps) - STEPS_MIN))

    @property
    def step_s(self) -> float:
        """Median seconds of a step over `PACE_STEPS` in a row, once it goes steadily; NaN if there are too few."""
        at_s = np.array([step.committed_at_s for step in self.steps[self.left_out_steps :]])
        if len(at_s) < 2:
            return float("nan")
        if len(at_s) > PACE_STEPS + 1:
            at_s = at_s[:-1]  # without a step behind it the last one of a run ends sooner
        steps = min(PACE_STEPS, len(at_s) // 2)
        return float(np.median((at_s[steps:] - at_s[:-steps]) / steps))

    @property
    def tokens_per_s(self) -> float:
        """The rate at `step_s`."""
        return self.tokens_per_step / self.step_s

    def tokens_by(self, at_s: float) -> float:
        """Return the tokens of the steps committed by `at_s`. A step in flight counts for the elapsed part of its time;
        the first one from the start of the world. Undone steps do not count."""
        times_s = np.concatenate([[0.0], self._times_s()])
        return self.tokens_per_step * float(np.interp(at_s, times_s, np.arange(len(times_s))))

    def tokens_per_s_from(self, from_s: float) -> float:
        """Return the rate from `from_s` on, standstills included; NaN if less than a whole step was committed since
        then.

        The measured time ends with the last commit, or with the run if it stood still after it.
        """
        times_s = self._times_s()
        until_s = max(from_s, float(times_s.max(initial=0.0)))
        if self.ending.at_s - until_s > STANDSTILL_TIMES * _usual_s(np.diff(times_s), len(times_s) - 1):
            until_s = self.ending.at_s
        tokens = self.tokens_by(until_s) - self.tokens_by(from_s)
        return tokens / (until_s - from_s) if tokens >= self.tokens_per_step else float("nan")

    @property
    def settled_from_s(self) -> float:
        """`SETTLED_S`, or half of the time of a run that committed no whole step after that."""
        return SETTLED_S if math.isfinite(self.tokens_per_s_from(SETTLED_S)) else min(SETTLED_S, self.ending.at_s / 2.0)

    @property
    def standstill_s(self) -> float:
        """The total standstill after the first step: the time beyond the neighbours' pace of each step that stood
        still."""
        times_s = self._times_s()
        stood_s = 0.0
        for index, took_s in enumerate(np.diff([*times_s, self.ending.at_s])[: len(times_s)]):
            usual_s = _usual_s(np.diff(times_s), index)
            if took_s > STANDSTILL_TIMES * usual_s:
                stood_s += float(took_s) - usual_s
        return stood_s

    def _times_s(self) -> npt.NDArray[np.float64]:
        return np.array([step.committed_at_s for step in self.steps])

    def count(self, change: Change) -> int:
        """Count the events of this kind."""
        return sum(event.change == change for event in self.events)


def _usual_s(took_s: npt.NDArray[np.float64], index: int) -> float:
    """Return the pace beside `took_s[index]`: the slower of the medians before and after it; inf without a neighbour.

    Args:
        took_s: [S], from each step to the next.
        index: up to S, the time after the last step.
    """
    sides = (took_s[max(0, index - NEIGHBOURS) : max(0, index)], took_s[index + 1 : index + 1 + NEIGHBOURS])
    return max((float(np.median(side)) for side in sides if len(side)), default=float("inf"))
