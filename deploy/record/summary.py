"""Sums up a run in figures and in words, from its record alone."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.deploy.record.lines import StepLine, ValidationLine
from shoal.deploy.record.reading import Record

_AT_THE_END = 10
"""How many steps the last loss is a mean of, since that of one step is noisy."""
NAMES_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Totals of all lines that hold in a record."""

    name: str
    run: str
    step: int
    """Steps done."""
    steps: int
    """How many steps the whole run has; 0: it is not known."""
    recorded: int
    """How many steps have a line."""
    tokens: int
    began_s: float | None
    ended_s: float | None
    """Seconds since 1970, of the first and the last step; None: there is none."""
    loss: tuple[float, float] | None
    """(the loss of the first step, the mean loss of the last ten)."""
    validation: tuple[ValidationLine, ValidationLine, ValidationLine] | None
    """(first, last, best) validation loss."""
    tokens_per_s: float | None
    """The median of tokens/s over the steps."""
    peers_max: int
    names: tuple[str, ...]
    """The peers that took part, in the order in which they came."""
    redone: int
    """How many steps were lost when the run went back, and done again."""
    eras: int
    """How often the run went back to a snapshot."""
    lost: int
    """How many steps have no line."""
    given_up: int
    """How many microbatches a step was made without."""
    duplicates: int
    """How many microbatches were computed twice."""

    @property
    def elapsed_s(self) -> float:
        return self.ended_s - self.began_s if self.began_s is not None and self.ended_s is not None else 0.0


def totals(record: Record) -> Totals:
    steps = record.steps
    start = record.starts[-1] if record.starts else None
    paces = [line.tokens_per_s for line in steps if line.tokens_per_s is not None]
    recorded = sum(line.steps for line in steps)
    first = steps[0].step - steps[0].steps if steps else 0
    return Totals(
        name=start.name if start else "",
        run=start.run if start else "",
        step=steps[-1].step if steps else 0,
        steps=start.steps if start else 0,
        recorded=recorded,
        tokens=sum(line.tokens for line in steps),
        began_s=min(line.time for line in steps) if steps else None,
        ended_s=max(line.time for line in steps) if steps else None,
        loss=_losses(steps),
        validation=_validations(record.validations),
        tokens_per_s=statistics.median(paces) if paces else None,
        peers_max=max((line.peers for line in steps), default=0),
        names=tuple(dict.fromkeys(line.name for line in record.peers)),
        redone=sum(line.steps for line in record.redone),
        eras=max((line.era for line in steps), default=0),
        lost=steps[-1].step - first - recorded if steps else 0,
        given_up=sum(line.given_up for line in steps),
        duplicates=sum(line.duplicates for line in steps),
    )


def _losses(steps: Sequence[StepLine]) -> tuple[float, float] | None:
    losses = [line.loss for line in steps if line.loss is not None]
    return (losses[0], statistics.fmean(losses[-_AT_THE_END:])) if losses else None


def _validations(lines: Sequence[ValidationLine]) -> tuple[ValidationLine, ValidationLine, ValidationLine] | None:
    return (lines[0], lines[-1], min(lines, key=lambda line: line.loss)) if lines else None


def in_words(record: Record, path: Path) -> tuple[str, ...]:
    """The run so far, for the terminal. Args: path: of the record."""
    found = totals(record)
    of = f" of {found.steps:,}" if found.steps else ""
    lines = [f"{found.name}: {found.step:,}{of} steps, {_worked(found)}"]
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
    if found.names:
        lines.append(f"  peers        {_named(found.names)}; {found.peers_max} at work at once, at most")
    lines.append(f"  lost         {what_was_lost(found)}")
    lines.append(f"  record       {path}")
    return tuple(lines)


def _worked(found: Totals) -> str:
    if not found.recorded:
        return "nothing recorded"
    pace = f", {found.tokens_per_s:,.0f} tokens/s in the median" if found.tokens_per_s else ""
    return f"{amount(found.tokens)} tokens in {span(found.elapsed_s)}{pace}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more


def what_was_lost(found: Totals) -> str:
    """`nothing`, or what."""
    parts = []
    if found.redone:
        times = "once" if found.eras == 1 else f"{found.eras} times"
        parts.append(f"{counted(found.redone, 'step')} done again, as the run went back {times}")
    if found.given_up:
        parts.append(f"{counted(found.given_up, 'microbatch', 'microbatches')} given up")
    if found.duplicates:
        parts.append(f"{counted(found.duplicates, 'microbatch', 'microbatches')} computed twice")
    if found.lost:
        parts.append(f"{counted(found.lost, 'step')} not in the record, since nobody who is left knew of it")
    return "; ".join(parts) or "nothing"


def counted(number: int, one: str, many: str = "") -> str:
    """`1 step`, `1,200 steps`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def span(seconds: float) -> str:
    """`45 s`, `12 min 5 s`, `3 h 10 min`, `2 d 4 h`."""
    for unit, name, smaller, less in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name} {int(seconds % unit // smaller)} {less}"
    return f"{seconds:.0f} s"


def amount(number: float) -> str:
    """`9,812`, `35.1 k`, `3.3 M`."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit and number >= 1e4:
            return f"{number / unit:.1f} {name}"
    return f"{number:,.0f}"
