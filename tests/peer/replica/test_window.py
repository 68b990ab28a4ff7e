"""The window by itself, and at the head of a simulated pipeline of real Schedules.

The pipeline: stage k takes seconds_K[k] for a forward, twice that for a backward (the last stage three times, for its
loss job), and `latency_s` lies between stages. Its bandwidth-delay product (BDP) is the empty round trip over the time
that the slowest stage needs for a microbatch. Stage 0 is never slower than the others here: if it is, doing all its
backwards before the next forward makes it feed the pipeline in bursts, which no window can mend.
"""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.commands import Finished, SendActivation, SendGradient
from shoal.peer.replica.events import Arrived, GradientArrived, JobDone, PeerReady, ScheduleEvent
from shoal.peer.replica.flow import Window
from shoal.peer.replica.job import Job
from shoal.peer.replica.router import Router
from shoal.peer.replica.schedule import Schedule
from shoal.protocol.identity import PeerID


def window(size: int = 2) -> Window:
    made = Window(num_stages=1)
    made.size = size
    return made


def test_it_starts_with_one_in_each_stage_and_one_on_the_way_and_grows_with_the_first_that_come_back() -> None:
    made = Window(num_stages=5)
    assert made.size == 6
    for at in range(6):
        made.sent(at, now_s=0.1 * at)
    for at in range(6):
        made.returned(at, now_s=2.0 + 0.1 * at, waited_s=0.0)
    assert made.size == 12


def test_it_grows_so_much_and_no_more_where_there_are_more_stages_than_it_remembers_microbatches() -> None:
    made = Window(num_stages=40, memory=32)
    for at in range(200):
        made.sent(at, now_s=float(at))
        made.returned(at, now_s=at + 0.9, waited_s=0.0)
    assert made.size == 2, "one at a time is all that goes through it"


def test_there_is_room_until_it_is_full_and_again_when_one_is_back() -> None:
    made = window(2)
    made.sent("a", now_s=0.0)
    assert made.has_room
    made.sent("b", now_s=0.0)
    assert not made.has_room
    made.returned("a", now_s=1.0, waited_s=0.0)
    assert made.has_room
    assert made.in_flight == 1


def test_what_is_forgotten_makes_room_and_leaves_no_sample() -> None:
    made = window(1)
    made.sent("a", now_s=0.0)
    made.forget("a")
    made.forget("a")
    assert made.has_room
    assert not made._round_trips_s


def test_what_was_never_sent_leaves_no_sample() -> None:
    made = window()
    made.returned("a", now_s=1.0, waited_s=0.0)
    assert not made._round_trips_s
    assert made.size == 2


def test_idle_time_is_no_sign_of_a_slow_pipeline() -> None:
    """One microbatch a second, then nothing to do for an hour, then one a second again."""
    made = window(1)
    for start_s in [0.0, 1.0, 2.0, 3600.0, 3601.0]:
        made.sent(start_s, now_s=start_s)
        made.returned(start_s, now_s=start_s + 1.0, waited_s=0.0)
    assert min(made._rates) == max(made._rates) == 1.0


def test_a_neighbour_that_claims_more_waiting_than_the_round_trip_had_does_not_break_it() -> None:
    made = window()
    for at in range(40):
        made.sent(at, now_s=float(at))
        made.returned(at, now_s=at + 0.5, waited_s=1e30)
    assert made.size == 2


def test_it_never_grows_beyond_its_limit() -> None:
    made = Window(num_stages=1, size_max=8)
    for at in range(200):
        while made.has_room:
            made.sent(object(), now_s=float(at))
        made.returned(next(iter(made._sent)), now_s=at + 0.5, waited_s=0.0)
    assert made.size == 8


@dataclass
class Pipeline:
    """`heads` replicas of stage 0 before one replica of each other stage. `noise`: jobs take 1 +- noise of the mean.
    `far_s`: the stages between the first and the last have two replicas, this much more latency lies around the second.
    `link_s`: a link carries one message at a time, for so long; as in the driver, the wait for it is told.
    """

    seconds_K: list[float]
    latency_s: float
    heads: int = 1
    noise: float = 0.0
    far_s: float | None = None
    link_s: float = 0.0
    now_s: float = 0.0
    cores: dict[PeerID, Schedule] = field(default_factory=dict)
    busy_s: Counter[PeerID] = field(default_factory=Counter)
    finished: int = 0
    _order: "itertools.count[int]" = field(default_factory=itertools.count)
    _indices: "itertools.count[int]" = field(default_factory=itertools.count)
    _agenda: list[tuple[float, int, PeerID, ScheduleEvent]] = field(default_factory=list)
    _free_s: dict[tuple[PeerID, PeerID], float] = field(default_factory=dict)
    _waits: dict[tuple[Microbatch, PeerID], float] = field(default_factory=dict)
    _rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        K = len(self.seconds_K)
        middle = 1 if self.far_s is None else 2
        replicas = [self.heads, *[middle] * (K - 2), 1] if K > 1 else [self.heads]
        for stage in range(K):
            for replica in range(replicas[stage]):
                after = range(replicas[stage + 1]) if stage + 1 < K else ()
                router = Router(shares={PeerID(f"{stage + 1}.{there}"): 1.0 for there in after})
                head = Window(num_stages=K) if stage == 0 else None
                before = range(replicas[stage - 1]) if stage else ()
                self.cores[PeerID(f"{stage}.{replica}")] = Schedule(
                    stage=stage,
                    num_stages=K,
                    s_max=0,
                    version=0,
                    router=router,
                    window=head,
                    upstream=frozenset(PeerID(f"{stage - 1}.{there}") for there in before),
                )
        for name, core in self.cores.items():
            for target in core.router.shares:
                self._do(name, PeerReady(target))

    @property
    def product(self) -> float:
        """The bandwidth-delay product, in microbatches."""
        empty_s = 3 * sum(self.seconds_K) + 2 * self.latency_s * (len(self.seconds_K) - 1)
        return empty_s / max(3 * self.seconds_K[0] / self.heads, *(3 * s for s in self.seconds_K))

    @property
    def in_flight_max(self) -> int:
        """What all windows together allow."""
        return sum(core.window.size for core in self.cores.values() if core.window)

    def run(self, seconds: float) -> float:
        """Returns: the busy share of the busiest replica."""
        until_s, before = self.now_s + seconds, Counter(self.busy_s)
        self._supply()
        while self._agenda and self._agenda[0][0] <= until_s:
            self.now_s, _, name, event = heapq.heappop(self._agenda)
            self._do(name, event)
            self._supply()
        self.now_s = until_s
        return max(self.busy_s[name] - before[name] for name in self.cores) / seconds

    def validate(self, count: int) -> None:
        for _ in range(count):
            self._do(PeerID("0.0"), Arrived(Microbatch(0, -1 - next(self._indices)), None))

    def _supply(self) -> None:
        for name, core in self.cores.items():
            if core.is_first and core.num_waiting == 0:
                self._do(name, Arrived(Microbatch(0, next(self._indices)), None))

    def _do(self, name: PeerID, event: ScheduleEvent) -> None:
        core = self.cores[name]
        for command in core.handle(event, now_s=self.now_s):
            match command:
                case Job():
                    seconds = self.seconds_K[core.stage] * {"backward": 2, "loss": 3}.get(command.kind, 1)
                    seconds *= 1 + self._rng.uniform(-self.noise, self.noise)
                    self.busy_s[name] += seconds
                    self._later(seconds, name, JobDone(command))
                case SendActivation(microbatch, target):
                    waited_s = self._waits[microbatch, name] = self._link(name, target)
                    self._later(waited_s + self._way_s(name, target), target, Arrived(microbatch, name))
                case SendGradient(microbatch, target, waited_s):
                    link_s = self._link(name, target)
                    told_s = waited_s + link_s + self._waits.pop((microbatch, target))
                    event = GradientArrived(microbatch, name, told_s)
                    self._later(link_s + self._way_s(name, target), target, event)
                case Finished():
                    self.finished += 1

    def _way_s(self, source: PeerID, target: PeerID) -> float:
        """Without waiting."""
        between_far = any(peer.endswith(".1") and not peer.startswith("0") for peer in (source, target))
        return self.latency_s + self.link_s + (self.far_s or 0.0) * between_far

    def _link(self, source: PeerID, target: PeerID) -> float:
        """Take it for one message. Returns: the wait for it."""
        free_s = max(self.now_s, self._free_s.get((source, target), 0.0))
        self._free_s[source, target] = free_s + self.link_s
        return free_s - self.now_s

    def _later(self, seconds: float, name: PeerID, event: ScheduleEvent) -> None:
        heapq.heappush(self._agenda, (self.now_s + seconds, next(self._order), name, event))


PIPELINES = {
    "equal stages, short links": Pipeline([0.1] * 3, 0.05),
    "equal stages, long links": Pipeline([0.1] * 3, 0.5),
    "six stages": Pipeline([0.1] * 6, 0.1),
    "slow in the middle": Pipeline([0.1, 0.3, 0.1], 0.05),
    "slow at the end, far away": Pipeline([0.05, 0.1, 0.3], 1.0),
    "slow at the end, near": Pipeline([0.01, 0.3], 0.01),
    "two stages, no way between": Pipeline([0.1, 0.1], 0.0),
    "two heads": Pipeline([0.1, 0.1, 0.1], 0.2, heads=2),
    "four heads": Pipeline([0.1, 0.1, 0.1, 0.1], 0.5, heads=4),
}


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES.keys())
def test_the_slowest_stage_is_kept_busy_and_hardly_anything_waits(pipeline: Pipeline) -> None:
    pipeline.run(60.0)
    assert pipeline.run(60.0) >= 0.95
    # A head has at least two, or nothing would be there when one comes back.
    bound = 2 * pipeline.product + 2 * pipeline.heads
    assert pipeline.in_flight_max <= bound
    pipeline.run(180.0)
    assert pipeline.in_flight_max <= bound, "it goes on growing"


@pytest.mark.parametrize("seconds_K", [[0.1] * 3, [0.1] * 6, [0.1, 0.3, 0.1]], ids=str)
def test_jobs_of_uneven_length_cost_little_and_do_not_inflate_it(seconds_K: list[float]) -> None:
    pipeline = Pipeline(seconds_K, 0.1, noise=0.3)
    pipeline.run(100.0)
    assert pipeline.run(150.0) >= 0.9
    assert pipeline.in_flight_max <= 2.5 * pipeline.product + 1


@pytest.mark.parametrize("far_s", [0.2, 0.5])
def test_ways_of_unequal_length_are_filled(far_s: float) -> None:
    """With the smallest round trip in the place of the mean the window stays too small for the longer ways."""
    pipeline = Pipeline([0.05, 0.2, 0.2, 0.2, 0.05], 0.05, far_s=far_s)
    pipeline.run(60.0)
    assert pipeline.run(60.0) >= 0.87
    held = pipeline.in_flight_max
    pipeline.run(180.0)
    assert pipeline.in_flight_max <= 1.3 * held, "it goes on growing"


def test_a_slow_link_is_kept_busy_and_no_line_forms_before_it() -> None:
    """A message takes half a second to leave, the slowest stage 0.3 s: two messages a second in each direction."""
    pipeline = Pipeline([0.1, 0.1, 0.1], 0.1, link_s=0.5)
    pipeline.run(60.0)
    before = pipeline.finished
    pipeline.run(120.0)
    assert pipeline.finished - before >= 0.95 * 120.0 / 0.5
    empty_s = 0.9 + 4 * (0.1 + 0.5)
    assert pipeline.in_flight_max <= 2 * empty_s / 0.5 + 1


def test_it_follows_a_pipeline_that_gets_longer_and_shorter_again() -> None:
    pipeline = Pipeline([0.1] * 3, 0.05)
    pipeline.run(60.0)
    short = pipeline.in_flight_max
    pipeline.latency_s = 0.8
    pipeline.run(60.0)
    assert pipeline.run(60.0) >= 0.95
    assert pipeline.in_flight_max > 2 * short
    pipeline.latency_s = 0.05
    pipeline.run(30.0)
    assert pipeline.run(30.0) >= 0.95
    assert pipeline.in_flight_max <= short + 2


def test_it_follows_a_stage_that_gets_slower_and_faster_again() -> None:
    pipeline = Pipeline([0.1] * 3, 0.5)
    pipeline.run(60.0)
    even = pipeline.in_flight_max
    pipeline.seconds_K[1] = 0.5
    pipeline.run(120.0)
    assert pipeline.run(60.0) >= 0.95
    assert pipeline.in_flight_max < even / 2
    pipeline.seconds_K[1] = 0.1
    pipeline.run(60.0)
    assert pipeline.run(60.0) >= 0.95
    assert pipeline.in_flight_max <= even + 2


def test_validation_in_between_does_not_shrink_it() -> None:
    """It comes home without a backward, in a third of the time: a way that training does not take."""
    pipeline = Pipeline([0.1] * 3, 0.5)
    pipeline.run(60.0)
    before = pipeline.in_flight_max
    pipeline.validate(4)
    smallest = before
    for _ in range(50):
        pipeline.run(0.5)
        smallest = min(smallest, pipeline.in_flight_max)
    assert smallest >= before - 1


def test_all_of_it_is_in_flight_and_no_more() -> None:
    pipeline = Pipeline([0.1, 0.3, 0.1], 0.05)
    for _ in range(200):
        pipeline.run(0.1)
        for core in pipeline.cores.values():
            if core.window:
                assert core.window.in_flight <= max(core.window.size, 2 * (3 + 1))
    assert pipeline.finished > 15
