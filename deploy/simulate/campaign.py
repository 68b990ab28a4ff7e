"""One seed of a campaign: draw what goes wrong, let a swarm suffer it, and watch the invariants all the while.

A seed decides the network, the machines' speeds, the staleness and the schedule of faults, so that the same seed (of
the same commit) is the same run, event for event: `Verdict.trace_hash` says so.
"""

import asyncio
import gc
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from shoal.deploy.simulate.events import Committed, Event, Injected, Quiet, Ticked
from shoal.deploy.simulate.invariants import Expectation, all_invariants
from shoal.deploy.simulate.swarm import SimSwarm
from shoal.deploy.simulate.tiny_run import tiny_corpus, tiny_spec
from shoal.peer.single_process import train
from shoal.protocol.errors import LocalError
from shoal.protocol.sim.chaos import Fault, FaultKind, Schedule, draw_schedule, play
from shoal.protocol.sim.loop import Deadlock, VirtualTimeLoop, run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import RunSpec

TICK_S = 0.25
BEGINS_S = 120.0
"""By when the first step must be committed; nothing goes wrong before that."""
LASTS_S_MAX = 1800.0
LAST_EVENTS = 40
STEP_S = 2.0
"""What a step takes, about, while all is well: longer than a round trip, so that faults hit all its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignOptions:
    """What all seeds of a campaign have in common."""

    peers: int = 9
    stages: int = 3
    steps: int = 45
    fault_s: float = 60.0
    """Nothing new goes wrong later than this after the first commit."""
    mean_gap_s: float = 8.0
    """Between two faults."""
    kinds: tuple[FaultKind, ...] = tuple(FaultKind)

    def __post_init__(self) -> None:
        if self.peers < 2 * self.stages:
            raise LocalError(f"{self.peers} peers are too few: a campaign needs two for each of {self.stages} stages")
        if self.steps * STEP_S < self.fault_s:
            raise LocalError(f"{self.steps} steps are over before {self.fault_s:g} s of faults are")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a seed draws."""

    seed: int
    spec: RunSpec
    latency_s: float
    rate_bytes_per_s: float
    jitter_s: float
    device_flop_per_s: float
    speeds: tuple[float, ...]
    schedule: Schedule


@dataclass(slots=True, kw_only=True)
class Verdict:
    """How a seed went. `broken` is the sentence that did not hold, None if all did."""

    seed: int
    broken: str | None = None
    detail: str = ""
    schedule: Schedule = ()
    last_events: tuple[str, ...] = ()
    trace_hash: str = ""
    injected: dict[str, int] = field(default_factory=dict)
    recoveries_s: list[float] = field(default_factory=list)
    """From each kill to the next commit of the last stage."""
    steps: int = 0
    microbatches: int = 0
    """Committed, summed over stages."""
    duplicates: int = 0
    given_up: int = 0
    virtual_s: float = 0.0
    training_s: float = 0.0
    """From the first to the last commit of the last stage."""
    wall_s: float = 0.0


def draw_trial(seed: int, options: CampaignOptions) -> Trial:
    rng = random.Random(f"shoal campaign/{seed}")
    latency_s = rng.choice((0.005, 0.02, 0.05, 0.1))
    spec = tiny_spec(
        steps=options.steps,
        peers=options.peers,
        stages=options.stages,
        s_max=rng.choice((0, 0, 1)),
        term_s=rng.choice((5.0, 15.0, 60.0)),
    )
    speeds = tuple(rng.choice((0.5, 1.0, 1.0, 1.0, 2.0)) for _ in range(options.peers))
    schedule = draw_schedule(
        rng,
        peer_names(options),
        duration_s=options.fault_s,
        mean_gap_s=options.mean_gap_s,
        kinds=options.kinds,
    )
    return Trial(
        seed=seed,
        spec=spec,
        latency_s=latency_s,
        rate_bytes_per_s=rng.choice((1e6, 1e7)),
        jitter_s=latency_s * rng.choice((0.0, 0.2, 1.0)),
        device_flop_per_s=2.5e7,
        speeds=speeds,
        schedule=schedule,
    )


def parse_kinds(names: Sequence[str]) -> tuple[FaultKind, ...]:
    """All kinds if there are no `names`. Raises: LocalError: one of them is no kind of fault."""
    try:
        return tuple(FaultKind(name) for name in names) or tuple(FaultKind)
    except ValueError as error:
        raise LocalError(f"{error}: a fault is one of {', '.join(FaultKind)}") from error


def peer_names(options: CampaignOptions) -> list[str]:
    return [f"n{number}" for number in range(options.peers)]


def run_seed(seed: int, options: CampaignOptions, *, schedule: Schedule | None = None) -> Verdict:
    """Args: schedule: instead of the one that the seed draws (to see which of its faults it takes)."""
    trial = draw_trial(seed, options)
    watch = _Watch(trial, options, trial.schedule if schedule is None else schedule)
    begun_s = time.perf_counter()
    torch.set_num_threads(1)  # the models are tiny: a second thread costs each operation more than it gives
    try:
        run(watch.watch())
    except Deadlock as error:
        watch.condemn("there is always something that can happen", str(error))
    except Exception as error:
        watch.condemn("the simulation itself does not fail", repr(error))
    gc.collect()  # a task that failed unobserved says so now, and not in the next seed
    verdict = watch.verdict
    verdict.wall_s = time.perf_counter() - begun_s
    return verdict


@lru_cache(maxsize=8)
def single_process_losses(spec: RunSpec) -> tuple[float, ...]:
    """What the same training gives in one process, step by step."""
    return tuple(step.loss for step in train(spec, tiny_corpus(), steps=spec.training.steps))


class _Broken(Exception):
    """An invariant does not hold: the run ends here."""


class _Watch:
    """One seed's run, its invariants and what it says of itself."""

    def __init__(self, trial: Trial, options: CampaignOptions, schedule: Schedule) -> None:
        self.verdict = Verdict(seed=trial.seed, schedule=schedule)
        spec = trial.spec
        expected = Expectation(
            steps=spec.training.steps,
            microbatches=spec.training.microbatches_per_step,
            stages=spec.swarm.stages,
            losses=single_process_losses(spec) if spec.training.s_max == 0 else None,
        )
        self._trial = trial
        self._options = options
        self._invariants = all_invariants(expected)
        self._last_events: deque[str] = deque(maxlen=LAST_EVENTS)
        self._commits: dict[tuple[int, int, int], Committed] = {}
        self._kills_s: list[float] = []

    async def watch(self) -> None:
        trial = self._trial
        network = uniform(trial.latency_s, trial.rate_bytes_per_s, jitter_s=trial.jitter_s)
        swarm = SimSwarm(
            trial.spec,
            tiny_corpus(),
            seed=trial.seed,
            network=network,
            device_flop_per_s=trial.device_flop_per_s,
            on_event=self._see,
        )
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.set_exception_handler(lambda _, context: swarm.world.failures.append(("somebody", _unheard(context))))
        try:
            for name, speed in zip(peer_names(self._options), trial.speeds, strict=True):
                swarm.launch(name, speed=speed)
            await self._suffer(swarm)
        except _Broken:
            pass
        finally:
            self._conclude(swarm)

    async def _suffer(self, swarm: SimSwarm) -> None:
        while not self._commits:
            if swarm.world.now_s() > BEGINS_S:
                self.condemn(f"the first step is committed within {BEGINS_S:.0f} s", "")
                raise _Broken
            await self._tick(swarm)
        playing = asyncio.create_task(
            play(swarm.world, self.verdict.schedule, on_return=swarm.launch, on_fault=self._fault), name="the faults"
        )
        while not playing.done():
            await self._tick(swarm)
        playing.result()
        self._see(Quiet(at_s=swarm.world.now_s()))
        while swarm.running:
            if swarm.world.now_s() > LASTS_S_MAX:
                self.condemn(f"the run is over within {LASTS_S_MAX:.0f} s", f"{', '.join(swarm.running)} still run")
                raise _Broken
            await self._tick(swarm)

    async def _tick(self, swarm: SimSwarm) -> None:
        await asyncio.sleep(TICK_S)
        swarm.tell_failures()
        self._see(Ticked(at_s=swarm.world.now_s(), running=swarm.running))
        if self.verdict.broken is not None:
            raise _Broken

    def _fault(self, fault: Fault) -> None:
        at_s = asyncio.get_running_loop().time()
        if fault.kind is FaultKind.CRASH:
            self._kills_s.append(at_s)
        self._see(Injected(at_s=at_s, fault=fault))

    def _see(self, event: Event) -> None:
        """Called from inside nodes: says nothing to them, whatever it finds."""
        if self.verdict.broken is not None:
            return
        if not isinstance(event, Ticked):
            self._last_events.append(f"{event.at_s:9.3f} s  {event}")
        if isinstance(event, Committed):
            self._commits.setdefault((event.report.era, event.report.stage, event.report.step), event)
        for invariant in self._invariants:
            flaw = invariant.see(event)
            if flaw is not None:
                self.condemn(invariant.sentence, f"at {event.at_s:.3f} s: {flaw}")
                return

    def condemn(self, sentence: str, detail: str) -> None:
        if self.verdict.broken is None:
            self.verdict.broken, self.verdict.detail = sentence, detail
            self.verdict.last_events = tuple(self._last_events)

    def _conclude(self, swarm: SimSwarm) -> None:
        verdict = self.verdict
        verdict.trace_hash = swarm.world.trace_hash()
        verdict.virtual_s = swarm.world.now_s()
        verdict.injected = dict(sorted(Counter(str(fault.kind) for fault in verdict.schedule).items()))
        reports = [event.report for event in self._commits.values()]
        verdict.microbatches = sum(report.microbatches for report in reports)
        verdict.duplicates = sum(report.duplicates for report in reports)
        verdict.given_up = sum(report.given_up for report in reports)
        last_stage = self._options.stages - 1
        times_s = [event.at_s for event in self._commits.values() if event.report.stage == last_stage]
        verdict.steps = len({report.step for report in reports if report.stage == last_stage})
        verdict.training_s = max(times_s, default=0.0) - min(times_s, default=0.0)
        verdict.recoveries_s = _recoveries(self._kills_s, times_s)


def _recoveries(kills_s: Sequence[float], commits_s: Sequence[float]) -> list[float]:
    """From each kill to the next commit."""
    return [after[0] - kill_s for kill_s in kills_s if (after := sorted(s for s in commits_s if s > kill_s))]


def _unheard(context: dict[str, object]) -> Exception:
    """What asyncio says when nobody awaited a failure."""
    error = context.get("exception")
    return error if isinstance(error, Exception) else LocalError(str(context.get("message")))
