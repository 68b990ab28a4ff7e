"""`shoal` whose coordinators keep their first layout, of as many stages as the run file says: `pinned.py COMMAND …`.
`PinnedAllocator` does the same in virtual time."""

from dataclasses import replace

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import NO_MOVES, Layout, SwarmSnapshot
from shoal.coordinator.allocate.live_allocator import EvolutionaryAllocator, _shared, _shared_anew
from shoal.coordinator.allocate.measured_topology import topology_of
from shoal.protocol.plan import Plan


class PinnedAllocator(EvolutionaryAllocator):
    """Divides the layers evenly, deals everybody who is there to the stages, and moves nobody from then on. Who comes
    later stands by. Only shares follow what is measured, and a member that is lost is replaced."""

    def allocate(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> Layout:
        if previous is None:
            return _with_shares(snapshot, GreedyAllocator().allocate(snapshot, None, seed=seed))
        there = {peer.peer for peer in snapshot.peers if not peer.draining}
        placed = {peer for stage in previous.stages for peer in stage.peers}
        if not placed <= there:
            return super().allocate(snapshot, previous, seed=seed)
        spares = tuple(sorted(there - placed))
        return _with_shares(snapshot, Layout(stages=previous.stages, spares=spares, reason=NO_MOVES))

    def search(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        if previous is None:
            layout = self.allocate(snapshot, None, seed=seed)
            return layout, layout.reason
        if any(peer.draining for peer in snapshot.peers) or (shared := _shared_anew(snapshot, previous)) is None:
            return None, "stays: the layout is pinned"
        return shared, shared.reason


def _with_shares(snapshot: SwarmSnapshot, layout: Layout) -> Layout:
    if snapshot.network is None or snapshot.workload is None:
        return layout
    return replace(layout, stages=_shared(topology_of(snapshot), snapshot.workload, layout.stages))


if __name__ == "__main__":
    from shoal.deploy import cli
    from shoal.deploy.node import node

    node.EvolutionaryAllocator = PinnedAllocator  # type: ignore[misc]
    cli.run(cli.app)
