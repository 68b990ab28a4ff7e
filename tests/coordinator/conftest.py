"""Makers of adverts, heartbeats and plans, and a swarm of peers that do nothing but coordinate.

Every peer of `FakeSwarm` runs the real driver in virtual time; only its heartbeats are made up.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from open_gate import OpenGate

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Allocator
from shoal.coordinator.chain import PlanChain
from shoal.coordinator.driver import Callbacks, Coordination
from shoal.coordinator.era import Certificates
from shoal.coordinator.ledger import StepRecord
from shoal.coordinator.store import PlanStore
from shoal.protocol.certificate import Attested
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import PeerID
from shoal.protocol.membership import Members
from shoal.protocol.messages import Advert, CommitReport, Heartbeat, Holding, LinkReport
from shoal.protocol.plan import Member, Plan, PlanProof, SignedPlan, Stage, plan_digest
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import SimPeer, World
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec, TrainingSpec, run_id


@pytest.fixture(autouse=True)
def certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats that are made up attest nothing: what they say of disks counts here. `test_certificates.py` has the
    real thing."""
    monkeypatch.setattr(Certificates, "layers", lambda self, age: None)
    monkeypatch.setattr("shoal.coordinator.core.certified_flaw", lambda *args, **named: "")


def advert_of(name: str, **claims: Any) -> Advert:
    honest: dict[str, Any] = {
        "device": "cpu",
        "flop_per_s": 1e12,
        "memory_bytes": 1 << 30,
        "upload_bytes_per_s": 1e7,
        "download_bytes_per_s": 1e8,
        "addresses": (f"/ip4/10.0.0.1/tcp/1/p2p/{name}",),
        "has_data": True,
    }
    return Advert(name=name, **(honest | claims))


def heartbeat_of(name: str, *, advert: Advert | None = None, **says: Any) -> Heartbeat:
    usual: dict[str, Any] = {
        "plan_sequence": 0,
        "plan_digest": "",
        "stage": None,
        "version": 0,
        "synced": False,
        "draining": False,
    }
    return Heartbeat(advert=advert or advert_of(name), **(usual | says))


def stages_of(groups: Sequence[Sequence[str]]) -> tuple[Stage, ...]:
    """Two layers a stage."""
    return tuple(
        Stage(
            first_layer=2 * index,
            last_layer=2 * index + 2,
            members=tuple(Member(peer=PeerID(peer), share=1.0, bandwidth=1.0) for peer in group),
        )
        for index, group in enumerate(groups)
    )


def plan_of(
    groups: Sequence[Sequence[str]],
    *,
    coordinator: str,
    order: tuple[int, int] = (1, 1),
    base: SignedPlan | None = None,
    reason: str = "",
    **says: Any,
) -> SignedPlan:
    """Signed by nobody: pure cores see only plans that a driver has verified. Fresh, so that nobody need have state.

    Whoever is a member of `base` has voted for it, in a way that `believe` believes.
    """
    votes = tuple((at, b"yes") for at in range(len(base.plan.electors))) if base else ()
    plan = unsigned(
        Plan(
            run="run",
            term=order[0],
            sequence=order[1],
            coordinator=PeerID(coordinator),
            stages=stages_of(groups),
            reason=reason,
            **({"not_started": True, "previous": base.digest if base else ""} | says),
        )
    )
    return msgspec.structs.replace(plan, proof=PlanProof(order[0], votes)) if base else plan


def sign_vote(body: bytes) -> bytes:
    return b"yes"


def believe(signer: PeerID, signature: bytes, body: bytes) -> bool:
    return signature == b"yes"


def unsigned(plan: Plan) -> SignedPlan:
    return SignedPlan(plan, msgspec.msgpack.encode(plan), plan_digest(plan))


@dataclass(kw_only=True)
class FakePeer:
    """Says what its fields say in its next heartbeat."""

    port: SimPeer
    advert: Advert
    coordination: Coordination = field(init=False)
    plans: list[SignedPlan] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    draining: bool = False
    silent: tuple[PeerID, ...] = ()
    state: tuple[int, int] | None = None
    """(era, stage) of what it holds; from a fresh plan, or from a mate as soon as there is one."""
    begins: bool = True
    """Whether it comes by the state that a fresh plan begins with."""
    version: int = 0
    holdings: tuple[Holding, ...] = ()
    attested: tuple[Attested, ...] = ()
    commits: list[CommitReport] = field(default_factory=list)
    mates: Callable[[], Sequence["FakePeer"]] = list
    probed: list[LinkReport] = field(default_factory=list)
    """What it measures as soon as it is asked."""

    @property
    def name(self) -> str:
        return self.port.name

    @property
    def peer_id(self) -> PeerID:
        return self.port.peer_id

    @property
    def order(self) -> tuple[int, int]:
        return self.coordination.plan.plan.order if self.coordination.plan else (0, 0)

    @property
    def plan(self) -> Plan:
        assert self.coordination.plan is not None
        return self.coordination.plan.plan

    def obey(self, signed: SignedPlan) -> None:
        self.plans.append(signed)
        plan, stage = signed.plan, signed.plan.stage_of(self.peer_id)
        if stage is None or self.state != (plan.era, stage):
            self.state = (plan.era, stage) if plan.not_started and self.begins and stage is not None else None
            self.version = plan.restore_version if plan.not_started else 0

    def probe(self, peers: tuple[PeerID, ...], beside: tuple[PeerID, ...]) -> None:
        self.probed += [LinkReport(peer=peer, round_trip_s=0.04, bytes_per_s=1e7, num_probes=3) for peer in peers]

    def heartbeat(self) -> Heartbeat:
        commits, self.commits = tuple(self.commits), []
        links, self.probed = tuple(self.probed), []
        live = self.coordination.plan
        stage = live.plan.stage_of(self.peer_id) if live else None
        if live is not None and stage is not None and self.state is None:
            mate = next((mate for mate in self.mates() if mate.state == (live.plan.era, stage)), None)
            if mate is not None:
                self.state, self.version = mate.state, mate.version
        return Heartbeat(
            advert=self.advert,
            plan_sequence=live.plan.sequence if live else 0,
            plan_digest=live.digest if live else "",
            era=live.plan.era if live else 0,
            stage=stage,
            version=self.version,
            synced=self.state is not None,
            holdings=self.holdings,
            attested=self.attested,
            draining=self.draining,
            silent=self.silent,
            commits=commits,
            links=links,
        )


class Invited(Members):
    """Anybody is a member, and `invites` says by which invite (PeerID -> key)."""

    def __init__(self) -> None:
        super().__init__("", PeerID(""), is_open=True)
        self.invites: dict[PeerID, bytes] = {}

    def invite_of(self, peer: PeerID) -> bytes:
        return self.invites.get(peer, b"")


class FakeSwarm:
    """Peers of one run in one world; the first that is added owns it."""

    def __init__(
        self,
        seed: int,
        *,
        min_peers: int,
        heartbeat_s: float = 1.0,
        term_s: float = 60.0,
        steps: int = 50,
        expert_slots: int = 0,
        allocator: Allocator | None = None,
    ) -> None:
        self.allocator = allocator or GreedyAllocator()
        self.world = World(seed, uniform(0.02, jitter_s=0.005))
        self.peers: dict[str, FakePeer] = {}
        self.spec = RunSpec(
            model=ModelSpec(num_experts=4 if expert_slots else 0),
            training=TrainingSpec(steps=steps, validation_interval_steps=0),
            swarm=SwarmSpec(
                stages=3, min_peers=min_peers, heartbeat_s=heartbeat_s, term_s=term_s, expert_slots=expert_slots
            ),
        )
        self.members = Invited()
        self._owner: SimPeer | None = None

    async def add(
        self, name: str, *, store: PlanStore | None = None, keeps: bool = False, invite: bytes = b"", **claims: Any
    ) -> FakePeer:
        port = self.world.add_peer(name)
        self.members.invites[port.peer_id] = invite
        self._owner = self._owner or port
        endpoint = Endpoint(
            port.identity,
            port.transport,
            run=run_id(self.spec, self._owner.peer_id),
            gate=OpenGate(self.members),
            first_sequence=int(1e6 * self.world.now_s()),
        )
        advert = advert_of(name, addresses=port.transport.addresses(), **claims)
        peer = FakePeer(port=port, advert=advert, mates=self.alive)
        peer.coordination = Coordination(
            endpoint=endpoint,
            directory=port.directory,
            clock=port.clock,
            spec=self.spec,
            owner=self._owner.peer_id,
            allocator=self.allocator,
            store=store or PlanStore(port.disk if keeps else None),
            heartbeat=peer.heartbeat,
            callbacks=Callbacks(on_plan=peer.obey, on_step=peer.steps.append, on_probe=peer.probe),
            rng=self.world.rng(f"coordination/{name}"),
        )
        self.peers[name] = peer
        await port.spawn(peer.coordination.start())
        return peer

    async def begin(self, num_peers: int, **claims: Any) -> None:
        """Add peers and wait until all obey the first plan."""
        for number in range(num_peers):
            await self.add(f"p{number}", **claims)
        await self.until(lambda: all(peer.order == (1, 1) for peer in self.alive()), within_s=10.0)

    def alive(self) -> list[FakePeer]:
        return [peer for peer in self.peers.values() if peer.port.is_alive]

    @property
    def coordinator(self) -> FakePeer:
        """Of the highest plan that anybody alive obeys."""
        newest = max(self.alive(), key=lambda peer: peer.order).plan
        return next(peer for peer in self.peers.values() if peer.peer_id == newest.coordinator)

    def agreed(self) -> bool:
        """Everyone alive obeys one plan, and its coordinator is alive."""
        return len({peer.order for peer in self.alive()}) == 1 and self.coordinator.port.is_alive

    async def until(self, condition: Callable[[], bool], *, within_s: float) -> float:
        """Virtual time that passed until `condition` held."""
        begun_s = self.world.now_s()
        while not condition():
            state = {peer.name: peer.order for peer in self.alive()}
            assert self.world.now_s() < begun_s + within_s, f"not within {within_s} s: {state}"
            await asyncio.sleep(0.05)
        return self.world.now_s() - begun_s

    def chain(self) -> list[Plan]:
        """Every plan that anybody obeyed, by order; fails if two share one, the links do not hold, or a peer went
        back."""
        plans: dict[tuple[int, int], SignedPlan] = {}
        for peer in self.peers.values():
            orders = [signed.plan.order for signed in peer.plans]
            assert orders == sorted(set(orders)), f"{peer.name} obeyed {orders}"
            for signed in peer.plans:
                assert plans.setdefault(signed.plan.order, signed).digest == signed.digest
        chain = [plans[order] for order in sorted(plans)]
        for before, after in itertools.pairwise(chain):
            assert after.plan.previous == before.digest
        return [signed.plan for signed in chain]

    async def close(self) -> None:
        for peer in self.alive():
            await peer.port.spawn(peer.coordination.close(leave=False))
        assert self.world.failures == []


SwarmRunner = Callable[..., FakeSwarm]


@pytest.fixture
def run_swarm() -> SwarmRunner:
    """run_swarm(scenario, seed=…, **swarm): run `scenario(swarm)` in virtual time and close what it left."""

    def go(scenario: Callable[[FakeSwarm], Awaitable[None]], *, seed: int = 1, **swarm: Any) -> FakeSwarm:
        made = FakeSwarm(seed, **swarm)

        async def main() -> None:
            await scenario(made)
            await made.close()

        run(main())
        return made

    return go


@pytest.fixture(scope="session")
def make_advert() -> Callable[..., Advert]:
    return advert_of


@pytest.fixture(scope="session")
def make_heartbeat() -> Callable[..., Heartbeat]:
    return heartbeat_of


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., SignedPlan]:
    return plan_of


@pytest.fixture(scope="session")
def make_unsigned() -> Callable[[Plan], SignedPlan]:
    return unsigned


@pytest.fixture(scope="session")
def make_chain() -> Callable[..., PlanChain]:
    """make_chain(run="run", owner="a"): it believes who votes `yes`."""
    return lambda run="run", owner="a": PlanChain(run, owner=PeerID(owner), verify=believe, verify_order=believe)
