"""Builds the record of a run, step by step, from reports by members of each group. Pure.

A group is the peers of one stage, or the holders of one expert of a stage. Each step comes out once, in order, when
every group has reported it. If a report is missing, the book waits `PATIENCE_S` from the moment when the group must
have committed the step. Then it gives the step out without that report, or counts the step as lost if the missing
report is the last stage's, which has the loss.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from shoal.deploy.record.lines import StepLine, perplexity
from shoal.protocol.limits import MICROBATCHES_PER_STEP_MAX, STAGES_MAX
from shoal.protocol.messages import CommitReport

PATIENCE_S: Final = 20.0
"""Seconds to wait for a group's report of a step: time enough to ask up to ten members of the group, one by one."""
RATE_S: Final = 30.0
"""Seconds over which tokens/s is averaged. If one step takes longer, its own tokens/s is recorded."""
FIRST_S: Final = 5.0
"""Seconds that a new record waits, before its first step, for reports of older steps from other peers."""
AGO_S_MAX: Final = 10 * 365 * 86400.0

Key = tuple[int, int]
"""Names a step: (era, number of the step from 0). The era counts returns to snapshots and changes of stages."""


@dataclass(slots=True)
class _Open:
    heard_s: float
    passed_s: float | None = None
    """When it became certain that every group had committed the step; None: it is not certain yet."""
    reports: dict[int, tuple[float, CommitReport]] = field(default_factory=dict)


class Book:
    """Collects reports and releases complete steps.

    Args:
        num_experts: the number of groups of expert holders beside each stage's own group.
        lead_steps: no group commits step `t + lead_steps` before all other groups have committed step `t`.
        tokens_per_step: a report that claims more tokens is ignored.
        learning_rate: returns the learning rate of a step, counted from 0.
        reached: (era, steps done) at the end of the existing record; its steps are not released again. None: a new
            record, which begins with the oldest step that any peer knows.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        lead_steps: int,
        tokens_per_step: int,
        learning_rate: Callable[[int], float],
        reached: Key | None = None,
    ) -> None:
        self._num_experts, self._lead_steps = num_experts, lead_steps
        self._tokens_per_step, self._learning_rate = tokens_per_step, learning_rate
        self._is_new = reached is None
        self._next: Key = reached or (0, 0)
        """(era, step) of the next step to release, unless a later era begins first."""
        self._begins: dict[int, int] = {}
        """Era (training generation) -> the model version at which it started, as its plans say."""
        self._stages: dict[int, int] = {}
        """Era -> number of stages according to the era's plans or, without a plan, to reports of the last stage."""
        self._open: dict[Key, _Open] = {}
        self._newest: dict[int, Key] = {}
        """Group -> (era, step) of the newest step that it has reported."""
        self._paces: deque[tuple[float, int]] = deque()
        self.lost = 0
        """The number of steps missing from the record, as the last stage's report, which has the loss, never came."""

    @property
    def reached(self) -> Key:
        """(era, steps done) of the newest released step; the era is the training generation."""
        return self._next

    @property
    def is_complete(self) -> bool:
        """True if every known step has been released."""
        return not self._open

    def wanted(self, groups: Iterable[int]) -> Key:
        """Return (era, step) of the first step of which we may still lack a report by one of `groups`."""
        return min((self._after(self._newest.get(group)) for group in groups), default=self._next)

    def missing(self) -> tuple[Key, list[int]] | None:
        """Return ((era, step), groups to ask) of the oldest step that later steps wait for; None: there is none."""
        for key in sorted(self._open):
            entry = self._open[key]
            if key != self._next and key[0] == self._next[0]:
                return self._next, list(range(self._groups_of(self._next[0])))
            if entry.passed_s is not None:
                return key, [group for group in range(self._groups_of(key[0])) if group not in entry.reports]
            return None
        return None

    def begins(self, era: int, version: int, num_stages: int) -> None:
        """Note from a plan that `era` (a training generation) starts at `version` and has `num_stages` stages."""
        self._begins[era], self._stages[era] = version, num_stages

    def note(self, report: CommitReport, at_s: float, now_s: float) -> None:
        """Add a group's report of a step. Args: at_s: the time of the group's commit, on the clock of `now_s`."""
        key = report.era, report.step
        if key < self._next or not self._is_sound(report) or not now_s - AGO_S_MAX < at_s <= now_s:
            return
        if report.loss is not None:  # only the last stage knows the loss
            self._stages.setdefault(report.era, report.stage + 1)
        entry = self._open.setdefault(key, _Open(heard_s=now_s))
        if report.stage not in entry.reports or entry.reports[report.stage][1].gradient_norm is None:
            entry.reports[report.stage] = at_s, report
        self._newest[report.stage] = max(key, self._newest.get(report.stage, key))

    def due(self, now_s: float, *, flush: bool = False) -> list[StepLine]:
        """Release the steps that are complete or have waited long enough for reports, and return in order those with
        the last stage's report. Their field `time` is on the clock of `now_s`.

        Args: flush: release all steps, because no more reports will come.
        """
        self._note_passed(now_s)
        begun = self._firsts()
        steps = []
        for key in sorted(self._open):
            entry, first = self._open[key], self._first(key[0])
            whole = len(entry.reports) == self._groups_of(key[0])
            if not whole and any(era > key[0] and step <= key[1] for era, step in begun.items()):
                del self._open[key]  # the run went back before it was complete
                continue
            since_s = entry.passed_s if key == first else entry.heard_s
            patience_s = FIRST_S if self._is_new and key != first else PATIENCE_S
            waited = since_s is not None and now_s >= since_s + patience_s
            if not ((whole and key == first) or waited or flush):
                break
            del self._open[key]
            known = self._stages.get(key[0], 0) - 1 in entry.reports
            self.lost += (0 if self._is_new else max(0, key[1] - first[1])) + (not known)
            self._next, self._is_new = (key[0], key[1] + 1), False
            if known:
                steps.append(self._step(key, entry))
        return steps

    def _note_passed(self, now_s: float) -> None:
        newest = max(self._newest.values(), default=(0, -1))
        for key, entry in self._open.items():
            if entry.passed_s is None:
                missing = (group for group in range(self._groups_of(key[0])) if group not in entry.reports)
                led = (key[0], key[1] + self._lead_steps) <= newest
                if led or all(key < self._newest.get(group, key) for group in missing):
                    entry.passed_s = now_s

    def _firsts(self) -> dict[int, int]:
        """Return {era: the first step of this era that some group reported and that is not released yet}."""
        firsts: dict[int, int] = {}
        for era, step in self._open:
            firsts[era] = min(step, firsts.get(era, step))
        return firsts

    def _first(self, era: int) -> Key:
        """Return (era, step) of the next step to release in `era`; in a new era, the first step by the era's plan."""
        if era == self._next[0]:
            return self._next
        return era, self._begins.get(era, self._next[1])

    def _after(self, key: Key | None) -> Key:
        return self._next if key is None else max(self._next, (key[0], key[1] + 1))

    def _groups_of(self, era: int) -> int:
        """Return the number of groups that commit each step of `era`, expert holders included; 0 if unknown."""
        return self._stages.get(era, 0) * (1 + self._num_experts)

    def _is_sound(self, report: CommitReport) -> bool:
        counts = (report.microbatches, report.duplicates, report.given_up, report.dissenting, report.members)
        return (
            0 <= report.stage < (self._groups_of(report.era) or STAGES_MAX * (1 + self._num_experts))
            and report.era >= 0
            and all(0 <= count <= MICROBATCHES_PER_STEP_MAX * 16 for count in counts)
            and 0 <= report.tokens <= self._tokens_per_step
            and math.isfinite(report.staleness_steps_mean)
        )

    def _step(self, key: Key, entry: _Open) -> StepLine:
        reports = [report for _, report in entry.reports.values()]
        num_stages, num_groups = self._stages[key[0]], self._groups_of(key[0])
        stages = [report for report in reports if report.stage < num_stages]
        last = entry.reports[num_stages - 1][1]
        at_s = max(at_s for at_s, _ in entry.reports.values())
        by_group = {report.stage: _finite(report.gradient_norm) for report in reports}
        norms = [norm for norm in by_group.values() if norm is not None]
        loss = last.loss if last.loss is not None and math.isfinite(last.loss) else None
        return StepLine(
            time=at_s,
            step=key[1] + 1,
            era=key[0],
            loss=loss,
            perplexity=perplexity(loss),
            learning_rate=self._learning_rate(key[1]),
            gradient_norm=math.hypot(*norms) if len(norms) == num_groups else None,
            gradient_norms=tuple(by_group.get(stage) for stage in range(num_stages)),
            tokens=last.tokens,
            tokens_per_s=self._pace(at_s, last.tokens),
            staleness=sum(report.staleness_steps_mean for report in stages) / len(stages),
            peers=sum(report.members for report in stages),
            given_up=sum(report.given_up for report in reports),
            duplicates=sum(report.duplicates for report in reports),
            dissenting=sum(report.dissenting for report in reports),
            unheard=num_groups - len(reports),
        )

    def _pace(self, at_s: float, tokens: int) -> float | None:
        """Note that a step with `tokens` was committed at `at_s`. Return the mean tokens/s over the last `RATE_S`
        seconds; over this step, if it took longer; since the first known step, if that is later. None: first step."""
        paces = self._paces
        paces.append((at_s, tokens))
        while len(paces) > 2 and paces[1][0] <= at_s - RATE_S:
            paces.popleft()
        elapsed_s = at_s - paces[0][0]
        if elapsed_s <= 0.0:
            return None
        return (sum(count for _, count in paces) - paces[0][1]) / elapsed_s


def _finite(norm: float | None) -> float | None:
    return norm if norm is not None and 0.0 <= norm < math.inf else None
