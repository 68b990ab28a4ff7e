"""Shows a demo's events, which its children report, on the terminal and in `--json`; makes the summary."""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec
from rich.console import Console

from shoal.deploy.base.disk_error import or_say
from shoal.deploy.base.words import short
from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.demo.pace import gaps_s
from shoal.deploy.demo.step_book import StepBook
from shoal.deploy.demo.summary import DemoRecord, DemoStepLine, DemoSummary, FaultLine
from shoal.deploy.record.report import (
    Committed,
    Contribution,
    Joined,
    Left,
    Note,
    Obeys,
    Phase,
    Ready,
    Report,
    Status,
    StepDone,
    Validated,
)
from shoal.deploy.terminal.presenter import Presenter
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import SwarmStatus
from shoal.protocol.spec import RunSpec

if TYPE_CHECKING:
    from shoal.deploy.dashboard.server import Dashboard

_RECENT_STEPS = 17
"""Tokens/s are computed from this many of the newest steps."""
_STEP_PATIENCE_S = 8.0
"""Seconds to wait for a step's last reports: the group of a killed member reports its commit five seconds late."""
_STATUS_FRESH_S = 2.5
_PLAN_SETTLED_S = 1.0
"""A peer to kill is chosen only once the plan is this many seconds old: a second plan often follows the first at once
and moves layers."""


class Chronicle:
    """Takes reports and faults, and prints, draws and records them. Args: title: the panel's title."""

    def __init__(self, spec: RunSpec, console: Console, *, title: str) -> None:
        self.started_s = time.monotonic()
        self.title = title
        self.record = DemoRecord()
        self._presenter = Presenter(RunFacts.of(spec), title=title, console=console, shows_mine=False)
        self._spec = spec
        self._book = StepBook(lead_steps=spec.training.s_max + 2, patience_s=_STEP_PATIENCE_S)
        self._plan: Obeys | None = None
        self._status: SwarmStatus | None = None
        self._status_at_s = -_STATUS_FRESH_S
        self._plan_at_s = -_PLAN_SETTLED_S
        self._validation: tuple[int, float] | None = None
        """(version, loss) of the newest validation."""
        self._validation_told = -1
        self._num_here = 0
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._json: IO[bytes] | None = None
        self._dashboard: Dashboard | None = None

    def show_on(self, dashboard: "Dashboard | None") -> None:
        """Pass all reports to the dashboard too, from now on."""
        self._dashboard = dashboard
        if dashboard is not None:
            self._presenter.say(dashboard.announcement)

    def doing(self, what: str) -> None:
        """Show what the demo does before or after training."""
        self._presenter.doing = what

    @contextlib.contextmanager
    def kept(self, json_path: Path | None) -> Iterator[None]:
        """Draw the panel and write JSON lines inside the context. Raises: LocalError: the file cannot be written."""
        with contextlib.ExitStack() as stack:
            if json_path is not None:
                with or_say(f"cannot write {json_path}"):
                    self._json = stack.enter_context(json_path.open("wb"))
            stack.callback(self._presenter.close)
            self._presenter.draw()
            yield

    @property
    def status(self) -> SwarmStatus | None:
        """The swarm's status, to choose a victim; None if the status is too old, if a peer already obeys a newer plan,
        or if the plan is so new that another plan may soon replace it."""
        status, plan, now_s = self._status, self._plan, time.monotonic()
        if status is None or now_s >= self._status_at_s + _STATUS_FRESH_S or now_s < self._plan_at_s + _PLAN_SETTLED_S:
            return None
        if plan is not None and (status.term, status.plan_sequence) < (plan.term, plan.sequence):
            return None
        return status

    # --- what comes ---

    def take(self, name: str, report: Report) -> None:
        now_s = time.monotonic()
        if not isinstance(report, Committed | StepDone | Note):
            self._show(report)
        match report:
            case Ready():
                self.record.run = report.run
                self._presenter.say("a peer on another terminal or machine joins with:")
                self._presenter.say(f"shoal join {report.invite}")
            case Joined():
                self._take_arrival(report)
            case Obeys():
                self._take_plan(report, now_s)
            case Committed():
                self._book.commit(report.report, now_s)
                self.tell_steps()
            case StepDone():
                self._book.tell(report, now_s)
                self.tell_steps()
            case Validated():
                self.record.validate(report)
                self._validation = report.report.step, report.report.loss
            case Status():
                self._take_status(report.status, now_s)
            case Note():
                self.note(f"{name}: {report.text}")
            case Left():
                self.record.finished |= report.finished

    def take_fault(self, fault: FaultLine) -> None:
        now_s = time.monotonic()
        fault = msgspec.structs.replace(fault, seconds=round(now_s - self.started_s, 3))
        self.record.faults.append((now_s, fault))
        self._write_json(fault)
        stage = "" if fault.stage is None else f", stage {fault.stage}"
        stage += "" if fault.expert is None else f", which holds expert {fault.expert}, the busiest"
        self.note(f"chaos at {fault.seconds:.1f} s: {fault.kind.replace('_', ' ')} {fault.peer}{stage}")

    def take_left_behind(self, name: str, processes: Sequence[int]) -> None:
        self.record.left_behind += len(processes)
        self.note(f"{name} left processes behind: {', '.join(map(str, processes))}")

    def take_failure(self, name: str, what: str) -> None:
        """Count and report a peer that failed by itself."""
        self.record.failed += 1
        self.note(f"{name} {what}")

    # --- what is told ---

    def note(self, text: str) -> None:
        self._presenter.note(text)
        if self._dashboard is not None:
            self._dashboard.take(Note(text=text))

    def tell_steps(self, *, flush: bool = False) -> None:
        """Show and record the steps that have all reports or have waited too long for them; with `flush` all steps."""
        for at_s, step in self._book.due(time.monotonic(), flush=flush):
            self._tell_step(at_s, step)

    def sum_up(
        self, *, peers: int, chaos: bool, watched_until_s: float, snapshot: str, sample: str, folder: Path
    ) -> DemoSummary:
        """Make the summary. Args: watched_until_s: when the demo stopped waiting for steps, in `time.monotonic()`."""
        record, book, spec = self.record, self._book, self._spec
        times_s, gaps = record.step_times_s, gaps_s(record.step_times_s)
        summary = DemoSummary(
            steps=spec.training.steps if record.finished else record.steps_seen,
            finished=record.finished,
            loss_first=record.first.loss if record.first else None,
            loss_last=record.loss_last,
            val_loss=record.val_loss,
            tokens_per_s=round(len(gaps) * spec.tokens_per_step / sum(gaps), 1) if any(gaps) else 0.0,
            staleness_mean=record.staleness_sum / len(times_s) if times_s else 0.0,
            coordinator_terms=len(record.terms),
            peers=peers,
            rollbacks=record.rollbacks,
            duplicates=book.duplicates,
            duplicates_share=book.duplicates / book.microbatches if book.microbatches else 0.0,
            given_up=book.given_up,
            dissenting=book.dissenting,
            stall_s_max=round(record.stall_s_max(watched_until_s), 3),
            step_s_median=round(statistics.median(gaps), 3) if gaps else None,
            validations=dict(sorted(record.validations.items())),
            failed=record.failed,
            chaos=record.chaos() if chaos else None,
            experts=record.experts.figures,
            seconds=round(time.monotonic() - self.started_s, 1),
            first_step_s=round(times_s[0] - self.started_s, 1) if times_s else None,
            rss_mb_max=dict(record.rss_mb_max),
            run=record.run,
            snapshot=snapshot,
            sample=sample,
            folder=str(folder),
        )
        self._write_json(summary)
        return summary

    # --- inside ---

    def _show(self, report: Report) -> None:
        if self._dashboard is not None:
            self._dashboard.take(report)
        if not isinstance(report, Contribution | Phase):  # the panel does not show single peers' contributions
            self._presenter.take(report)

    def _take_arrival(self, joined: Joined) -> None:
        self._num_here += 1
        if self._status is None:
            self._presenter.doing = f"waiting for the other peers: {self._num_here} here so far"
        if not self._presenter.redraws:
            self._presenter.say(f"{joined.name} has joined ({short(joined.peer)})")

    def _take_plan(self, plan: Obeys, now_s: float) -> None:
        """Note a plan if it is newer than the last: every peer reports each plan, a restarted peer first an old one."""
        self._book.obey(plan.era, begins=plan.restored, num_stages=plan.stages)
        before, order = self._plan, (plan.term, plan.sequence)
        if before is not None and order <= (before.term, before.sequence):
            return
        self._plan, self._plan_at_s = plan, now_s
        self.record.terms.add(plan.term)
        if self._presenter.redraws:
            return  # the panel shows plans itself
        if before is not None and before.term != plan.term:
            self._presenter.say(f"term {plan.term}: the coordinator's role moved to {short(plan.coordinator)}")
        self._presenter.say(f"plan {plan.sequence}: {plan.reason}")

    def _take_status(self, status: SwarmStatus, now_s: float) -> None:
        """Take a coordinator's status. Ignore the status of an older plan: a suspended former coordinator sent it."""
        before, order = self._status, (status.term, status.plan_sequence)
        if before is None or order >= (before.term, before.plan_sequence):
            self.record.see(status)
            self._status, self._status_at_s = status, now_s
            if before is None:
                self._presenter.doing = ""
            plan = self._plan
            # A new coordinator does not know all peers of its plan yet, so its first statuses lack some.
            whole = plan is not None and plan.sequence == status.plan_sequence and len(status.peers) >= plan.peers
            if whole and self.record.experts.see(status):
                self._presenter.tell_experts()

    def _tell_step(self, at_s: float, step: StepDone) -> None:
        validation, plan = self._validation, self._plan
        shown = msgspec.structs.replace(
            step,
            validation_loss=validation[1] if validation else None,
            validation_step=validation[0] if validation else None,
            tokens_per_s=self._recent_tokens_per_s(at_s),
            term=plan.term if plan else 0,
            peers=plan.peers if plan else 0,
            coordinator=plan.coordinator if plan else PeerID(""),
        )
        news = validation is not None and validation[0] != self._validation_told
        self._validation_told = validation[0] if validation else -1
        self.record.add(shown, at_s)
        self._show(shown)
        line = {name: getattr(shown, name) for name in DemoStepLine.__struct_fields__ if hasattr(shown, name)} | {
            "val_loss": shown.validation_loss if news else None,
            "tokens_per_s": round(shown.tokens_per_s, 1),
            "seconds": round(at_s - self.started_s, 3),
        }
        self._write_json(DemoStepLine(**line))
        self._presenter.tell_step(shown)

    def _recent_tokens_per_s(self, at_s: float) -> float:
        self._recent.append(at_s)
        tokens = (len(self._recent) - 1) * self._spec.tokens_per_step
        elapsed_s = at_s - self._recent[0]
        return tokens / elapsed_s if elapsed_s > 0 else 0.0

    def _write_json(self, line: msgspec.Struct) -> None:
        if self._json is not None:
            self._json.write(msgspec.json.encode(line) + b"\n")
            self._json.flush()
