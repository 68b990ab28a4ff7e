"""Results as JSON, tables and plots. Each row is judged at its own best learning rate."""

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rows import Row, Table
from settings import Finished, Outcome, Point

RESULTS = "results.json"
TABLES = "tables.md"


def write(tables: Sequence[Table], finished: dict[str, Finished], out: Path) -> None:
    """Everything, from what there is. Plots need matplotlib, which is of the extra `study`."""
    lines = sorted(finished.values(), key=lambda line: (line.run.group, line.key))
    encoded = [msgspec.json.encode(line).decode() for line in lines]
    temporary = out / f"{RESULTS}.new"
    temporary.write_text("[\n" + ",\n".join(encoded) + "\n]\n")
    temporary.replace(out / RESULTS)
    (out / "runs.jsonl").unlink(missing_ok=True)  # all of it is in the results now
    made = [table for table in tables if any(_is_made(row, finished) for row in table.rows)]
    text = [table_text(table, finished) for table in made]
    (out / TABLES).write_text("# Results\n\n" + LEGEND + "\n" + "\n".join(text))
    for table in made:
        plot(table, finished, out)


LEGEND = """\
Validation loss in nats at the end; columns are learning rates (seed 0). *Best* is the row's best rate, mean ± standard
deviation where it has more seeds. *Behind* is that loss minus the synchronous row's, *gap closed* the part of the way
from "none" back to synchronous. *Stale* is the mean staleness of a forward in updates. *Sooner* says how many times
sooner, in virtual time, the row has the loss that the synchronous row ends with (on the curves' few samples; -: never).
Rows, rates and seeds that were not run are left out; `study.py --list` names them.
"""


def table_text(table: Table, finished: dict[str, Finished]) -> str:
    """In markdown."""
    rates = sorted({rate for row in table.rows for rate in row.rates})
    head = [
        "row",
        *(f"{rate:g}" for rate in rates),
        "best",
        "behind",
        "gap closed",
        "right",
        "stale",
        "virtual s",
        "sooner",
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    synchronous, none = _of_role(table, "synchronous", finished), _of_role(table, "none", finished)
    for row in filter(lambda row: _is_made(row, finished), table.rows):
        by_rate = [_cell(row, rate, finished) for rate in rates]
        lines.append(f"| {row.label} | {' | '.join([*by_rate, *_judged(row, finished, synchronous, none)])} |")
    return f"## {table.title}\n\n" + "\n".join(lines) + "\n"


def best_outcomes(row: Row, finished: dict[str, Finished]) -> list[Outcome]:
    """Of all seeds at the best rate so far; empty if all diverge."""
    rate = row.best_rate(finished, so_far=True)
    if rate is None:
        return []
    lines = [finished.get(row.at(rate, seed).key) for seed in range(row.seeds)]
    return [line.outcome for line in lines if line is not None]


def mean_loss(outcomes: Sequence[Outcome]) -> float:
    """Infinite if a seed diverged or there is none."""
    losses = [math.inf if o.validation_loss is None else o.validation_loss for o in outcomes]
    return statistics.fmean(losses) if losses else math.inf


def gap_closed(loss: float, *, synchronous: float, none: float) -> float | None:
    """1: as good as synchronous, 0: as bad as nothing; None where there is no gap."""
    if not (math.isfinite(loss) and math.isfinite(none) and none > synchronous):
        return None
    return (none - loss) / (none - synchronous)


def seconds_to(loss: float, curve: Sequence[Point]) -> float:
    """Virtual time at which a curve first is at `loss`, between its points; infinite if never."""
    if curve and curve[0].loss <= loss:
        return curve[0].virtual_s
    for before, after in itertools.pairwise(curve):
        if after.loss <= loss:
            part = (before.loss - loss) / (before.loss - after.loss)
            return before.virtual_s + part * (after.virtual_s - before.virtual_s)
    return math.inf


def _is_made(row: Row, finished: dict[str, Finished]) -> bool:
    return any(run.key in finished for run in row.first())


def _of_role(table: Table, role: str, finished: dict[str, Finished]) -> list[Outcome]:
    rows = [row for row in table.rows if row.role == role]
    return best_outcomes(rows[0], finished) if rows else []


def _cell(row: Row, rate: float, finished: dict[str, Finished]) -> str:
    line = finished.get(row.at(rate, 0).key) if rate in row.rates else None
    if line is None:
        return ""
    loss = line.outcome.validation_loss
    text = "diverged" if loss is None else f"{loss:.3f}"
    return f"**{text}**" if rate == row.best_rate(finished, so_far=True) else text


def _judged(
    row: Row, finished: dict[str, Finished], synchronous: Sequence[Outcome], none: Sequence[Outcome]
) -> list[str]:
    outcomes = best_outcomes(row, finished)
    loss = mean_loss(outcomes)
    if not math.isfinite(loss):
        return [""] * 7
    losses = [o.validation_loss for o in outcomes if o.validation_loss is not None]
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    behind = loss - mean_loss(synchronous)
    closed = gap_closed(loss, synchronous=mean_loss(synchronous), none=mean_loss(none))
    return [
        f"{loss:.3f}{spread}",
        f"{behind:+.3f}" if math.isfinite(behind) else "",
        "" if closed is None or row.role else f"{closed:.0%}",
        f"{statistics.fmean(o.right or 0.0 for o in outcomes):.1%}",
        f"{outcomes[0].staleness_mean:.2f}",
        f"{outcomes[0].virtual_s:.0f}",
        _sooner(outcomes, synchronous),
    ]


def _sooner(outcomes: Sequence[Outcome], synchronous: Sequence[Outcome]) -> str:
    if not synchronous or not synchronous[0].curve:
        return ""
    end = synchronous[0].curve[-1].loss  # which noise may have let the curve reach before
    reached_s = seconds_to(end, outcomes[0].curve)
    return f"{seconds_to(end, synchronous[0].curve) / reached_s:.2f}" if math.isfinite(reached_s) else "-"


def plot(table: Table, finished: dict[str, Finished], out: Path) -> bool:
    """Loss against units and against virtual time, of seed 0 at each row's best rate. Returns: whether it was drawn."""
    drawn = [(row, row.best_rate(finished, so_far=True)) for row in table.rows]
    curves = [(row, finished[row.at(rate, 0).key]) for row, rate in drawn if rate is not None]
    curves = [(row, line) for row, line in curves if len(line.outcome.curve) > 1]
    if not curves:
        return False
    try:
        import matplotlib as mpl
    except ImportError:
        print(f"no plot of {table.name}: matplotlib is not installed")
        return False
    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for row, line in curves:
        points = line.outcome.curve
        style = "k-" if row.role == "synchronous" else "k:" if row.role == "none" else "-"
        label = f"{row.label} ({line.run.optimizer.learning_rate:g})"
        axes[0].plot([p.units for p in points], [p.loss for p in points], style, label=label, linewidth=1.3)
        axes[1].plot([p.virtual_s for p in points], [p.loss for p in points], style, linewidth=1.3)
    low = min(p.loss for _, line in curves for p in line.outcome.curve)
    high = max(line.outcome.curve[0].loss for _, line in curves)
    axes[0].set_ylim(low - 0.03 * (high - low), high)
    axes[0].set_ylabel("validation loss, nats")
    axes[0].set_xlabel("samples" if curves[0][1].run.task != "bytes" else "tokens")
    axes[1].set_xlabel("virtual seconds")
    axes[0].legend(fontsize="small", frameon=False)
    figure.suptitle(table.title, fontsize="medium")
    figure.savefig(out / f"{table.name}.png", dpi=80)
    pyplot.close(figure)
    return True
