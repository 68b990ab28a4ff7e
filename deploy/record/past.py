"""Remembers the commits of a peer's groups, for peers that keep a record and were absent.

A coordinator hears of all commits of its term, but that knowledge is lost when it is killed. Every member of a group
knows the group's commits. So a recording peer asks one member of each group: a step is forgotten only if all members of
a group are gone.
"""

from bisect import bisect_left, insort

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import HISTORY_COMMITS_MAX, HISTORY_PER_REPLY_MAX
from shoal.protocol.messages import CommitReport, History, HistoryRequest, PastCommit, PastValidation, ValidationReport
from shoal.protocol.ports import Clock

_VALIDATIONS_MAX = 256


class Past:
    """The newest commits of this peer's groups, and the validations that it led."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._commit_keys: list[tuple[int, int, int]] = []
        """Sorted (era, step, group)."""
        self._commits: dict[tuple[int, int, int], tuple[float, CommitReport]] = {}
        self._validation_keys: list[tuple[int, int]] = []
        self._validations: dict[tuple[int, int], tuple[float, ValidationReport]] = {}

    def committed(self, report: CommitReport) -> None:
        """Remember a commit of a group of this peer. A repeated report, from another member, counts once."""
        key = report.era, report.step, report.stage
        if key in self._commits:
            return
        self._commits[key] = self._clock.now_s(), report
        insort(self._commit_keys, key)
        if len(self._commit_keys) > HISTORY_COMMITS_MAX:
            del self._commits[self._commit_keys.pop(0)]

    def validated(self, report: ValidationReport) -> None:
        key = report.era, report.step
        if key in self._validations:
            return
        self._validations[key] = self._clock.now_s(), report
        insort(self._validation_keys, key)
        if len(self._validation_keys) > _VALIDATIONS_MAX:
            del self._validations[self._validation_keys.pop(0)]

    def since(self, request: HistoryRequest) -> History:
        """Return the oldest of the requested commits and validations."""
        now_s = self._clock.now_s()
        first = bisect_left(self._commit_keys, (*request.commits_from, -1))
        commits = (self._commits[key] for key in self._commit_keys[first : first + HISTORY_PER_REPLY_MAX])
        first = bisect_left(self._validation_keys, request.validations_from)
        validations = (self._validations[key] for key in self._validation_keys[first : first + HISTORY_PER_REPLY_MAX])
        return History(
            commits=tuple(PastCommit(round(now_s - at_s, 3), report) for at_s, report in commits),
            validations=tuple(PastValidation(round(now_s - at_s, 3), report) for at_s, report in validations),
        )

    def serve(self, endpoint: Endpoint) -> None:
        """Answer requests of other peers."""

        async def answer(source: PeerID, message: HistoryRequest) -> History:
            return self.since(message)

        endpoint.on(HistoryRequest, answer)
