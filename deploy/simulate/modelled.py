"""Runs the real drivers on modelled devices: a network, a run spec and a layout in, what happened out.

The nodes are those of `shoal join`; only what they compute with is another (`arithmetic.py`), so that a thousand of
them, with a model that none could hold, fit into one process.
"""

import asyncio
import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.coordinator.allocate.interface import Allocator
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.shares import split
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.simulate.extents import with_modelled_base
from shoal.deploy.simulate.logbook import SimLedger, traffic_matrix
from shoal.deploy.simulate.modelled_swarm import ModelledSwarm, Ports, Seat, check_devices, peer_ids
from shoal.deploy.simulate.pinned import PinnedAllocator
from shoal.deploy.simulate.result import STEPS_MIN, Ending, SimResult, StepCommitted
from shoal.deploy.simulate.routing import Routing
from shoal.deploy.simulate.severing import Severing, check_severings
from shoal.deploy.simulate.slowing import Slowing, check_slowings
from shoal.deploy.simulate.standstill import Seen, why_no_step
from shoal.protocol.errors import LocalError
from shoal.protocol.limits import BULK_CHUNK_BYTES
from shoal.protocol.sim.loop import run as run_in_virtual_time
from shoal.protocol.sim.network import MatrixNetwork
from shoal.protocol.sim.world import World
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import Topology

_READ_EVERY_S = 60.0
"""How often, in virtual time, the work of devices is added up, and forgotten unless a timeline is wanted."""


class Churn(NamedTuple):
    """`remove` is a power cut, `leave` a good-bye, `add` a (re)start, which comes to nothing while the good-bye lasts.
    A device whose first event is an `add` above 0 s is not there before that."""

    at_s: float
    kind: Literal["add", "remove", "leave"]
    device: int


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """What ends a run, whichever comes first."""

    steps: int | None = None
    """How many steps every stage commits before the run ends; None: those of the spec."""
    steps_after: int = 0
    """The run has so many more steps than it ends with: the last that counts then has a next one to overlap with."""
    seconds: float | None = None
    """The virtual time at which the run ends; None: it has no such end."""
    look_every_s: float = _READ_EVERY_S
    """How often, in virtual time, `is_enough` is asked and the work of devices is read."""
    is_enough: Callable[[], str] = lambda: ""
    """A function that says why the run should end, and nothing while it may go on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelledRun:
    """The input of a simulation. The spec's `swarm.stages` and `swarm.min_peers` follow the placement, if any; it never
    validates, and keeps no snapshots.
    """

    topology: Topology
    spec: RunSpec
    """The spec of the modelled run: nothing of its model is ever allocated."""
    stages: Placement | Allocator | None = None
    """A placement holds as long as its devices are there; an allocator is asked at every change; None: the live one."""
    seed: int = 0
    churn: Sequence[Churn] = ()
    hindrances: Sequence[Slowing | Severing] = ()
    """Devices and links that become slower, and pairs that lose each other; those of devices that come later do not
    count."""
    limits: RunLimits = RunLimits()
    record_timeline: bool = False
    ports: Callable[[Seat], Ports] | None = None
    """What each node gets of its device; None: the device's own. Benchmarks put the habits of other systems here."""
    chunk_bytes: int | None = None
    """The size of the pieces in which gradient sums and states travel, in bytes of fp32: a piece of sums in 4 bits
    takes an eighth of it. None: `chunk_bytes_on` says it for the network."""
    expert_loads: Sequence[float] | None = None
    """Where the run spec places experts (`swarm.expert_slots`): what part of the tokens wants each. None: all alike."""
    on_progress: Callable[[float], None] = lambda share: None
    """A function that is told at every step which share of the run is over, in [0, 1]."""


CHUNK_BYTES_MAX = 8 << 20
_CHUNK_S = 0.4


def chunk_bytes_on(topology: Topology) -> int:
    """How large the pieces are in which sums and states travel here, as fp32.

    A simulation's time goes into its frames, so they are larger than a real peer's. But nothing more urgent stops them,
    while a real peer's line takes 25 ms of a frame at a time: so the slowest uplink takes `_CHUNK_S` for a piece in
    fp32, an eighth of that in 4 bits; no piece is smaller than a real peer's.
    """
    slowest = float(np.min(topology.up_bytes_per_s, initial=np.inf))
    return int(min(CHUNK_BYTES_MAX, max(BULK_CHUNK_BYTES, _CHUNK_S * slowest)))


def run_modelled(run: ModelledRun) -> SimResult:
    """Raises: LocalError: a device of the placement or of the churn does not exist, or the run cannot begin, or its
    experts' loads are not those of its experts."""
    devices = {device for stage in _placed(run) for device in stage}
    check_devices(run.topology, devices, "the placement")
    check_devices(run.topology, {event.device for event in run.churn}, "the churn")
    slowings, severings = _hindrances(run)
    check_slowings(run.topology, slowings)
    check_severings(run.topology, severings)
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
    swarm = ModelledSwarm(
        world,
        t,
        spec,
        allocator,
        ledger,
        chunk_bytes=run.chunk_bytes or chunk_bytes_on(t),
        ports=run.ports,
        routing=Routing(spec, run.expert_loads) if spec.swarm.expert_slots else None,
    )
    for device in sorted(set(range(t.num_devices)) - _absent(run)):
        swarm.launch(device)
    for event in sorted(run.churn, key=lambda event: event.at_s):
        happen = {"add": swarm.launch, "remove": swarm.remove, "leave": swarm.leave}[event.kind]
        asyncio.get_running_loop().call_at(event.at_s, happen, event.device)
    slowings, severings = _hindrances(run)
    for slowing in sorted(slowings, key=lambda slowing: slowing.at_s):
        asyncio.get_running_loop().call_at(slowing.at_s, swarm.slow, slowing)
    for severing in sorted(severings):
        asyncio.get_running_loop().call_at(severing.at_s, swarm.sever, severing.one, severing.other)
        if severing.until_s < math.inf:
            asyncio.get_running_loop().call_at(severing.until_s, swarm.join, severing.one, severing.other)
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
            standstill="" if len(ledger.steps) >= STEPS_MIN else why_no_step(_seen(run, spec, world, ledger)),
            undone=tuple(ledger.undone),
        ),
        trace_hash=world.trace_hash(),
        first_step_bytes=first_bytes[0] if first_bytes else None,
    )


def _hindrances(run: ModelledRun) -> tuple[list[Slowing], list[Severing]]:
    slowings = [each for each in run.hindrances if isinstance(each, Slowing)]
    return slowings, [each for each in run.hindrances if isinstance(each, Severing)]


def _seen(run: ModelledRun, spec: RunSpec, world: World, ledger: SimLedger) -> Seen:
    devices = range(run.topology.num_devices)
    return Seen(
        topology=run.topology,
        spec=spec,
        plan=ledger.plan,
        devices={peer: device for device, peer in peer_ids(world, devices).items()},
        present=ledger.present,
        left_at_s={event.device: event.at_s for event in ledger.events if event.change == "left"},
        ended_at_s=world.now_s(),
        last_step_at_s=ledger.steps[-1].committed_at_s if ledger.steps else None,
    )


def _share_over(run: ModelledRun, spec: RunSpec, step: StepCommitted) -> float:
    """The share of the run that is over, towards whichever end is nearer."""
    by_steps = (step.step + 1) / (spec.training.steps - run.limits.steps_after)
    return min(1.0, by_steps if run.limits.seconds is None else max(by_steps, step.committed_at_s / run.limits.seconds))


async def _until_over(run: ModelledRun, ledger: SimLedger) -> str:
    """Returns: why it was cut off; empty: it was not."""
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
    """The run spec as it is in this world. Raises: LocalError: it cannot be."""
    spec, here = run.spec, run.topology.num_devices - len(_absent(run))
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
        raise LocalError(f"this run cannot be: {error}") from error


def _placed(run: ModelledRun) -> tuple[tuple[int, ...], ...]:
    return run.stages.stages if isinstance(run.stages, Placement) else ()


def _absent(run: ModelledRun) -> set[int]:
    """The devices that come later, whose first event adds them."""
    first: dict[int, Churn] = {}
    for event in sorted(run.churn, key=lambda event: event.at_s):
        first.setdefault(event.device, event)
    return {device for device, event in first.items() if event.kind == "add" and event.at_s > 0.0}


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Collect cycles rarely: Python looks at everything that lives, and what makes up a world of a thousand peers lives
    as long as the world does."""
    before, was_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not was_frozen:  # else what the caller has frozen would be looked through again
            gc.unfreeze()
