"""Runs shoal's own peers and coordinators on modelled devices, in virtual time. Takes a network, a run spec and a
layout, and returns a `SimResult`.

The nodes are those of `shoal join`, but they compute without numbers (`arithmetic.py`). So a thousand nodes, with a
model too large for this machine, fit into one process.
"""

import asyncio
import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.coordinator.allocate.interface import Allocator
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import split
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.simulate.extents import with_modelled_base
from shoal.deploy.simulate.logbook import SimLedger, traffic_matrix
from shoal.deploy.simulate.modelled_swarm import ModelledSwarm, check_devices, peer_ids
from shoal.deploy.simulate.pinned import PinnedAllocator
from shoal.deploy.simulate.result import STEPS_MIN, Ending, SimResult, StepCommitted
from shoal.deploy.simulate.routing import SimulatedRouting
from shoal.deploy.simulate.standstill import why_no_step
from shoal.protocol.errors import LocalError
from shoal.protocol.limits import BULK_CHUNK_BYTES
from shoal.protocol.sim.dirt import CLEAN, Dirt
from shoal.protocol.sim.loop import run as run_in_virtual_time
from shoal.protocol.sim.network import MatrixNetwork
from shoal.protocol.sim.world import World
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import Topology


class Churn(NamedTuple):
    """A change of membership: `remove` is a power cut, `leave` an orderly end, `add` a start or restart. An `add` while
    the device is still leaving does nothing. If a device's first event is an `add` after 0 s, it is absent before."""

    at_s: float
    kind: Literal["add", "remove", "leave"]
    device: int


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """The conditions that end a run, as soon as one of them holds."""

    steps: int | None = None
    """The number of steps that every stage commits before the run ends; None: as in the spec."""
    steps_after: int = 0
    """The number of uncounted steps planned after `steps`, so that the last counted step overlaps with a next one."""
    seconds: float | None = None
    """The virtual time at which the run ends; None: unlimited."""
    look_every_s: float = 60.0
    """The most virtual seconds between calls of `is_enough`. In between, the times of finished jobs are added up, and
    the jobs are dropped to save memory, unless a timeline is wanted."""
    is_enough: Callable[[], str] = lambda: ""
    """Returns why to end the run now; empty: the run goes on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelledRun:
    """The input of a simulation."""

    topology: Topology
    spec: RunSpec
    """The run spec. The simulation changes it: a placement in `stages` gives the number of stages, `min_peers` is the
    number of devices present at first, and learning-rate warm-up, validations and snapshots are off."""
    stages: Placement | Allocator | None = None
    """A placement is kept, without its absent devices; an allocator is asked at every change of members. None: the
    coordinators use their own allocator."""
    seed: int = 0
    churn: Sequence[Churn] = ()
    dirt: Dirt = CLEAN
    """The disturbances of all devices and lines."""
    limits: RunLimits = RunLimits()
    record_timeline: bool = False
    make_swarm: Callable[..., ModelledSwarm] = ModelledSwarm
    """Makes the swarm. Tests and benchmarks pass another maker, to disturb devices or to imitate other systems."""
    chunk_bytes: int | None = None
    """The size of pieces in which gradients and states are sent, in fp32 bytes; None: `chunk_bytes_on(topology)`."""
    expert_loads: Sequence[float] | None = None
    """The relative loads of the experts, if the run spec places experts. None: all equal."""
    on_progress: Callable[[float], None] = lambda share: None
    """Called after each committed step with the share of the run that is over, in [0, 1]."""


def chunk_bytes_on(topology: Topology) -> int:
    """Return the piece size of sums and states on this network, in bytes of fp32.

    The real time of a simulation grows with the number of frames, so pieces are larger than a real peer's. But urgent
    frames have to wait for a piece in transit, while a real peer's line is free again after 25 ms. So the slowest
    uplink sends a piece in 0.4 s in fp32 (in 0.05 s in 4 bits). A piece is at least a real peer's, and at most 8 MiB.
    """
    slowest = float(np.min(topology.up_bytes_per_s, initial=np.inf))
    return int(min(8 << 20, max(BULK_CHUNK_BYTES, 0.4 * slowest)))


def run_modelled(run: ModelledRun) -> SimResult:
    """Simulate a run. Raises: LocalError: a device is unknown, expert loads are wrong, or the spec is invalid."""
    devices = {device for stage in _placed(run) for device in stage}
    check_devices(run.topology, devices, "the placement")
    check_devices(run.topology, {event.device for event in run.churn}, "the churn")
    begun_s = time.perf_counter()
    with _collecting_rarely():
        result = run_in_virtual_time(_play(run))
    return dataclasses.replace(result, ending=result.ending._replace(wall_s=time.perf_counter() - begun_s))


async def _play(run: ModelledRun) -> SimResult:
    t, spec = run.topology, _spec_of(run)
    world = World(run.seed, MatrixNetwork(t), acquainted=True)
    if isinstance(run.stages, Placement):
        peers = peer_ids(world, range(t.num_devices))
        allocator: Allocator | None = PinnedAllocator(run.stages, peers, split(t, Workload.of(spec), run.stages))
    else:
        allocator = run.stages
    first_bytes: list[npt.NDArray[np.int64]] = []

    def stepped(step: StepCommitted) -> None:
        if not first_bytes:
            first_bytes.append(traffic_matrix(world.sent_bytes, t.num_devices))
        run.on_progress(_share_over(run, spec, step))

    ledger = SimLedger(
        t.num_devices,
        steps=spec.training.steps - run.limits.steps_after,
        keeps_timeline=run.record_timeline,
        on_step=stepped,
    )
    swarm = run.make_swarm(
        world,
        t,
        spec,
        allocator,
        ledger,
        chunk_bytes=run.chunk_bytes or chunk_bytes_on(t),
        routing=SimulatedRouting(spec, run.expert_loads) if spec.swarm.expert_slots else None,
        dirt=lambda device: (run.dirt, None),
    )
    for device in sorted(set(range(t.num_devices)) - absent_at_first(run.churn)):
        swarm.launch(device)
    for event in sorted(run.churn, key=lambda event: event.at_s):
        happen = {"add": swarm.launch, "remove": swarm.remove, "leave": swarm.leave}[event.kind]
        asyncio.get_running_loop().call_at(event.at_s, happen, event.device)
    cut_off = await _until_over(run, ledger)
    ledger.read_jobs()
    ledger.failures += [f"{name}: {error!r}" for name, error in world.failures]
    return SimResult(
        steps=tuple(ledger.steps),
        tokens_per_step=spec.tokens_per_step,
        timeline=ledger.timeline(),
        busy_s=ledger.busy_s(),
        traffic_bytes=traffic_matrix(world.sent_bytes, t.num_devices),
        events=tuple(ledger.events),
        duplicates=ledger.duplicates,
        given_up=ledger.given_up,
        failures=tuple(ledger.failures),
        ending=Ending(
            at_s=world.now_s(),
            wall_s=0.0,
            num_events=world.num_events,
            cut_off=cut_off,
            standstill=_standstill(run, spec, world, ledger),
            undone=tuple(ledger.undone),
        ),
        trace_hash=world.trace_hash(),
        first_step_bytes=first_bytes[0] if first_bytes else None,
    )


def _standstill(run: ModelledRun, spec: RunSpec, world: World, ledger: SimLedger) -> str:
    if len(ledger.steps) >= STEPS_MIN:
        return ""
    return why_no_step(
        run.topology,
        spec,
        ledger.plan,
        {peer: device for device, peer in peer_ids(world, range(run.topology.num_devices)).items()},
        present=set(ledger.present),
        left_at_s={event.device: event.at_s for event in ledger.events if event.change == "left"},
        waited_s=world.now_s() - (ledger.steps[-1].committed_at_s if ledger.steps else 0.0),
    )


def _share_over(run: ModelledRun, spec: RunSpec, step: StepCommitted) -> float:
    by_steps = (step.step + 1) / (spec.training.steps - run.limits.steps_after)
    return min(1.0, by_steps if run.limits.seconds is None else max(by_steps, step.committed_at_s / run.limits.seconds))


async def _until_over(run: ModelledRun, ledger: SimLedger) -> str:
    """Wait until the run ends. Returns: why the run was cut off; empty: it was not."""
    until_s = math.inf if run.limits.seconds is None else run.limits.seconds
    loop = asyncio.get_running_loop()
    while loop.time() < until_s and not ledger.reached.is_set():
        if why := run.limits.is_enough():
            return why
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min(until_s, loop.time() + run.limits.look_every_s)):
                await ledger.reached.wait()
        ledger.read_jobs()
    return ""


def _spec_of(run: ModelledRun) -> RunSpec:
    """Return the spec of `run` as the simulated nodes get it. Raises: LocalError: the spec is invalid."""
    spec, here = run.spec, run.topology.num_devices - len(absent_at_first(run.churn))
    stages = len(_placed(run)) or spec.swarm.stages
    swarm = {"stages": stages, "min_peers": max(1, here), "snapshot_interval_steps": 0}
    training = {
        "validation_interval_steps": 0,
        "steps": (run.limits.steps or spec.training.steps) + run.limits.steps_after,
    }
    optimizer = {"warmup_steps": 0}
    try:
        spec = msgspec.structs.replace(
            spec,
            swarm=msgspec.structs.replace(spec.swarm, **swarm),
            training=msgspec.structs.replace(spec.training, **training),
            optimizer=msgspec.structs.replace(spec.optimizer, **optimizer),
        )
        return with_modelled_base(spec)
    except ValueError as error:
        raise LocalError(f"this run is invalid: {error}") from error


def _placed(run: ModelledRun) -> tuple[tuple[int, ...], ...]:
    return run.stages.stages if isinstance(run.stages, Placement) else ()


def absent_at_first(events: Iterable[Churn]) -> frozenset[int]:
    """Return the devices that are absent when a run begins."""
    first: dict[int, Churn] = {}
    for event in sorted(events, key=lambda event: event.at_s):
        first.setdefault(event.device, event)
    return frozenset(device for device, event in first.items() if event.kind == "add" and event.at_s > 0.0)


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Make Python collect reference cycles rarely: a collection inspects all objects, and the objects of a thousand
    simulated peers live to the end."""
    before, was_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not was_frozen:  # keep objects frozen that the caller froze
            gc.unfreeze()
