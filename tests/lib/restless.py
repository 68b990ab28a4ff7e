"""A swarm in which nobody keeps a place for long: its search moves members at random whenever it is asked, while peers
die. Measures how long training stands still.

A real search moves few, and seldom. What goes wrong when a stage's members leave it one after the other, or when the
one that was to stay dies, shows here within minutes of virtual time. A seed decides everything and replays exactly.
"""

import asyncio
import math
import random
from dataclasses import dataclass

import msgspec
from sightings import Event, Obeyed
from sim_swarm import SimSwarm
from tiny_run import tiny_corpus, tiny_spec

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Layout, SwarmSnapshot
from shoal.protocol.plan import Member, Plan
from shoal.protocol.sim.loop import run as run_in_virtual_time
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import RunSpec

MOVED_MAX = 3
"""Members that one search moves, at most."""
HEARTBEAT_S = 0.4
"""Short: a search waits for some heartbeats after each change."""
DEVICE_FLOP_PER_S = 4e7
STEPS = 10_000
"""More than anybody gets to."""
_POLL_S = 0.2
_REASON = "restless"


class RestlessAllocator(GreedyAllocator):
    """Implements `Searching`. Half of each stage's members stay, as the real one promises; nothing else is sensible."""

    def prepare(self) -> None:
        """Nothing is compiled."""

    def search(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        if previous is None:
            return None, "the first plan is nobody's move"
        rng = random.Random(f"restless/{seed}/{previous.sequence}")
        stages = [list(stage.members) for stage in previous.stages]
        may_leave = [len(members) // 2 for members in stages]
        home = [(member, k) for k, members in enumerate(stages) for member in members]
        rng.shuffle(home)
        wanted, moved = rng.randint(1, MOVED_MAX), 0
        for member, k in home:
            if moved < wanted and may_leave[k] > 0:
                may_leave[k] -= 1
                moved += 1
                stages[k].remove(member)
                stages[rng.choice([other for other in range(len(stages)) if other != k])].append(member)
        if not moved:
            return None, "everybody is needed where he is"
        layout = Layout(
            stages=tuple(
                msgspec.structs.replace(stage, members=_equal(members))
                for stage, members in zip(previous.stages, stages, strict=True)
            ),
            spares=previous.spares,
            reason=f"{_REASON}: {moved} move",
        )
        return layout, layout.reason


def _equal(members: list[Member]) -> tuple[Member, ...]:
    """With equal shares, in the order of their identifiers."""
    ranked = sorted(members, key=lambda member: member.peer)
    return tuple(Member(member.peer, 1.0 / len(ranked), member.bandwidth) for member in ranked)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestlessRun:
    """What a seed is to suffer."""

    seed: int
    peers: int = 8
    s_max: int = 1
    kill_every_s: float = 8.0
    """Never the last that holds a stage; of those killed two in five come back, for the others somebody new."""
    seconds: float = 120.0
    """Of virtual time, from the third step on."""


@dataclass(slots=True, kw_only=True)
class RestlessResult:
    steps: int = 0
    stall_s: float = 0.0
    """The longest time without a step."""
    stalled_at_s: float = math.nan
    """When that ended, or the run did."""
    kills: int = 0
    moves: int = 0
    """Plans that a search has made."""


def play_restless(restless: RestlessRun) -> RestlessResult:
    """Raises: LocalError: a node failed; a bug. TimeoutError: it did not even begin."""
    return run_in_virtual_time(_play(restless))


async def _play(restless: RestlessRun) -> RestlessResult:
    rng = random.Random(f"restless run/{restless.seed}")
    result, moves = RestlessResult(), set[tuple[int, int]]()

    def seen(event: Event) -> None:
        if isinstance(event, Obeyed) and event.plan.plan.reason.startswith(_REASON):
            moves.add(event.plan.plan.order)

    swarm = SimSwarm(
        _spec_of(restless),
        tiny_corpus(),
        seed=restless.seed,
        network=uniform(rng.choice((0.002, 0.02)), 1e7),
        device_flop_per_s=DEVICE_FLOP_PER_S,
        allocator=RestlessAllocator(),
        on_event=seen,
    )
    loop = asyncio.get_running_loop()
    names = [f"n{number}" for number in range(restless.peers)]
    for name in names:
        swarm.launch(name)
    await swarm.until(lambda: len(swarm.steps) > 2)
    begun_s = stepped_s = loop.time()
    kill_at_s, num_steps = begun_s + restless.kill_every_s, len(swarm.steps)
    while loop.time() < begun_s + restless.seconds:
        await asyncio.sleep(_POLL_S)
        swarm.raise_failures()
        if len(swarm.steps) != num_steps:
            num_steps, stepped_s = len(swarm.steps), loop.time()
        elif loop.time() - stepped_s > result.stall_s:
            result.stall_s, result.stalled_at_s = loop.time() - stepped_s, loop.time()
        if loop.time() >= kill_at_s:
            kill_at_s += restless.kill_every_s
            result.kills += _kill_somebody(swarm, names, rng)
    result.steps, result.moves = num_steps, len(moves)
    return result


def _spec_of(restless: RestlessRun) -> RunSpec:
    spec = tiny_spec(steps=STEPS, peers=restless.peers, s_max=restless.s_max, microbatches=5, term_s=30.0)
    return msgspec.structs.replace(spec, swarm=msgspec.structs.replace(spec.swarm, heartbeat_s=HEARTBEAT_S))


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
    if rng.random() >= 0.4:
        names.remove(victim)
        victim = f"n{1 + max(int(name[1:]) for name in (*names, victim))}"
        names.append(victim)
    swarm.launch(victim)
    return 1
