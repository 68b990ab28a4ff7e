"""Measures the run's speed: tokens a second over the last minute, standstills included. Pure.

The run's progress is a curve of committed tokens over time: marks, at most `MARK_S` (or one longer step) apart, with
straight lines between them. The rate is the rise of the curve in the window over the window's length: a run that stands
still for a whole window has a rate of zero. The window ends at the last commit or, if the next step is slower than
usual, one usual step before now. Its length is `WINDOW_S`, or `WINDOW_STEPS` of the usual steps if these are slow.

The figure is the same on every coordinator: marks travel with their ages, in leadership transfers and heartbeat
replies."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from shoal.protocol.messages import PaceMark

WINDOW_S = 60.0
WINDOW_STEPS = 4
"""The window over which the rate is measured has at least this many usual steps: fewer say little."""
MARK_S = 8.0
MARKS_MAX = 20
"""The most marks kept: three in a row span over `MARK_S`, so 15 cover the window; a changing rate needs more."""
SEEN_MARKS = 5
"""A layout's rate is the median of this many newest rates between two marks, so a change shows after three marks."""
LATE_S = 5.0
LATE_STEPS = 1.5
"""A step is late once the time since the last commit exceeds both `LATE_S` and this multiple of the usual step time."""
STANDS_STEPS = 3.0
"""People are told that a run stands still once its step takes this multiple of the usual time, and over `LATE_S`."""
AGE_S_MAX = 7 * 24 * 3600.0


@dataclass(slots=True)
class _Mark:
    era: int
    step: int
    at_s: float
    num_steps: int
    """The steps since the previous mark."""
    tokens: int
    """The tokens since the previous mark (unused for the oldest mark, which has no previous one)."""


class TokenRate:
    """The run's recent progress. Args: tokens_per_step: the tokens that count for a step without a report."""

    def __init__(self, *, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._marks: deque[_Mark] = deque(maxlen=MARKS_MAX)
        self._begun = 0, 0

    def begin_era(self, era: int, version: int) -> None:
        """Roll back to `version`: later steps run again, and their tokens count again."""
        self._begun = era, version

    def committed(self, era: int, step: int, tokens: int, at_s: float) -> None:
        """Record that `step` was committed at `at_s`; if a later step was recorded before, `step` counts already."""
        last = self._marks[-1] if self._marks else None
        if last is None:
            self._marks.append(_Mark(era, step, at_s, 1, tokens))
            return
        if (era, step) <= (last.era, last.step):
            return
        at_s = max(at_s, last.at_s)
        base = last.step if era == last.era else self._begun[1] - 1
        num_steps = max(1, step - base)
        tokens += (num_steps - 1) * self._tokens_per_step
        before = self._marks[-2] if len(self._marks) > 1 else None
        if before is not None and at_s - before.at_s <= MARK_S and era == last.era:
            last.step, last.at_s = step, at_s
            last.num_steps, last.tokens = last.num_steps + num_steps, last.tokens + tokens
        else:
            self._marks.append(_Mark(era, step, at_s, num_steps, tokens))

    # --- rates ---

    def tokens_per_s(self, now_s: float) -> float:
        """Return the rate over the window; 0 before the second step."""
        if len(self._marks) < 2:
            return 0.0
        usual_s = self.usual_step_s
        end_s = max(self._marks[-1].at_s, now_s - usual_s)
        length_s = min(max(WINDOW_S, WINDOW_STEPS * usual_s), end_s - self._marks[0].at_s)
        if length_s <= 0.0:
            return 0.0
        return sum(_within(before, mark, end_s - length_s) for before, mark in pairwise(self._marks)) / length_s

    def seen(self, era: int, version: int) -> tuple[float, int]:
        """Return (tokens a second, number of measured steps) of a layout that is live since `version` of `era`; (0, 0):
        too few steps. The rate is the median of the rates between marks (points of the curve), which one standstill
        does not change."""
        since = era, version - 1
        counted = [
            (mark.tokens / (mark.at_s - before.at_s), mark.num_steps)
            for before, mark in pairwise(self._marks)
            if mark.era == era and (before.era, before.step) >= since and mark.at_s > before.at_s
        ][-SEEN_MARKS:]
        if 2 * len(counted) <= SEEN_MARKS:
            return 0.0, 0
        return median(rate for rate, _ in counted), sum(num_steps for _, num_steps in counted)

    def newest(self, now_s: float) -> float:
        """Return the tokens a second between the last two marks; 0: unknown. If the current step is late, the rate is
        at most that of this step so far. This figure is quick but noisy, so another figure should confirm it."""
        if len(self._marks) < 2:
            return 0.0
        before, last = self._marks[-2], self._marks[-1]
        rate = last.tokens / (last.at_s - before.at_s) if last.at_s > before.at_s else math.inf
        late_s = self._late_s(now_s, LATE_STEPS)
        return min(rate, self._tokens_per_step / late_s) if late_s else rate

    def commits_within(self, seconds: float, now_s: float, *, believed_s: float = 0.0) -> tuple[int, float] | None:
        """Return (expected commits in the next `seconds`, fraction of the following step done by then) at the current
        pace; None before the second step.

        Args:
            seconds: if negative, the progress of the current step counts only up to that time in the past.
            believed_s: predicted time of a step. A late step counts with this time or, if longer, the time that it has
                taken."""
        if len(self._marks) < 2:
            return None
        before, last = self._marks[-2], self._marks[-1]
        idle_s = max(0.0, now_s - last.at_s)
        step_s = max(self.usual_step_s, (last.at_s - before.at_s) / last.num_steps)
        if idle_s > step_s:
            step_s = max(idle_s, believed_s)
        if step_s <= 0.0:
            return None
        part, whole = math.modf(max(0.0, idle_s + seconds) / step_s)
        return int(whole), part

    def idle_s(self, now_s: float) -> float | None:
        """Return the time since the last commit; None: no commit is known."""
        return max(0.0, now_s - self._marks[-1].at_s) if self._marks else None

    def stands_s(self, now_s: float) -> float:
        """Return the length of a standstill; 0 while a step may still be running, or no commit is known."""
        return self._late_s(now_s, STANDS_STEPS)

    def _late_s(self, now_s: float, steps: float) -> float:
        """Return the time since the last commit if it exceeds both `steps` usual steps and `LATE_S`; else 0."""
        idle_s = self.idle_s(now_s) or 0.0
        return idle_s if idle_s > max(LATE_S, steps * self.usual_step_s) else 0.0

    @property
    def usual_step_s(self) -> float:
        """Median seconds of a step; 0 before the second step. One standstill hardly changes the median."""
        if len(self._marks) < 2:
            return 0.0
        return median((mark.at_s - before.at_s) / mark.num_steps for before, mark in pairwise(self._marks))

    # --- to others, and from them ---

    def tell(self, now_s: float) -> tuple[PaceMark, ...]:
        """Return the marks with their ages, for other peers."""
        return tuple(
            PaceMark(mark.era, mark.step, round(max(0.0, now_s - mark.at_s), 3), mark.num_steps, mark.tokens)
            for mark in self._marks
        )

    def take_over(self, told: Sequence[PaceMark], now_s: float) -> None:
        """Replace our marks by a coordinator's, unless that coordinator has missed our newest commits."""
        marks = _sound(told, now_s)
        if not marks:
            return
        newest = self._marks[-1] if self._marks else None
        if newest is None or (marks[-1].era, marks[-1].step) >= (newest.era, newest.step):
            self._marks = deque(marks, maxlen=MARKS_MAX)


def _within(before: _Mark, mark: _Mark, since_s: float) -> float:
    """Return how many of the tokens between two marks were committed after `since_s`."""
    if mark.at_s <= since_s:
        return 0.0
    if before.at_s >= since_s:
        return mark.tokens
    return mark.tokens * (mark.at_s - since_s) / (mark.at_s - before.at_s)


def _sound(told: Sequence[PaceMark], now_s: float) -> list[_Mark]:
    """Return the marks that another peer reports; none if they are inconsistent, since it is not trusted."""
    marks = []
    for mark in told[-MARKS_MAX:]:
        if not (
            math.isfinite(mark.age_s) and 0.0 <= mark.age_s <= AGE_S_MAX and mark.tokens >= 0 and mark.num_steps > 0
        ):
            return []
        marks.append(_Mark(mark.era, mark.step, now_s - mark.age_s, mark.num_steps, mark.tokens))
    grows = all((a.era, a.step) < (b.era, b.step) and a.at_s <= b.at_s for a, b in pairwise(marks))
    return marks if grows else []
