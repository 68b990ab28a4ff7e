"""Keeps a peer's reports until a coordinator has them. Pure."""

from collections import deque
from dataclasses import dataclass

import msgspec

from shoal.protocol.limits import REPORTS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import CommitReport, Heartbeat, ValidationReport

WAITING_MAX = 4096
"""How many reports are kept while nobody coordinates: an hour of one a second. Beyond that the oldest are forgotten."""

Report = CommitReport | ValidationReport


@dataclass(frozen=True, slots=True)
class Waiting:
    """A report, as it was when it came, and when it came."""

    report: Report
    since_s: float

    def now(self, now_s: float) -> Report:
        """The report as it is to be sent: a commit is sent with its age."""
        if not isinstance(self.report, CommitReport):
            return self.report
        return msgspec.structs.replace(self.report, age_s=self.report.age_s + max(0.0, now_s - self.since_s))


class ReportQueue:
    """Reports leave oldest first, a few a heartbeat, and stay here until a coordinator has answered a heartbeat with
    them."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque(maxlen=WAITING_MAX)
        self._sent: tuple[Waiting, ...] = ()

    def __len__(self) -> int:
        return len(self._waiting)

    def enclose(self, heartbeat: Heartbeat, now_s: float) -> tuple[Heartbeat, tuple[Waiting, ...]]:
        """Take in `heartbeat`'s reports and give it the oldest ones instead.

        Returns: (the heartbeat to send, what to call `arrived` or `failed` with). While one heartbeat with reports is
            under way the next goes without.
        """
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
        """A coordinator has these reports."""
        for waiting in sent:
            if self._waiting and self._waiting[0] == waiting:  # else the full queue has forgotten it
                self._waiting.popleft()
        self.failed(sent)

    def failed(self, sent: tuple[Waiting, ...]) -> None:
        """Nobody says that a coordinator has these reports: they are sent again."""
        if sent and sent == self._sent:
            self._sent = ()
