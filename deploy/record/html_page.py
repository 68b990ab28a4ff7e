"""Renders a run's record as one self-contained HTML page. It loads nothing, and names of peers are only text.

The plots are the dashboard's (`../dashboard/static/`), embedded with uPlot and their style.
"""

import csv
import html
import io
import re
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from string import Template

import msgspec

from shoal.deploy.base.words import ENDING
from shoal.deploy.record.lines import PlanLine, StepLine, ValidationLine
from shoal.deploy.record.reading import Record
from shoal.deploy.record.summary import Totals, amount, span, what_was_lost
from shoal.deploy.record.writing import merged

PAGE = Path(__file__).parent / "page"
STATIC = Path(__file__).parents[1] / "dashboard" / "static"
POINTS_MAX = 4000
"""The most points of a plot; neighbours are merged. `shoal report --csv` has every step."""
CHANGES_MAX = 200
_CSV = (
    "step time loss perplexity validation_loss learning_rate gradient_norm tokens tokens_per_s staleness_steps peers "
    "given_up duplicates era"
)
_MODULE = re.compile(r"^(import .*;\n|export )", re.M)


class _Data(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    points: Sequence[tuple[float, int, float | None, float | None, float, float | None, float | None]]
    """Points in the fields of `dashboard.view.Point`."""
    validations: Sequence[tuple[float, int, float]]
    plans: Sequence[tuple[float, str]]


def render_page(record: Record) -> str:
    """Return the whole page."""
    found = Totals(record)
    title = found.name or "a run of shoal"
    return Template(_text(PAGE / "page.html")).substitute(
        title=html.escape(title),
        subtitle=html.escape(_subtitle(found)),
        tiles=_tiles(found),
        curves=_curves(),
        changes=_changes(record),
        peers=_peers(found),
        facts=_facts(record, found),
        style=_text(STATIC / "uplot" / "uPlot.min.css") + _text(STATIC / "style.css") + _text(PAGE / "page.css"),
        uplot=_text(STATIC / "uplot" / "uPlot.iife.min.js"),
        script="".join(
            _MODULE.sub("", _text(path))
            for path in (STATIC / "format.js", STATIC / "downloads.js", STATIC / "charts.js", PAGE / "page.js")
        ),
        data=embedded(_data(record, title)),
    )


def csv_of(record: Record) -> str:
    """Return CSV: a line for every valid step and validation, ordered by step."""
    table = io.StringIO()
    writer = csv.DictWriter(table, _CSV.split(), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    lines: list[StepLine | ValidationLine] = [*record.steps, *record.validations]
    for line in sorted(lines, key=lambda line: line.step):
        if isinstance(line, StepLine):
            writer.writerow(msgspec.structs.asdict(line) | {"staleness_steps": line.staleness})
        else:
            writer.writerow({"step": line.step, "time": line.time, "validation_loss": line.loss, "era": line.era})
    return table.getvalue()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _curves() -> str:
    page = _text(STATIC / "index.html")
    begin = page.index('<section id="curves"')
    return page[begin : page.index("</section>", begin) + len("</section>")]


def embedded(data: msgspec.Struct) -> str:
    """Return JSON that cannot end its script element."""
    text = msgspec.json.encode(data).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(record: Record, title: str) -> _Data:
    every = -(-len(record.steps) // POINTS_MAX) or 1
    steps = [merged(record.steps[index : index + every]) for index in range(0, len(record.steps), every)]
    made = {line.step: line.time for line in record.steps}
    return _Data(
        name=title,
        points=[
            (line.time, line.step, line.loss, line.tokens_per_s, line.staleness, line.learning_rate, line.gradient_norm)
            for line in steps
        ],
        validations=[(made.get(line.step, line.time), line.step, line.loss) for line in record.validations],
        plans=[(line.time, line.reason) for line in _real_changes(record.plans)],
    )


def _subtitle(found: Totals) -> str:
    start = found.start
    if found.times_s is None:
        return "Nothing was recorded yet."
    model = f"{amount(start.num_parameters)} parameters in {start.num_layers} layers; " if start else ""
    return f"{model}{_date(found.times_s[0])} to {_date(found.times_s[1])}; run {found.run or 'without a name'}"


def _tiles(found: Totals) -> str:
    of = f"of {found.steps:,}" if found.steps else ""
    tiles = [("Steps", f"{found.step:,}", of)]
    if found.loss is not None:
        tiles.append(("Loss", f"{found.loss[1]:.3f}", f"{found.loss[0]:.3f} at first"))
    if found.validation is not None:
        _, last, best = found.validation
        tiles.append(("Validation", f"{last.loss:.3f}", f"at step {last.step:,}; best {best.loss:.3f}"))
    pace = f"{found.tokens_per_s:,.0f} a second" if found.tokens_per_s else ""
    tiles.append(("Tokens", amount(found.tokens), pace))
    tiles.append(("Time", span(found.elapsed_s), "from the first step to the last"))
    return "".join(
        f'<article><h2>{html.escape(name)}</h2><p><b class="word">{html.escape(value)}</b></p>'
        f'<p class="quiet">{html.escape(more)}</p></article>'
        for name, value, more in tiles
    )


def _changes(record: Record) -> str:
    names = {line.peer[-8:]: line.name for line in record.peers}
    rows = [(line.time, line.reason, "plan") for line in _real_changes(record.plans)]
    rows += [(line.time, f"the record goes on, kept by {line.peer_name}", "note") for line in record.starts[1:]]
    if not rows:
        return '<li class="quiet">Nothing.</li>'
    shown = sorted(rows, key=lambda row: row[0])[-CHANGES_MAX:]
    return "".join(
        f'<li class="{kind}"><time>{_date(at_s)}</time> '
        f"{html.escape(ENDING.sub(lambda found: names.get(found.group(), found.group()), text))}</li>"
        for at_s, text, kind in shown
    )


def _real_changes(plans: Iterable[PlanLine]) -> list[PlanLine]:
    """Return plans in which peers came, went or moved, without mere transfers of the coordinator's role."""
    told = sorted(plans, key=lambda line: (line.term, line.sequence))
    return [line for line in told if "hand-over from" not in line.reason and "is under way" not in line.reason]


def _peers(found: Totals) -> str:
    rows = []
    for share in found.shares:
        stages = sorted({line.stage for line in share.lines if line.stage is not None})
        where = ", ".join(map(str, stages)) or "standing by"
        device = next((line.device for line in share.lines if line.device), "")
        came = _date(share.lines[0].time)
        cells = (share.name, device, where, came, span(share.work_s), amount(share.tokens))
        title = html.escape(share.lines[0].peer)
        rows.append(f'<tr title="{title}">{"".join(f"<td>{html.escape(cell)}</td>" for cell in cells)}</tr>')
    names = ("peer", "device", "stages", "came", "at work for", "tokens meanwhile")
    heads = "".join(f"<th>{head}</th>" for head in names)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _facts(record: Record, found: Totals) -> str:
    start = found.start
    rows = [
        ("steps", f"{found.step:,}" + (f" of {found.steps:,}" if found.steps else "")),
        ("tokens trained on", f"{found.tokens:,}"),
        ("from the first step to the last", span(found.elapsed_s)),
        ("longest standstill", _standstill(record.steps)),
        ("tokens a second", f"{found.tokens_per_s:,.0f} in the median" if found.tokens_per_s else "not known"),
        ("peers at work at once", f"{found.peers_max} at most"),
        ("lost", what_was_lost(found)),
        ("coordinators", f"{len({line.coordinator for line in record.plans})}"),
    ]
    if found.validation is not None:
        first, last, best = (f"{line.loss:.4f} at step {line.step:,}" for line in found.validation)
        rows.append(("validation", f"{first}, {last}, best {best}"))
    if start is not None:
        rows += [("parameters", f"{start.num_parameters:,}"), ("optimizer", start.optimizer), *start.fields.items()]
        rows += [("shoal", start.version), ("record kept by", f"{start.peer_name} ({start.peer})")]
    return "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)


def _standstill(steps: Sequence[StepLine]) -> str:
    gaps = [(after.time - before.time, before.step) for before, after in pairwise(steps)]
    longest_s, step = max(gaps, default=(0.0, 0))
    return f"{span(longest_s)}, after step {step:,}" if step else "none"


def _date(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))
