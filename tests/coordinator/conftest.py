"""Peers that do nothing but coordinate: a real driver each, in virtual time, with heartbeats made up here."""

from dataclasses import dataclass, field

import msgspec

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.driver import Coordination
from shoal.coordinator.ledger import StepRecord
from shoal.coordinator.store import PlanStore
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.messages import Advert, CommitReport, Heartbeat
from shoal.protocol.plan import SignedPlan
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import SimPeer, World
from shoal.protocol.spec import RunSpec, SwarmSpec, TrainingSpec, run_id


def advert(name: str, *, flop_per_s: float = 1e12, has_data: bool = True, willing: bool = True) -> Advert:
    return Advert(
        name=name,
        device="cpu",
        flop_per_s=flop_per_s,
        memory_bytes=1 << 30,
        upload_bytes_per_s=1e7,
        download_bytes_per_s=1e8,
        addresses=(f"/sim/{name}",),
        has_data=has_data,
        willing_to_coordinate=willing,
    )


@dataclass(kw_only=True)
class FakePeer:
    """Says what its fields say in its next heartbeat."""

    port: SimPeer
    advert: Advert
    coordination: Coordination = field(init=False)
    plans: list[SignedPlan] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    draining: bool = False
    version: int = 0
    commits: list[CommitReport] = field(default_factory=list)

    @property
    def plan(self) -> SignedPlan:
        assert self.coordination.plan is not None
        return self.coordination.plan

    def heartbeat(self) -> Heartbeat:
        commits, self.commits = tuple(self.commits), []
        live = self.coordination.plan
        stage = live.plan.stage_of(self.port.peer_id) if live else None
        return Heartbeat(
            advert=self.advert,
            plan_sequence=live.plan.sequence if live else 0,
            plan_digest=live.digest if live else "",
            stage=stage,
            version=self.version,
            synced=stage is not None,
            draining=self.draining,
            commits=commits,
        )


class FakeSwarm:
    """`peers` of one run in one world; the first that is added owns it."""

    def __init__(self, seed: int, *, num_peers: int, heartbeat_s: float = 1.0, term_s: float = 60.0) -> None:
        self.world = World(seed, uniform(0.02, jitter_s=0.005))
        self.peers: dict[str, FakePeer] = {}
        self.spec = RunSpec(
            training=TrainingSpec(steps=50),
            swarm=SwarmSpec(stages=3, min_peers=num_peers, heartbeat_s=heartbeat_s, term_s=term_s),
        )
        self._owner: SimPeer | None = None

    async def add(self, name: str, *, store: PlanStore | None = None, **claims: bool | float) -> FakePeer:
        port = self.world.add_peer(name)
        self._owner = self._owner or port
        run = run_id(self.spec, self._owner.peer_id)
        said = msgspec.structs.replace(advert(name, **claims), addresses=port.transport.addresses())  # type: ignore[arg-type]
        peer = FakePeer(port=port, advert=said)
        first_sequence = int(1e6 * self.world.now_s())
        endpoint = Endpoint(port.identity, port.transport, run=run, first_sequence=first_sequence)
        peer.coordination = Coordination(
            endpoint=endpoint,
            directory=port.directory,
            clock=port.clock,
            spec=self.spec,
            owner=self._owner.peer_id,
            allocator=GreedyAllocator(),
            store=store or PlanStore(),
            heartbeat=peer.heartbeat,
            on_plan=peer.plans.append,
            on_step=peer.steps.append,
            rng=self.world.rng(f"coordination/{name}"),
        )
        self.peers[name] = peer
        await port.spawn(peer.coordination.start())
        return peer

    async def begin(self, num_peers: int) -> None:
        for number in range(num_peers):
            await self.add(f"p{number}")

    def alive(self) -> list[FakePeer]:
        return [peer for peer in self.peers.values() if peer.port.is_alive]

    def coordinator(self) -> FakePeer:
        """Of the highest plan that anybody alive obeys."""
        newest = max(self.alive(), key=lambda p: p.plan.plan.order).plan.plan
        return next(p for p in self.peers.values() if p.port.peer_id == newest.coordinator)
