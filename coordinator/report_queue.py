"""Keeps a peer's reports until a coordinator has them. Pure."""

from collections import deque

import msgspec

from shoal.protocol.limits import REPORTS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import CommitReport, Heartbeat, ValidationReport

WAITING_MAX = 4096
"""Reports kept while there is no coordinator: an hour of one a second. Beyond that the oldest are dropped."""

Waiting = tuple[float, CommitReport | ValidationReport]
"""(the time since which a report waits, the report)."""


class ReportQueue:
    """A queue that sends the oldest reports first, a few a heartbeat, and keeps each until a coordinator has it."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque(maxlen=WAITING_MAX)
        self._sent: tuple[Waiting, ...] = ()

    def enclose(self, heartbeat: Heartbeat, now_s: float) -> tuple[Heartbeat, tuple[Waiting, ...]]:
        """Queue `heartbeat`'s reports and replace them by the oldest ones; none while others are in flight. A commit
        contains its age.
        Returns: (the heartbeat to send, the argument for `arrived` or `failed`)."""
        known = [report for _, report in self._waiting]
        new: tuple[CommitReport | ValidationReport, ...] = (*heartbeat.commits, *heartbeat.validations)
        self._waiting.extend((now_s, report) for report in new if report not in known)
        sent: tuple[Waiting, ...] = ()
        if not self._sent:
            sent = self._sent = tuple(self._waiting)[:REPORTS_PER_HEARTBEAT_MAX]
        commits = tuple(
            msgspec.structs.replace(report, age_s=report.age_s + max(0.0, now_s - since_s))
            for since_s, report in sent
            if isinstance(report, CommitReport)
        )
        validations = tuple(report for _, report in sent if isinstance(report, ValidationReport))
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
