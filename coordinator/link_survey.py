"""Chooses the links that peers should measure next. Pure.

The coordinator asks for unknown links (`HeartbeatReply.probe`). Before the first plan each peer measures a few links
with each heartbeat, because the lines are idle. While the run trains, a standby measures one link with each heartbeat
until a search can place it. Every other peer measures one link at a time, in this order: towards an unknown standby, in
use and a minute old, unknown, old. Links in use are measured far more often while the run is slower than the figures
explain. If several links of one peer have become slow, all peers measure their link towards it; otherwise a search
would move its traffic to its other links. Before all that, a peer tries the peers that report it as unreachable, and
now and then those that it cannot reach (`reachability.py`). Among several candidates it takes the network card that has
rested longest.

Peers that name one machine share a network card (`Advert.machine`), and simultaneous probes would see half of it each.
So before the first plan they take turns with links that leave their machine, and a measurement of one of them counts
for all. Between them one link each is measured, to check that they are where they say."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from shoal.coordinator.allocate.measured import LinkBook
from shoal.coordinator.allocate.reachability import RETRY_HEARTBEATS, Reachability
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PROBES_PER_REPLY_MAX
from shoal.protocol.plan import Plan

PARTNERS_FIRST = 8
"""Known links of each peer before the first plan, or before the first search with a standby."""
PARTNERS_ENOUGH = 48
"""A peer with this many known links measures no more: the others are estimated from them."""
APART_HEARTBEATS = 15.0
"""The time between two probes of a peer while the run trains."""
STALE_S = 300.0
IN_USE_STALE_S = 60.0
"""Ages at which a link is measured again: `STALE_S`, or `IN_USE_STALE_S` if the plan uses it."""
DOUBT_HEARTBEATS = 2.0
DOUBT_STALE_S = 10.0
"""The same while the run is slower than the figures explain."""
SUSPECT_STALE_S = 60.0
SUSPECT_PER_HEARTBEAT = 4
"""All links of a peer with a suspected line, older than `SUSPECT_STALE_S`, are measured, this many a heartbeat."""
CONFIRM_HEARTBEATS = 3.0
"""Time for the answer to such a request: two probes and the next heartbeat."""
UNANSWERED_HEARTBEATS = 10.0
"""A requested link without a report is requested again after this time."""


class LinkSurvey:
    def __init__(self, links: LinkBook, heartbeat_s: float, reach: Reachability) -> None:
        self._links = links
        self._reach = reach
        self._heartbeat_s = heartbeat_s
        self._machines: dict[PeerID, str] = {}
        self._asked_s: dict[tuple[PeerID, PeerID], float] = {}
        """(from, towards) -> time of the last request."""
        self._turn = 0
        self._probed: dict[str, int] = {}
        """Peer or network card -> turn of the last request to measure a link towards it."""
        self._asker_s: dict[PeerID, float] = {}
        self._leaving: dict[str, tuple[PeerID, float]] = {}
        """Network card -> the peer last asked to measure links that leave it, and when."""
        self._suspected_s: dict[PeerID, float] = {}
        """Peer -> when its line was first suspected to have become slow."""
        self._rests_s: dict[PeerID, float] = {}
        """Suspected peer -> when the next link towards it may be measured."""

    def forget(self) -> None:
        self._machines, self._asked_s, self._probed, self._asker_s, self._leaving = {}, {}, {}, {}, {}
        self._suspected_s, self._rests_s = {}, {}

    def hear(self, peer: PeerID, machine: str) -> None:
        """Record the machine of `peer`; empty: one of its own."""
        self._machines[peer] = machine

    def is_enough(self, peers: Sequence[PeerID], now_s: float) -> bool:
        """True if a first plan is possible: enough links of each machine are known, or known to be unreachable."""
        known: dict[str, set[PeerID]] = {}
        size = Counter(self._card(peer) for peer in peers)
        for peer in peers:
            known.setdefault(self._card(peer), set()).update(self._found_from(peer, now_s))
        return all(
            sum(self._card(peer) != card for peer in known[card].intersection(peers))
            >= min(PARTNERS_FIRST, len(peers) - size[card])
            for card in known
        )

    def is_falling(self, peers: Collection[PeerID]) -> bool:
        """True if a link between two of these may have become slow, and a few more reports will decide."""
        return self._links.is_falling(peers)

    def is_confirming(self, peers: Collection[PeerID], now_s: float) -> bool:
        """True if one of these may have a slow line and figures of another's link towards it are still expected: not
        measured since, or requested less than `CONFIRM_HEARTBEATS` ago."""
        suspects = self._suspects(now_s).intersection(peers)
        lately_s = now_s - CONFIRM_HEARTBEATS * self._heartbeat_s
        return any(
            self._is_unconfirmed(peer, other, now_s) or self._asked_s.get((peer, other), -math.inf) > lately_s
            for other in suspects
            for peer in peers
            if peer != other
        )

    def _suspects(self, now_s: float) -> set[PeerID]:
        self._suspected_s = {peer: self._suspected_s.get(peer, now_s) for peer in self._links.degraded_links()}
        return set(self._suspected_s)

    def _is_unconfirmed(self, peer: PeerID, other: PeerID, now_s: float) -> bool:
        since_s = max(self._suspected_s[other], now_s - SUSPECT_STALE_S)
        return peer != other and self._asked_s.get((peer, other), -math.inf) < since_s

    def is_known(self, peer: PeerID, others: Collection[PeerID], now_s: float) -> bool:
        """True if enough links of `peer` to others are known to place it."""
        return len(self._found_from(peer, now_s).intersection(others)) >= min(PARTNERS_FIRST, len(others) - 1)

    def _found_from(self, peer: PeerID, now_s: float) -> set[PeerID]:
        """Return the peers to which `peer` has measured its link, or has none."""
        return self._links.known_from(peer) | self._reach.cannot_reach(peer, now_s)

    def choose(self, peer: PeerID, others: Collection[PeerID], now_s: float) -> tuple[PeerID, ...]:
        """Return the peers to which `peer` should measure its link before the first plan."""
        card = self._card(peer)
        mates = self.mates(peer, others)
        known = self._links.known_from(peer)
        chosen: tuple[PeerID, ...] = ()
        if mates and known.isdisjoint(mates):
            chosen = self._chosen(peer, [p for p in (min(mates),) if self._is_unknown(peer, p, now_s)], now_s, most=1)
        if self._is_in_turn(peer, mates, now_s):
            known_here = known.union(*(self._links.known_from(mate) for mate in mates))
            unknown = [p for p in others if self._card(p) != card and self._is_unknown(peer, p, now_s)]
            new = [p for p in unknown if p not in known_here] or unknown
            outside = self._chosen(peer, new, now_s, most=PROBES_PER_REPLY_MAX - len(chosen))
            if outside:
                self._leaving[card] = peer, now_s
            chosen += outside
        return chosen

    def mates(self, peer: PeerID, others: Iterable[PeerID]) -> tuple[PeerID, ...]:
        """Return those of `others` that name the same machine as `peer`."""
        return tuple(p for p in others if p != peer and self._card(p) == self._card(peer))

    def choose_one(self, peer: PeerID, plan: Plan, now_s: float, *, in_doubt: bool = False) -> tuple[PeerID, ...]:
        """Return the peer to which `peer` should measure its link while the run trains; usually none."""
        if tried := self._to_try(peer, plan, now_s):
            return self._chosen(peer, tried, now_s, most=1)
        if peer in plan.spares and not self.is_known(peer, plan.members, now_s):
            workers = [p for stage in plan.stages for p in stage.peers]
            candidates = [p for p in workers if self._is_unknown(peer, p, now_s)]
            candidates = candidates or [p for p in plan.members if self._is_unknown(peer, p, now_s)]
            return self._chosen(peer, candidates, now_s, most=1)
        if suspects := self._to_confirm(peer, plan, now_s):
            chosen = self._chosen(peer, suspects, now_s, most=1)
            self._rests_s[chosen[0]] = now_s + self._heartbeat_s / SUSPECT_PER_HEARTBEAT
            return chosen
        apart, stale_s = (DOUBT_HEARTBEATS, DOUBT_STALE_S) if in_doubt else (APART_HEARTBEATS, IN_USE_STALE_S)
        if now_s < self._asker_s.get(peer, -math.inf) + apart * self._heartbeat_s:
            return ()
        unheard = [p for p in plan.spares if p not in self._links.targets]
        candidates = [p for p in unheard if self._is_unknown(peer, p, now_s)]
        if candidates:
            return self._chosen(peer, candidates, now_s, most=1)
        stage = plan.stage_of(peer)
        near = () if stage is None else plan.stages[max(0, stage - 1) : stage + 2]
        used = {p for part in near for p in part.peers}
        candidates = [p for p in used if self._is_stale(peer, p, now_s, stale_s)]
        if not candidates:
            known = self._links.known_from(peer) & set(plan.members)
            if len(known) < min(PARTNERS_ENOUGH, len(plan.members) - 1):
                candidates = [p for p in plan.members if p not in known and self._is_unknown(peer, p, now_s)]
        if not candidates:
            candidates = [p for p in plan.members if self._is_stale(peer, p, now_s, STALE_S)]
        return self._chosen(peer, candidates, now_s, most=1)

    def _to_confirm(self, peer: PeerID, plan: Plan, now_s: float) -> list[PeerID]:
        """Return members with a possibly slow line, towards which `peer` has not measured its link since."""
        return [
            other
            for other in self._suspects(now_s)
            if plan.has(other)
            and now_s >= self._rests_s.get(other, -math.inf)
            and self._is_unconfirmed(peer, other, now_s)
        ]

    def _to_try(self, peer: PeerID, plan: Plan, now_s: float) -> list[PeerID]:
        """Return members that `peer` should try to reach: those that report it as unreachable, unless `peer` has
        reported on them; otherwise those that `peer` failed to reach at its last try, a while ago."""
        apart_s = UNANSWERED_HEARTBEATS * self._heartbeat_s
        accused = [
            other
            for other in self._reach.accused_by_others(peer)
            if plan.has(other) and now_s >= self._asked_s.get((peer, other), -math.inf) + apart_s
        ]
        if accused:
            return accused
        lost = (other for other in self._reach.failed_from(peer) if plan.has(other))
        return [other for other in lost if self._is_stale(peer, other, now_s, RETRY_HEARTBEATS * self._heartbeat_s)]

    def _card(self, peer: PeerID) -> str:
        return self._machines.get(peer) or peer

    def _is_in_turn(self, peer: PeerID, mates: Sequence[PeerID], now_s: float) -> bool:
        """True if no other peer behind the same card is measuring or has the next turn."""
        if not mates or (last := self._leaving.get(self._card(peer))) is None:
            return True
        asker, asked_s = last
        beats = 2.0 if asker == peer else 1.0  # the peer that had the turn is gone
        return now_s >= asked_s + beats * self._heartbeat_s

    def _chosen(self, peer: PeerID, candidates: Iterable[PeerID], now_s: float, *, most: int) -> tuple[PeerID, ...]:
        left = list(candidates)
        chosen: list[PeerID] = []
        while left and len(chosen) < most:
            other = min(left, key=lambda p: (self._probed.get(self._card(p), 0), self._probed.get(p, 0), p < peer, p))
            left.remove(other)
            chosen.append(other)
            self._turn += 1
            self._probed[self._card(other)] = self._probed[other] = self._turn
            self._asked_s[peer, other] = self._asker_s[peer] = now_s
        return tuple(chosen)

    def _is_unknown(self, peer: PeerID, other: PeerID, now_s: float) -> bool:
        asked_s = self._asked_s.get((peer, other), -math.inf)
        known = other in self._links.known_from(peer)
        return other != peer and not known and now_s >= asked_s + UNANSWERED_HEARTBEATS * self._heartbeat_s

    def _is_stale(self, peer: PeerID, other: PeerID, now_s: float, stale_s: float) -> bool:
        return other != peer and now_s >= self._asked_s.get((peer, other), -math.inf) + stale_s
