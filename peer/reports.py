"""A peer's reports of commits and validations, kept until the coordinator has them."""

from collections import deque
from collections.abc import Callable

import msgspec

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.limits import REPORTS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import CommitReport, ValidationReport
from shoal.protocol.ports import Clock


class Reports:
    """The reports of one peer. Args: on_commit: receives every commit of its groups, even if another member reports."""

    def __init__(
        self,
        endpoint: Endpoint,
        clock: Clock,
        *,
        on_commit: Callable[[CommitReport], None] | None,
        on_validation: Callable[[ValidationReport], None] | None,
    ) -> None:
        self._endpoint, self._clock = endpoint, clock
        self._on_commit = on_commit
        self._on_validation = on_validation
        self._commits: list[tuple[CommitReport, float]] = []
        """(report, time of the commit)."""
        self.validations: deque[ValidationReport] = deque(maxlen=1)

    def take_commits(self) -> tuple[CommitReport, ...]:
        """Hand over as many as a heartbeat carries, oldest first; the caller must deliver them."""
        taken, self._commits = (
            self._commits[:REPORTS_PER_HEARTBEAT_MAX],
            self._commits[REPORTS_PER_HEARTBEAT_MAX:],
        )
        now_s = self._clock.now_s()
        return tuple(msgspec.structs.replace(report, age_s=now_s - at_s) for report, at_s in taken)

    def committed(self, report: CommitReport) -> None:
        """Note a commit that we report."""
        report = msgspec.structs.replace(report, era=self._endpoint.era)
        self._commits.append((report, self._clock.now_s()))
        self.witnessed(report)

    def witnessed(self, report: CommitReport) -> None:
        """Note a commit that another member reports."""
        if self._on_commit:
            self._on_commit(msgspec.structs.replace(report, era=self._endpoint.era))

    def validated(self, report: ValidationReport) -> None:
        report = msgspec.structs.replace(report, era=self._endpoint.era)
        self.validations.append(report)
        if self._on_validation:
            self._on_validation(report)
