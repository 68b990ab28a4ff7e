"""A swarm whose stages change all the time: its search cuts the model elsewhere, into more or fewer stages with other
members, whenever it is asked, while peers may die. Experts may be placed, and follow. A seed decides everything and
replays exactly.
"""

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
from blake3 import blake3
from sightings import CommitSeen, Event, Obeyed
from sim_swarm import SimSwarm
from single_process import train
from tiny_run import tiny_corpus, tiny_spec
from torch import Tensor

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Layout, SwarmSnapshot
from shoal.peer.handoff.initial import weights_digest
from shoal.peer.model.frozen import stored_base
from shoal.peer.model.layout import EMBED, HEAD, all_layer_keys, init_layer, tied_spans
from shoal.protocol.messages import CommitReport
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.sim.loop import run as run_in_virtual_time
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import AdapterSpec, BaseFormat, InitialSpec, RunSpec

LAYERS = 6
HEARTBEAT_S = 0.4
DEVICE_FLOP_PER_S = 4e7
LOSS_DIFFERENCE_MAX = 1e-4
"""Sums over other groups round otherwise."""
_POLL_S = 0.2
_REASON = "divides"


@dataclass
class DividingAllocator(GreedyAllocator):
    """Implements `Searching`: each layout that it finds has other boundaries. Args: run: the seed of the run."""

    run: int

    def prepare(self) -> None:
        """Nothing is compiled."""

    def search(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        if previous is None:
            return None, "the first plan is by rule"
        rng = random.Random(f"dividing/{self.run}/{previous.sequence}")
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
    microbatches: int = 5
    experts: int = 0
    """Of each layer, placed among the members of its stage; 0: a dense model."""
    tied: bool = False
    """The head is the embedding."""
    base: BaseFormat | None = None
    """How the base of adapters is stored, which one peer alone has at first; None: all weights train."""
    heartbeat_s: float = HEARTBEAT_S
    kill_every_s: float = 0.0
    """0: nobody dies. Never the last that holds a stage, or an expert of it."""


@dataclass(slots=True, kw_only=True)
class DividingResult:
    commits: dict[tuple[int, int, int], CommitReport]
    """(era, step, group) -> what the group's members report."""
    divisions: int
    """Plans that begin with other boundaries than the plan before."""
    stage_counts: set[int] = field(default_factory=set)
    called_off: int = 0
    rollbacks: int = 0
    """How often the run went back to a snapshot or its seed."""
    kills: int = 0
    stall_s: float = 0.0
    compared: int = 0
    """Versions at which both ends of a tied model were looked at."""
    step_s: list[float] = field(default_factory=list)
    """Seconds between the moments at which all stages had committed a step and the next."""
    division_s: list[float] = field(default_factory=list)
    """Those of them between which the stages became others."""
    flaws: list[str] = field(default_factory=list)
    """What must not be at any moment, as sentences."""

    @property
    def twice(self) -> int:
        """Microbatches that were computed again though nothing had been lost of them."""
        return sum(report.duplicates for report in self.commits.values())


def dividing_spec(run: DividingRun) -> RunSpec:
    spec = tiny_spec(
        steps=run.steps,
        peers=run.peers,
        stages=3,
        s_max=run.s_max,
        microbatches=run.microbatches,
        term_s=30.0,
        experts=run.experts,
    )
    spec = msgspec.structs.replace(
        spec,
        model=msgspec.structs.replace(spec.model, num_layers=LAYERS, tied=run.tied),
        swarm=msgspec.structs.replace(spec.swarm, heartbeat_s=run.heartbeat_s),
    )
    if run.base is None:
        return spec
    spec = msgspec.structs.replace(spec, adapter=AdapterSpec(kind="lora", rank=4, base=run.base))
    digests = tuple(weights_digest(stored) for stored in base_of(spec).values())
    return msgspec.structs.replace(spec, initial=InitialSpec(source="elsewhere", digests=digests))


def base_of(spec: RunSpec) -> dict[str, Tensor]:
    """What the adapters stand beside: other weights than the seed's."""
    keys = all_layer_keys(spec.model)
    return {key: stored_base(spec, key, init_layer(spec.model, key, spec.seed + 1)) for key in keys}


class _Copy:
    """Implements `InitialWeights`."""

    def __init__(self, spec: RunSpec) -> None:
        self._layers = base_of(spec)

    async def read(self, keys: Sequence[str]) -> Mapping[str, Tensor]:
        return {key: self._layers[key] for key in keys}


def play_dividing(run: DividingRun) -> DividingResult:
    """Raises: LocalError: a node failed; a bug. TimeoutError: it did not end."""
    return run_in_virtual_time(_play(run))


def flaws_of(run: DividingRun, result: DividingResult) -> list[str]:
    """What was lost, or came out otherwise than in one process; of a run that is not synchronous the losses may differ.

    A step counts as its last era has it: one that went back to a snapshot did some steps again.
    """
    newest: dict[int, dict[int, CommitReport]] = {}
    for (era, step, stage), report in sorted(result.commits.items()):
        if any(report.era < era for report in newest.get(step, {}).values()):
            newest[step] = {}
        newest.setdefault(step, {})[stage] = report
    flaws = list(result.flaws)
    losses = {step: _loss(newest.get(step, {}), run.experts) for step in range(run.steps)}
    untold = [step for step, loss in losses.items() if loss is None]
    if untold:
        flaws.append(f"not every group has committed steps {untold[:5]}")
    given_up = sum(report.given_up for report in result.commits.values())
    if given_up:
        flaws.append(f"{given_up} microbatches were given up")
    if any(report.dissenting for report in result.commits.values()):
        flaws.append("a member had another state than its group")
    if run.s_max == 0:
        single = losses_of(dividing_spec(run))
        wrong = [s for s, loss in losses.items() if loss is not None and abs(loss - single[s]) > LOSS_DIFFERENCE_MAX]
        if wrong:
            flaws.append(f"the loss differs at steps {wrong[:5]}")
    if result.twice and not result.kills:
        flaws.append(f"{result.twice} microbatches were computed twice, and nobody had died")
    return flaws


def _loss(told: Mapping[int, CommitReport], num_experts: int) -> float | None:
    """The loss of a step, which its last stage alone knows; None: some group has not reported it. Args: told: by group,
    stages first."""
    last = next((stage for stage, report in told.items() if report.loss is not None), None)
    if last is None or not set(range((last + 1) * (1 + num_experts))).issubset(told):
        return None
    return told[last].loss


@lru_cache(maxsize=4)
def losses_of(spec: RunSpec) -> tuple[float, ...]:
    """The losses of the same training in one process, step by step."""
    base = None if spec.adapter is None else base_of(spec)
    return tuple(step.loss for step in train(spec, tiny_corpus(), steps=spec.training.steps, base=base))


async def _play(run: DividingRun) -> DividingResult:
    rng = random.Random(f"dividing run/{run.seed}")
    plans: dict[int, Plan] = {}
    result = DividingResult(commits={}, divisions=0)
    committed_s: dict[tuple[int, int], dict[int, float]] = {}

    def seen(event: Event) -> None:
        match event:
            case Obeyed():
                plans[event.plan.plan.sequence] = event.plan.plan
            case CommitSeen(report=report):
                committed_s.setdefault((report.era, report.step), {}).setdefault(report.stage, event.at_s)
                known = result.commits.setdefault((report.era, report.step, report.stage), report)
                if known.digest != report.digest:
                    result.flaws.append(f"two states of group {report.stage} after step {report.step}")

    spec = dividing_spec(run)
    swarm = SimSwarm(
        spec,
        tiny_corpus(),
        seed=run.seed,
        network=uniform(rng.choice((0.002, 0.02)), 1e7),
        device_flop_per_s=DEVICE_FLOP_PER_S,
        allocator=DividingAllocator(run.seed),
        on_event=seen,
        initial={"n0": _Copy(spec)} if run.base is not None else None,
    )
    loop = asyncio.get_running_loop()
    names = [f"n{number}" for number in range(run.peers)]
    for name in names:
        swarm.launch(name)
    matrices: dict[tuple[int, int], dict[str, bytes]] = {}
    await swarm.until(lambda: len(swarm.steps) > 2)
    stepped_s, num_steps, kill_at_s = loop.time(), len(swarm.steps), loop.time() + run.kill_every_s
    # A coordinator that dies between hearing of the last step and telling it leaves a swarm that ends without a word of
    # it. What its groups have committed `flaws_of` looks at.
    while max(swarm.steps) < run.steps - 1 and swarm.running:
        await asyncio.sleep(_POLL_S)
        swarm.raise_failures()
        if run.tied:
            _look_at_matrices(swarm, spec, matrices)
        if len(swarm.steps) != num_steps:
            num_steps, stepped_s = len(swarm.steps), loop.time()
        if not _has_ended(run, result.commits):
            result.stall_s = max(result.stall_s, loop.time() - stepped_s)
        if result.stall_s > 300.0:
            raise TimeoutError("no step for five minutes")
        if run.kill_every_s and loop.time() >= kill_at_s:
            kill_at_s += run.kill_every_s
            result.kills += _kill_somebody(swarm, plans[max(plans)], names, rng)
    await swarm.end()
    result.flaws += [f"two matrices at {at}: {sorted(had)}" for at, had in matrices.items() if len({*had.values()}) > 1]
    result.compared = sum({key.split()[0] for key in had} == {EMBED, HEAD} for had in matrices.values())
    for before, after in itertools.pairwise(sorted(committed_s)):
        taken_s = max(committed_s[after].values()) - max(committed_s[before].values())
        (result.step_s if before[0] == after[0] else result.division_s).append(taken_s)
    ordered = [plans[sequence] for sequence in sorted(plans)]
    promised = swarm.spec.swarm.expert_replicas
    for plan in ordered:
        for entry in plan.experts:
            if len(entry.members) < min(promised, len(plan.stages[entry.stage].members)):
                result.flaws.append(f"{len(entry.members)} holders of expert {entry.expert} in plan {plan.sequence}")
    for before, after in itertools.pairwise(ordered):
        bounds = [stage.layers for stage in after.stages]
        result.divisions += [stage.layers for stage in before.stages] != bounds
        result.called_off += bool(before.cutover_version) and not after.cutover_version and not after.not_started
        result.rollbacks = max(result.rollbacks, after.rollbacks)
        result.stage_counts.add(len(bounds))
    return result


def _has_ended(run: DividingRun, commits: Mapping[tuple[int, int, int], CommitReport]) -> bool:
    """All groups have made the last step: what goes on until the peers have heard so is no standstill."""
    told = {stage: report for (_, step, stage), report in commits.items() if step == run.steps - 1}
    return _loss(told, run.experts) is not None


def _look_at_matrices(swarm: SimSwarm, spec: RunSpec, seen: dict[tuple[int, int], dict[str, bytes]]) -> None:
    """What each peer has of a tied model's matrix and its moments, by (era, version)."""
    for name, node in swarm.nodes.items():
        replica = node.peer.replica
        if name not in swarm.running or replica is None or replica.state is None:
            continue
        for key, span in tied_spans(spec, replica.keys).items():
            parts = [tensor[: span.stop - span.start] for tensor in replica.state.layers[key].tensors]
            digest = blake3(b"".join(part.numpy().tobytes() for part in parts)).digest()
            seen.setdefault((node.endpoint.era, replica.state.version), {})[f"{key} of {name}"] = digest


def _kill_somebody(swarm: SimSwarm, plan: Plan, names: list[str], rng: random.Random) -> int:
    """Args: plan: the newest. Returns: how many; 0 if every stage, or some expert, hangs on one peer."""
    holders: dict[int, list[str]] = {}
    for name in names:
        stage = swarm.stage_of(name) if name in swarm.running else None
        if stage is not None:
            holders.setdefault(stage, []).append(name)
    candidates = [name for held in holders.values() if len(held) > 1 for name in held]
    if plan.experts:
        candidates = [name for name in candidates if _leaves_experts(swarm, plan, name)]
    if not candidates:
        return 0
    victim = rng.choice(candidates)
    swarm.world.crash(swarm.world.peers[victim])
    swarm.launch(victim)
    return 1


def _leaves_experts(swarm: SimSwarm, plan: Plan, name: str) -> bool:
    """Whether the others hold the state of every expert without `name`."""
    held = {
        membership.group_id
        for other, node in swarm.nodes.items()
        if other != name and other in swarm.running and node.endpoint.era == plan.era
        for membership in node.peer.experts.memberships
        if membership.is_ready
    }
    return held.issuperset(range(len(plan.stages), len(plan.stages) + len(plan.experts)))
