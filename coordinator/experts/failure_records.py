"""Records how long each peer was seen and how often it failed, and derives its probability of failure. Pure.

The coordinator adds up the time between a peer's heartbeats. If its plan leaves out a peer that neither drained nor
said good-bye, that is a failure. When the role is handed over, the records go to the next coordinator. After a crash,
the successor goes on with the records of its own last term as coordinator, if any, or with the prior (an assumed rate).

A record belongs to an identity, across restarts of the peer's process. After `SEEN_S_MAX` older failures count less and
less, so a machine that moved to a better place recovers."""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PEER_ID_CHARS_MAX
from shoal.protocol.messages import FailureRecord

PRIOR_S = 6 * 3600.0
"""An unknown node is assumed to fail once in this time: a volunteer's evening."""
HORIZON_S = 600.0
"""The least time that a layout, or a placement of experts, is expected to last: volunteers come and go."""
SEEN_S_MAX = 7 * 24 * 3600.0
"""The longest time seen that a record contains: a week, with the nights and the weekend of a volunteer's machine."""
FAILURES_MAX = 256.0
"""A record has at most this many failures, one in 40 minutes for a week: more mean a useless peer or a false count."""
GAP_S_MAX = 60.0
"""A peer counts as seen between two heartbeats if they are at most this far apart; else the peer or we were away."""
RECORDS_MAX = 4096
HANDED_OVER_MAX = 512
"""The most records handed over, 75 bytes each: 38 KB of a message that also has a plan, adverts and loads."""


@dataclass(slots=True)
class _Past:
    failures: float = 0.0
    seen_s: float = 0.0
    heard_s: float | None = None
    """The time of the peer's last heartbeat, by our clock; None: none since its last failure or a hand-over to us."""


@dataclass(slots=True)
class FailureRecords:
    _pasts: OrderedDict[PeerID, _Past] = field(default_factory=OrderedDict)
    """{peer: its record}. The first is forgotten first: peers that we never heard, then the one silent for longest."""

    def heard(self, peer: PeerID, now_s: float) -> None:
        past = self._past(peer)
        gap_s = now_s - past.heard_s if past.heard_s is not None else 0.0
        past.heard_s = now_s
        if not 0.0 < gap_s <= GAP_S_MAX:
            return
        past.seen_s += gap_s
        if past.seen_s > SEEN_S_MAX:
            past.failures *= SEEN_S_MAX / past.seen_s
            past.seen_s = SEEN_S_MAX

    def lost(self, peer: PeerID) -> None:
        """Record a failure of `peer`: a plan left the peer out, although it had neither drained nor said good-bye."""
        past = self._past(peer)
        past.failures, past.heard_s = min(FAILURES_MAX, past.failures + 1.0), None

    def probabilities(self, peers: Sequence[PeerID]) -> list[float]:
        """Return for each of `peers` the probability that it fails within `HORIZON_S`: by its own record if that is
        long, otherwise mostly by the mean over all peers of this swarm, lost ones included."""
        failures = sum(past.failures for past in self._pasts.values())
        seen_s = sum(past.seen_s for past in self._pasts.values())
        prior_s = (seen_s + PRIOR_S) / (failures + 1.0)
        pasts = [self._pasts.get(peer, _Past()) for peer in peers]
        return [failure_probability(past.failures, past.seen_s, prior_s=prior_s) for past in pasts]

    def tell(self, members: Collection[PeerID]) -> tuple[FailureRecord, ...]:
        """Return up to `HANDED_OVER_MAX` records for the next coordinator: the members', then the last heard peers'."""
        order = dict.fromkeys([peer for peer in members if peer in self._pasts] + [*reversed(self._pasts)])
        known = ((peer, self._pasts[peer]) for peer in islice(order, HANDED_OVER_MAX))
        return tuple(FailureRecord(peer, past.failures, past.seen_s) for peer, past in known)

    def take_over(self, records: Iterable[FailureRecord]) -> None:
        """Take over the previous coordinator's records. Our own record of a peer stays if we watched it for longer. The
        figures of two records are never added up, so a record received twice counts once."""
        for past in self._pasts.values():
            past.heard_s = None  # the received records include the time since that heartbeat
        for record in islice(records, HANDED_OVER_MAX):
            figures = record.failures, record.seen_s
            if len(record.peer) > PEER_ID_CHARS_MAX or not all(0.0 <= figure < math.inf for figure in figures):
                continue
            seen_s = min(record.seen_s, SEEN_S_MAX)
            known = self._pasts.get(record.peer)
            if known is None or known.seen_s <= seen_s:
                self._pasts[record.peer] = _Past(min(record.failures, FAILURES_MAX), seen_s)
            if known is None:
                self._pasts.move_to_end(record.peer, last=False)  # unknown names are forgotten first
        self._forget()

    def _past(self, peer: PeerID) -> _Past:
        past = self._pasts.setdefault(peer, _Past())
        self._pasts.move_to_end(peer)
        self._forget()
        return past

    def _forget(self) -> None:
        while len(self._pasts) > RECORDS_MAX:
            self._pasts.popitem(last=False)


def failure_probability(num_failures: float, seen_s: float, *, prior_s: float = PRIOR_S) -> float:
    """Return the probability of a failure within `HORIZON_S`, if failures come at a constant rate. The prior of the
    rate is a gamma distribution worth one failure in `prior_s` seconds. After a day or two the peer's own record
    dominates.
    Args: num_failures: the peer's failures while it was seen for `seen_s` seconds. prior_s: the mean seconds between
    failures of similar nodes."""
    return -math.expm1(-(num_failures + 1.0) / (seen_s + prior_s) * HORIZON_S)


def rounded(probability: float) -> float:
    """Round to a power of two, so that noise does not move experts, and similar nodes can exchange their experts."""
    return math.ldexp(1.0, round(math.log2(min(1.0, max(2.0**-20, probability)))))
