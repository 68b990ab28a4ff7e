"""The real drivers in virtual time, with real gradients: what is stale is what the swarm lets be.

`Recording` writes down at which version each stage was when it forwarded each microbatch; as a `Plan` that record can
be played by `regimes.steps`, which must then train the same (a test does it). No coordinator: the plan is given.

The model is small, the network and the cards are not. So devices are slowed down until a microbatch takes them as long
as the scenario's own takes them, and links until its activations do. Its gradients are then relatively smaller than the
large model's, by (parameters / activations), so reductions are cheap here.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from plans import Group
from regimes import Recorder
from settings import Run, Swarm
from tasks import ByteGPT, Task
from torch import Tensor

from shoal.deploy.simulate.scenario import find_scenario
from shoal.peer.arithmetic import TorchArithmetic
from shoal.peer.data.corpus import Corpus
from shoal.peer.driver import PeerDriver
from shoal.peer.model.flop import backward_flop, forward_flop
from shoal.peer.model.layout import all_layer_keys, stage_layer_keys
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.stage import StageRuntime
from shoal.peer.pipeline.state import StageState
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.messages import CommitReport
from shoal.protocol.plan import Member, Plan, Stage, sign_plan
from shoal.protocol.ports import Payload
from shoal.protocol.sim.loop import run as run_in_virtual_time
from shoal.protocol.sim.matrix import MatrixNetwork
from shoal.protocol.sim.world import World
from shoal.protocol.spec import RunSpec, WireSpec, run_id
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
    """Step -> when the last stage to commit it did."""

    def forwarded(self, stage: int, microbatch: Microbatch, version: int) -> None:
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


class RecordingArithmetic(TorchArithmetic):
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
        compensation=run.method.name,
        validation_interval_steps=0,
    )
    swarm = msgspec.structs.replace(
        spec.swarm, stages=stages, min_peers=stages * replicas, snapshot_interval_steps=0, heartbeat_s=10.0, term_s=60.0
    )
    wire = WireSpec(activations="fp32", gradients="fp32")
    return msgspec.structs.replace(spec, training=training, swarm=swarm, wire=wire, optimizer=run.optimizer)


async def _play(
    task: ByteGPT, run: Run, spec: RunSpec, topology: Topology, chosen: list[list[int]], recorder: Recorder
) -> Recording:
    bounds = [spec.model.num_layers * stage // len(chosen) for stage in range(len(chosen) + 1)]
    keys = [stage_layer_keys(spec.model, first, last) for first, last in itertools.pairwise(bounds)]
    recording = Recording(keys, spec.training.s_max)
    world = World(run.seed, MatrixNetwork(topology), acquainted=True)
    watch = _Watch(run, recording, recorder)
    drivers = {}
    owner = world.identity(f"device {chosen[0][0]}")
    for device in sorted(itertools.chain(*chosen)):
        name = f"device {device}"
        peer = world.add_peer(
            name,
            place=device,
            device_flop_per_s=float(topology.flop_per_s[device]),
            up_bytes_per_s=float(topology.up_bytes_per_s[device]),
            down_bytes_per_s=float(topology.down_bytes_per_s[device]),
            plug=int(topology.card[device]),
        )
        driver = PeerDriver(
            endpoint=Endpoint(peer.identity, peer.transport, run=run_id(spec, owner.peer_id)),
            compute=peer.compute,
            clock=peer.clock,
            spec=spec,
            arithmetic=RecordingArithmetic(spec, task.corpus, recording),
            disk=None,
            name=name,
            memory_bytes=MEMORY_BYTES,
            on_commit=watch.committed,
            on_state=watch.stepped,
        )
        await peer.spawn(driver.start())
        drivers[name] = driver
    plan = Plan(
        run=run_id(spec, owner.peer_id),
        term=1,
        sequence=1,
        previous="",
        coordinator=owner.peer_id,
        stages=tuple(
            Stage(first, last, tuple(Member(world.identity(f"device {d}").peer_id, 1.0, 1.0, 1) for d in devices))
            for (first, last), devices in zip(itertools.pairwise(bounds), chosen, strict=True)
        ),
        fresh=True,
    )
    signed = sign_plan(owner, plan)
    for name, driver in drivers.items():
        world.peers[name].context().run(driver.obey, signed)
    try:
        await asyncio.wait(
            {watch.over, *(driver.failure for driver in drivers.values())}, return_when="FIRST_COMPLETED"
        )
        for failed in (watch.over, *(driver.failure for driver in drivers.values())):
            if failed.done():
                failed.result()
    finally:
        for name, driver in drivers.items():
            await world.peers[name].spawn(driver.close())
    if world.failures:
        raise RuntimeError(f"a driver failed: {world.failures[0]!r}") from world.failures[0][1]
    return recording


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

    def _committed_by_all(self, step: int, commits: dict[int, CommitReport]) -> None:
        now_s = asyncio.get_running_loop().time()
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


def devices_of(topology: Topology, stages: int, replicas: int) -> list[list[int]]:
    """One region a stage, in the order of the shortest way through them; several stages a region where there are fewer.

    Raises: ValueError: too few devices.
    """
    by_region: dict[str, list[int]] = {}
    for device in range(topology.num_devices):
        by_region.setdefault(topology.regions[device], []).append(device)
    regions = list(by_region)[:stages]
    heads = [by_region[region][0] for region in regions]
    latency_s = topology.latency_s[np.ix_(heads, heads)]

    def length_s(order: tuple[int, ...]) -> float:
        return float(sum(latency_s[a, b] for a, b in itertools.pairwise(order)))

    order = min(itertools.permutations(range(len(regions))), key=length_s)
    places = [regions[order[stage * len(regions) // stages]] for stage in range(stages)]
    chosen = []
    for place in places:
        if len(by_region[place]) < replicas:
            raise ValueError(f"{place or 'the network'} has too few devices for {stages} stages of {replicas}")
        chosen.append([by_region[place].pop(0) for _ in range(replicas)])
    return chosen


def slowed_down(topology: Topology, large: RunSpec, small: RunSpec) -> Topology:
    """So that a microbatch of `small` takes devices and links as long as one of `large`."""
    compute = _flop(small) / _flop(large)
    message = _message_bytes(small) / _message_bytes(large)
    return Topology(
        latency_s=topology.latency_s.copy(),
        bytes_per_s=topology.bytes_per_s * message,
        flop_per_s=topology.flop_per_s * compute,
        memory_bytes=topology.memory_bytes.copy(),
        up_bytes_per_s=topology.up_bytes_per_s * message,
        down_bytes_per_s=topology.down_bytes_per_s * message,
        card=topology.card.copy(),
        names=topology.names,
        regions=topology.regions,
        may_feed=topology.may_feed.copy(),
    )


def _flop(spec: RunSpec) -> float:
    """Of a microbatch through all layers, forward and backward."""
    tokens = spec.training.microbatch_size * spec.model.context
    return sum(
        forward_flop(spec.model, key, tokens) + backward_flop(spec.model, key, tokens)
        for key in all_layer_keys(spec.model)
    )


def _message_bytes(spec: RunSpec) -> float:
    width = 4 if spec.wire.activations == "fp32" else 2
    return float(spec.training.microbatch_size * spec.model.context * spec.model.dim * width)
