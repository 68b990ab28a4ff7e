"""Runs one peer, and also the coordinator while this peer has that role, on one transport.

Only this module connects `peer` and `coordinator`: it passes the peer's heartbeat to the coordination, and live plans
from the coordination to the peer. A node gets its network, device and clock from its caller: `session/` gives it
libp2p, the simulator runs hundreds of nodes in one process.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeVar

from shoal.coordinator.allocate.interface import Allocator
from shoal.coordinator.allocate.live_allocator import EvolutionaryAllocator
from shoal.coordinator.driver import Callbacks, Coordination, ignore
from shoal.coordinator.ledger import StepRecord
from shoal.coordinator.store import PLANS, PlanStore
from shoal.deploy.node.renewal import Renewal
from shoal.deploy.record.past import Past
from shoal.deploy.state.spec_record import Found, SpecKeeper
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.compute.compute_device import ComputeDevice
from shoal.peer.data.corpus import Corpus
from shoal.peer.driver import PeerDriver
from shoal.peer.handoff.initial import InitialWeights
from shoal.peer.links.meter import LinkMeter, MeteredTransport
from shoal.peer.model.state import StageState
from shoal.peer.presence.own_word import Claims
from shoal.peer.presence.ports import Ports
from shoal.peer.presence.reports import Watcher
from shoal.peer.replica.flow import Traffic
from shoal.protocol.access import Gate
from shoal.protocol.durable import next_incarnation
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import PEER_NAME_CHARS_MAX
from shoal.protocol.messages import CommitReport, SwarmStatus, ValidationReport
from shoal.protocol.plan import SignedPlan
from shoal.protocol.ports import Clock, Compute, Directory, Disk, RunBlocking, Transport, inline
from shoal.protocol.seals import SEALS, Seals
from shoal.protocol.spec import RunSpec, run_id

LEAVE_S = 30.0
"""The time in which a leaving peer may finish its work. After SIGTERM it has only `LEAVE_SOON_S` (`stop.py`)."""

EXCLUDED = (
    "this machine, or the invite with which it joined, has been excluded from the run: ask its host why; the others "
    "no longer accept anything from this machine"
)

DISPLACED = (
    "another process has been started as this peer, on another machine or in a container, from a copy of its state "
    "folder: the others now hear that one alone, so this one stops; give each machine its own state folder"
)

logger = logging.getLogger(__name__)

_CPU = ComputeDevice()

Said = TypeVar("Said")


def both(first: Callable[[Said], None], then: Callable[[Said], None]) -> Callable[[Said], None]:
    """Return a function that passes its argument to `first`, then to `then`."""

    def tell(said: Said) -> None:
        first(said)
        then(said)

    return tell


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """The run that a node takes part in."""

    spec: RunSpec
    owner: PeerID
    record: bytes | None = None
    """The signed spec, which this peer keeps in the directory. None: it keeps none, and looks for no newer revision."""
    corpus: Corpus | None = None
    """The run's text; None: this peer never holds stage 0."""
    initial: InitialWeights | None = None
    """Initial weights from a file: on the host of an imported model, and on peers that have a copy of the adapters'
    base model. None: this peer draws or downloads them."""

    @property
    def id(self) -> str:
        return run_id(self.spec, self.owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePorts:
    """The network, device, clock and disk of a node: real ones, or simulated."""

    transport: Transport
    directory: Directory
    compute: Compute
    clock: Clock
    disk: Disk | None
    """Keeps the plans that this peer obeyed and its snapshots, in the run's folder; None: nothing is kept."""
    rng: random.Random
    device: ComputeDevice = _CPU
    memory_bytes: int | None = None
    """Bytes of memory that a plan may use on this peer; None: all that is free, which a simulation cannot reproduce."""
    machine: str = ""
    """A name of the network card that this peer uses, equal for all peers that share it; empty: nobody shares it."""
    run_blocking: RunBlocking = inline
    """Runs work that blocks on the disk: `asyncio.to_thread` in reality, inline in virtual time."""
    run_search: RunBlocking = inline
    """Runs layout searches: `in_background` in reality, inline in virtual time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeListeners:
    """Callbacks for events at a node."""

    on_step: Callable[[StepRecord], None] = ignore
    """Called for each step while this peer coordinates."""
    on_plan: Callable[[SignedPlan], None] = ignore
    """Called for every plan that this peer obeys."""
    on_commit: Callable[[CommitReport], None] = ignore
    """Called for every commit of this peer's groups, even if another member reports the commit to the coordinator."""
    on_validation: Callable[[ValidationReport], None] = ignore
    on_state: Callable[[int, StageState], None] | None = None
    """Called with (group, state) after this peer has stepped or loaded the state of one of its groups."""
    say: Callable[[str], None] = logger.info
    """Called with a sentence for the person at this machine."""


NOBODY = NodeListeners()


class Node:
    """Takes part in one run, from `start` to `close`.

    Args:
        gate: decides which senders and messages this peer accepts.
        hears: callbacks for events at this node.
        arithmetic: computes forwards and backwards; None: use the run's model and text, on the ports' device.
        traffic: routes microbatches and bounds their number in flight; None: use the plan's shares and measurements.
        seals: signs and checks messages; only a simulation, in which every peer is ours, may replace the default.
        allocator: makes the plans while this peer coordinates; every peer of the run must have the same kind.
    """

    def __init__(
        self,
        run: NodeRun,
        ports: NodePorts,
        *,
        identity: Identity,
        gate: Gate,
        name: str,
        hears: NodeListeners = NOBODY,
        arithmetic: Arithmetic | None = None,
        traffic: Traffic | None = None,
        seals: Seals = SEALS,
        allocator: Allocator | None = None,
    ) -> None:
        spec, clock, disk = run.spec, ports.clock, ports.disk
        self.spec = spec
        self.owner = run.owner
        self.run = run.id
        self.past = Past(clock)
        """The commits of the run that this peer remembers, for other peers' records."""
        incarnation = next_incarnation(disk, PurePosixPath(self.run) / "incarnation", wall_s=clock.wall_s())
        self.links = LinkMeter(clock)
        """Measures the traffic with each other peer."""
        metered = MeteredTransport(ports.transport, self.links, clock)
        self.endpoint = Endpoint(identity, metered, run=self.run, gate=gate, first_sequence=incarnation, seals=seals)
        self.endpoint.revision = spec.revision
        self._renewal = Renewal(self.endpoint, disk)
        self._spec_keeper: SpecKeeper | None = None
        if run.record is not None:
            self._spec_keeper = SpecKeeper(ports.directory, self.endpoint, (spec, run.record), run.owner)
        self.peer = PeerDriver(
            Ports(
                endpoint=self.endpoint,
                compute=ports.compute,
                clock=clock,
                meter=self.links,
                disk=disk,
                run_blocking=ports.run_blocking,
            ),
            spec=spec,
            arithmetic=arithmetic or Arithmetic.on(ports.device, spec, run.corpus),
            traffic=traffic,
            claims=Claims(name=name[:PEER_NAME_CHARS_MAX], machine=ports.machine, memory_bytes=ports.memory_bytes),
            watcher=Watcher(
                on_commit=both(self.past.committed, hears.on_commit),
                on_validation=both(self.past.validated, hears.on_validation),
                on_state=hears.on_state,
                on_end=lambda: self.coordination.report(),
                say=hears.say,
            ),
        )
        self.past.serve(self.endpoint)
        self.peer.begin_with(run.initial)
        self._on_plan = hears.on_plan
        gate.members.on_exclusion.append(self.peer.lose_excluded)
        self.coordination = Coordination(
            endpoint=self.endpoint,
            directory=ports.directory,
            clock=clock,
            spec=spec,
            owner=run.owner,
            allocator=allocator or EvolutionaryAllocator(),
            store=PlanStore(disk, PurePosixPath(self.run) / PLANS),
            heartbeat=self.peer.heartbeat,
            callbacks=Callbacks(
                on_plan=self._obey,
                on_step=hears.on_step,
                on_save=self.peer.save_at,
                on_safe=self.peer.thin,
                on_probe=self.peer.measure_links,
                on_doubt=self.peer.look_at_links,
            ),
            run_blocking=ports.run_search,
            rng=ports.rng,
            has_lost_all=self.peer.has_lost_all,
        )
        self._keeping: list[asyncio.Task[None]] = []

    @property
    def peer_id(self) -> PeerID:
        return self.endpoint.peer_id

    @property
    def is_coordinator(self) -> bool:
        return self.coordination.core.is_coordinator

    async def start(self) -> None:
        """Measure this machine, then look for other peers. Raises: LocalError: the state on disk is of another run."""
        if self._spec_keeper is not None:
            self._keeping.append(asyncio.create_task(self._spec_keeper.keep(), name="keep the run spec"))
        if self.endpoint.members.certificate:
            self._keeping.append(asyncio.create_task(self._renewal.keep(), name="keep the certificate"))
        await self.peer.start()
        await self.coordination.start()

    async def wait_done(self) -> Found | None:
        """Wait until the last step is done and other peers know that, or until the owner has continued the run.

        Returns: None: the run is done; else the spec's newer revision, under which a new node must replace this one.
        Raises: ShoalError: this peer cannot go on.
        """
        heartbeat_s = self.spec.swarm.heartbeat_s
        while not (self.coordination.core.done or self._is_left_behind):
            if self.peer.failure.done():
                self.peer.failure.result()
            if self.endpoint.members.excludes_us(self.peer_id):
                raise LocalError(EXCLUDED)
            if self.endpoint.is_displaced:
                raise LocalError(DISPLACED)
            if self._newer is not None:
                return self._newer
            if self._spec_keeper is not None and self.coordination.core.newest_revision > self.spec.revision:
                self._spec_keeper.hurry()
            await asyncio.sleep(heartbeat_s / 4)
        await self.peer.drain(10.0)  # the last validation may still be under way
        await asyncio.sleep(4.0 * heartbeat_s)  # meanwhile answer peers and coordinators that missed the end
        return self._newer

    @property
    def _newer(self) -> Found | None:
        keeper = self._spec_keeper
        return keeper.newer.result() if keeper is not None and keeper.newer.done() else None

    @property
    def _is_left_behind(self) -> bool:
        """True if our stage has committed the last step, and no peer has answered for a long time."""
        replica = self.peer.replica
        at_the_end = replica is not None and replica.version == self.spec.training.steps
        return at_the_end and self.coordination.silence_s > 20.0 * self.spec.swarm.heartbeat_s

    async def leave(self, *, within_s: float = LEAVE_S) -> None:
        """Drain: finish work in flight and wait for its commit, save what no other peer holds, and say goodbye.

        Args: within_s: seconds for the drain, without the goodbye; other peers redo work that is unfinished then.
        """
        await self.peer.drain(within_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if within_s >= LEAVE_S else 2.0):
                await self.coordination.close(leave=True)

    async def close(self) -> None:
        """Stop now, without draining. Safe to call twice, and after `leave`."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self.coordination.close(leave=False)
        await self.peer.close()

    def _obey(self, plan: SignedPlan) -> None:
        self._on_plan(plan)
        before = self.coordination.core.chain.links.before_last
        if before is not None and not self.endpoint.gate.has_plan:
            self.endpoint.obey(before.plan)  # members that left since may still be draining
        self.endpoint.obey(plan.plan)
        self.peer.obey(plan, predecessor=before)

    async def status(self) -> SwarmStatus:
        """Ask the coordinator for the swarm's status. Raises: Unreachable, Refused, RemoteError: no answer came."""
        return await self.coordination.ask_status()
