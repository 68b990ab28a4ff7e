"""Run whole nodes in virtual time, as `shoal host` and `shoal join` start them, without processes.

Each name is a machine; its process may die, and `launch` begins its next life. Its events (plans obeyed, states held,
commits, rounds) go to `on_event`; `invariants.py` says what must hold of them.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from sightings import CommitSeen, Event, Failed, FinishSeen, Held, Obeyed, Opened, Started

from shoal.coordinator.allocate.interface import Allocator
from shoal.coordinator.ledger import StepRecord
from shoal.deploy.node.node import LEAVE_S, Node, NodeListeners, NodePorts, NodeRun
from shoal.deploy.state.spec_record import FIND_S, fetch_spec, seal_spec
from shoal.peer.data.corpus import Corpus
from shoal.peer.handoff.initial import InitialWeights
from shoal.peer.model.state import StageState
from shoal.peer.replica.flow import Traffic
from shoal.protocol.access import Gate
from shoal.protocol.envelope import Envelope
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, InviteKey
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.membership import Members, delegate
from shoal.protocol.messages import RoundStart
from shoal.protocol.ports import CallHandler, FrameHandler, Payload, Priority, Transport
from shoal.protocol.sim.network import Network
from shoal.protocol.sim.world import SimPeer, World
from shoal.protocol.spec import RunSpec, run_id


class SimSwarm:
    """Nodes of one run; the first to be launched is its host and owner.

    Args:
        corpus: the run's text.
        allocator: of every coordinator; None: the one of `shoal join`.
        traffic: as for `PeerDriver`.
        on_event: called with every event, in order.
        initial: name -> the initial weights, or the base of the adapters, that it has.
        is_open: True: any peer is a member; False: only launched ones, by the host's invite.
    """

    def __init__(
        self,
        spec: RunSpec,
        corpus: Corpus,
        *,
        seed: int,
        network: Network,
        device_flop_per_s: float = 2e8,
        allocator: Allocator | None = None,
        traffic: Traffic | None = None,
        on_event: Callable[[Event], None] | None = None,
        initial: Mapping[str, InitialWeights] | None = None,
        is_open: bool = True,
    ) -> None:
        self.spec = spec
        self.corpus = corpus
        self.world = World(seed, network)
        self.nodes: dict[str, Node] = {}
        """The newest process of each name, once it has started."""
        self.steps: dict[int, StepRecord] = {}
        """The steps, each as first reported by a coordinator."""
        self.ended: set[str] = set()
        """The names that have no process because the newest one has ended by itself."""
        self._device_flop_per_s = device_flop_per_s
        self._allocator = allocator
        self._traffic = traffic
        self._on_event = on_event or (lambda event: None)
        self._initial = dict(initial or {})
        self._is_open = is_open
        self._owner: SimPeer | None = None
        self._speeds: dict[str, float] = {}
        self._with_text: dict[str, bool] = {}
        self._lives: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[bool]] = {}
        self._failures_told = 0

    # --- machines ---

    def launch(self, name: str, *, speed: float = 1.0, has_text: bool = True) -> "asyncio.Task[bool]":
        """Start the next process of `name`; `speed` and `has_text` hold for its first and all later ones.

        Returns: the task in which it lives until it ends by itself; after a crash it never does.
        """
        self._speeds.setdefault(name, speed)
        self._with_text.setdefault(name, has_text)
        peer = self.world.add_peer(name, device_flop_per_s=self._device_flop_per_s * self._speeds[name])
        self._owner = self._owner or peer
        self._lives[name] = life = self._lives.get(name, -1) + 1
        self.nodes.pop(name, None)
        self.ended.discard(name)
        self._tell(Started, name, life, peer=peer.peer_id)
        task = peer.spawn(self._live(name, life, peer), name="life")
        task.add_done_callback(lambda done: self._life_over(name, life, done))
        self._tasks[name] = task
        return task

    async def add(self, name: str, *, speed: float = 1.0, has_text: bool = True) -> Node:
        """Launch a node, and wait until it takes part."""
        self.launch(name, speed=speed, has_text=has_text)
        await self.until(lambda: name in self.nodes)
        return self.nodes[name]

    async def leave(self, name: str, *, within_s: float = LEAVE_S) -> None:
        """Let a node say good-bye, as a process does on a first signal."""
        node = self.nodes.pop(name)
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.wait([task])
        self.ended.add(name)

        async def go() -> None:
            await node.leave(within_s=within_s)
            await node.close()

        await self.world.peers[name].spawn(go())

    @property
    def running(self) -> tuple[str, ...]:
        """The names that are alive and have not ended."""
        return tuple(name for name in self._lives if name not in self.ended and self.world.peers[name].is_alive)

    def stage_of(self, name: str) -> int | None:
        """Return the stage that the node holds and takes traffic for."""
        replica = self.nodes[name].peer.replica if name in self.nodes else None
        return replica.stage if replica and replica.is_ready else None

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 600.0) -> None:
        """Wait until `condition` holds. Raises: TimeoutError; LocalError: a node failed meanwhile."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.raise_failures()
                await asyncio.sleep(0.1)

    async def end(self, *, timeout_s: float = 3600.0) -> None:
        """Wait until every process has ended because the run is done."""
        await self.until(lambda: not self.running, timeout_s=timeout_s)
        self.raise_failures()

    def raise_failures(self) -> None:
        """Raise the first failure, which is a bug. Raises: LocalError: a handler or a node failed."""
        if self.world.failures:
            name, error = self.world.failures[0]
            raise LocalError(f"{name} failed: {error!r}") from error

    # --- one process ---

    async def _live(self, name: str, life: int, peer: SimPeer) -> bool:
        """Live one process. Returns: True if it must restart, since the run has been continued."""
        for other in self.world.peers.values():  # outside simulations the invite's addresses and the directory do this
            await other.transport.introduce(peer.peer_id, peer.transport.addresses())
            await peer.transport.introduce(other.peer_id, other.transport.addresses())
        spec, owner, record = await self._find_run(peer)

        def tell(kind: Callable[..., Event], **facts: object) -> None:
            self._tell(kind, name, life, **facts)

        def holds(stage: int, state: StageState) -> None:
            total = sum(float(t.abs().sum()) for layer in state.layers.values() for t in layer.tensors)
            tell(
                Held,
                incarnation=node.peer.services.life.incarnation,
                era=node.endpoint.era,
                stage=stage,
                version=state.version,
                digest=state.digest(),
                is_finite=math.isfinite(total),
            )

        text = self.corpus if self._with_text[name] else None
        run = NodeRun(spec=spec, owner=owner, record=record, corpus=text, initial=self._initial.get(name))
        ports = NodePorts(
            transport=RoundTap(peer.transport, lambda start: tell(Opened, start=start)),
            directory=peer.directory,
            compute=peer.compute,
            clock=peer.clock,
            disk=peer.disk,
            rng=self.world.rng(f"{name}, life {life}"),
            memory_bytes=1 << 30,
        )
        node = Node(
            run,
            ports,
            identity=peer.identity,
            gate=Gate(self._members_as(peer, run.id), peer.peer_id),
            name=name,
            hears=NodeListeners(
                on_step=self._stepped,
                on_plan=lambda plan: tell(Obeyed, plan=plan),
                on_commit=lambda report: tell(CommitSeen, report=report),
                on_state=holds,
            ),
            allocator=self._allocator,
            traffic=self._traffic,
        )
        await node.start()
        self.nodes[name] = node
        newer = await node.wait_done()
        if newer is not None:
            await node.leave()
        await node.close()
        return newer is not None

    async def _find_run(self, peer: SimPeer) -> tuple[RunSpec, PeerID, bytes]:
        """Return the spec: the host has it; others poll the directory without a limit, as `shoal join` does."""
        owner = self._owner
        assert owner is not None
        if owner.peer_id == peer.peer_id:
            return self.spec, owner.peer_id, seal_spec(peer.identity, self.spec)
        invite = Invite(PROTOCOL_VERSION, run_id(self.spec, owner.peer_id), owner.peer_id, ())
        while True:
            try:
                spec, record = await fetch_spec(peer.directory, invite, timeout_s=FIND_S)
            except LocalError:
                continue  # as if its user restarted it
            return spec, owner.peer_id, record

    def _members_as(self, peer: SimPeer, run: str) -> Members:
        assert self._owner is not None
        key = None
        if not self._is_open:
            seed = self._owner.identity.public_key  # any 32 bytes: secrecy does not matter here
            delegation = delegate(self._owner.identity, Identity(seed).public_key, run=run)
            key = InviteKey(seed, delegation)
        return Invite(PROTOCOL_VERSION, run, self._owner.peer_id, (), key).members_for(peer.peer_id)

    def _stepped(self, step: StepRecord) -> None:
        self.steps.setdefault(step.step, step)

    def _life_over(self, name: str, life: int, task: "asyncio.Task[bool]") -> None:
        if task.cancelled() or self._lives[name] != life:
            return
        error = task.exception()
        if error is None and task.result():
            self.world.crash(self.world.peers[name])  # an ended process leaves only its disk
            self.launch(name)
        elif error is None:
            self.ended.add(name)
            self._tell(FinishSeen, name, life)
        elif isinstance(error, Exception):
            self.world.failures.append((name, error))

    def tell_failures(self) -> None:
        """Report the failures since the last call as events."""
        for name, error in self.world.failures[self._failures_told :]:
            self._tell(Failed, name, self._lives.get(name, 0), error=_describe(error))
        self._failures_told = len(self.world.failures)

    def _tell(self, kind: Callable[..., Event], name: str, life: int, **facts: object) -> None:
        self._on_event(kind(at_s=asyncio.get_running_loop().time(), name=name, life=life, **facts))


class RoundTap:
    """A transport that reports the rounds that its peer opens; everything else passes."""

    def __init__(self, transport: Transport, on_round: Callable[[RoundStart], None]) -> None:
        self._transport = transport
        self._on_round = on_round
        self._last: RoundStart | None = None

    @property
    def peer_id(self) -> PeerID:
        return self._transport.peer_id

    def addresses(self) -> tuple[str, ...]:
        return self._transport.addresses()

    def serve(self, *, on_call: CallHandler, on_frame: FrameHandler) -> None:
        self._transport.serve(on_call=on_call, on_frame=on_frame)

    async def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        await self._transport.introduce(peer, addresses)

    async def call(self, peer: PeerID, request: bytes, *, timeout_s: float) -> bytes:
        if b"RoundStart" in request:
            start = _ROUNDS.decode(_ENVELOPES.decode(request).body)
            if start != self._last:  # the same to every member
                self._last = start
                self._on_round(start)
        return await self._transport.call(peer, request, timeout_s=timeout_s)

    async def send(
        self, peer: PeerID, meta: bytes, payload: Payload, *, priority: Priority, again: bytes | None = None
    ) -> None:
        await self._transport.send(peer, meta, payload, priority=priority, again=again)

    async def close(self) -> None:
        await self._transport.close()


_ENVELOPES = msgspec.msgpack.Decoder(Envelope)
_ROUNDS = msgspec.msgpack.Decoder(RoundStart)


def _describe(error: BaseException) -> str:
    """Return the error and the place where it was raised, for debugging."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace else ""
    return f"{type(error).__name__}: {error}{where}"
