"""Remembers the commits of a peer's groups, for other peers that keep a record and missed them.

A peer that keeps a record asks one member of each group, because every member remembers the group's commits: a commit
is forgotten only if all members of its group are gone. A coordinator knows all commits of its term, but if it is
killed, they are lost.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import HISTORY_COMMITS_MAX, HISTORY_PER_REPLY_MAX
from shoal.protocol.messages import CommitReport, History, HistoryRequest, PastCommit, PastValidation, ValidationReport
from shoal.protocol.ports import Clock

Report = TypeVar("Report", CommitReport, ValidationReport)


class _Kept(Generic[Report]):
    """Keeps one report per key, with its time of arrival. If there are more than `most`, the lowest key is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: list[tuple[int, ...]] = []
        """The keys of the reports, sorted."""
        self._reports: dict[tuple[int, ...], tuple[float, Report]] = {}

    def add(self, key: tuple[int, ...], at_s: float, report: Report) -> None:
        """Keep a report unless `key` has one: all members of a group send the same report of a commit."""
        if key not in self._reports:
            self._reports[key] = at_s, report
            insort(self._keys, key)
            if len(self._keys) > self._most:
                del self._reports[self._keys.pop(0)]

    def oldest(self, first: tuple[int, ...], now_s: float) -> Iterator[tuple[float, Report]]:
        """Yield (seconds since arrival, report) by ascending key from `first` on, as many as fit into a reply."""
        begin = bisect_left(self._keys, first)
        for key in self._keys[begin : begin + HISTORY_PER_REPLY_MAX]:
            at_s, report = self._reports[key]
            yield round(now_s - at_s, 3), report


class Past:
    """Keeps reports of the newest commits of this peer's groups, and of validations that this peer led."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._commits = _Kept[CommitReport](HISTORY_COMMITS_MAX)
        self._validations = _Kept[ValidationReport](256)

    def committed(self, report: CommitReport) -> None:
        self._commits.add((report.era, report.step, report.stage), self._clock.now_s(), report)

    def validated(self, report: ValidationReport) -> None:
        self._validations.add((report.era, report.step), self._clock.now_s(), report)

    def since(self, request: HistoryRequest) -> History:
        """Answer `request`: return kept commits and validations from its two keys on, as many of each as fit."""
        now_s = self._clock.now_s()
        commits = self._commits.oldest((*request.commits_from, -1), now_s)
        validations = self._validations.oldest(request.validations_from, now_s)
        return History(
            commits=tuple(PastCommit(*each) for each in commits),
            validations=tuple(PastValidation(*each) for each in validations),
        )

    def serve(self, endpoint: Endpoint) -> None:
        """Answer other peers' requests for past commits and validations."""

        async def answer(source: PeerID, message: HistoryRequest) -> History:
            return self.since(message)

        endpoint.on(HistoryRequest, answer)
