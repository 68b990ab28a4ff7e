"""Decides when the coordinator searches for a better layout than the live one, and keeps the results. Pure.

A change is answered at once with a repaired layout. The search follows, and returns a layout or none. It begins

- for the first plan, which waits a while for the result;
- `SETTLE_HEARTBEATS` after the last change of swarm or plan, when reports of the new neighbours are here;
- at once, if the only change is a lost member: a stage that has lost one of few members delays all others;
- when measurements have changed since the last search (`has_drifted`), or the layout's rate has changed or differs much
  from the prediction (`calibration`); but not if the last search for this plan and swarm failed with an error;
- but never sooner than `REST_HEARTBEATS` after the last search, or `SETTLE_HEARTBEATS` if a member is gone.

A result is valid only for the swarm and plan of its search. A successor learns whether the plan has been searched, so
that a quiet hour of sixty terms does not cost sixty searches."""

import math
from dataclasses import dataclass

import numpy as np

from shoal.coordinator.allocate.interface import Layout, MeasuredPeer, Places, SwarmSnapshot, places_of
from shoal.coordinator.allocate.measured import Pair
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan
from shoal.protocol.topology import Floats

SETTLE_HEARTBEATS = 8.0
"""Time until newcomers have their state and their links are reported, four with each heartbeat."""
REST_HEARTBEATS = 30.0
REST_PEERS = 256
"""Searching this many peers takes a second or two. With more, searches and checks are further apart."""
LOOK_HEARTBEATS = 10.0
"""Interval at which the coordinator checks for changed measurements."""
AFRESH_TERMS = 10
"""One term in this many begins with a search even if the predecessor has searched, to notice slow changes."""
FIRST_PATIENCE_S = 10.0
"""Longest wait of the first plan for a search, which may have to compile its kernels, once on each machine."""
LINKS_PATIENCE_HEARTBEATS = 10.0
"""Longest wait of the first plan for measured links, at least 5 s. Each peer beyond eight adds half a heartbeat, up to
30 heartbeats in all, because each machine measures one link at a time."""

Swarm = tuple[object, ...]
"""Facts about the present peers; a change of any may need a new layout (`ReplanPolicy`)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SearchJob:
    """One search. `previous` is None for a first plan."""

    snapshot: SwarmSnapshot
    previous: Plan | None
    swarm: Swarm
    seed: int

    def is_for(self, plan: Plan | None, swarm: Swarm) -> bool:
        """True if this search was for the layers and members of `plan`, and for this swarm."""
        return self.swarm == swarm and _places(self.previous) == _places(plan)


class SearchSchedule:
    """Begins searches and keeps their results until they are proposed. Args: enabled: the allocator can search."""

    def __init__(self, heartbeat_s: float, *, enabled: bool) -> None:
        self._heartbeat_s = heartbeat_s
        self._enabled = enabled
        self._running: SearchJob | None = None
        self._found: tuple[SearchJob, Layout] | None = None
        self._last: SearchJob | None = None
        """The last search that has ended, ours or the predecessor's."""
        self._is_bug = False
        """True if the last search raised an exception: repeated for the same layout and swarm, it would raise again."""
        self._inherited: tuple[Places, frozenset[Pair]] | None = None
        """The layers and members that the predecessor has searched for, and the pairs of peers then unreachable."""
        self._seen: tuple[Places, Swarm] | None = None
        self._members: frozenset[PeerID] = frozenset()
        self._due_s = -math.inf
        self._rested_s = -math.inf
        """The earliest time of the next search."""
        self._first_asked_s: float | None = None
        self._links_asked_s: float | None = None

    def begin_term(
        self, plan: Plan, now_s: float, *, searched: bool, unreachable: frozenset[Pair] = frozenset()
    ) -> None:
        """Begin a term of ours, and drop the stale knowledge of an earlier one.
        Args: searched: the predecessor has searched for a better layout than the plan's. unreachable: the pairs of
        members that could not reach each other, as far as the predecessor knew."""
        self._running = self._found = self._last = self._seen = None
        self._inherited = (places_of(plan), unreachable) if searched and plan.term % AFRESH_TERMS else None
        self._members = frozenset(plan.members)
        self._due_s = now_s + SETTLE_HEARTBEATS * self._heartbeat_s

    def forget(self) -> None:
        """Allow the same search again, because the layout that the last one found has failed."""
        self._last = None

    def has_searched(self, plan: Plan, swarm: Swarm) -> bool:
        """True if the last search was for the layers and members of this plan, and for this swarm."""
        return self._last is not None and self._last.is_for(plan, swarm)

    # --- the first plan ---

    def awaits_links(self, num_peers: int, now_s: float) -> bool:
        """True if the first plan should wait for measured links."""
        if not self._enabled:
            return False
        self._links_asked_s = now_s if self._links_asked_s is None else self._links_asked_s
        heartbeats = min(LINKS_PATIENCE_HEARTBEATS + 0.5 * max(0, num_peers - 8), 30.0)
        return now_s < self._links_asked_s + max(5.0, heartbeats * self._heartbeat_s)

    def awaits_first(self, swarm: Swarm, now_s: float) -> bool:
        """True if the first plan should wait for a search; `found_for` then returns the result."""
        if not self._enabled or (self._last is not None and self._last.swarm == swarm):
            return False
        self._first_asked_s = now_s if self._first_asked_s is None else self._first_asked_s
        return now_s < self._first_asked_s + FIRST_PATIENCE_S

    # --- later plans ---

    def is_due(self, plan: Plan, swarm: Swarm, now_s: float, *, is_off: bool = False) -> bool:
        """True if `begin` should be called. Args: is_off: the layout is far slower than predicted, or its rate has
        changed since the last search began; then the next search is due after the usual pause."""
        if not self._enabled:
            return False
        seen = places_of(plan), swarm
        if seen != self._seen:
            if (members := frozenset(plan.members)) < self._members:
                self._due_s = self._rested_s
            else:
                self._due_s = max(self._due_s, now_s + SETTLE_HEARTBEATS * self._heartbeat_s)
            self._seen, self._members, self._found = seen, members, None
        due_s = min(self._due_s, self._rested_s) if is_off and self._last is not None else self._due_s
        return self._running is None and self._found is None and now_s >= due_s

    def begin(
        self,
        snapshot: SwarmSnapshot,
        plan: Plan | None,
        swarm: Swarm,
        now_s: float,
        *,
        seed: int,
        is_off: bool = False,
    ) -> SearchJob | None:
        """Return the search to begin now; None: nothing has changed since the last one, or a first search runs."""
        job, last = SearchJob(snapshot=snapshot, previous=plan, swarm=swarm, seed=seed), self._last
        if plan is None:
            if self._running is not None and self._running.swarm == swarm:
                return None
        else:
            apart = self._heartbeat_s * max(1.0, len(snapshot.peers) / REST_PEERS)
            self._due_s = now_s + LOOK_HEARTBEATS * apart
            if self._inherited == (places_of(plan), snapshot.unreachable) and not is_off:
                self._inherited, self._last, self._is_bug = None, job, False
                return None
            same = last is not None and last.is_for(plan, swarm)
            if last and same and (self._is_bug or not (is_off or has_drifted(last.snapshot, snapshot))):
                return None
            self._due_s, self._rested_s = now_s + REST_HEARTBEATS * apart, now_s + SETTLE_HEARTBEATS * apart
        self._running = job
        return job

    def returned(self, job: SearchJob, layout: Layout | None, *, is_bug: bool = False) -> bool:
        """Record the end of `job`. Returns: False if the result is not wanted any more."""
        if job is not self._running:
            return False
        self._running = None
        self._found = (job, layout) if layout is not None else None
        self._last, self._is_bug = job, is_bug
        return True

    def found_for(self, plan: Plan | None, swarm: Swarm) -> Layout | None:
        """Return the result of a search for this plan and swarm, only once; None: there is none."""
        found, self._found = self._found, None
        if found is None:
            return None
        job, layout = found
        return layout if job.is_for(plan, swarm) else None


def _places(plan: Plan | None) -> Places | None:
    return places_of(plan) if plan is not None else None


def keeps_state(layout: Layout, live: Plan, peers: tuple[MeasuredPeer, ...]) -> bool:
    """True if each stage keeps a member that holds its state now, and no peer drains."""
    synced = {peer.peer: peer.synced_stage for peer in peers}
    stays = all(
        any(synced.get(peer) == index and peer in live.stages[index].peers for peer in stage.peers)
        for index, stage in enumerate(layout.stages)
    )
    return stays and not any(peer.draining for peer in peers)


def has_drifted(before: SwarmSnapshot, after: SwarmSnapshot) -> bool:
    """True if figures of the same peers have changed by more than noise, many figures are new, or plans are now made
    for another kind of step (synchronous or not)."""
    if before.workload != after.workload:
        return True
    then, now = (np.array([peer.flop_per_s for peer in snapshot.peers]) for snapshot in (before, after))
    if _far(then, now, 1.3).any():
        return True
    if before.network is None or after.network is None:
        return before.network is not after.network
    old, new = before.network, after.network
    late = np.fabs(old.latency_s - new.latency_s) > 0.005
    if (late & _far(old.latency_s, new.latency_s, 1.6)).any() or _far(old.bytes_per_s, new.bytes_per_s, 1.6).any():
        return True
    was, known = ~np.isnan(old.bytes_per_s), ~np.isnan(new.bytes_per_s)
    return bool((known & ~was).sum() > was.sum() / 4)


def _far(a: Floats, b: Floats, factor: float) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
    """Return a mask: True where `a` and `b` are both known and differ by more than `factor`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.fabs(np.log(a / b)) > math.log(factor)
