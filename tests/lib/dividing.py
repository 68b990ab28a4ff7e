"""A swarm whose stages change all the time: its search cuts the model elsewhere, into more or fewer stages with other
members, whenever it is asked, while peers may die. A seed decides everything and replays exactly.
"""

import asyncio
import itertools
import random
from dataclasses import dataclass, field

import msgspec

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Snapshot
from shoal.coordinator.ledger import StepRecord
from shoal.coordinator.plan_layout import Layout
from shoal.deploy.simulate.sightings import Event, Obeyed
from shoal.deploy.simulate.swarm import SimSwarm
from shoal.deploy.simulate.tiny_run import tiny_corpus, tiny_spec
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.sim.loop import run as run_in_virtual_time
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import RunSpec

LAYERS = 6
HEARTBEAT_S = 0.4
DEVICE_FLOP_PER_S = 4e7
_POLL_S = 0.2
_REASON = "divides"


class DividingAllocator(GreedyAllocator):
    """Implements `Searching`: each layout that it finds has other boundaries."""

    def prepare(self) -> None:
        """Nothing is compiled."""

    def search(self, snapshot: Snapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        if previous is None:
            return None, "the first plan is by rule"
        rng = random.Random(f"dividing/{seed}/{previous.sequence}")
        peers = [peer.peer for peer in snapshot.peers]
        rng.shuffle(peers)
        num_stages = rng.randint(1, min(LAYERS, len(peers)))
        bounds = [0, *sorted(rng.sample(range(1, LAYERS), num_stages - 1)), LAYERS]
        groups = [sorted(peers[k::num_stages]) for k in range(num_stages)]
        layout = Layout(
            stages=tuple(
                Stage(
                    first_layer=first,
                    last_layer=last,
                    members=tuple(Member(peer, 1.0 / len(group), 1.0) for peer in group),
                )
                for first, last, group in zip(bounds, bounds[1:], groups, strict=False)
            ),
            spares=(),
            reason=f"{_REASON}: {num_stages} stages",
        )
        return layout, layout.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class DividingRun:
    """What a seed is to suffer."""

    seed: int
    peers: int = 6
    s_max: int = 0
    steps: int = 120
    kill_every_s: float = 0.0
    """0: nobody dies. Never the last that holds a stage."""


@dataclass(slots=True, kw_only=True)
class DividingResult:
    records: list[StepRecord]
    """As the coordinators told them."""
    divisions: int
    """Plans that begin with other boundaries than the plan before."""
    stage_counts: set[int] = field(default_factory=set)
    called_off: int = 0
    kills: int = 0
    stall_s: float = 0.0


def dividing_spec(run: DividingRun) -> RunSpec:
    spec = tiny_spec(steps=run.steps, peers=run.peers, stages=3, s_max=run.s_max, microbatches=5, term_s=30.0)
    return msgspec.structs.replace(
        spec,
        model=msgspec.structs.replace(spec.model, num_layers=LAYERS),
        swarm=msgspec.structs.replace(spec.swarm, heartbeat_s=HEARTBEAT_S),
    )


def play_dividing(run: DividingRun) -> DividingResult:
    """Raises: LocalError: a node failed; a bug. TimeoutError: it did not end."""
    return run_in_virtual_time(_play(run))


async def _play(run: DividingRun) -> DividingResult:
    rng = random.Random(f"dividing run/{run.seed}")
    plans: dict[int, Plan] = {}

    def seen(event: Event) -> None:
        if isinstance(event, Obeyed):
            plans[event.plan.plan.sequence] = event.plan.plan

    swarm = SimSwarm(
        dividing_spec(run),
        tiny_corpus(),
        seed=run.seed,
        network=uniform(rng.choice((0.002, 0.02)), 1e7),
        device_flop_per_s=DEVICE_FLOP_PER_S,
        allocator=DividingAllocator(),
        on_event=seen,
    )
    loop = asyncio.get_running_loop()
    names = [f"n{number}" for number in range(run.peers)]
    for name in names:
        swarm.launch(name)
    await swarm.until(lambda: len(swarm.steps) > 2)
    result = DividingResult(records=[], divisions=0)
    stepped_s, num_steps, kill_at_s = loop.time(), len(swarm.steps), loop.time() + run.kill_every_s
    while max(swarm.steps) < run.steps - 1:
        await asyncio.sleep(_POLL_S)
        swarm.raise_failures()
        if len(swarm.steps) != num_steps:
            num_steps, stepped_s = len(swarm.steps), loop.time()
        result.stall_s = max(result.stall_s, loop.time() - stepped_s)
        if result.stall_s > 300.0:
            raise TimeoutError("no step for five minutes")
        if run.kill_every_s and loop.time() >= kill_at_s:
            kill_at_s += run.kill_every_s
            result.kills += _kill_somebody(swarm, names, rng)
    await swarm.end()
    result.records = [swarm.steps[step] for step in sorted(swarm.steps)]
    ordered = [plans[sequence] for sequence in sorted(plans)]
    for before, after in itertools.pairwise(ordered):
        bounds = [stage.layers for stage in after.stages]
        result.divisions += [stage.layers for stage in before.stages] != bounds
        result.called_off += bool(before.ends_at) and not after.ends_at and not after.fresh
        result.stage_counts.add(len(bounds))
    return result


def _kill_somebody(swarm: SimSwarm, names: list[str], rng: random.Random) -> int:
    """Returns: how many; 0 if every stage hangs on one peer."""
    holders: dict[int, list[str]] = {}
    for name in names:
        stage = swarm.stage_of(name) if name in swarm.running else None
        if stage is not None:
            holders.setdefault(stage, []).append(name)
    candidates = [name for held in holders.values() if len(held) > 1 for name in held]
    if not candidates:
        return 0
    victim = rng.choice(candidates)
    swarm.world.crash(swarm.world.peers[victim])
    swarm.launch(victim)
    return 1
