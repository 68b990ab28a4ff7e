"""`shoal` whose coordinators keep a fixed layout: peer_with_layout.py counted|greedy|live COMMAND ... A demo starts its
peers the same way."""

import sys
from dataclasses import replace

import msgspec

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Layout, SwarmSnapshot
from shoal.deploy import cli
from shoal.deploy.demo import crew
from shoal.deploy.node import node
from shoal.protocol.plan import Member, Plan


class CountedAllocator(GreedyAllocator):
    """The greedy rules, but the first plan deals the peers out as they are counted off from the slowest on."""

    def allocate(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> Layout:
        layout = super().allocate(snapshot, previous, seed=seed)
        if previous is not None:
            return layout
        by_speed = sorted(snapshot.peers, key=lambda peer: peer.flop_per_s)
        size = len(by_speed) // len(layout.stages)
        stages = tuple(
            msgspec.structs.replace(
                stage,
                members=tuple(Member(peer=p.peer, share=p.flop_per_s, bandwidth=1.0) for p in by_speed[at : at + size]),
            )
            for at, stage in zip(range(0, len(by_speed), size), layout.stages, strict=True)
        )
        return replace(layout, stages=stages)


FIXED = {"greedy": GreedyAllocator, "counted": CountedAllocator}

if __name__ == "__main__":
    layout = sys.argv.pop(1)
    if layout in FIXED:
        node.EvolutionaryAllocator = FIXED[layout]  # type: ignore[assignment, misc]
    crew.CLI = (sys.executable, __file__, layout)  # type: ignore[assignment]
    cli.app()
