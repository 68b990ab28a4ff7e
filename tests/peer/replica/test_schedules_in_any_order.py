"""K stages x R replicas of Schedule, played against each other in random order.

The player keeps the tables that the driver keeps (inputs, contexts, gradients), so that a command which the driver
could not carry out, or a table that nobody empties, fails here.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.commands import Finished, Forget, RejectMicrobatch, SendActivation, SendGradient
from shoal.peer.replica.events import (
    Arrived,
    Contributed,
    GradientArrived,
    HandedBack,
    JobDone,
    JobDropped,
    JobParked,
    Paused,
    PeerLost,
    PeerReady,
    Resumed,
    ScheduleEvent,
    StepReady,
)
from shoal.peer.replica.flow import Window
from shoal.peer.replica.job import Job
from shoal.peer.replica.router import Router
from shoal.peer.replica.schedule import Schedule
from shoal.protocol.identity import PeerID


@dataclass
class Replica:
    """A core and the tables of its driver."""

    name: PeerID
    core: Schedule
    running: Job | None = None
    parked: list[Job] = field(default_factory=list)
    """They wait for other peers."""
    had_turn: bool = False
    """The last job that was no step was a backward."""
    inputs: set[Microbatch] = field(default_factory=set)
    contexts: set[Microbatch] = field(default_factory=set)
    gradients: set[Microbatch] = field(default_factory=set)
    summed: Counter[Microbatch] = field(default_factory=Counter)
    told: Counter[Microbatch] = field(default_factory=Counter)

    def start(self, job: Job) -> None:
        assert self.running is None, "two jobs at once"
        assert all(job.microbatch != parked.microbatch for parked in self.parked), "a microbatch in two jobs"
        self.running = job
        version, microbatch = self.core.version, job.microbatch
        assert job.version == version
        if microbatch is None:
            return
        had_turn, self.had_turn = self.had_turn, job.kind == "backward"
        if job.kind == "backward":
            self.contexts.remove(microbatch)
            self.gradients.remove(microbatch)
            return
        assert had_turn or not self.core._returned, "two forwards before a backward"
        assert not self.core._step_ready, "forward before the step"
        assert microbatch.step - version <= (0 if microbatch.validates else self.core.s_max), "not admitted yet"
        if not self.core.is_first:
            self.inputs.remove(microbatch)

    def park(self) -> Job:
        assert self.running is not None
        job, self.running = self.running, None
        self.parked.append(job)
        return job

    def end(self, parked: Job | None = None) -> Job:
        """The job that runs, or one that is parked."""
        job = parked or self.running
        assert job is not None
        if parked is None:
            self.running = None
        else:
            self.parked.remove(parked)
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
    parks: bool = False
    """Jobs may wait for other peers."""
    peers: dict[PeerID, Replica] = field(default_factory=dict)
    air: list[tuple[PeerID, ScheduleEvent]] = field(default_factory=list)
    doubted: set[tuple[PeerID, PeerID]] = field(default_factory=set)
    paused: set[PeerID] = field(default_factory=set)
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
                    Schedule(
                        stage=stage,
                        num_stages=self.stages,
                        s_max=self.s_max,
                        version=0,
                        router=router,
                        window=window,
                        upstream=frozenset(PeerID(f"{stage - 1}.{i}") for i in range(self.replicas)),
                    ),
                )
        for replica in self.peers.values():
            for target in replica.core.router.shares:
                self.do(replica, PeerReady(target))
        work = [Microbatch(t, i) for t in range(self.steps) for i in range(-self.validation, self.M)]
        for microbatch in work:
            self.granted.append(microbatch)
            self.air.append((PeerID(f"0.{self.rng.randrange(self.replicas)}"), Arrived(microbatch, None)))

    def run(self, *, doubts: int = 0, deaths: int = 0, pauses: int = 0) -> None:
        """Until nothing is left to happen."""
        for _ in range(100_000):
            running = [r.name for r in self.peers.values() if r.running]
            parked = [(r.name, job) for r in self.peers.values() for job in r.parked]
            moves: list[tuple[PeerID, ScheduleEvent | Job] | PeerID] = [*self.air, *running, *parked, *self._commits()]
            if doubts and self.rng.random() < 0.1:
                doubts -= 1
                self._doubt()
            elif deaths and self.rng.random() < 0.02:
                deaths -= 1
                self._kill()
            elif pauses and self.rng.random() < 0.1:
                pauses -= 1
                self._pause()
            elif self.paused and self.rng.random() < 0.03:
                self._resume()
            elif moves:
                self._play(self.rng.choice(moves))
            elif self.doubted:
                self._believe()
            elif self.paused:
                self._resume()
            else:
                return
        raise AssertionError("it never ends")

    def _commits(self) -> list[tuple[PeerID, ScheduleEvent]]:
        """Steps that a replica may take: its stage has the whole of them."""
        return [
            (name, StepReady(v))
            for name, replica in self.peers.items()
            if (v := replica.core.version) < self.steps
            and not replica.core._step_ready
            and not (replica.running and replica.running.kind == "step")
            and all(self.contributed[replica.core.stage][Microbatch(v, i)] for i in range(self.M))
        ]

    def _play(self, move: tuple[PeerID, ScheduleEvent | Job] | PeerID) -> None:
        if isinstance(move, str):
            replica = self.peers[move]
            waits = self.parks and replica.running and replica.running.microbatch and self.rng.random() < 0.5
            self.do(replica, JobParked(replica.park()) if waits else JobDone(replica.end()))
            return
        name, event = move
        if isinstance(event, Job):
            if not self.peers[name].core.goes_on(event):
                self.peers[name].parked.remove(event)
                self.do(self.peers[name], JobDropped(event))
            else:
                self.do(self.peers[name], JobDone(self.peers[name].end(event)))
            return
        if move in self.air:
            self.air.remove((name, event))
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

    def do(self, replica: Replica, event: ScheduleEvent) -> None:
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
                case RejectMicrobatch(microbatch, None, begun):
                    self.air.append((self._takes(replica.name), Arrived(microbatch, None, begun)))
                case RejectMicrobatch(microbatch, target, _) if target is not None:
                    self.air.append((target, HandedBack(microbatch, replica.name)))
                case Finished(microbatch):
                    self.finished[microbatch] += 1
                case Forget(microbatch):
                    for table in (replica.inputs, replica.contexts, replica.gradients):
                        table.discard(microbatch)

    def _takes(self, name: PeerID) -> PeerID:
        """Who leads stage 0 while `name` pauses."""
        return self.rng.choice([p for p, r in self.peers.items() if r.core.is_first and p not in self.paused] or [name])

    def _pause(self) -> None:
        """Any, at once or in two goes; those before it may hear of that late."""
        who = self.rng.choice(sorted(self.peers))
        self.paused.add(who)
        self.do(self.peers[who], Paused(at_once=self.rng.random() < 0.5))
        for replica in self.peers.values():
            if self.rng.random() < 0.5:
                replica.core.router.set_ready(who, False)

    def _resume(self) -> None:
        who = self.rng.choice(sorted(self.paused))
        self.paused.discard(who)
        if who not in self.peers:
            return
        self.do(self.peers[who], Resumed())
        for replica in self.peers.values():
            if who in replica.core.router.shares:
                self.do(replica, PeerReady(who))

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
    "parks": st.booleans(),
}


def play(seed: int, *, parks: bool | int = False, **sizes: int) -> Play:
    return Play(random.Random(seed), parks=bool(parks), **sizes)


@settings(max_examples=100)
@given(**PLAYS)
def test_in_any_order_each_microbatch_contributes_once_a_stage_and_finishes_once(seed: int, **sizes: int) -> None:
    made = play(seed, **sizes)
    made.run()
    made.check_all_is_done_and_nothing_left()
    training = Counter(m for m in made.granted if not m.validates)
    assert made.contributed == [training] * made.stages


@settings(max_examples=150)
@given(**PLAYS, doubts=st.integers(1, 12))
def test_false_suspicion_costs_work_but_no_microbatch_and_no_memory(seed: int, doubts: int, **sizes: int) -> None:
    made = play(seed, **sizes)
    made.run(doubts=doubts if made.stages > 1 else 0)
    made.check_all_is_done_and_nothing_left()
    assert made.contributed[0] == Counter(m for m in made.granted if not m.validates)


@settings(max_examples=150)
@given(**PLAYS, doubts=st.integers(0, 4), deaths=st.integers(1, 4))
def test_deaths_cost_work_but_no_microbatch_and_no_memory(seed: int, doubts: int, deaths: int, **sizes: int) -> None:
    made = play(seed, **sizes)
    made.run(doubts=doubts if made.stages > 1 else 0, deaths=deaths)
    made.check_all_is_done_and_nothing_left()
    assert made.contributed[0] == Counter(m for m in made.granted if not m.validates)


@settings(max_examples=150)
@given(**PLAYS, pauses=st.integers(1, 6), doubts=st.integers(0, 3), deaths=st.integers(0, 2))
def test_pauses_cost_work_but_no_microbatch_and_no_memory(
    seed: int, pauses: int, doubts: int, deaths: int, **sizes: int
) -> None:
    made = play(seed, **sizes)
    made.run(pauses=pauses, doubts=doubts if made.stages > 1 else 0, deaths=deaths)
    made.check_all_is_done_and_nothing_left()
    assert made.contributed[0] == Counter(m for m in made.granted if not m.validates)
