"""A peer's reports of commits, validations and unsound members: for the coordinator, and for an observer here."""

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
    """Receives every commit of the peer's groups, even if another member reports it to the coordinator."""
    on_validation: Callable[[ValidationReport], None] | None = None
    on_state: Callable[[int, StageState], None] | None = None
    """Receives (group, state) after each step or load of one of the peer's states."""
    on_end: Callable[[], None] | None = None
    """Called when a group of ours reaches the end of the layout: the run stands still until the coordinator knows."""
    say: Callable[[str], None] = logger.info
    """Tells the person at this machine a sentence."""


class Reports:
    """The reports of one peer, kept until the coordinator has them."""

    def __init__(self, endpoint: Endpoint, clock: Clock, plans: Plans, watcher: Watcher) -> None:
        self._endpoint, self._clock, self._plans, self._watcher = endpoint, clock, plans, watcher
        self._commits: list[tuple[CommitReport, float]] = []
        """(report, time of the commit)."""
        self.validations: deque[ValidationReport] = deque(maxlen=1)
        self._unsound: set[PeerID] = set()

    def take_commits(self) -> tuple[CommitReport, ...]:
        """Hand over as many as a heartbeat carries, oldest first; the caller must deliver them."""
        taken, self._commits = (
            self._commits[:REPORTS_PER_HEARTBEAT_MAX],
            self._commits[REPORTS_PER_HEARTBEAT_MAX:],
        )
        now_s = self._clock.now_s()
        return tuple(msgspec.structs.replace(report, age_s=now_s - at_s) for report, at_s in taken)

    @property
    def unsound(self) -> tuple[PeerID, ...]:
        """Members by the plan that are of no use to a group of ours."""
        plan = self._plans.newest
        return tuple(sorted(filter(plan.has, self._unsound)))[:UNSOUND_MAX] if plan is not None else ()

    # --- told by our parts in groups ---

    def committed(self, report: CommitReport) -> None:
        """Note a commit that we report."""
        of_era = msgspec.structs.replace(report, era=self._endpoint.era)
        self._commits.append((of_era, self._clock.now_s()))
        self.witnessed(report)

    def witnessed(self, report: CommitReport) -> None:
        """Note a commit that another member reports."""
        if self._watcher.on_commit:
            self._watcher.on_commit(msgspec.structs.replace(report, era=self._endpoint.era))
        plan = self._plans.newest
        if plan is not None and plan.cutover_version == report.step + 1:
            self.hurry()

    def hurry(self) -> None:
        """Ask for a heartbeat soon: the coordinator waits for what we have to say."""
        if self._watcher.on_end:
            self._watcher.on_end()

    def validated(self, report: ValidationReport) -> None:
        report = msgspec.structs.replace(report, era=self._endpoint.era)
        self.validations.append(report)
        if self._watcher.on_validation:
            self._watcher.on_validation(report)

    def accuse(self, peer: PeerID) -> None:
        """Note a peer that has sent numbers into a round that no gradient has, or that restarts without end."""
        self._unsound.add(peer)

    def has_state(self, group: int, state: StageState) -> None:
        """Note that our part in `group` has stepped to `state` or loaded it."""
        if self._watcher.on_state:
            self._watcher.on_state(group, state)

    def say(self, sentence: str) -> None:
        """Tell the person at this machine a sentence."""
        self._watcher.say(sentence)
