"""Decides when the coordinator searches for a better layout than the live one, and keeps the results. Pure.

A change is answered at once with a repaired layout. The search follows, and returns a layout or none. It begins

- for the first plan, which waits a while for the result;
- `SETTLE_HEARTBEATS` after the last change of swarm or plan, when reports of the new neighbours are here;
- at once, or `LOSS_HEARTBEATS` after the last search, if the only change is a lost member: a stage that has lost one of
  few members delays all others;
- every `REST_HEARTBEATS`, since speeds and links change; after an error only when the swarm or the plan has changed.

A result is valid only for the swarm and plan of its search."""

import math
from dataclasses import dataclass

from shoal.coordinator.allocate.interface import Layout, MeasuredPeer, Places, SwarmSnapshot, places_of
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan

SETTLE_HEARTBEATS = 8.0
"""Time until newcomers have their state and their links are reported, four with each heartbeat."""
LOSS_HEARTBEATS = 2.0
REST_HEARTBEATS = 15.0
REST_PEERS = 64
"""Searching this many peers takes half a second. With more, searches are further apart."""
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
    """Begins searches and keeps their results until they are proposed.
    Args: enabled: the allocator can search. term_s: the length of a term, which has time for a search."""

    def __init__(self, heartbeat_s: float, *, term_s: float, enabled: bool) -> None:
        self._heartbeat_s = heartbeat_s
        self._settle_s = min(SETTLE_HEARTBEATS * heartbeat_s, term_s / 2)
        self._enabled = enabled
        self._running: SearchJob | None = None
        self._found: tuple[SearchJob, Layout] | None = None
        self._seen: tuple[Places, Swarm] | None = None
        self._members: frozenset[PeerID] = frozenset()
        self._due_s = -math.inf
        self._begun_s = -math.inf
        self._apart_s = heartbeat_s
        """A heartbeat interval, or more if the swarm of the last search was large."""
        self._searched_first: Swarm | None = None
        """The swarm that was searched for the first plan."""
        self._first_asked_s: float | None = None
        self._links_asked_s: float | None = None

    def begin_term(self, plan: Plan, now_s: float) -> None:
        """Begin a term of ours, and drop the stale knowledge of an earlier one."""
        self._running = self._found = self._seen = None
        self._members = frozenset(plan.members)
        self._due_s = now_s + self._settle_s

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
        if not self._enabled or self._searched_first == swarm:
            return False
        self._first_asked_s = now_s if self._first_asked_s is None else self._first_asked_s
        return now_s < self._first_asked_s + FIRST_PATIENCE_S

    # --- later plans ---

    def is_due(self, plan: Plan, swarm: Swarm, now_s: float) -> bool:
        """True if `begin` should be called."""
        if not self._enabled:
            return False
        seen = places_of(plan), swarm
        if seen != self._seen:
            if (members := frozenset(plan.members)) < self._members:
                self._due_s = self._begun_s + LOSS_HEARTBEATS * self._apart_s
            else:
                rested_s = self._begun_s + REST_HEARTBEATS * self._apart_s
                self._due_s = max(rested_s, now_s + self._settle_s)
            self._seen, self._members, self._found = seen, members, None
        return self._running is None and self._found is None and now_s >= self._due_s

    def begin(
        self, snapshot: SwarmSnapshot, plan: Plan | None, swarm: Swarm, now_s: float, *, seed: int
    ) -> SearchJob | None:
        """Return the search to begin now; None: it runs already, for the first plan of this swarm."""
        if plan is None and self._running is not None and self._running.swarm == swarm:
            return None
        if plan is not None:
            self._begun_s, self._apart_s = now_s, self._heartbeat_s * max(1.0, len(snapshot.peers) / REST_PEERS)
            self._due_s = now_s + REST_HEARTBEATS * self._apart_s
        self._running = SearchJob(snapshot=snapshot, previous=plan, swarm=swarm, seed=seed)
        return self._running

    def returned(self, job: SearchJob, layout: Layout | None, *, is_bug: bool = False) -> bool:
        """Record the end of `job`. Args: is_bug: it raised an exception, and would again for this plan and swarm.
        Returns: False if the result is not wanted any more."""
        if job is not self._running:
            return False
        self._running = None
        self._found = (job, layout) if layout is not None else None
        if job.previous is None:
            self._searched_first = job.swarm
        if is_bug:
            self._due_s = math.inf
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
