"""Keeps a peer's reports until a coordinator has them. Pure."""

from collections import deque
from dataclasses import dataclass

import msgspec

from shoal.protocol.limits import REPORTS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import CommitReport, Heartbeat, ValidationReport

WAITING_MAX = 4096
"""Reports kept while there is no coordinator: an hour of one a second. Beyond that the oldest are dropped."""

Report = CommitReport | ValidationReport


@dataclass(frozen=True, slots=True)
class Waiting:
    report: Report
    since_s: float

    def now(self, now_s: float) -> Report:
        """Return the report to send; a commit contains its age."""
        if not isinstance(self.report, CommitReport):
            return self.report
        return msgspec.structs.replace(self.report, age_s=self.report.age_s + max(0.0, now_s - self.since_s))


class ReportQueue:
    """A queue that sends the oldest reports first, a few a heartbeat, and keeps each until a coordinator has it."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque(maxlen=WAITING_MAX)
        self._sent: tuple[Waiting, ...] = ()

    def __len__(self) -> int:
        return len(self._waiting)

    def enclose(self, heartbeat: Heartbeat, now_s: float) -> tuple[Heartbeat, tuple[Waiting, ...]]:
        """Queue `heartbeat`'s reports and replace them by the oldest ones; none while others are in flight.
        Returns: (the heartbeat to send, the argument for `arrived` or `failed`)."""
        known = [waiting.report for waiting in self._waiting]
        new: tuple[Report, ...] = (*heartbeat.commits, *heartbeat.validations)
        self._waiting.extend(Waiting(report, now_s) for report in new if report not in known)
        sent: tuple[Waiting, ...] = ()
        if not self._sent:
            sent = self._sent = tuple(self._waiting)[:REPORTS_PER_HEARTBEAT_MAX]
        reports = [waiting.now(now_s) for waiting in sent]
        commits = tuple(r for r in reports if isinstance(r, CommitReport))
        validations = tuple(r for r in reports if isinstance(r, ValidationReport))
        return msgspec.structs.replace(heartbeat, commits=commits, validations=validations), sent

    def arrived(self, sent: tuple[Waiting, ...]) -> None:
        """Drop these reports, because a coordinator has them."""
        for waiting in sent:
            if self._waiting and self._waiting[0] == waiting:  # otherwise the full queue has dropped it
                self._waiting.popleft()
        self.failed(sent)

    def failed(self, sent: tuple[Waiting, ...]) -> None:
        """Send these reports again: no coordinator has confirmed them."""
        if sent and sent == self._sent:
            self._sent = ()
