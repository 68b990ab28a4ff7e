"""Reports wait here until a coordinator has them. Pure."""

from collections import deque

import msgspec

from shoal.protocol.limits import REPORTS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import CommitReport, Heartbeat, ValidationReport

WAITING_MAX = 4096
"""Reports kept while nobody coordinates: hours at a step a second. Beyond, the oldest are forgotten."""

Report = CommitReport | ValidationReport


class ReportOutbox:
    """Reports leave oldest first, a few a heartbeat, and stay until a coordinator has answered one that had them."""

    def __init__(self) -> None:
        self._waiting: deque[Report] = deque(maxlen=WAITING_MAX)
        self._sent: tuple[Report, ...] = ()

    def __len__(self) -> int:
        return len(self._waiting)

    def enclose(self, heartbeat: Heartbeat) -> tuple[Heartbeat, tuple[Report, ...]]:
        """Take `heartbeat`'s reports in and give it the oldest instead.

        Returns: (the heartbeat to send, what to call `arrived` or `failed` with). While one heartbeat with reports is
        under way the next goes without.
        """
        new: tuple[Report, ...] = (*heartbeat.commits, *heartbeat.validations)
        self._waiting.extend(report for report in new if report not in self._waiting)
        reports: tuple[Report, ...] = ()
        if not self._sent:
            reports = self._sent = tuple(self._waiting)[:REPORTS_PER_HEARTBEAT_MAX]
        commits = tuple(r for r in reports if isinstance(r, CommitReport))
        validations = tuple(r for r in reports if isinstance(r, ValidationReport))
        return msgspec.structs.replace(heartbeat, commits=commits, validations=validations), reports

    def arrived(self, reports: tuple[Report, ...]) -> None:
        """A coordinator has them."""
        for report in reports:
            if self._waiting and self._waiting[0] == report:  # else the full queue has forgotten it
                self._waiting.popleft()
        self.failed(reports)

    def failed(self, reports: tuple[Report, ...]) -> None:
        """Nobody says that a coordinator has them: they go again."""
        if reports and reports == self._sent:
            self._sent = ()
