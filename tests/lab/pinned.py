"""`shoal` whose coordinators keep their first layout, of as many stages as the run file says: `pinned.py COMMAND …`.
`PinnedAllocator` does the same in virtual time."""

from shoal.coordinator.allocate.interface import SwarmSnapshot
from shoal.coordinator.allocate.live_allocator import EvolutionaryAllocator
from shoal.coordinator.allocate.plan_layout import Layout
from shoal.protocol.plan import Plan


class PinnedAllocator(EvolutionaryAllocator):
    """Looks for the first layout as usual, and for no other one. A stage whose last holder is lost gets one all the
    same."""

    def search(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        if previous is None:
            return super().search(snapshot, previous, seed=seed)
        return None, "stays: the layout is pinned"


if __name__ == "__main__":
    from shoal.deploy import cli
    from shoal.deploy.node import node

    node.EvolutionaryAllocator = PinnedAllocator  # type: ignore[misc]
    cli.run(cli.app)
