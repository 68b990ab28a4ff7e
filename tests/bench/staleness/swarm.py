"""The real drivers in virtual time, with real gradients: what is stale is what the swarm lets be.

`Recording` writes down at which version each stage was when it forwarded each microbatch; as a `Plan` that record can
be played by `regimes.steps`, which must then train the same (a test does it). Where devices work is given.

The model is small, the network and the cards are not. So devices are slowed down until a microbatch takes them as long
as the scenario's own takes them, and links until its activations do. Its gradients are then relatively smaller than the
large model's, by (parameters / activations), so reductions are cheap here.
"""

import asyncio
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from places import devices_of, slowed_down
from plans import Group
from recorder import Recorder
from settings import Run, Swarm
from tasks import ByteGPT, Task
from torch import Tensor

from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import split
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.node.node import Node, NodeListeners, NodePorts, NodeRun
from shoal.deploy.simulate.modelled_swarm import name_of, peer_ids
from shoal.deploy.simulate.pinned import PinnedAllocator
from shoal.deploy.simulate.scenario import find_scenario
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.data.corpus import Corpus
from shoal.peer.model.layout import stage_layer_keys
from shoal.peer.model.state import StageState
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.stage import StageRuntime
from shoal.protocol.access import Gate
from shoal.protocol.membership import Members
from shoal.protocol.messages import CommitReport
from shoal.protocol.ports import Payload
from shoal.protocol.sim.loop import run as run_in_virtual_time
from shoal.protocol.sim.network import MatrixNetwork
from shoal.protocol.sim.trust import TrustingSeals
from shoal.protocol.sim.world import SimPeer, World
from shoal.protocol.spec import RunSpec, WireSpec
from shoal.protocol.topology import Topology

MEMORY_BYTES = 16 << 30


@dataclass
class Recording:
    """Versions at each forward; implements `Plan`."""

    stages: Sequence[Sequence[str]]
    s_max: int
    staleness: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(step, index) -> staleness by stage; of a microbatch that ran twice, that of the last time."""
    ended_s: dict[int, float] = field(default_factory=dict)
    """Step -> when the last stage committed it, from the first forward on: a swarm needs a while to come together."""
    began_s: float | None = None

    def forwarded(self, stage: int, microbatch: Microbatch, version: int) -> None:
        if self.began_s is None:
            self.began_s = asyncio.get_running_loop().time()
        at = (microbatch.step, microbatch.index)
        self.staleness.setdefault(at, [0] * len(self.stages))[stage] = max(0, microbatch.step - version)

    def groups(self, step: int) -> list[Group]:
        indices: dict[tuple[int, ...], list[int]] = {}
        for (t, index), staleness in sorted(self.staleness.items()):
            if t == step:
                indices.setdefault(tuple(staleness), []).append(index)
        return [Group(tuple(group), staleness) for staleness, group in sorted(indices.items())]

    def ends_s(self, step: int) -> float:
        return self.ended_s[step]


class RecordingRuntime(StageRuntime):
    """Tells at which version it forwards what."""

    def __init__(
        self,
        spec: RunSpec,
        first: int,
        last: int,
        *,
        corpus: Corpus | None,
        on_forward: Callable[[Microbatch, int], None],
    ) -> None:
        super().__init__(spec, first, last, corpus=corpus, device=torch.device("cpu"))
        self._on_forward = on_forward

    def forward(self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True) -> bytearray:
        self._on_forward(microbatch, self.version)
        return super().forward(microbatch, payload, contributes=contributes)

    def loss(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> tuple[float, bytearray | None]:
        self._on_forward(microbatch, self.version)
        return super().loss(microbatch, payload, contributes=contributes)


class RecordingArithmetic(Arithmetic):
    def __init__(self, spec: RunSpec, corpus: Corpus, recording: Recording) -> None:
        super().__init__(spec, corpus, torch.device("cpu"))
        self._run_spec, self._text, self._recording = spec, corpus, recording

    def runtime(self, first_layer: int, last_layer: int) -> StageRuntime:
        keys = stage_layer_keys(self._run_spec.model, first_layer, last_layer)
        stage = next(stage for stage, its in enumerate(self._recording.stages) if its[0] == keys[0])

        def forwarded(microbatch: Microbatch, version: int) -> None:
            if not microbatch.validates:
                self._recording.forwarded(stage, microbatch, version)

        corpus = self._text if first_layer == 0 else None
        return RecordingRuntime(self._run_spec, first_layer, last_layer, corpus=corpus, on_forward=forwarded)


def train_swarm(task: Task, run: Run, recorder: Recorder) -> Recording:
    """Raises: ValueError: the task is no byte GPT, or the network has too few devices."""
    if not isinstance(task, ByteGPT) or not isinstance(run.regime, Swarm):
        raise ValueError("only the byte GPT can be trained by the swarm itself")
    scenario = find_scenario(run.regime.scenario)
    spec = _spec(task.spec, run)
    chosen = devices_of(scenario.topology, run.regime.stages, run.regime.replicas)
    topology = slowed_down(scenario.topology, scenario.spec, spec)
    return run_in_virtual_time(_play(task, run, spec, topology, chosen, recorder))


def _spec(spec: RunSpec, run: Run) -> RunSpec:
    assert isinstance(run.regime, Swarm)
    stages, replicas = run.regime.stages, run.regime.replicas
    training = msgspec.structs.replace(
        spec.training,
        steps=run.updates,
        s_max=run.regime.s_max,
        synchronous_steps=run.regime.begins_synchronously,
        compensation=run.method.name,
        validation_interval_steps=0,
    )
    swarm = msgspec.structs.replace(spec.swarm, stages=stages, min_peers=stages * replicas, snapshot_interval_steps=0)
    wire = WireSpec(activations="fp32", gradients="fp32")
    return msgspec.structs.replace(spec, training=training, swarm=swarm, wire=wire, optimizer=run.optimizer)


async def _play(
    task: ByteGPT, run: Run, spec: RunSpec, topology: Topology, chosen: list[list[int]], recorder: Recorder
) -> Recording:
    bounds = tuple(spec.model.num_layers * stage // len(chosen) for stage in range(len(chosen) + 1))
    recording = Recording(
        [stage_layer_keys(spec.model, *ends) for ends in itertools.pairwise(bounds)], spec.training.s_max
    )
    world = World(run.seed, MatrixNetwork(topology), acquainted=True)
    placement = Placement(stages=tuple(tuple(sorted(devices)) for devices in chosen), bounds=bounds)
    watch = _Watch(run, recording, recorder)
    nodes = _Nodes(task, spec, world, topology, placement, watch, recording)
    for device in itertools.chain(*chosen):
        nodes.launch(device)
    kills = asyncio.create_task(nodes.suffer(run))
    try:
        await watch.over
    finally:
        kills.cancel()
        await asyncio.wait({kills})
    watch.check(world, kills)
    return recording


class _Nodes:
    """Whole nodes, each with its turn as coordinator; whoever coordinates makes the plan that was given."""

    def __init__(
        self,
        task: ByteGPT,
        spec: RunSpec,
        world: World,
        topology: Topology,
        placement: Placement,
        watch: "_Watch",
        recording: Recording,
    ) -> None:
        self._spec, self._world, self._topology, self._placement = spec, world, topology, placement
        self._watch = watch
        self._arithmetic = functools.partial(RecordingArithmetic, spec, task.corpus, recording)
        peers = peer_ids(world, range(topology.num_devices))
        self._owner = peers[placement.stages[0][0]]
        self._allocator = PinnedAllocator(placement, peers, split(topology, Workload.of(spec), placement))
        self._seals = TrustingSeals()
        self._lives: dict[int, int] = {}

    def launch(self, device: int) -> None:
        """Its next process."""
        t, name = self._topology, name_of(device)
        peer = self._world.add_peer(
            name,
            place=device,
            device_flop_per_s=float(t.flop_per_s[device]),
            up_bytes_per_s=float(t.up_bytes_per_s[device]),
            down_bytes_per_s=float(t.down_bytes_per_s[device]),
            plug=int(t.card[device]),
        )
        self._lives[device] = life = self._lives.get(device, -1) + 1
        peer.spawn(self._live(peer, name, life), name="life").add_done_callback(self._watch.ended)

    async def suffer(self, run: Run) -> None:
        """Somebody dies and comes back, again and again; one at a time, so that a stage always has a holder."""
        assert isinstance(run.regime, Swarm)
        rng = self._world.rng("kills")
        while run.regime.kill_every_s > 0:
            await asyncio.sleep(rng.expovariate(1 / run.regime.kill_every_s))
            device = rng.choice([device for stage in self._placement.stages for device in stage])
            self._world.crash(self._world.peers[name_of(device)])
            await asyncio.sleep(run.regime.back_s)
            self.launch(device)
            await asyncio.sleep(run.regime.back_s)

    async def _live(self, peer: SimPeer, name: str, life: int) -> None:
        run = NodeRun(spec=self._spec, owner=self._owner)
        node = Node(
            run,
            NodePorts(
                transport=peer.transport,
                directory=peer.directory,
                compute=peer.compute,
                clock=peer.clock,
                disk=None,
                rng=self._world.rng(f"{name}, life {life}"),
                memory_bytes=MEMORY_BYTES,
            ),
            identity=peer.identity,
            gate=Gate(Members(run.id, self._owner, is_open=True), peer.peer_id),
            name=name,
            hears=NodeListeners(on_commit=self._watch.committed, on_state=self._watch.stepped),
            arithmetic=self._arithmetic(),
            seals=self._seals,
            allocator=self._allocator,
        )
        await node.start()
        await node.wait_done()
        await node.close()


class _Watch:
    """Puts together what drivers tell, and ends the run."""

    def __init__(self, run: Run, recording: Recording, recorder: Recorder) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._run = run
        self._recording = recording
        self._recorder = recorder
        self._commits: dict[int, dict[int, CommitReport]] = {}  # step -> stage -> report
        self._told = 0
        self._states: dict[int, dict[int, StageState]] = {}  # version -> stage -> state

    def committed(self, report: CommitReport) -> None:
        commits = self._commits.setdefault(report.step, {})
        commits.setdefault(report.stage, report)
        while len(self._commits.get(self._told, {})) == len(self._recording.stages):
            self._committed_by_all(self._told, self._commits.pop(self._told))
            self._told += 1

    def stepped(self, stage: int, state: StageState) -> None:
        if state.version and self._recorder.wants(state.version):
            self._states.setdefault(state.version, {})[stage] = state
            self._look(state.version)

    def ended(self, life: "asyncio.Task[None]") -> None:
        """Of a node's own will, or by an error, which ends the run."""
        error = None if life.cancelled() else life.exception()
        if error is not None and not self.over.done():
            self.over.set_exception(error)

    def check(self, world: World, kills: "asyncio.Task[None]") -> None:
        """Raises: what has failed unseen."""
        if not kills.cancelled():
            kills.result()
        if world.failures:
            raise RuntimeError(f"a driver failed: {world.failures[0]!r}") from world.failures[0][1]

    def _committed_by_all(self, step: int, commits: dict[int, CommitReport]) -> None:
        now_s = asyncio.get_running_loop().time() - (self._recording.began_s or 0.0)
        self._recording.ended_s[step] = now_s
        num_stages = len(self._recording.stages)
        for (t, _), staleness in self._recording.staleness.items():
            if t == step:
                self._recorder.stale(sum(staleness) / num_stages, 1 / self._run.shape.microbatches_per_step)
        loss = commits[num_stages - 1].loss
        self._guarded(lambda: self._recorder.updated(float("nan") if loss is None else loss, now_s))
        self._look(step + 1)

    def _look(self, version: int) -> None:
        """Once all stages have it, and its step has been told."""
        states = self._states.get(version, {})
        if len(states) < len(self._recording.stages) or version - 1 not in self._recording.ended_s:
            return
        weights: dict[str, Tensor] = {
            key: layer.param_N for state in states.values() for key, layer in state.layers.items()
        }
        del self._states[version]
        self._guarded(lambda: self._recorder.reached(version, weights, self._recording.ended_s[version - 1]))
        if version == self._run.updates and not self.over.done():
            self.over.set_result(None)

    def _guarded(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:  # of the recorder: it ends the run, and no driver
            if not self.over.done():
                self.over.set_exception(error)
