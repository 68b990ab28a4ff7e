"""Holds the result of a modelled run, for tables and charts, and computes its figures."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

JobKind = Literal["forward", "backward", "step", "validate", "probe"]
"""The kinds of `Compute` jobs. The last stage's job of forward, loss and backward counts as a forward."""
Change = Literal["joined", "left", "plan", "era", "division"]
"""The kinds of events. `era`: the run returned to an earlier version; `division`: the layers were divided into other
stages, which went on at the version of the former stages."""


STEPS_MIN = 2
"""A speed needs at least this many commits, because a step lasts from one commit to the next."""
WARM_UP_STEPS = 2
"""The number of first steps that `step_s` and `tokens_per_s` leave out. During these, peers join, the pipeline
fills, and the number of microbatches in flight grows."""
PACE_STEPS = 2
"""The number of consecutive steps over which the pace is measured. With a staleness of one step, commits come in pairs,
one late and the next soon after; so a median of single steps would be too long or too short."""
SETTLED_S = 300.0
"""The virtual time after which a swarm with its own coordinators is compared with its planned layout. By then it has
had time to measure, to search and to move. Every published figure keeps this convention."""
NEIGHBOURS = 5
"""A step's usual pace is the median over this many steps before it, or after it if that is larger."""
STANDSTILL_TIMES = 2.0
"""A step counts as a standstill if it takes more than this multiple of the usual pace."""


class StepCommitted(NamedTuple):
    """A step that every group has committed: each stage, and the holders of each expert if experts are placed."""

    step: int
    committed_at_s: float


class JobSpan(NamedTuple):
    """One job (forward, backward, …) of one device."""

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
    """Why the run was ended early; empty: it reached its number of steps or its time."""
    standstill: str = ""
    """Why the run committed too few steps for a speed; empty: it committed enough."""
    undone: tuple[StepCommitted, ...] = ()
    """The committed steps that a return to an earlier version undid."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SimResult:
    """The result of a run. Seconds are virtual and count from the start of the simulation; a device is given by its
    index in the topology."""

    steps: tuple[StepCommitted, ...]
    tokens_per_step: int
    timeline: tuple[tuple[JobSpan, ...], ...]
    """[N], the jobs of each device by time; empty if no timeline was recorded."""
    busy_s: tuple[float, ...]
    """[N], the seconds for which each device worked in all, speed probes left out."""
    traffic_bytes: npt.NDArray[np.int64]
    """[N, N], the bytes of all frames from each device (row) to each other one. Requests and answers do not count."""
    events: tuple[Happened, ...]
    duplicates: int
    """The number of microbatches counted twice, summed over all commits of all groups."""
    given_up: int
    """The number of microbatches left out of a step, summed over all commits of all groups."""
    failures: tuple[str, ...]
    """Errors that ended a node, and exceptions of handlers: signs of a bug, or of a run that could not finish."""
    ending: Ending
    trace_hash: str
    first_step_bytes: npt.NDArray[np.int64] | None = None
    """[N, N], the part of `traffic_bytes` up to the first commit; None: it was not recorded."""

    @property
    def bytes_per_step(self) -> npt.NDArray[np.float64]:
        """[N, N], mean bytes a step from each device (row) to each other one. The first step does not count, unless it
        is the only one or its bytes were not recorded."""
        if self.first_step_bytes is None or len(self.steps) < STEPS_MIN:
            return self.traffic_bytes / len(self.steps)
        per_step: npt.NDArray[np.float64] = (self.traffic_bytes - self.first_step_bytes) / (len(self.steps) - 1)
        return per_step

    @property
    def left_out_steps(self) -> int:
        """The number of first steps left out as warm-up: `WARM_UP_STEPS`, or fewer in a short run."""
        return max(0, min(WARM_UP_STEPS, len(self.steps) - STEPS_MIN))

    @property
    def step_s(self) -> float:
        """The seconds of a step: the median, after the warm-up, of means over `PACE_STEPS` consecutive steps, or
        over one step in a short run; NaN: too few steps."""
        at_s = np.array([step.committed_at_s for step in self.steps[self.left_out_steps :]])
        if len(at_s) < 2:
            return float("nan")
        if len(at_s) > PACE_STEPS + 1:
            at_s = at_s[:-1]  # the last step of a run ends sooner, since no next step overlaps with it
        steps = min(PACE_STEPS, len(at_s) // 2)
        return float(np.median((at_s[steps:] - at_s[:-steps]) / steps))

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s if each step takes `step_s`."""
        return self.tokens_per_step / self.step_s

    def tokens_by(self, at_s: float) -> float:
        """Return the tokens of the steps committed by `at_s`. The step in flight at that time counts for the elapsed
        part of its time; the first step begins when the simulation does. Undone steps do not count."""
        times_s = np.concatenate([[0.0], self._times_s()])
        return self.tokens_per_step * float(np.interp(at_s, times_s, np.arange(len(times_s))))

    def tokens_per_s_from(self, from_s: float) -> float:
        """Return the mean tokens/s from `from_s` on, standstills included; NaN: less than one step was done since then.

        The measured time ends with the last commit, or with the run's end if the run stood still after that commit.
        """
        times_s = self._times_s()
        until_s = max(from_s, float(times_s.max(initial=0.0)))
        if self.ending.at_s - until_s > STANDSTILL_TIMES * _usual_s(np.diff(times_s), len(times_s) - 1):
            until_s = self.ending.at_s
        tokens = self.tokens_by(until_s) - self.tokens_by(from_s)
        return tokens / (until_s - from_s) if tokens >= self.tokens_per_step else float("nan")

    @property
    def settled_from_s(self) -> float:
        """The time from which the rate is measured: `SETTLED_S`; if no whole step follows it, at most half the run."""
        return SETTLED_S if math.isfinite(self.tokens_per_s_from(SETTLED_S)) else min(SETTLED_S, self.ending.at_s / 2.0)

    @property
    def standstill_s(self) -> float:
        """The seconds lost to standstills after the first step: of each step that counts as a standstill, the time
        beyond the usual pace."""
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
        """Return the number of events of kind `change`."""
        return sum(event.change == change for event in self.events)


def _usual_s(took_s: npt.NDArray[np.float64], index: int) -> float:
    """Return the usual seconds of a step near entry `index` of `took_s`: the median of the entries just before it or of
    those just after it, whichever is larger; inf: there are no other entries.

    Args:
        took_s: [S], the seconds from each commit to the next.
        index: in [0, S]; S stands for the time after the last commit.
    """
    sides = (took_s[max(0, index - NEIGHBOURS) : max(0, index)], took_s[index + 1 : index + 1 + NEIGHBOURS])
    return max((float(np.median(side)) for side in sides if len(side)), default=float("inf"))
