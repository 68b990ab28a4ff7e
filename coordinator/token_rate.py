"""How fast the run is: tokens a second over the last minute, standstills included. Pure.

The run's progress is a curve: the tokens committed so far, over time. It is kept as marks, which are `MARK_S` or a step
apart, whichever is longer, and is taken for straight between two of them. The rate is the rise of the curve in the
window over the window's length: a run that stands still for as long as the window has a rate of zero.

The window ends now, or at the last commit while the next step takes no longer than steps usually take: a step that is
under way is no standstill. The window is `WINDOW_S` long, or as long as `WINDOW_STEPS` of the usual steps if these are
slow.

The figure is the same whichever peer coordinates: marks cross the network with their ages, in a hand-over and in each
reply to a heartbeat. So every peer could go on with the curve, whatever becomes of the coordinator. (Lost: a rate that
each coordinator measures from the reports that reach it. After an outage these come all at once, and 15,481 tokens/s
were shown during a standstill of 30 s; or they go to another peer, and 135 were shown for a real 430.)
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from shoal.protocol.messages import PaceMark

WINDOW_S = 60.0
WINDOW_STEPS = 4
"""Fewer steps say little about a rate."""
MARK_S = 8.0
MARKS_MAX = 20
"""Two marks span more than `MARK_S`, so 15 of them cover the window; the rest is for a run whose rate changes."""
SEEN_MARKS = 7
"""A layout's rate is the median over its last marks, a minute at most if steps are short: what changes is seen after
four of them."""
SEEN_MARKS_MIN = 3
LATE_MARKS = 3
MUCH = 1.25
"""A layout that has slowed down so much is seen to be slow after two marks of three."""
SLOW_STEPS = 4.0
LATE_STEPS = 1.5
"""A step is late once it takes so many times what steps usually take, and at least `STANDS_S`."""
STANDS_S = 5.0
STANDS_STEPS = 3.0
"""A run stands still once the next step takes so many times what steps usually take, and at least `STANDS_S`."""
AGE_S_MAX = 7 * 24 * 3600.0


@dataclass(slots=True)
class _Mark:
    """A point on the curve."""

    era: int
    step: int
    at_s: float
    num_steps: int
    """The steps since the mark before."""
    tokens: int
    """The tokens since the mark before. Nobody knows over which time those of the oldest mark came."""


class TokenRate:
    """The run's recent progress, as far as this peer has heard of it.

    Args:
        tokens_per_step: what a step counts if its report has not come.
    """

    def __init__(self, *, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._marks: deque[_Mark] = deque(maxlen=MARKS_MAX)
        self._begun = 0, 0

    def begin_era(self, era: int, version: int) -> None:
        """The run went back to `version`: later steps run again, and their tokens count again."""
        self._begun = era, version

    def committed(self, era: int, step: int, tokens: int, at_s: float) -> None:
        """`step` was committed at `at_s`. If we hear of it late, it has already been counted as a whole step with the
        first one behind it."""
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

    # --- what it says ---

    def tokens_per_s(self, now_s: float) -> float:
        """The rate over the window; 0 before the second step."""
        if len(self._marks) < 2:
            return 0.0
        usual_s = self.usual_step_s
        end_s = max(self._marks[-1].at_s, now_s - usual_s)
        length_s = min(max(WINDOW_S, WINDOW_STEPS * usual_s), end_s - self._marks[0].at_s)
        if length_s <= 0.0:
            return 0.0
        return sum(_within(before, mark, end_s - length_s) for before, mark in pairwise(self._marks)) / length_s

    def seen(self, era: int, version: int, now_s: float) -> tuple[float, int]:
        """The tokens a second of a layout that has been at work since `version` of `era`, and over how many steps; (0,
        0): these are too few.

        This is a median over marks, which one standstill does not change. If the last of them say much less it is the
        median of those; and if the step under way takes `SLOW_STEPS` times what steps usually take, it is no more than
        that step's own.
        """
        since = era, version - 1
        counted = [
            (mark.tokens / (mark.at_s - before.at_s), mark.num_steps)
            for before, mark in pairwise(self._marks)
            if mark.era == era and (before.era, before.step) >= since and mark.at_s > before.at_s
        ][-SEEN_MARKS:]
        if len(counted) < SEEN_MARKS_MIN:
            return 0.0, 0
        num_steps = sum(num_steps for _, num_steps in counted)
        usual = median(rate for rate, _ in counted)
        late = median(rate for rate, _ in counted[-LATE_MARKS:])
        rate = late if late * MUCH < usual else usual
        idle_s = now_s - self._marks[-1].at_s
        if idle_s > max(STANDS_S, SLOW_STEPS * self.usual_step_s):
            rate = min(rate, self._tokens_per_step / idle_s)
        return rate, num_steps

    def newest(self, now_s: float) -> float:
        """The tokens a second of the last mark, or no more than those of the step under way if that is late; 0: not
        known. This is quick and noisy: something else has to bear it out."""
        if len(self._marks) < 2:
            return 0.0
        before, last = self._marks[-2], self._marks[-1]
        rate = last.tokens / (last.at_s - before.at_s) if last.at_s > before.at_s else math.inf
        idle_s = now_s - last.at_s
        is_late = idle_s > max(STANDS_S, LATE_STEPS * self.usual_step_s)
        return min(rate, self._tokens_per_step / idle_s) if is_late else rate

    def commits_within(self, seconds: float, now_s: float, *, believed_s: float = 0.0) -> tuple[int, float] | None:
        """How many commits are to be expected from `now_s` on for so long, if steps go on to take what the last ones
        took, and the part of the step after these that is over by then; None before the second step.

        Args:
            seconds: below 0: until so long ago, as if the commit that is due now were not.
            believed_s: what a step should take. Once the one under way is late it takes that, or has taken longer.
        """
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
        """The time since the last commit; None: no commit is known."""
        return max(0.0, now_s - self._marks[-1].at_s) if self._marks else None

    def stands_s(self, now_s: float) -> float:
        """The time without a commit; 0 while that may be a step's usual time, or no commit is known."""
        idle_s = self.idle_s(now_s)
        patience_s = max(STANDS_S, STANDS_STEPS * self.usual_step_s)
        return idle_s if idle_s is not None and idle_s > patience_s else 0.0

    @property
    def usual_step_s(self) -> float:
        """Seconds; 0 before the second step. This is a median over marks: a standstill is in one mark alone, and so
        does not change it."""
        if len(self._marks) < 2:
            return 0.0
        return median((mark.at_s - before.at_s) / mark.num_steps for before, mark in pairwise(self._marks))

    # --- to others, and from them ---

    def tell(self, now_s: float) -> tuple[PaceMark, ...]:
        """The marks with their ages, for other peers."""
        return tuple(
            PaceMark(
                era=mark.era,
                step=mark.step,
                age_s=round(max(0.0, now_s - mark.at_s), 3),
                num_steps=mark.num_steps,
                tokens=mark.tokens,
            )
            for mark in self._marks
        )

    def take_over(self, told: Sequence[PaceMark], now_s: float) -> None:
        """Replace our marks by a coordinator's, if it knows as much as we do: it may have missed the newest commits."""
        marks = _sound(told, now_s)
        if not marks:
            return
        newest = self._marks[-1] if self._marks else None
        if newest is None or (marks[-1].era, marks[-1].step) >= (newest.era, newest.step):
            self._marks = deque(marks, maxlen=MARKS_MAX)


def _within(before: _Mark, mark: _Mark, since_s: float) -> float:
    """How many of the tokens between two marks came after `since_s`."""
    if mark.at_s <= since_s:
        return 0.0
    if before.at_s >= since_s:
        return mark.tokens
    return mark.tokens * (mark.at_s - since_s) / (mark.at_s - before.at_s)


def _sound(told: Sequence[PaceMark], now_s: float) -> list[_Mark]:
    """The marks that another peer has told us; none if they contradict themselves, since it may say anything."""
    marks = []
    for mark in told[-MARKS_MAX:]:
        if not (
            math.isfinite(mark.age_s) and 0.0 <= mark.age_s <= AGE_S_MAX and mark.tokens >= 0 and mark.num_steps > 0
        ):
            return []
        marks.append(_Mark(mark.era, mark.step, now_s - mark.age_s, mark.num_steps, mark.tokens))
    grows = all((a.era, a.step) < (b.era, b.step) and a.at_s <= b.at_s for a, b in pairwise(marks))
    return marks if grows else []
