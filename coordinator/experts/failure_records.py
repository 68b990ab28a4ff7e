"""Records of each peer's past: how long it was seen, and how often it was lost. Pure.

Theory of operation. The coordinator hears every peer's heartbeats and adds up the time between them. If a plan of its
own leaves out a peer that neither drained nor said good-bye, that is a failure of the peer's. At a hand-over the
records go to the heir, so they grow along the chain of coordinators. A coordinator that dies hands nothing over: its
heir goes on from what it knew when it last had the role, at worst from nothing, the prior of `failure_rate.py`.

A record is of an identity, whatever becomes of its process. It fades: what is older than `SEEN_S_MAX` counts less and
less, so a machine that was moved to a better place is not condemned for ever.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from shoal.coordinator.experts.failure_rate import PRIOR_FAILURES, PRIOR_S, failure_probability
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PEER_ID_CHARS_MAX
from shoal.protocol.messages import PeerRecord

HORIZON_S = 600.0
"""How long a placement stands if nobody comes or goes before: `expert_groups.LOOK_STEPS` of some ten seconds each."""
SEEN_S_MAX = 7 * 24 * 3600.0
"""A week has the nights and the weekend of a volunteer's machine."""
FAILURES_MAX = 256.0
"""The most failures in a week. Beyond one every forty minutes, figures are of no use, or not true."""
GAP_S_MAX = 60.0
"""The longest time between two heartbeats that counts as seen. In a longer gap the peer was not there, or we did not
listen."""
RECORDS_MAX = 4096
HANDED_OVER_MAX = 512
"""How many records of 75 bytes are handed over: 38 KB of a message that has a plan, adverts and loads in it already."""


@dataclass(slots=True)
class _Past:
    failures: float = 0.0
    seen_s: float = 0.0
    heard_s: float | None = None
    """The time of its last heartbeat, in our clock; None: none has come since the records were handed to us."""


@dataclass(slots=True)
class FailureRecords:
    """The records of all peers."""

    _pasts: OrderedDict[PeerID, _Past] = field(default_factory=OrderedDict)
    """The records; the peer of which nothing was heard for longest is first."""

    def heard(self, peer: PeerID, now_s: float) -> None:
        """A heartbeat of `peer` has come."""
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
        """A plan left `peer` out, and it had said no good-bye."""
        past = self._past(peer)
        past.failures, past.heard_s = min(FAILURES_MAX, past.failures + 1.0), None

    def probability(self, peer: PeerID) -> float:
        """The chance that `peer` fails before experts are placed again."""
        past = self._pasts.get(peer, _Past())
        return failure_probability(past.failures, past.seen_s, horizon_s=HORIZON_S)

    def probabilities(self, peers: Sequence[PeerID]) -> list[float]:
        """The chance of each of `peers` to fail within `HORIZON_S`. A peer of which little is known is taken for one
        like the others of this swarm, those that are gone included."""
        failures = sum(past.failures for past in self._pasts.values())
        seen_s = sum(past.seen_s for past in self._pasts.values())
        prior_s = PRIOR_FAILURES * (seen_s + PRIOR_S) / (failures + PRIOR_FAILURES)
        pasts = [self._pasts.get(peer, _Past()) for peer in peers]
        return [failure_probability(p.failures, p.seen_s, horizon_s=HORIZON_S, prior_s=prior_s) for p in pasts]

    def tell(self, members: Collection[PeerID]) -> tuple[PeerRecord, ...]:
        """The records for the next coordinator: of `members` first, then of the peers that were here last and may come
        back."""
        order = dict.fromkeys(peer for peer in members if peer in self._pasts)
        order |= dict.fromkeys(reversed(self._pasts))
        known = ((peer, self._pasts[peer]) for peer in tuple(order)[:HANDED_OVER_MAX])
        return tuple(PeerRecord(peer, past.failures, past.seen_s) for peer, past in known)

    def take_over(self, records: Iterable[PeerRecord]) -> None:
        """Take over what the coordinator before us knows. If we have watched a peer for longer our own record stays,
        because the other one may come from a coordinator that began anew. No figure adds to another, so a record that
        comes twice counts once."""
        for past in self._pasts.values():
            past.heard_s = None  # the time since then is in what we are told
        for record in tuple(records)[:HANDED_OVER_MAX]:
            figures = record.failures, record.seen_s
            if len(record.peer) > PEER_ID_CHARS_MAX or not all(0.0 <= figure < math.inf for figure in figures):
                continue
            seen_s = min(record.seen_s, SEEN_S_MAX)
            known = self._pasts.get(record.peer)
            if known is None or known.seen_s <= seen_s:
                self._pasts[record.peer] = _Past(min(record.failures, FAILURES_MAX), seen_s)
            if known is None:
                self._pasts.move_to_end(record.peer, last=False)  # names that nobody bears are forgotten first
        self._forget()

    def _past(self, peer: PeerID) -> _Past:
        past = self._pasts.setdefault(peer, _Past())
        self._pasts.move_to_end(peer)
        self._forget()
        return past

    def _forget(self) -> None:
        while len(self._pasts) > RECORDS_MAX:
            self._pasts.popitem(last=False)
