"""Knows the links between peers, as both of their ends report them, and chooses those to measure next. Pure.

**Measurements.** The coordinator asks for unknown links (`HeartbeatReply.probe`). Before the first plan each peer
measures a few links with each heartbeat, because the lines are idle. While the run trains, a standby measures one link
with each heartbeat until a search can place it. Every other peer measures one link at a time. It prefers the link
towards a standby that no peer has probed; then a link in use that was measured a minute ago; then an unknown link; then
an old one. Links in use are measured far more often while the run is slower than the figures explain. If several links
of one peer have become slow, all peers measure their link towards it; otherwise a search would move that peer's traffic
to its other links, on old figures. Before all that, a peer tries to reach those that report it as unreachable, and now
and then those that it failed to reach. Among several candidates the coordinator takes the network card that was probed
least recently.

Peers that name one machine share a network card (`Advert.machine`), and simultaneous probes would see half of its rate
each. So before the first plan they take turns with links that leave their machine, and a measurement by one peer counts
for all. Each also measures a link to another peer of its machine, to check that they share one.

**Unreachable pairs.** Two peers behind routers may never connect, and a connected pair may lose its connection. Each
peer reports how many tries to reach another peer have failed since that peer last answered (`LinkReport.num_failed`). A
pair is unreachable if both of its ends report failures, with at least one try each and `TRIES_MIN` together, and have
not connected for `PATIENCE_HEARTBEATS`; if they have never connected, one try each is enough. So no third peer can
separate two others, a peer that calls all others unreachable is not believed, and two liars only harm their own pair.
The pair is reachable again when either end reports an answer of the other, or when no report has arrived for
`EXPIRY_HEARTBEATS`."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from statistics import median

import numpy as np

from shoal.coordinator.allocate.measured import (
    BOAST,
    CLAIM_MIN,
    ODD,
    WIDE,
    Estimate,
    MeasuredNetwork,
    Pair,
    bounded,
)
from shoal.coordinator.roster import TOLD_MAX, Failing, LinkRecord, PeerRecord, Roster
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LINKS_PER_HEARTBEAT_MAX, PROBES_PER_REPLY_MAX
from shoal.protocol.messages import LinkReport, UnreachablePair
from shoal.protocol.plan import Plan

LINKS_KEPT_MAX = 64
"""Each reporter's newest reports are kept, this many links and as many failing ones: an honest peer has no more."""
PROBES_CERTAIN = 3
"""A link's rate is the best of this many probes; the best of fewer is a lower bound."""
SLOW_LINE, SLOW_LINE_MIN = 0.5, 4
"""A peer's whole line counts as slow once this part of its links, and at least `SLOW_LINE_MIN`, have become slow."""

TRIES_MIN = 3
PATIENCE_HEARTBEATS = 2.0
"""A pair is unreachable once both ends report failures for this long: a broken connection often returns at once."""
RETRY_HEARTBEATS = 30.0
"""Both ends of an unreachable pair are asked to try again at this interval."""
EXPIRY_HEARTBEATS = 150.0

PARTNERS_FIRST = 8
"""This many links of each peer must be known before the first plan, and of a standby before a search places it."""
PARTNERS_ENOUGH = 48
"""A peer with this many known links measures no more: its other links are estimated from the known ones."""
APART_HEARTBEATS = 15.0
"""The time between two probes by one peer while the run trains."""
STALE_S = 300.0
IN_USE_STALE_S = 60.0
"""A link is measured again after `STALE_S` or, if the plan uses it, after `IN_USE_STALE_S`."""
DOUBT_HEARTBEATS = 2.0
DOUBT_STALE_S = 10.0
"""The interval `DOUBT_HEARTBEATS` and the age `DOUBT_STALE_S` replace `APART_HEARTBEATS` and `IN_USE_STALE_S` while the
run is slower than the figures explain."""
SUSPECT_PER_HEARTBEAT = 4
"""If a peer's line may be slow, this many links towards it are measured in a heartbeat, once per `IN_USE_STALE_S`."""
CONFIRM_HEARTBEATS = 3.0
"""Time until the result of a requested measurement is here: two probes and the next heartbeat."""
UNANSWERED_HEARTBEATS = 10.0
"""A requested link without a report is requested again after this time."""


class LinkSurvey:
    """Records measured links in the peers' records of `roster`, and chooses the links to measure next."""

    def __init__(self, roster: Roster) -> None:
        self._roster, self._heartbeat_s = roster, roster.heartbeat_s
        self._targets: set[PeerID] = set()
        """Peers towards which another peer has probed its link."""
        self._fallen: set[tuple[PeerID, PeerID]] = set()
        """(reporter, target) of each link that has become slow and has stayed so."""
        self._turn = 0
        self._probed: dict[str, int] = {}
        """Peer or network card -> serial number of the last request to measure a link towards it."""
        self._leaving: dict[str, tuple[PeerID, float]] = {}
        """Network card -> (its peer that was last asked to measure links to other machines, time of that request)."""
        self._suspected_s: dict[PeerID, float] = {}
        """Peer -> when its line was first suspected to have become slow."""

    def begin_term(self, members: Collection[PeerID]) -> None:
        """Begin our term as coordinator. The roster has already forgotten the reports of all but the plan's members."""
        links = [
            (one, other, link) for one, record in self._roster.records.items() for other, link in record.links.items()
        ]
        for _, other, link in links:
            link.fell_to = link.fell_to if other in members else math.inf
        self._targets = {other for _, other, link in links if link.num_probes}
        self._fallen = {(one, other) for one, other, link in links if link.fell_to < math.inf}
        self._probed, self._leaving, self._suspected_s = {}, {}, {}

    # --- what peers report ---

    def note(
        self, reporter: PeerID, reports: Iterable[LinkReport], now_s: float, *, busy: Collection[PeerID] = ()
    ) -> None:
        """Record the links in a heartbeat of `reporter`, which is not trusted.
        Args: busy: peers with a stage: a probe of their lines may meet other traffic."""
        record = self._roster.of(reporter)
        for report in islice(reports, LINKS_PER_HEARTBEAT_MAX):
            if report.peer != reporter:
                self._note_link(reporter, record, report, now_s, is_busy=reporter in busy or report.peer in busy)
                self._note_tries(reporter, record, report, now_s)

    def _note_link(
        self, reporter: PeerID, record: PeerRecord, report: LinkReport, now_s: float, *, is_busy: bool
    ) -> None:
        links = record.links
        link = links.pop(report.peer) if report.peer in links else LinkRecord()
        links[report.peer] = link  # the last reported comes last
        link.round_trip.add(report.round_trip_s, now_s, WIDE)
        link.received.add(report.received_bytes_per_s, now_s, WIDE)
        before = link.sent.value if link.sent.n else 0.0
        if report.has_fallen and report.bytes_per_s < before / ODD:
            link.sent = Estimate()  # the reporter has measured the lower rate twice
        link.num_probes = PROBES_CERTAIN if report.has_fallen else min(max(report.num_probes, 0), PROBES_CERTAIN)
        probes, told = max(1, link.num_probes), (report.bytes_per_s, report.num_probes)
        # A report has the best probe, so a later one may leave it unchanged: after our request it still counts as new.
        answers = link.sent.at_s < record.asked_s.get(report.peer, -math.inf) <= now_s - self._heartbeat_s
        variance = WIDE / probes if is_busy else WIDE / probes**2
        link.sent.add(report.bytes_per_s, now_s, variance, is_new=answers or told != link.told)
        link.told = told
        if link.sent.n and link.sent.value < before / ODD:
            link.fell_to = link.sent.value
            self._fallen.add((reporter, report.peer))
        elif report.bytes_per_s > ODD * link.fell_to:
            link.fell_to = math.inf
            self._fallen.discard((reporter, report.peer))
        if link.num_probes:
            self._targets.add(report.peer)
        if len(links) > LINKS_KEPT_MAX:
            target = next(iter(links))
            del links[target]
            self._fallen.discard((reporter, target))

    def _note_tries(self, reporter: PeerID, record: PeerRecord, report: LinkReport, now_s: float) -> None:
        failing = record.failing
        claim = failing.pop(report.peer, None)
        if report.num_failed <= 0:
            if claim is not None:  # the two have met
                self._roster.at(report.peer).failing.pop(reporter, None)
            return
        since_s = claim.since_s if claim is not None else now_s
        failing[report.peer] = Failing(report.num_failed, since_s, now_s, has_met=report.round_trip_s > 0.0)
        if len(failing) > LINKS_KEPT_MAX:
            del failing[next(iter(failing))]

    # --- pairs without a link ---

    def pairs(self, now_s: float, among: Collection[PeerID] | None = None) -> frozenset[Pair]:
        """Return the pairs of peers that cannot reach each other. Args: among: only pairs of these peers; None: all."""
        return frozenset(
            (one, other)
            for one, record in self._roster.records.items()
            for other in record.failing
            if one < other
            and (among is None or (one in among and other in among))
            and self._apart_s(one, other, now_s) is not None
        )

    def cannot_reach(self, peer: PeerID, now_s: float) -> frozenset[PeerID]:
        failing = self._roster.at(peer).failing
        return frozenset(other for other in failing if self._apart_s(peer, other, now_s) is not None)

    def tell(self, now_s: float) -> tuple[UnreachablePair, ...]:
        """Return the pairs of peers that cannot reach each other, for the next coordinator."""
        told = ((now_s - (self._apart_s(one, other, now_s) or 0.0), one, other) for one, other in self.pairs(now_s))
        return tuple(UnreachablePair(one, other, age_s) for age_s, one, other in sorted(told)[:TOLD_MAX])

    def take_over(self, pairs: Iterable[UnreachablePair], now_s: float) -> None:
        """Replace our unreachable pairs by the previous coordinator's, as if both ends had reported each pair `age_s`
        ago. That coordinator knows which pairs have met since our last term."""
        for known in self._roster.records.values():
            known.failing.clear()
        for pair in islice(pairs, TOLD_MAX):
            if pair.one == pair.other or not 0.0 <= pair.age_s < EXPIRY_HEARTBEATS * self._heartbeat_s:
                continue
            said_s = now_s - pair.age_s
            claim = Failing(TRIES_MIN, said_s - PATIENCE_HEARTBEATS * self._heartbeat_s, said_s)
            for one, other in ((pair.one, pair.other), (pair.other, pair.one)):
                self._roster.of(one).failing.setdefault(other, claim)

    def _apart_s(self, one: PeerID, other: PeerID, now_s: float) -> float | None:
        """Return the time of the last report that this pair cannot connect; None: the pair counts as reachable."""
        ours = self._roster.at(one).failing.get(other)
        theirs = self._roster.at(other).failing.get(one)
        if ours is None or theirs is None:
            return None
        said_s, since_s = max(ours.said_s, theirs.said_s), max(ours.since_s, theirs.since_s)
        if now_s >= said_s + EXPIRY_HEARTBEATS * self._heartbeat_s:
            return None
        is_settled = now_s >= since_s + PATIENCE_HEARTBEATS * self._heartbeat_s
        have_met = ours.has_met or theirs.has_met
        is_apart = not have_met or (is_settled and ours.tries + theirs.tries >= TRIES_MIN)
        return said_s if is_apart else None

    # --- figures ---

    def seen_by_others(self) -> frozenset[PeerID]:
        """The peers from which another peer has received data."""
        links = (item for known in self._roster.records.values() for item in known.links.items())
        return frozenset(peer for peer, link in links if link.received.n)

    def uploads(self, claims: dict[PeerID, float]) -> dict[PeerID, float]:
        """Return the bytes/s at which each peer sends over its median link, as its receivers confirm. If none of a
        peer's links is measured, its claim counts, up to the median of the measured peers; if it claims nothing, the
        median of all peers counts."""
        measured, found = dict[PeerID, float](), dict[PeerID, float]()
        for peer, claim in claims.items():
            rates = [
                min(link.sent.value, BOAST * back.received.value)
                for target, link in self._roster.at(peer).links.items()
                if link.sent.n and (back := self._roster.at(target).links.get(peer)) is not None and back.received.n
            ]
            if rates:
                measured[peer] = median(rates)
            elif claim >= CLAIM_MIN:
                found[peer] = claim
        found = bounded(found, measured) | measured
        usual = median(found.values()) if found else 0.0
        return {peer: found.get(peer, max(usual, claim)) for peer, claim in claims.items()}

    def network(self, peers: Sequence[PeerID], now_s: float) -> MeasuredNetwork:
        number = {peer: index for index, peer in enumerate(peers)}
        latency_s, sent, received, variance = (np.full((len(peers), len(peers)), np.nan) for _ in range(4))
        is_certain = np.zeros((len(peers), len(peers)), dtype=np.bool_)
        slow_lines = self._slow_lines(len(peers) - 1)
        for i, reporter in enumerate(peers):
            for target, link in self._roster.at(reporter).links.items():
                if (j := number.get(target)) is None:
                    continue
                # Older figures of a slow line's other links date from before it became slow.
                is_current = slow_lines.isdisjoint((reporter, target)) or link.fell_to < math.inf
                latency_s[i, j], received[j, i] = link.round_trip.log, link.received.log
                sent[i, j] = link.sent.log if is_current else math.nan
                is_certain[i, j], variance[i, j] = link.num_probes >= PROBES_CERTAIN, link.sent.variance(now_s)
        latency_s, sent, received = np.exp(latency_s) / 2, np.exp(sent), np.exp(received)
        said, seen = sent, ~np.isnan(received)
        if seen.any():
            sent = np.where(seen, sent, np.minimum(sent, BOAST * np.median(received[seen])))
        rate = np.where(np.isnan(sent), np.nan, np.fmin(sent, BOAST * received))
        return MeasuredNetwork(
            latency_s=np.fmax(latency_s, latency_s.T),
            bytes_per_s=rate,
            is_certain=is_certain & ~np.isnan(sent),
            rate_variance=np.where(rate < said, np.fmax(variance, WIDE), np.where(np.isnan(rate), np.nan, variance)),
        )

    def is_falling(self, peers: Collection[PeerID]) -> bool:
        """True if a link between two of `peers` may have become slow, and a few more reports will decide."""
        among = set(peers)
        return any(
            link.sent.is_falling
            for reporter in among
            for target, link in self._roster.at(reporter).links.items()
            if target in among
        )

    def degraded_links(self) -> dict[PeerID, int]:
        """Return {peer: number of its slow links} for peers with two or more, and more than any peer at their ends."""
        ends: dict[PeerID, set[PeerID]] = {}
        for reporter, target in self._fallen:
            ends.setdefault(reporter, set()).add(target)
            ends.setdefault(target, set()).add(reporter)
        return {
            peer: len(others)
            for peer, others in ends.items()
            if len(others) > 1 and all(len(ends[other]) < len(others) for other in others)
        }

    def _slow_lines(self, num_others: int) -> set[PeerID]:
        """Return the peers with so many slow links (`SLOW_LINE`) that old figures of their other links are void."""
        slow_min = max(SLOW_LINE_MIN, SLOW_LINE * num_others)
        return {peer for peer, num_slow in self.degraded_links().items() if num_slow >= slow_min}

    def _probed_from(self, peer: PeerID) -> set[PeerID]:
        """Return the peers towards which `peer` has probed its link."""
        return {target for target, link in self._roster.at(peer).links.items() if link.num_probes}

    def _found_from(self, peer: PeerID, now_s: float) -> set[PeerID]:
        """Return the peers to which `peer` has measured its link, or which it cannot reach."""
        return self._probed_from(peer) | self.cannot_reach(peer, now_s)

    # --- is enough known? ---

    def is_enough(self, peers: Sequence[PeerID], now_s: float) -> bool:
        """True if enough links of each machine are known, or known not to exist, for a first plan."""
        found: dict[str, set[PeerID]] = {}
        size = Counter(self._card(peer) for peer in peers)
        for peer in peers:
            found.setdefault(self._card(peer), set()).update(self._found_from(peer, now_s))
        return all(
            sum(self._card(peer) != card for peer in found[card].intersection(peers))
            >= min(PARTNERS_FIRST, len(peers) - size[card])
            for card in found
        )

    def is_known(self, peer: PeerID, others: Collection[PeerID], now_s: float) -> bool:
        """True if `peer` has measured, or failed to open, enough links towards `others` to get a stage."""
        return len(self._found_from(peer, now_s).intersection(others)) >= min(PARTNERS_FIRST, len(others) - 1)

    def is_confirming(self, peers: Collection[PeerID], now_s: float) -> bool:
        """True if one of `peers` may have a slow line, and another may not have measured its link towards that peer
        yet: it was asked less than `CONFIRM_HEARTBEATS` ago, or not since the suspicion."""
        lately_s = now_s - CONFIRM_HEARTBEATS * self._heartbeat_s
        return any(
            not since_s <= self._asked_s(peer, other) <= lately_s
            for other, since_s in self._suspects(now_s).items()
            if other in peers
            for peer in peers
            if peer != other
        )

    def _suspects(self, now_s: float) -> dict[PeerID, float]:
        """Return {peer with a possibly slow line: time T}: measurements of its links count only if made after T."""
        self._suspected_s = {peer: self._suspected_s.get(peer, now_s) for peer in self.degraded_links()}
        return {peer: max(since_s, now_s - IN_USE_STALE_S) for peer, since_s in self._suspected_s.items()}

    # --- which to measure next ---

    def choose(self, peer: PeerID, others: Collection[PeerID], now_s: float) -> tuple[PeerID, ...]:
        """Return the peers to which `peer` should measure its link before the first plan."""
        card, mates, probed = self._card(peer), self.mates(peer, others), self._probed_from(peer)
        chosen: tuple[PeerID, ...] = ()
        if mates and probed.isdisjoint(mates):
            chosen = self._chosen(peer, [p for p in (min(mates),) if self._is_unknown(peer, p, now_s)], now_s, most=1)
        if self._is_in_turn(peer, mates, now_s):
            probed_here = probed.union(*(self._probed_from(mate) for mate in mates))
            unknown = [p for p in others if self._card(p) != card and self._is_unknown(peer, p, now_s)]
            new = [p for p in unknown if p not in probed_here] or unknown
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
            self._roster.of(chosen[0]).rests_s = now_s + self._heartbeat_s / SUSPECT_PER_HEARTBEAT
            return chosen
        apart, stale_s = (DOUBT_HEARTBEATS, DOUBT_STALE_S) if in_doubt else (APART_HEARTBEATS, IN_USE_STALE_S)
        if now_s < max(self._roster.at(peer).asked_s.values(), default=-math.inf) + apart * self._heartbeat_s:
            return ()
        stage, probed = plan.stage_of(peer), self._probed_from(peer).intersection(plan.members)
        near = () if stage is None else plan.stages[max(0, stage - 1) : stage + 2]
        wanted = plan.members if len(probed) < min(PARTNERS_ENOUGH, len(plan.members) - 1) else ()
        candidates = (
            [p for p in plan.spares if p not in self._targets and self._is_unknown(peer, p, now_s)]
            or [p for part in near for p in part.peers if self._is_stale(peer, p, now_s, stale_s)]
            or [p for p in wanted if p not in probed and self._is_unknown(peer, p, now_s)]
            or [p for p in plan.members if self._is_stale(peer, p, now_s, STALE_S)]
        )
        return self._chosen(peer, candidates, now_s, most=1)

    def _to_confirm(self, peer: PeerID, plan: Plan, now_s: float) -> list[PeerID]:
        """Return the members suspected of a slow line to which `peer` was not asked to measure since the suspicion."""
        return [
            other
            for other, since_s in self._suspects(now_s).items()
            if other != peer and plan.has(other) and self._asked_s(peer, other) < since_s
            if now_s >= self._roster.at(other).rests_s
        ]

    def _to_try(self, peer: PeerID, plan: Plan, now_s: float) -> list[PeerID]:
        """Return members that `peer` should try to reach: those that report it as unreachable, unless `peer` reports
        them too; otherwise those that `peer` failed to reach at its last try, a while ago."""
        failing, apart_s = self._roster.at(peer).failing, UNANSWERED_HEARTBEATS * self._heartbeat_s
        accusers = [
            other
            for other, known in self._roster.records.items()
            if peer in known.failing
            and other not in failing
            and plan.has(other)
            and self._is_stale(peer, other, now_s, apart_s)
        ]
        if accusers:
            return accusers
        retry_s = RETRY_HEARTBEATS * self._heartbeat_s
        return [other for other in failing if plan.has(other) and self._is_stale(peer, other, now_s, retry_s)]

    def _card(self, peer: PeerID) -> str:
        return self._roster.at(peer).machine or peer

    def _is_in_turn(self, peer: PeerID, mates: Sequence[PeerID], now_s: float) -> bool:
        """True if `peer` may measure now: no other peer on its network card was just asked, or has the next turn."""
        if not mates or (last := self._leaving.get(self._card(peer))) is None:
            return True
        asker, asked_s = last
        beats = 2.0 if asker == peer else 1.0  # the last asker waits for another's turn first
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
            self._roster.of(peer).asked_s[other] = now_s
        return tuple(chosen)

    def _asked_s(self, peer: PeerID, other: PeerID) -> float:
        """Return the time at which `peer` was last asked to measure its link to `other`; -inf: not in this term."""
        return self._roster.at(peer).asked_s.get(other, -math.inf)

    def _is_unknown(self, peer: PeerID, other: PeerID, now_s: float) -> bool:
        link = self._roster.at(peer).links.get(other)
        is_probed = link is not None and link.num_probes > 0
        return not is_probed and self._is_stale(peer, other, now_s, UNANSWERED_HEARTBEATS * self._heartbeat_s)

    def _is_stale(self, peer: PeerID, other: PeerID, now_s: float, stale_s: float) -> bool:
        return other != peer and now_s >= self._asked_s(peer, other) + stale_s
