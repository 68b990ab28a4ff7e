"""A swarm of real peer drivers in virtual time, under a plan that the test gives (no coordinator)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from open_gate import OpenGate

from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.driver import PeerDriver
from shoal.peer.links.meter import LinkMeter
from shoal.peer.presence.own_word import Claims
from shoal.peer.presence.ports import Ports
from shoal.peer.presence.reports import Watcher
from shoal.peer.replica.flow import Traffic
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.messages import CommitReport, ValidationReport
from shoal.protocol.plan import ExpertGroup, Member, Plan, SignedPlan, Stage, sign_plan
from shoal.protocol.ports import Disk
from shoal.protocol.sim.network import Network
from shoal.protocol.sim.world import SimPeer, World
from shoal.protocol.spec import RunSpec, run_id
from shoal.protocol.wire_format import Formats

# The models here are tiny: a second thread costs each operation more than it gives.
torch.set_num_threads(1)


@dataclass
class Swarm:
    """Peers named `stage.replica`; `commits` are the last stage's reports by step."""

    spec: RunSpec
    world: World
    corpus: Corpus
    drivers: dict[str, PeerDriver] = field(default_factory=dict)
    commits: dict[int, dict[int, CommitReport]] = field(default_factory=dict)
    plan: SignedPlan | None = None

    @property
    def losses(self) -> list[float]:
        last = len(self.plan.plan.stages) - 1 if self.plan else 0
        return [self.commits[last][step].loss or 0.0 for step in sorted(self.commits.get(last, {}))]

    @property
    def validations(self) -> list[ValidationReport]:
        reports = [r for d in self.drivers.values() for r in d.reports.validations]
        return sorted(reports, key=lambda r: r.step)

    def peer(self, name: str) -> SimPeer:
        return self.world.peers[name]

    def _committed(self, report: CommitReport) -> None:
        self.commits.setdefault(report.stage, {}).update({report.step: report})

    async def add(
        self,
        name: str,
        *,
        device_flop_per_s: float = 1e12,
        disk: Disk | None = None,
        keeps: bool = False,
        traffic: Traffic | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> PeerDriver:
        """`keeps`: it has the disk that this world gives its name."""
        peer = self.world.add_peer(name, device_flop_per_s=device_flop_per_s)
        disk = peer.disk if keeps else disk
        owner = next(iter(self.world.peers.values())).peer_id
        incarnation = int(self.world.now_s() * 1e6)
        endpoint = Endpoint(
            peer.identity, peer.transport, run=run_id(self.spec, owner), gate=OpenGate(), first_sequence=incarnation
        )

        async def make() -> PeerDriver:
            driver = PeerDriver(
                Ports(
                    endpoint=endpoint,
                    compute=peer.compute,
                    clock=peer.clock,
                    meter=LinkMeter(peer.clock),
                    disk=disk,
                ),
                spec=self.spec,
                arithmetic=Arithmetic(self.spec, self.corpus, torch.device("cpu"), dtype=dtype),
                traffic=traffic,
                claims=Claims(name=name),
                watcher=Watcher(on_commit=self._committed),
            )
            await driver.start()
            return driver

        for other in self.world.peers.values():  # in life the coordinator's adverts do this
            await other.transport.introduce(peer.peer_id, peer.transport.addresses())
            await peer.transport.introduce(other.peer_id, other.transport.addresses())
        self.drivers[name] = await peer.spawn(make())
        return self.drivers[name]

    def obey(
        self,
        stages: list[list[str]],
        *,
        not_started: bool,
        experts: list[list[list[str]]] | None = None,
        spares: tuple[str, ...] = (),
        era: int = 0,
        restore: int = 0,
        unless: tuple[str, ...] = (),
        formats: Formats | None = None,
    ) -> None:
        """Give every peer (`unless` named) the next plan: equal layer ranges, equal shares.

        `experts`: who holds them, by stage and expert; None: they are not placed.
        """
        layers = self.spec.model.num_layers
        bounds = [layers * i // len(stages) for i in range(len(stages) + 1)]
        owner = next(iter(self.world.peers.values()))
        before = self.plan
        sequence = before.plan.sequence + 1 if before else 1

        def members(group: int, names: list[str]) -> tuple[Member, ...]:
            stayed = before.plan.group_members(group) if before and before.plan.era == era else ()
            since = {member.peer: member.since for member in stayed}
            peers = [self.peer(name).peer_id for name in names]
            return tuple(Member(peer, 1.0, 1.0, since.get(peer, sequence)) for peer in peers)

        units = [(stage, expert) for stage, of_stage in enumerate(experts or ()) for expert in range(len(of_stage))]
        plan = Plan(
            run=run_id(self.spec, owner.peer_id),
            term=1,
            sequence=sequence,
            previous=before.digest if before else "",
            coordinator=owner.peer_id,
            stages=tuple(
                Stage(bounds[stage], bounds[stage + 1], members(stage, names)) for stage, names in enumerate(stages)
            ),
            formats=formats,
            spares=tuple(self.peer(name).peer_id for name in spares),
            experts=tuple(
                ExpertGroup(stage, expert, members(len(stages) + number, experts[stage][expert] if experts else []))
                for number, (stage, expert) in enumerate(units)
            ),
            not_started=not_started,
            era=era,
            restore_version=restore,
            restore_era=max(0, era - 1),
        )
        self.plan = sign_plan(owner.identity, plan)
        for name, driver in self.drivers.items():
            if name not in unless:
                self.tell(name, driver)

    def tell(self, name: str, driver: PeerDriver) -> None:
        """The newest plan, to one peer."""
        assert self.plan is not None
        self.peer(name).context().run(driver.obey, self.plan)

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 3600.0) -> None:
        """Wait in virtual time; a peer that failed ends the test."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                for driver in self.drivers.values():
                    if driver.failure.done():
                        driver.failure.result()
                await asyncio.sleep(0.05)

    async def until_step(self, step: int) -> None:
        """Every stage has committed `step` steps."""
        assert self.plan is not None
        stages = range(len(self.plan.plan.stages))
        await self.until(lambda: all(step - 1 in self.commits.get(stage, {}) for stage in stages))

    async def close(self) -> None:
        for name, driver in self.drivers.items():
            if self.peer(name).is_alive:
                await self.peer(name).spawn(driver.close())


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that a tiny model learns something of."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = [f"the {i % 7}th fish of shoal {i % 13} swims {i * i % 31} miles\n" for i in range(3000)]
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="session")
def tiny_spec(text: Path) -> RunSpec:
    return msgspec.convert(
        {
            "seed": 3,
            "model": {"dim": 32, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64, "context": 32},
            "data": {"source": str(text)},
            "optimizer": {"name": "adamw", "learning_rate": 3e-3, "warmup_steps": 2},
            "training": {
                "steps": 20,
                "microbatches_per_step": 6,
                "microbatch_size": 2,
                "s_max": 0,
                "synchronous_steps": 0,  # a test that sets s_max wants to see it in a few steps
            },
            "swarm": {"stages": 3, "min_peers": 6},
            "wire": {"activations": "fp32"},
        },
        RunSpec,
    )


@pytest.fixture(scope="session")
def make_swarm() -> Callable[..., Swarm]:
    """(spec, seed, network) -> an empty swarm; call it inside the virtual-time loop."""

    def make(spec: RunSpec, *, seed: int = 0, network: Network) -> Swarm:
        return Swarm(spec, World(seed, network), load_corpus(spec.data, context=spec.model.context))

    return make
