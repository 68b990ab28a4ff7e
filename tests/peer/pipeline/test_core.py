"""PipelineCore by itself, and K stages x R replicas of it played against each other in random order.

The player keeps the tables that the driver keeps (inputs, contexts, gradients), so that a command which the driver
could not carry out, or a table that nobody empties, fails here.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.peer.pipeline.core import (
    Arrived,
    Command,
    Contributed,
    Event,
    Finished,
    Forget,
    GradientArrived,
    Job,
    JobDone,
    PeerLost,
    PeerReady,
    PipelineCore,
    SendActivation,
    SendGradient,
    StepReady,
    VersionSet,
)
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.router import Router
from shoal.peer.pipeline.window import Window
from shoal.protocol.identity import PeerID

UP, DOWN, OTHER = (PeerID(name) for name in ("up", "down", "other"))


def core(*, stage: int = 1, num_stages: int = 3, s_max: int = 1, targets: tuple[PeerID, ...] = (DOWN,)) -> PipelineCore:
    """All targets are ready."""
    router = Router()
    router.set_shares(dict.fromkeys(targets, 1.0))
    for target in targets:
        router.set_ready(target, True)
    window = Window(num_stages=num_stages) if stage == 0 else None
    return PipelineCore(stage=stage, num_stages=num_stages, s_max=s_max, version=0, router=router, window=window)


def feed(made: PipelineCore, *events: Event) -> list[Command]:
    """The commands of the last event."""
    commands: list[Command] = []
    for event in events:
        commands = made.handle(event, now_s=0.0)
    return commands


def job(kind: str, step: int, index: int, version: int = 0) -> Job:
    return Job(kind, Microbatch(step, index), version)  # type: ignore[arg-type]


A, B, C = Microbatch(0, 0), Microbatch(0, 1), Microbatch(0, 2)


def test_a_microbatch_goes_forward_on_back_and_home() -> None:
    made = core()
    assert feed(made, Arrived(A, UP)) == [job("forward", 0, 0)]
    assert feed(made, JobDone(job("forward", 0, 0))) == [SendActivation(A, DOWN)]
    assert feed(made, GradientArrived(A, DOWN)) == [job("backward", 0, 0)]
    assert feed(made, JobDone(job("backward", 0, 0))) == [Contributed(A, 0), SendGradient(A, UP), Forget(A)]
    assert made.is_idle


def test_the_last_stage_does_all_in_one_job() -> None:
    made = core(stage=2)
    assert feed(made, Arrived(A, UP)) == [job("loss", 0, 0)]
    assert feed(made, JobDone(job("loss", 0, 0))) == [Contributed(A, 0), SendGradient(A, UP), Forget(A)]


def test_a_lone_stage_is_first_and_last() -> None:
    made = core(stage=0, num_stages=1)
    assert feed(made, Arrived(A, None)) == [job("loss", 0, 0)]
    assert feed(made, JobDone(job("loss", 0, 0))) == [Contributed(A, 0), Finished(A), Forget(A)]


def test_backward_goes_before_forward() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), Arrived(B, UP), Arrived(C, UP))
    feed(made, GradientArrived(A, DOWN))
    assert feed(made, JobDone(job("forward", 0, 1))) == [SendActivation(B, DOWN), job("backward", 0, 0)]


def test_a_step_goes_before_backward_and_lower_microbatches_before_higher() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), Arrived(B, UP), GradientArrived(A, DOWN))
    feed(made, Arrived(Microbatch(1, 0), UP), Arrived(C, UP), StepReady(0))
    assert feed(made, JobDone(job("forward", 0, 1))) == [SendActivation(B, DOWN), Job("step", None, 0)]
    assert feed(made, JobDone(Job("step", None, 0))) == [job("backward", 0, 0, 1)]
    assert feed(made, JobDone(job("backward", 0, 0, 1)))[-1] == job("forward", 0, 2, 1)


def test_a_microbatch_too_far_ahead_waits_for_the_step() -> None:
    made = core(s_max=1)
    assert feed(made, Arrived(Microbatch(2, 0), UP)) == []
    assert feed(made, StepReady(0)) == [Job("step", None, 0)]
    assert feed(made, JobDone(Job("step", None, 0))) == [job("forward", 2, 0, 1)]
    commands = feed(made, JobDone(job("forward", 2, 0, 1)), GradientArrived(Microbatch(2, 0), DOWN))
    assert commands == [job("backward", 2, 0, 1)]
    assert feed(made, JobDone(job("backward", 2, 0, 1)))[0] == Contributed(Microbatch(2, 0), 1)


def test_staleness_is_that_of_the_forward_not_of_the_backward() -> None:
    made = core(stage=1)
    late = Microbatch(1, 0)
    feed(made, Arrived(late, UP), JobDone(job("forward", 1, 0)), StepReady(0), JobDone(Job("step", None, 0)))
    feed(made, GradientArrived(late, DOWN))
    assert feed(made, JobDone(job("backward", 1, 0, 1)))[0] == Contributed(late, 1)


def test_validation_waits_for_its_version_whatever_s_max_allows() -> None:
    made = core(s_max=3)
    check = Microbatch(1, -1)
    assert feed(made, Arrived(check, UP)) == []
    feed(made, StepReady(0))
    assert feed(made, JobDone(Job("step", None, 0))) == [job("validate", 1, -1, 1)]


def test_validation_comes_home_without_a_backward() -> None:
    made = core()
    check = Microbatch(0, -1)
    feed(made, Arrived(check, UP), JobDone(job("validate", 0, -1)))
    assert feed(made, GradientArrived(check, DOWN)) == [SendGradient(check, UP), Forget(check)]


def test_a_loaded_version_admits_what_waited_for_it() -> None:
    made = core(s_max=0)
    assert feed(made, Arrived(Microbatch(3, 0), UP)) == []
    assert feed(made, VersionSet(3)) == [job("forward", 3, 0, 3)]


def test_a_step_that_a_loaded_state_has_overtaken_is_not_taken() -> None:
    """Its gradient belongs to a version that we no longer have."""
    made = core()
    feed(made, Arrived(A, UP), StepReady(0), VersionSet(2))
    assert feed(made, JobDone(job("forward", 0, 0))) == [SendActivation(A, DOWN)]
    assert made.version == 2


def test_stage_zero_holds_back_what_the_window_has_no_room_for() -> None:
    made = core(stage=0)
    assert made.window is not None
    made.window.size = 1
    feed(made, Arrived(A, None), Arrived(B, None))
    assert feed(made, JobDone(job("forward", 0, 0))) == [SendActivation(A, DOWN)]
    feed(made, GradientArrived(A, DOWN))
    assert feed(made, JobDone(job("backward", 0, 0)))[-1] == job("forward", 0, 1)


def test_a_dead_target_is_replaced() -> None:
    made = core(targets=(DOWN, OTHER))
    feed(made, Arrived(A, UP))
    assert feed(made, JobDone(job("forward", 0, 0))) == [SendActivation(A, DOWN)]
    assert feed(made, PeerLost(DOWN)) == [SendActivation(A, OTHER)]
    assert feed(made, GradientArrived(A, DOWN)) == []  # the dead man's answer
    assert feed(made, GradientArrived(A, OTHER)) == [job("backward", 0, 0)]


def test_without_any_target_it_waits_for_one() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)))
    assert feed(made, PeerLost(DOWN)) == []
    assert feed(made, PeerReady(DOWN)) == [SendActivation(A, DOWN)]


def test_what_a_dead_source_sent_is_dropped_wherever_it_is() -> None:
    made = core(targets=(DOWN,))
    other = [Microbatch(0, i) for i in (4, 5)]
    for microbatch in (A, B):
        feed(made, Arrived(microbatch, UP), JobDone(job("forward", microbatch.step, microbatch.index)))
    feed(made, Arrived(other[0], OTHER), GradientArrived(A, DOWN), Arrived(C, UP))
    assert feed(made, PeerLost(UP)) == [Forget(A), Forget(B), Forget(C)]
    assert feed(made, JobDone(job("forward", 0, 4))) == [SendActivation(other[0], DOWN)]
    assert feed(made, GradientArrived(B, DOWN)) == []
    feed(made, GradientArrived(other[0], DOWN), JobDone(job("backward", 0, 4)))
    assert made.is_idle
    assert made.router._outstanding == {}


def test_a_target_lost_while_its_gradient_is_used_is_not_asked_again() -> None:
    made = core(targets=(DOWN, OTHER))
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), GradientArrived(A, DOWN))
    assert feed(made, PeerLost(DOWN)) == []
    assert feed(made, JobDone(job("backward", 0, 0))) == [Contributed(A, 0), SendGradient(A, UP), Forget(A)]
    assert made.is_idle


def test_a_gradient_that_comes_twice_is_used_once() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), GradientArrived(A, DOWN))
    assert feed(made, GradientArrived(A, DOWN)) == []
    assert feed(made, JobDone(job("backward", 0, 0))) == [Contributed(A, 0), SendGradient(A, UP), Forget(A)]


def test_all_who_sent_it_get_the_gradient() -> None:
    """Before us OTHER took over from UP, which was doubted. If only one were answered, the other could wait forever."""
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), Arrived(A, OTHER), GradientArrived(A, DOWN))
    done = [Contributed(A, 0), SendGradient(A, OTHER), SendGradient(A, UP), Forget(A)]
    assert feed(made, JobDone(job("backward", 0, 0))) == done


def test_a_microbatch_is_dropped_with_the_last_of_its_sources() -> None:
    made = core()
    feed(made, Arrived(A, UP), JobDone(job("forward", 0, 0)), Arrived(A, OTHER))
    assert feed(made, PeerLost(UP)) == []
    assert feed(made, PeerLost(OTHER)) == [Forget(A)]


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_in_the_gradient_sum_is_told_even_if_its_source_was_lost_meanwhile(stage: int) -> None:
    made = core(stage=stage)
    kind = "loss"
    feed(made, Arrived(A, UP))
    if stage == 1:
        kind = "backward"
        feed(made, JobDone(job("forward", 0, 0)), GradientArrived(A, DOWN))
    assert feed(made, PeerLost(UP)) == []
    assert feed(made, JobDone(job(kind, 0, 0))) == [Contributed(A, 0), Forget(A)]


def test_a_microbatch_that_comes_again_while_its_orphan_runs_is_run_for_its_new_source() -> None:
    made = core()
    feed(made, Arrived(A, UP), PeerLost(UP))
    assert feed(made, Arrived(A, OTHER)) == []
    assert feed(made, JobDone(job("forward", 0, 0))) == [job("forward", 0, 0)]
    assert feed(made, JobDone(job("forward", 0, 0))) == [SendActivation(A, DOWN)]
    feed(made, GradientArrived(A, DOWN))
    assert feed(made, JobDone(job("backward", 0, 0))) == [Contributed(A, 0), SendGradient(A, OTHER), Forget(A)]


# --- many cores, any order ---


@dataclass
class Replica:
    """A core and the tables of its driver."""

    name: PeerID
    core: PipelineCore
    running: Job | None = None
    inputs: set[Microbatch] = field(default_factory=set)
    contexts: set[Microbatch] = field(default_factory=set)
    gradients: set[Microbatch] = field(default_factory=set)
    summed: Counter[Microbatch] = field(default_factory=Counter)
    told: Counter[Microbatch] = field(default_factory=Counter)

    def start(self, job: Job) -> None:
        assert self.running is None, "two jobs at once"
        self.running = job
        version, microbatch = self.core.version, job.microbatch
        assert job.version == version
        if microbatch is None:
            return
        if job.kind == "backward":
            self.contexts.remove(microbatch)
            self.gradients.remove(microbatch)
            return
        assert not self.core._returned, "forward before backward"
        assert not self.core._step_ready, "forward before the step"
        assert microbatch.step - version <= (0 if microbatch.validates else self.core.s_max), "not admitted yet"
        if not self.core.is_first:
            self.inputs.remove(microbatch)

    def end(self) -> Job:
        assert self.running is not None
        job, self.running = self.running, None
        if job.kind == "forward" and job.microbatch:
            self.contexts.add(job.microbatch)
        if job.kind in ("backward", "loss") and job.microbatch:
            self.summed[job.microbatch] += 1
        return job


@dataclass
class Play:
    """K stages x R replicas; `rng` decides what happens next."""

    rng: random.Random
    stages: int
    replicas: int
    steps: int
    M: int
    s_max: int
    validation: int
    peers: dict[PeerID, Replica] = field(default_factory=dict)
    air: list[tuple[PeerID, Event]] = field(default_factory=list)
    doubted: set[tuple[PeerID, PeerID]] = field(default_factory=set)
    finished: Counter[Microbatch] = field(default_factory=Counter)
    contributed: list[Counter[Microbatch]] = field(default_factory=list)
    granted: list[Microbatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        for stage in range(self.stages):
            self.contributed.append(Counter())
            for index in range(self.replicas):
                name = PeerID(f"{stage}.{index}")
                window = Window(num_stages=self.stages) if stage == 0 else None
                router = Router()
                if stage + 1 < self.stages:
                    router.set_shares({PeerID(f"{stage + 1}.{i}"): 1.0 + i for i in range(self.replicas)})
                self.peers[name] = Replica(
                    name,
                    PipelineCore(
                        stage=stage,
                        num_stages=self.stages,
                        s_max=self.s_max,
                        version=0,
                        router=router,
                        window=window,
                    ),
                )
        for replica in self.peers.values():
            for target in replica.core.router.shares:
                self.do(replica, PeerReady(target))
        work = [Microbatch(t, i) for t in range(self.steps) for i in range(-self.validation, self.M)]
        for microbatch in work:
            self.granted.append(microbatch)
            self.air.append((PeerID(f"0.{self.rng.randrange(self.replicas)}"), Arrived(microbatch, None)))

    def run(self, *, doubts: int = 0, deaths: int = 0) -> None:
        """Until nothing is left to happen."""
        for _ in range(100_000):
            moves = [*self.air, *(r.name for r in self.peers.values() if r.running), *self._commits()]
            if doubts and self.rng.random() < 0.1:
                doubts -= 1
                self._doubt()
            elif deaths and self.rng.random() < 0.02:
                deaths -= 1
                self._kill()
            elif moves:
                self._play(self.rng.choice(moves))
            elif self.doubted:
                self._believe()
            else:
                return
        raise AssertionError("it never ends")

    def _commits(self) -> list[tuple[PeerID, Event]]:
        """Steps that a replica may take: its stage has the whole of them."""
        return [
            (name, StepReady(v))
            for name, replica in self.peers.items()
            if (v := replica.core.version) < self.steps
            and not replica.core._step_ready
            and not (replica.running and replica.running.kind == "step")
            and all(self.contributed[replica.core.stage][Microbatch(v, i)] for i in range(self.M))
        ]

    def _play(self, move: tuple[PeerID, Event] | PeerID) -> None:
        if isinstance(move, str):
            replica = self.peers[move]
            self.do(replica, JobDone(replica.end()))
            return
        if move in self.air:
            self.air.remove(move)
        name, event = move
        if name not in self.peers:
            return
        replica = self.peers[name]
        match event:  # what the driver keeps before it tells the core
            case Arrived(microbatch, source) if source is not None:
                if not replica.core.holds(microbatch):
                    replica.inputs.add(microbatch)
            case GradientArrived(microbatch, _) if not microbatch.validates:
                if not replica.core.holds(microbatch):
                    return
                replica.gradients.add(microbatch)
        self.do(replica, event)

    def do(self, replica: Replica, event: Event) -> None:
        for command in replica.core.handle(event, now_s=0.0):
            match command:
                case Job():
                    replica.start(command)
                case SendActivation(microbatch, target):
                    assert target in replica.core.router.shares
                    self.air.append((target, Arrived(microbatch, replica.name)))
                case SendGradient(microbatch, target):
                    self.air.append((target, GradientArrived(microbatch, replica.name)))
                case Contributed(microbatch, staleness_steps):
                    assert 0 <= staleness_steps <= self.s_max
                    replica.told[microbatch] += 1
                    self.contributed[replica.core.stage][microbatch] += 1
                case Finished(microbatch):
                    self.finished[microbatch] += 1
                case Forget(microbatch):
                    for table in (replica.inputs, replica.contexts, replica.gradients):
                        table.discard(microbatch)

    def _doubt(self) -> None:
        """Somebody takes a living neighbour for dead, and believes in it again later."""
        who = self.rng.choice([r for r in self.peers.values() if r.core.router.shares])
        living = [peer for peer in who.core.router.shares if peer in self.peers]
        target = self.rng.choice(living)
        self.doubted.add((who.name, target))
        self.do(who, PeerLost(target))
        if self.rng.random() < 0.5:
            self._believe()

    def _believe(self) -> None:
        who, target = self.rng.choice(sorted(self.doubted))
        self.doubted.discard((who, target))
        if who in self.peers and target in self.peers:
            self.do(self.peers[who], PeerReady(target))

    def _kill(self) -> None:
        """One that has a mate, and is not at stage 0 (whose microbatches another lead would grant again)."""
        stages = Counter(r.core.stage for r in self.peers.values())
        mortal = [r for r in self.peers.values() if r.core.stage > 0 and stages[r.core.stage] > 1]
        if not mortal:
            return
        dead = self.rng.choice(mortal)
        del self.peers[dead.name]
        for replica in self.peers.values():
            if abs(replica.core.stage - dead.core.stage) == 1:
                self.air.append((replica.name, PeerLost(dead.name)))

    def check_all_is_done_and_nothing_left(self) -> None:
        assert self.finished == Counter(self.granted)
        for replica in self.peers.values():
            core = replica.core
            assert core.is_idle
            tables = (core._flights, core._waiting, core._returned, core._unsent, core.router._outstanding)
            assert not any(tables), f"{replica.name} keeps {tables}"
            kept = (replica.inputs, replica.contexts, replica.gradients)
            assert not any(kept), f"the driver of {replica.name} keeps {kept}"
            assert core.window is None or core.window.in_flight == 0
            assert core.version == self.steps
            assert replica.summed == replica.told, "the gradient sum holds what the group was not told"


PLAYS = {
    "seed": st.integers(0, 2**32),
    "stages": st.integers(1, 4),
    "replicas": st.integers(1, 3),
    "steps": st.integers(1, 3),
    "M": st.integers(1, 6),
    "s_max": st.integers(0, 2),
    "validation": st.integers(0, 2),
}


def play(seed: int, **sizes: int) -> Play:
    return Play(random.Random(seed), **sizes)


@settings(max_examples=100, deadline=None)
@given(**PLAYS)
def test_in_any_order_each_microbatch_contributes_once_a_stage_and_finishes_once(seed: int, **sizes: int) -> None:
    made = play(seed, **sizes)
    made.run()
    made.check_all_is_done_and_nothing_left()
    training = Counter(m for m in made.granted if not m.validates)
    assert made.contributed == [training] * made.stages


@settings(max_examples=150, deadline=None)
@given(**PLAYS, doubts=st.integers(1, 12))
def test_false_suspicion_costs_work_but_no_microbatch_and_no_memory(seed: int, doubts: int, **sizes: int) -> None:
    made = play(seed, **sizes)
    made.run(doubts=doubts if made.stages > 1 else 0)
    made.check_all_is_done_and_nothing_left()
    assert made.contributed[0] == Counter(m for m in made.granted if not m.validates)


@settings(max_examples=150, deadline=None)
@given(**PLAYS, doubts=st.integers(0, 4), deaths=st.integers(1, 4))
def test_deaths_cost_work_but_no_microbatch_and_no_memory(seed: int, doubts: int, deaths: int, **sizes: int) -> None:
    made = play(seed, **sizes)
    made.run(doubts=doubts if made.stages > 1 else 0, deaths=deaths)
    made.check_all_is_done_and_nothing_left()
    assert made.contributed[0] == Counter(m for m in made.granted if not m.validates)
