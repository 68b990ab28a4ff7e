"""Decides when the coordinator transfers the role, and to which heir. Pure."""

from collections.abc import Sequence

import msgspec

from shoal.protocol.identity import PeerID

PATIENCE_HEARTBEATS = 1.25
"""Time for an heir's first plan, plus some round trips: requesting the term and the votes takes two."""
ROUND_TRIPS = 6.0
"""Number of our round trips to the heir that are added; the heir's own to the members may be three times as long."""


def transfer_body(term: int, heir: PeerID) -> bytes:
    """Return what the coordinator of `term` signs when it transfers the role to `heir`."""
    return msgspec.msgpack.encode((term, heir))


class LeadershipTransfer:
    """One leadership term, from its beginning to an heir's first plan."""

    def __init__(self, *, term_s: float, heartbeat_s: float, now_s: float) -> None:
        self._term_s, self._patience_s = term_s, PATIENCE_HEARTBEATS * heartbeat_s
        self._due_s = now_s + term_s
        self._asked: PeerID | None = None
        self._asked_until_s = 0.0
        self._passed_over: set[PeerID] = set()

    def begin(self, now_s: float) -> None:
        """Begin a term."""
        self._due_s = now_s + self._term_s
        self._asked, self._passed_over = None, set()

    def hasten(self, due_s: float) -> None:
        """Move the end of the term forward to `due_s`."""
        self._due_s = min(self._due_s, due_s)

    @property
    def is_waiting(self) -> bool:
        """True if an heir has been asked and still has time for its plan. Meanwhile this peer makes none."""
        return self._asked is not None

    def is_due(self, now_s: float) -> bool:
        """True if an heir should be asked now: the term is over, or the last heir did not take the role."""
        return now_s >= (self._asked_until_s if self._asked is not None else self._due_s)

    def may_wait(self, now_s: float, by_s: float) -> bool:
        """True if the role has been due for less than `by_s`, and no heir has been asked."""
        return self._asked is None and now_s < self._due_s + by_s

    def next(self, order: Sequence[PeerID], now_s: float) -> PeerID | None:
        """Return the next peer of `order` to ask; None: all have been asked, and the role stays for a while."""
        self._asked = next((peer for peer in order if peer not in self._passed_over), None)
        if self._asked is None:
            self._passed_over = set()
            self._due_s = now_s + self._patience_s
        else:
            self._passed_over.add(self._asked)
            self._asked_until_s = now_s + self._patience_s
        return self._asked

    def accepted(self, peer: PeerID, round_trip_s: float, now_s: float) -> None:
        """Record that `peer` takes the role; asking it took `round_trip_s`."""
        if peer == self._asked:
            self._asked_until_s = now_s + self._patience_s + ROUND_TRIPS * round_trip_s

    def declined(self, peer: PeerID, now_s: float) -> None:
        """Record that `peer` will not take the role, or cannot be reached."""
        if peer == self._asked:
            self._asked_until_s = now_s
