"""What a run of the study is, as data: its canonical JSON is its name, and all that it depends on beside the code."""

from typing import Literal

import msgspec
from blake3 import blake3
from tasks import BatchShape

from shoal.protocol.spec import OptimizerSpec


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Checks raise ValueError."""


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


class Method(_Settings, frozen=True):
    """A compensation of `shoal.peer.pipeline.prediction`."""

    name: str
    stash: bool | None = None
    """Whether a backward uses its forward's weights; None: as the compensation has it. Says nothing in regime C, where
    the pipeline keeps weights until the backward whatever the compensation."""

    @property
    def label(self) -> str:
        return self.name if self.stash is None else f"{self.name}, {'stashed' if self.stash else 'not stashed'}"


class _Regime(_Settings, frozen=True):
    @property
    def begins_synchronously(self) -> int:
        """For so many updates, whatever happens."""
        return 0


class _Begun:
    """A regime of which the first updates are made one after the other, so that none of them is stale."""

    __slots__ = ()
    synchronous_steps: int

    @property
    def begins_synchronously(self) -> int:
        return self.synchronous_steps


class Paper(_Regime, frozen=True, tag="A"):
    """One microbatch an update, 1F1B without flush: stage k of S is S - 1 - k updates behind at each forward.

    A device's forward takes 1 s of virtual time, its backward 2 s, a hop none.
    """

    stages: int = 8
    synchronous: bool = False
    """A microbatch begins when the one before it has ended, so nothing is stale."""


class PaperBegun(_Begun, Paper, frozen=True, tag="A, begun synchronously"):
    synchronous_steps: int = 100


class HeavyTailed(_Regime, frozen=True, tag="B"):
    """One microbatch an update, every hop as long as a Pareto variable says: microbatches overtake each other.

    Devices are as fast as in `Paper`.
    """

    stages: int = 8
    in_flight: int = 16
    """Microbatches between stage 0's forward and its backward; 1 is synchronous training."""
    hop_s: float = 0.5
    """The shortest hop."""
    tail: float = 1.5
    """Pareto exponent: the mean hop is hop_s * tail / (tail - 1), its variance is infinite below 2."""
    known: Literal["mean", "true"] = "mean"
    """What a stage takes its staleness to be at a forward: the mean of late, or what it will really be."""

    def __post_init__(self) -> None:
        _require(self.in_flight > 0, f"in_flight must be positive, is {self.in_flight}")
        _require(self.tail > 1, f"tail must be above 1, is {self.tail}")


class HeavyTailedBegun(_Begun, HeavyTailed, frozen=True, tag="B, begun synchronously"):
    synchronous_steps: int = 100


class Steps(_Regime, frozen=True, tag="C"):
    """Ours: M microbatches a step, one commit a step, all stages alike (`shape.microbatches_per_step` says M)."""

    shares: tuple[float, ...] = ()
    """Share of a step's microbatches that is stale by 1, by 2, ...; () is synchronous training."""
    replicas: int = 1
    """Members of each stage: each computes one in so many of a step's microbatches, with what it has seen itself."""
    waiting: float = 0.0
    """Share of the stale microbatches that is let in while the step before is being reduced, so that a member has all
    of its own gradients of that; the others are let in while its last microbatches are still under way."""
    steps_a_kill: float = 0.0
    """A replica dies so often, on average. The step that waits for its repairs lets the whole next one in: all of its
    microbatches are as stale as `shares` is long. 0: nobody dies."""
    stages: int = 8
    slot_s: float = 0.058
    """Forward and backward of a microbatch on one stage; the default is a V100's on 1/8 of GPT-3 XL."""
    hop_s: float = 0.11
    """From a stage to the next, the mean of eight cities."""
    commit_s: float = 1.0
    """Reduction and step."""

    def __post_init__(self) -> None:
        _require(all(0 <= share <= 1 for share in self.shares), "shares must be in [0, 1]")
        _require(sum(self.shares) <= 1 + 1e-9, "shares add to more than 1")
        _require(self.replicas > 0, f"replicas must be positive, is {self.replicas}")
        _require(0 <= self.waiting <= 1, f"waiting must be in [0, 1], is {self.waiting}")
        _require(self.steps_a_kill >= 0, f"steps_a_kill must not be negative, is {self.steps_a_kill}")

    @property
    def s_max(self) -> int:
        return len(self.shares)


class StepsBegun(_Begun, Steps, frozen=True, tag="C, begun synchronously"):
    synchronous_steps: int = 40


class Swarm(_Regime, frozen=True, tag="swarm"):
    """Ours, played by the real drivers on a network in virtual time; what is stale is what the swarm lets be."""

    scenario: str = "eight-cities"
    """A shipped scenario or a network file. Its workload's bytes and seconds are what the small model's stand for."""
    stages: int = 8
    replicas: int = 1
    """Devices of each stage, one region a stage where there are as many."""
    s_max: int = 1
    kill_every_s: float = 0.0
    """A replica dies so often, on average, of virtual time; 0: nobody does."""
    back_s: float = 10.0
    """It comes back after so long, without its state; the next one dies so much later at the earliest."""

    def __post_init__(self) -> None:
        _require(self.stages > 0 and self.replicas > 0, "stages and replicas must be positive")
        _require(self.kill_every_s == 0 or self.replicas > 1, "the only holder of a stage must not die")
        _require(self.kill_every_s >= 0 and self.back_s > 0, "nobody dies before they are back")


class SwarmBegun(_Begun, Swarm, frozen=True, tag="swarm, begun synchronously"):
    synchronous_steps: int = 40


Regime = Paper | PaperBegun | HeavyTailed | HeavyTailedBegun | Steps | StepsBegun | Swarm | SwarmBegun


class Run(_Settings, frozen=True):
    """One training run."""

    task: str
    """A name of `classifiers.TASKS`."""
    shape: BatchShape
    regime: Regime
    method: Method
    optimizer: OptimizerSpec
    updates: int
    seed: int = 0
    """Of initial weights, order of the data, delays."""
    validate_every: int = 50
    """Updates between two points of the curve."""
    group: str = ""
    """Which table it belongs to."""

    @property
    def key(self) -> str:
        """16 hex digits, equal for equal runs in whatever table they are."""
        return blake3(msgspec.json.encode(msgspec.structs.replace(self, group=""))).hexdigest(length=8)


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One point of a curve: after `updates`, `units` (tokens or samples) and virtual seconds."""

    updates: int
    units: int
    virtual_s: float
    loss: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has shown. Losses are in nats; None where training went to infinity."""

    validation_loss: float | None
    """Over all validation samples, after the last update."""
    right: float | None
    """Share of their targets that is predicted."""
    training_loss: float | None
    """Mean over the last tenth of the updates, with the weights that their forwards used."""
    units: int
    virtual_s: float
    staleness_mean: float
    """Updates between the weights of a forward and the weights that its gradient met; mean over microbatches and
    stages."""
    curve: tuple[Point, ...]
    """Of a few validation samples: not comparable with `validation_loss`."""
    processor_s: float


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the results."""

    key: str
    run: Run
    outcome: Outcome
