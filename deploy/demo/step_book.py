"""Assembles the steps of a run from the children's reports about their own stages. Pure.

Each member of each stage's group reports the group's commits (`report.Committed`) through a pipe that outlives the
member. So a report is lost only if all children of one stage die at once, and the stage's state is lost with them.
We do not take the steps from the coordinator: if it is killed, the steps that it has not reported are lost, and it may
be no child of this process.

If a stage has no child of this process, the coordinator's report (`report.StepDone`) replaces that stage's report,
provided that the coordinator is a child of this process.
"""

from dataclasses import dataclass, field

from shoal.deploy.record.report import StepDone
from shoal.protocol.messages import CommitReport

_Key = tuple[int, int]  # (era, step)


@dataclass(slots=True, kw_only=True)
class _Open:
    at_s: float
    passed_s: float | None = None
    """When we knew that every stage had committed the step, reported or not; None: we do not know it yet."""
    reports: dict[int, CommitReport] = field(default_factory=dict)
    told: StepDone | None = None


class StepBook:
    """Collects reports and releases complete steps. A step waits, without a limit, until every stage has committed it.

    Args:
        lead_steps: a stage commits step `t + lead_steps` only after all other stages have committed step `t`.
        patience_s: seconds that a step waits for missing reports once it is certain that every stage has committed it.
    """

    def __init__(self, *, lead_steps: int, patience_s: float) -> None:
        self._eras: dict[int, tuple[int, int]] = {}
        """Era (training generation) -> (the era's first step, number of stages), from plans."""
        self._lead_steps = lead_steps
        self._patience_s = patience_s
        self._reached: dict[int, _Key] = {}
        """Stage -> (era, number) of the newest step that the stage's members have reported."""
        self._open: dict[_Key, _Open] = {}
        self._newest: _Key = (0, -1)
        self._heard: set[tuple[_Key, int]] = set()
        self.microbatches = 0
        """Microbatches in the commits of all groups, summed. One that a group added twice counts twice."""
        self.duplicates = 0
        self.given_up = 0
        self.dissenting = 0

    def obey(self, era: int, *, begins: int, num_stages: int) -> None:
        """Note the era (training generation) of a plan. A child reports a plan before it commits steps under it.

        Args: begins: the era's first step.
        """
        self._eras[era] = begins, num_stages

    def commit(self, report: CommitReport, now_s: float) -> None:
        """Take the report of a commit. All members of a group report each commit; the first report counts."""
        key = report.era, report.step
        if (key, report.stage) in self._heard:
            return
        self._heard.add((key, report.stage))
        self.microbatches += report.microbatches + report.duplicates
        self.duplicates += report.duplicates
        self.given_up += report.given_up
        self.dissenting += report.dissenting
        if report.stage >= self._stages_of(key):
            return  # the group of an expert: steps wait only for stages
        self._reached[report.stage] = max(key, self._reached.get(report.stage, key))
        entry = self._entry(key, now_s)
        if entry is not None:
            entry.reports[report.stage] = report
            entry.at_s = now_s
        for older, waiting in self._open.items():
            if waiting.passed_s is None and self._is_passed(older, waiting):
                waiting.passed_s = now_s

    def tell(self, told: StepDone, now_s: float) -> None:
        """Take the coordinator's report that a step is committed."""
        entry = self._entry((told.era, told.step), now_s)
        if entry is not None and entry.told is None:
            entry.told = told
            if told.loss is not None and entry.passed_s is None:
                entry.passed_s = now_s

    def due(self, now_s: float, *, flush: bool = False) -> list[tuple[float, StepDone]]:
        """Release steps that are complete or overdue, in order. Return (time of the last report, step) of each. If a
        stage's report is missing, the step is as the coordinator reported it.

        Args: flush: no more reports will come, so also return steps that have only the last stage's report, which has
        the loss, or only the coordinator's.
        """
        steps = []
        for key in sorted(self._open):
            entry = self._open[key]
            waited = entry.passed_s is not None and now_s >= entry.passed_s + self._patience_s
            num_stages = self._stages_of(key)
            complete = self._follows(key) and len(entry.reports) == num_stages
            if not (waited or complete or (flush and (entry.told or num_stages - 1 in entry.reports))):
                if flush:
                    continue
                break
            del self._open[key]
            self._newest = key
            steps.append((entry.at_s, self._step(key, entry)))
        return steps

    def _stages_of(self, key: _Key) -> int:
        return self._eras.get(key[0], (0, 0))[1]

    def _follows(self, key: _Key) -> bool:
        """True if the step is the one after the newest released step, in its era or as the first of a later era."""
        era, step = self._newest
        begins, _ = self._eras.get(key[0], (0, 0))
        return key[1] == step + 1 and (key[0] == era or (key[0] > era and key[1] == begins))

    def _is_passed(self, key: _Key, entry: _Open) -> bool:
        """True if every stage has committed the step by now, even those that have not reported it."""
        missing = (stage for stage in range(self._stages_of(key)) if stage not in entry.reports)
        led = (key[0], key[1] + self._lead_steps) <= max(self._reached.values())
        return led or all(key < self._reached.get(stage, key) for stage in missing)

    def _entry(self, key: _Key, now_s: float) -> _Open | None:
        if key <= self._newest:
            return None  # the step was released without this report
        return self._open.setdefault(key, _Open(at_s=now_s))

    def _step(self, key: _Key, entry: _Open) -> StepDone:
        reports, told = list(entry.reports.values()), entry.told
        if told is not None and len(reports) < self._stages_of(key):
            return told
        last = entry.reports.get(self._stages_of(key) - 1)
        return StepDone(
            step=key[1],
            era=key[0],
            loss=last.loss if last else None,
            staleness_mean=sum(report.staleness_steps_mean for report in reports) / max(1, len(reports)),
            duplicates=sum(report.duplicates for report in reports),
            given_up=sum(report.given_up for report in reports),
            dissenting=sum(report.dissenting for report in reports),
        )
