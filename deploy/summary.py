"""What a demo leaves behind: a line a step and a summary, as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from shoal.deploy.report import StepDone
from shoal.protocol.messages import SwarmStatus


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of `--json`."""

    steps: int
    """Committed."""
    finished: bool
    """All steps of the run were."""
    loss_first: float | None
    loss_last: float | None
    val_loss: float | None
    tokens_per_s: float
    """From the first step's report to the last one's."""
    staleness_mean: float
    coordinator_terms: int
    peers: int
    duplicates: int
    given_up: int
    seconds: float
    """Of the whole demo."""
    first_step_s: float | None
    """After start."""
    rss_mb_max: Mapping[str, float]
    """Resident memory by peer, without its network daemon, sampled every two seconds."""
    run: str
    snapshot: str
    sample: str
    folder: str


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """The other lines of `--json`."""

    step: int
    loss: float | None
    val_loss: float | None
    tokens_per_s: float
    staleness_mean: float
    duplicates: int
    given_up: int
    term: int
    coordinator: str
    peers: int
    seconds: float
    """Since the demo began."""


@dataclass(slots=True)
class Record:
    """What the summary is made of."""

    first: StepDone | None = None
    last: StepDone | None = None
    first_s: float = 0.0
    last_s: float = 0.0
    num_steps: int = 0
    steps_seen: int = 0
    staleness_sum: float = 0.0
    duplicates: int = 0
    given_up: int = 0
    val_loss: float | None = None
    terms: set[int] = field(default_factory=set)
    rss_mb_max: dict[str, float] = field(default_factory=dict)
    run: str = ""
    invite: str = ""
    finished: bool = False

    def add(self, step: StepDone, now_s: float) -> None:
        if self.first is None:
            self.first, self.first_s = step, now_s
        self.last, self.last_s = step, now_s
        self.num_steps += 1
        self.staleness_sum += step.staleness_mean
        self.duplicates += step.duplicates
        self.given_up += step.given_up
        self.terms.add(step.term)
        self.steps_seen = max(self.steps_seen, step.step + 1)
        if step.validation_loss is not None:
            self.val_loss = step.validation_loss

    def see(self, status: SwarmStatus) -> None:
        """Says nothing of single steps, but is there also while a peer that is none of ours coordinates."""
        self.terms.add(status.term)
        self.steps_seen = max(self.steps_seen, status.step)
        if status.validation_loss is not None:
            self.val_loss = status.validation_loss

    def tokens_per_s(self, tokens_per_step: int) -> float:
        if self.first is None or self.last is None or self.last_s <= self.first_s:
            return 0.0
        return (self.last.step - self.first.step) * tokens_per_step / (self.last_s - self.first_s)
