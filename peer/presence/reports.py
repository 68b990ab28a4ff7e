"""Reports of commits, validations and faulty members, for the coordinator and an observer in this process."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shoal.peer.base.plans import Plans
from shoal.peer.model.state import StageState
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import REPORTS_PER_HEARTBEAT_MAX, UNSOUND_MAX
from shoal.protocol.messages import CommitReport, ValidationReport
from shoal.protocol.ports import Clock

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Callbacks for an observer of a peer's work."""

    on_commit: Callable[[CommitReport], None] | None = None
    """Gets every commit of the peer's groups, even one that another member reports to the coordinator."""
    on_validation: Callable[[ValidationReport], None] | None = None
    on_state: Callable[[int, StageState], None] | None = None
    """Gets (group, state) each time that the peer has made a step or loaded a state."""
    on_end: Callable[[], None] | None = None
    """Called when a heartbeat should go out at once: our group has reached the layout's last version (the run stands
    still until all groups have), or we have signed a state."""
    say: Callable[[str], None] = logger.info
    """Shows a sentence to the person at this machine."""


class Reports:
    """The reports of one peer, kept until the coordinator has them."""

    def __init__(self, endpoint: Endpoint, clock: Clock, plans: Plans, watcher: Watcher) -> None:
        self._endpoint, self._clock, self._plans, self._watcher = endpoint, clock, plans, watcher
        self._commits: list[tuple[CommitReport, float]] = []
        """Reports not yet sent, each as (report, time of the commit)."""
        self.validations: deque[ValidationReport] = deque(maxlen=1)
        self._unsound: set[PeerID] = set()

    def take_commits(self) -> tuple[CommitReport, ...]:
        """Remove and return the oldest commit reports, as many as a heartbeat carries. The caller must deliver them."""
        taken, self._commits = (
            self._commits[:REPORTS_PER_HEARTBEAT_MAX],
            self._commits[REPORTS_PER_HEARTBEAT_MAX:],
        )
        now_s = self._clock.now_s()
        return tuple(msgspec.structs.replace(report, age_s=now_s - at_s) for report, at_s in taken)

    @property
    def unsound(self) -> tuple[PeerID, ...]:
        """Members of the plan that we have recorded as faulty (`accuse`)."""
        plan = self._plans.newest
        return tuple(sorted(filter(plan.has, self._unsound)))[:UNSOUND_MAX] if plan is not None else ()

    # --- told by our parts in groups ---

    def committed(self, report: CommitReport) -> None:
        """Record a commit that we report to the coordinator."""
        of_era = msgspec.structs.replace(report, era=self._endpoint.era)
        self._commits.append((of_era, self._clock.now_s()))
        self.witnessed(report)

    def witnessed(self, report: CommitReport) -> None:
        """Record a commit that another member reports to the coordinator."""
        if self._watcher.on_commit:
            self._watcher.on_commit(msgspec.structs.replace(report, era=self._endpoint.era))
        plan = self._plans.newest
        if plan is not None and plan.cutover_version == report.step + 1:
            self.hurry()

    def hurry(self) -> None:
        """Have a heartbeat sent at once: the coordinator waits for our next report."""
        if self._watcher.on_end:
            self._watcher.on_end()

    def validated(self, report: ValidationReport) -> None:
        report = msgspec.structs.replace(report, era=self._endpoint.era)
        self.validations.append(report)
        if self._watcher.on_validation:
            self._watcher.on_validation(report)

    def accuse(self, peer: PeerID) -> None:
        """Record a faulty peer: it sent numbers in a round that no gradient has, or restarts without end."""
        self._unsound.add(peer)

    def has_state(self, group: int, state: StageState) -> None:
        """Tell the observer that our replica or expert in `group` has stepped to `state` or loaded it."""
        if self._watcher.on_state:
            self._watcher.on_state(group, state)

    def say(self, sentence: str) -> None:
        self._watcher.say(sentence)
