"""Renders a run's record as one self-contained HTML page, which loads nothing and shows peers' names only as text.

The page embeds the record as JSON, and uPlot and the dashboard's scripts and style (`../dashboard/static/`).
"""

import csv
import html
import io
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from string import Template

import msgspec

from shoal.deploy.base.words import short
from shoal.deploy.record.lines import StepLine, ValidationLine, merged, point_of
from shoal.deploy.record.reading import Record
from shoal.deploy.record.summary import Totals, what_was_lost

PAGE = Path(__file__).parent / "page"
STATIC = Path(__file__).parents[1] / "dashboard" / "static"
POINTS_MAX = 4000
"""The most points of a plot: neighbouring steps are merged to fit. `shoal report --csv` writes every step."""
_CSV = (
    "step time loss perplexity validation_loss learning_rate gradient_norm tokens tokens_per_s staleness_steps peers "
    "given_up duplicates era"
)
_MODULE = re.compile(r"^(import .*;\n|export )", re.M)


def render_page(record: Record) -> str:
    found = Totals(record)
    every = -(-len(record.steps) // POINTS_MAX) or 1
    steps = [merged(record.steps[index : index + every]) for index in range(0, len(record.steps), every)]
    made = {line.step: line.time for line in record.steps}
    data = vars(found) | {
        "lost": what_was_lost(found),
        "standstill": max(((b.time - a.time, a.step) for a, b in pairwise(record.steps)), default=(0.0, 0)),
        "starts": record.starts,
        "plans": sorted(record.plans, key=lambda line: (line.term, line.sequence)),
        "names": {short(line.peer): line.name for line in record.peers},
        "points": [point_of(line) for line in steps],
        "validations": [(made.get(line.step, line.time), line.step, line.loss) for line in record.validations],
    }
    return one_file(
        PAGE,
        found.name or "a run of shoal",
        data,
        style=_text(STATIC / "uplot" / "uPlot.min.css") + _text(STATIC / "style.css"),
        scripts=(STATIC / "downloads.js", STATIC / "charts.js"),
        uplot=_text(STATIC / "uplot" / "uPlot.iife.min.js"),
        curves=_curves(),
    )


def one_file(
    folder: Path, title: str, data: object, *, style: str = "", scripts: Sequence[Path] = (), **parts: str
) -> str:
    """Return a self-contained HTML page, made from `page.html`, `page.css` and `page.js` of `folder`.

    Args:
        data: values for `page.js`, embedded as JSON.
        style: CSS to insert before `page.css`.
        scripts: files that `page.js` uses beside `kit.js`.
        parts: values for the other placeholders of `page.html`.
    """
    modules = (STATIC / "kit.js", *scripts, folder / "page.js")
    text = msgspec.json.encode(data).decode()
    return Template(_text(folder / "page.html")).substitute(
        parts,
        title=html.escape(title),
        style=style + _text(folder / "page.css"),
        script="".join(_MODULE.sub("", _text(path)) for path in modules),
        data=text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),  # cannot end its element
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
