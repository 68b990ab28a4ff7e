"""Defines a demo's results: the JSON lines of steps, faults and the summary, and the summary as text."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from shoal.deploy.base.words import printable
from shoal.deploy.demo.expert_book import ExpertBook, ExpertFigures
from shoal.deploy.demo.pace import longest_stall_s, lost_s, recovery_s
from shoal.deploy.record.report import StepDone, Validated
from shoal.protocol.messages import SwarmStatus

FaultKind = Literal["kill", "kill_coordinator", "suspend", "resume", "start", "return"]


class ChaosFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of `--chaos`, or the one kill of `--moe`, and their cost."""

    kills: int
    """Killed peers, coordinators included."""
    coordinator_kills: int
    suspensions: int
    recovery_s: Sequence[float]
    """Seconds until the run had recovered (`pace.recovery_s`), for each kill from which it recovered, ascending."""
    recovery_s_median: float | None
    """The median recovery time in seconds over all kills with enough steps before and after them, where a kill without
    recovery counts as infinite. None: the median is infinite, or there are no such kills."""
    lost_s_max: float | None
    """Seconds of work lost (`pace.lost_s`) by the kill that lost most; None: unknown, or the run did not recover."""
    unrecovered: int
    """Kills from which the run did not recover although enough steps followed."""
    left_behind: int
    """Child processes of killed peers that did not end by themselves."""


class DemoSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of a demo, which is the last line of `--json`."""

    steps: int
    finished: bool
    loss_first: float | None
    loss_last: float | None
    val_loss: float | None
    tokens_per_s: float
    """The mean tokens/s between the first and the last step."""
    staleness_mean: float
    coordinator_terms: int
    peers: int
    rollbacks: int
    duplicates: int
    """Microbatches that a stage added twice to a step's gradient, summed over all stages."""
    duplicates_share: float
    """`duplicates` divided by the number of all added microbatches."""
    given_up: int
    """Microbatches that a commit left out because its deadline came first, summed over all stages."""
    dissenting: int
    """How often a member had other weights than its group after a commit; each member and commit counts."""
    stall_s_max: float
    """The longest time between two committed steps, in seconds. If the run is unfinished, its end counts as a step."""
    step_s_median: float | None
    validations: Mapping[int, float]
    """Model version -> validation loss."""
    failed: int
    """The number of peers that ended by an error of their own, or did not leave at the end."""
    chaos: ChaosFigures | None
    experts: ExpertFigures | None
    """The figures of the experts' placement; None: the run does not place experts on single peers."""
    seconds: float
    first_step_s: float | None
    """Seconds from the demo's start to its first step; None: there was no step."""
    rss_mb_max: Mapping[str, float]
    """Peer -> the largest resident memory in MB, sampled every two seconds, without the peer's network daemon."""
    run: str
    snapshot: str
    sample: str
    folder: str


class DemoStepLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `--json` for one step. Lines are in order; after a return to a snapshot, step numbers repeat."""

    step: int
    era: int
    loss: float | None
    val_loss: float | None
    tokens_per_s: float
    staleness_mean: float
    duplicates: int
    given_up: int
    dissenting: int
    term: int
    coordinator: str
    peers: int
    seconds: float
    """Seconds since the demo began."""


class FaultLine(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of `--chaos`, or the one kill of `--moe`, among the lines of the steps."""

    event: Literal["fault"] = "fault"
    kind: FaultKind
    peer: str
    stage: int | None = None
    """The stage that the peer held at the fault; None: none, or the line tells that a peer starts or resumes."""
    expert: int | None = None
    """The expert of which `--moe` killed a holder; None: the line tells of another fault."""
    seconds: float = 0.0


class DemoRecord:
    """Collects the data of the summary. Times are those of `time.monotonic()`."""

    def __init__(self) -> None:
        self.first: StepDone | None = None
        self.loss_last: float | None = None
        self.step_times_s: list[float] = []
        self.steps_seen = 0
        self.staleness_sum = 0.0
        self.rollbacks = 0
        self._era = 0
        self.validations: dict[int, float] = {}
        self.terms: set[int] = set()
        self.faults: list[tuple[float, FaultLine]] = []
        self.left_behind = 0
        self.failed = 0
        self.rss_mb_max: dict[str, float] = {}
        self.experts = ExpertBook()
        self.run = ""
        self.finished = False
        self.val_loss: float | None = None

    def add(self, step: StepDone, at_s: float) -> None:
        if self.first is None:
            self.first = step
        self.loss_last = self.loss_last if step.loss is None else step.loss
        # The last reports of two steps may arrive in the wrong order.
        self.step_times_s.append(max([at_s, *self.step_times_s[-1:]]))
        self.staleness_sum += step.staleness_mean
        if step.era > self._era:
            self.rollbacks += step.step < self.steps_seen  # otherwise only the stages changed
            self._era = step.era
        self.steps_seen = max(self.steps_seen, step.step + 1)

    def validate(self, validated: Validated) -> None:
        self.validations[validated.report.step] = validated.report.loss
        self.val_loss = self.validations[max(self.validations)]

    def see(self, status: SwarmStatus) -> None:
        """Note term and step of a status, and its validation loss as long as no child has reported one."""
        self.terms.add(status.term)
        self.steps_seen = max(self.steps_seen, status.step)
        if status.validation_loss is not None and not self.validations:
            self.val_loss = status.validation_loss

    def stall_s_max(self, end_s: float) -> float:
        """Return the longest time between two steps. In an unfinished run, `end_s` counts as the time of a step."""
        return longest_stall_s(self.step_times_s, end_s=None if self.finished else end_s)

    def chaos(self) -> ChaosFigures:
        kills = [(at_s, fault) for at_s, fault in self.faults if fault.kind in ("kill", "kill_coordinator")]
        told = [seconds for at_s, _ in kills if (seconds := recovery_s(self.step_times_s, at_s)) is not None]
        recovered = sorted(round(seconds, 2) for seconds in told if math.isfinite(seconds))
        lost = [seconds for at_s, _ in kills if (seconds := lost_s(self.step_times_s, at_s)) is not None]
        return ChaosFigures(
            kills=len(kills),
            coordinator_kills=sum(fault.kind == "kill_coordinator" for _, fault in kills),
            suspensions=sum(fault.kind == "suspend" for _, fault in self.faults),
            recovery_s=recovered,
            recovery_s_median=_finite(statistics.median(told)) if told else None,
            lost_s_max=_finite(max(lost)) if lost else None,
            unrecovered=len(told) - len(recovered),
            left_behind=self.left_behind,
        )


def _finite(seconds: float) -> float | None:
    return round(seconds, 2) if math.isfinite(seconds) else None


# --- for people ---

Line = tuple[str, str]


def summary_lines(summary: DemoSummary, *, unit: str) -> list[Line]:
    """Return (label, text) lines; a line without a label is plain text. Args: unit: `byte` or `token`, for losses."""
    tokens = f"{summary.tokens_per_s:,.0f} tokens/s"
    losses = f"{_loss(summary.loss_first)} -> {_loss(summary.loss_last)} nats a {unit}, val {_loss(summary.val_loss)}"
    lines = [
        ("steps", f"{summary.steps} in {summary.seconds:.0f} s, {tokens}"),
        ("loss", losses),
        ("staleness", f"{summary.staleness_mean:.2f} steps, {summary.coordinator_terms} coordinator terms"),
        (
            "ledger",
            f"{summary.duplicates} microbatches twice ({summary.duplicates_share:.2%}), {summary.given_up} given up, "
            f"{summary.dissenting} members dissented; longest wait for a step {summary.stall_s_max:.1f} s",
        ),
    ]
    if summary.rollbacks:
        lines.append(("snapshots", f"the run went back to one {summary.rollbacks} times"))
    if summary.experts:
        lines.append(_experts(summary.experts))
    if summary.chaos:
        lines.append(_chaos(summary.chaos))
    if summary.failed:
        lines.append(("failed", f"{summary.failed} peers failed by themselves"))
    if summary.rss_mb_max:
        lines.append(("memory", f"at most {max(summary.rss_mb_max.values()):.0f} MB a peer"))
    if summary.snapshot:
        # An untrained model may write terminal commands.
        text = [("", printable(line)) for line in summary.sample.splitlines()]
        lines += [("snapshot", summary.snapshot), ("sample", ""), *text]
    return [*lines, ("logs", f"{summary.folder}/logs")]


def _experts(experts: ExpertFigures) -> Line:
    fewest, most = experts.holders_min, experts.holders_max
    copies = str(fewest) if fewest == most else f"{fewest} to {most}"
    load = "" if experts.load_max is None else f"; the busiest had {experts.load_max:.1f} times the usual load"
    return "experts", f"each on {copies} peers; moved {experts.placements} times, {experts.copies} copies{load}"


def _chaos(chaos: ChaosFigures) -> Line:
    median = "-" if chaos.recovery_s_median is None else f"{chaos.recovery_s_median:.1f} s"
    lost = "" if chaos.lost_s_max is None else f"; at most {chaos.lost_s_max:.1f} s of work lost by one"
    return (
        "chaos",
        f"{chaos.kills} peers killed, {chaos.coordinator_kills} coordinating, {chaos.suspensions} suspended; "
        f"full pace again after {median} (median of {len(chaos.recovery_s)}, never after {chaos.unrecovered}){lost}",
    )


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
