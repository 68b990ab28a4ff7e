"""Summarises a run in figures and words, from its record and a sentence about unsaved steps."""

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from shoal.deploy.base.words import amount, counted, listed, span, times
from shoal.deploy.record.lines import PeerLine, StepLine
from shoal.deploy.record.reading import Record

_AT_THE_END = 10
"""The final loss is averaged over this many last steps, since the loss of one step is noisy."""
NAMES_MAX = 8
NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The time and the tokens for which one peer had a stage, by the lines of the record."""

    lines: Sequence[PeerLine]
    work_s: float
    tokens: int
    """All tokens on which the run trained while this peer had a stage. Other peers may have computed them."""

    @property
    def name(self) -> str:
        return self.lines[-1].name


class Totals:
    """Figures of a whole record, from its valid lines."""

    def __init__(self, record: Record) -> None:
        steps = record.steps
        self.start = start = record.starts[-1] if record.starts else None
        """The newest start of the peer that keeps the record."""
        losses = [line.loss for line in steps if line.loss is not None]
        paces = [line.tokens_per_s for line in steps if line.tokens_per_s is not None]
        times = [line.time for line in steps]
        self.name = start.name if start else ""
        self.run = start.run if start else ""
        self.step = steps[-1].step if steps else 0
        """The number of steps done."""
        self.steps = start.steps if start else 0
        """The number of steps of the whole run; 0: unknown."""
        self.recorded = sum(line.steps for line in steps)
        """The number of steps that have a line."""
        self.lost = self.step - (steps[0].step - steps[0].steps) - self.recorded if steps else 0
        """The number of steps without a line, counted from the record's first step."""
        self.loss = (losses[0], statistics.fmean(losses[-_AT_THE_END:])) if losses else None
        """(first known loss, mean of the last ten known losses), in nats a token; None: no loss is known."""
        tested = record.validations
        best = min(tested, key=lambda line: line.loss, default=None)
        self.validation = (tested[0], tested[-1], best) if best is not None else None
        """The lines of the first, the last and the best validation; None: the record has no validation."""
        self.tokens = sum(line.tokens for line in steps)
        self.tokens_per_s = statistics.median(paces) if paces else None
        """The median of the recorded tokens/s; None: no line has a rate."""
        self.times_s = (min(times), max(times)) if times else None
        """The times of the first and the last step, in seconds since 1970; None: there is no step."""
        self.elapsed_s = self.times_s[1] - self.times_s[0] if self.times_s is not None else 0.0
        self.peers_max = max((line.peers for line in steps), default=0)
        self.shares = shares(steps, record.peers)
        """The shares of all peers, ordered by the peers' first lines in the record."""
        self.redone = sum(line.steps for line in record.redone)
        """The number of steps that were done once, and then repeated because the run went back to a snapshot."""
        self.rollbacks = _rollbacks((*steps, *record.redone))
        """How often the run went back to a snapshot."""
        self.given_up = sum(line.given_up for line in steps)
        """The number of microbatches that groups left out of a step, summed over steps and groups."""
        self.duplicates = sum(line.duplicates for line in steps)
        """The number of microbatches computed twice, summed over steps and groups."""


def shares(steps: Sequence[StepLine], peers: Sequence[PeerLine]) -> tuple[Share, ...]:
    """Return each peer's time at work and tokens. Args: steps: the valid step lines; peers: lines on peers, by time."""
    by_time = sorted(steps, key=lambda line: line.time)
    times = [line.time for line in by_time]
    tokens = [0, *accumulate(line.tokens for line in by_time)]
    end_s = max([*times, *(line.time for line in peers)], default=0.0)
    by_peer: dict[str, list[PeerLine]] = {}
    for line in peers:
        by_peer.setdefault(line.peer, []).append(line)
    found = []
    for lines in by_peer.values():
        ends = [*(line.time for line in lines[1:]), end_s]
        spans = [(line.time, end) for line, end in zip(lines, ends, strict=True) if line.stage is not None]
        found.append(
            Share(
                lines=lines,
                work_s=sum(max(0.0, end - begin) for begin, end in spans),
                # A step counts for the peers at work when it was done.
                tokens=sum(
                    tokens[bisect_right(times, end)] - tokens[bisect_right(times, begin)]
                    for begin, end in spans
                    if end > begin
                ),
            )
        )
    return tuple(found)


def _rollbacks(steps: Sequence[StepLine]) -> int:
    lines = sorted(steps, key=lambda line: (line.era, line.step))
    return sum(after.era > before.era and after.step - after.steps < before.step for before, after in pairwise(lines))


def in_words(record: Record, path: Path, unsaved: str = "") -> tuple[str, ...]:
    """Return the summary for the terminal.

    Args: path: the record's path; unsaved: a sentence about steps that no disk has; empty: there are none.
    """
    found = Totals(record)
    of = f" of {found.steps:,}" if found.steps else ""
    pace = f", {found.tokens_per_s:,.0f} tokens/s in the median" if found.tokens_per_s else ""
    worked = f"{amount(found.tokens)} tokens in {span(found.elapsed_s)}{pace}" if found.recorded else "nothing recorded"
    lines = [f"{found.name}: {found.step:,}{of} steps, {worked}"]
    if found.loss is not None:
        lines.append(
            f"  loss         {found.loss[0]:.3f} at first, {found.loss[1]:.3f} over the last {_AT_THE_END} steps"
        )
    if found.validation is not None:
        first, last, best = found.validation
        better = f", best {best.loss:.3f} at step {best.step:,}" if best is not last else ""
        lines.append(
            f"  validation   {first.loss:.3f} at step {first.step:,}, {last.loss:.3f} at step {last.step:,}{better}"
        )
    if found.shares:
        told = [f"{one.name} ({f'{amount(one.tokens)} tokens' if one.work_s else 'stood by'})" for one in found.shares]
        lines.append(f"  peers        {listed(told, NAMES_MAX)}; {found.peers_max} at work at once, at most")
    lost = [unsaved] if unsaved else []
    if not unsaved or what_was_lost(found) != NOTHING:
        lost.append(what_was_lost(found))
    lines.append(f"  lost         {'; '.join(lost)}")
    lines.append(f"  record       {path}")
    return tuple(lines)


def what_was_lost(found: Totals) -> str:
    """Return the work that the run has lost in words, or `nothing`."""
    parts = []
    if found.redone:
        parts.append(f"{counted(found.redone, 'step')} done again, as the run went back {times(found.rollbacks)}")
    if found.given_up:
        parts.append(f"{counted(found.given_up, 'microbatch', 'microbatches')} given up")
    if found.duplicates:
        parts.append(f"{counted(found.duplicates, 'microbatch', 'microbatches')} computed twice")
    if found.lost:
        parts.append(f"{counted(found.lost, 'step')} not in the record, since no remaining peer knew of it")
    return "; ".join(parts) or NOTHING
