"""Figures, table and page of a comparison, from results that are made up here."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from shoal.coordinator.cost.placement import Cost, Placement
from shoal.deploy.planning.rows import Rows
from shoal.deploy.simulate import gantt
from shoal.deploy.simulate.html_report import pace, render_html
from shoal.deploy.simulate.outcome import Outcome, bound_by, idle_share, row_of
from shoal.deploy.simulate.result import Ending, Happened, JobSpan, SimResult, StepCommitted
from shoal.deploy.simulate.scenario import Scenario, find_scenario
from shoal.deploy.simulate.strategy import Strategy
from shoal.deploy.simulate.table import COLUMNS, LAST, cells, seconds, size
from shoal.protocol.spec import RunSpec

EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">&amp;'
CHROMIUM = Path("/usr/bin/chromium")
PLACEMENT = Placement(stages=((0, 1), (2,)), bounds=(0, 2, 6))
COST = Cost(seconds=9.0, parts={"tokens_per_s": 125.0}, bound=("compute", 1))


def result(**changes: Any) -> SimResult:
    """Four devices, five commits ten seconds apart; device 3 holds nothing, device 2 works half of the time."""
    busy = tuple(JobSpan("forward", 10.0 * k, 10.0 * k + 10.0) for k in range(5))
    half = tuple(
        span
        for k in range(5)
        for span in (JobSpan("backward", 10.0 * k, 10.0 * k + 4.0), JobSpan("step", 10.0 * k + 9.0, 10.0 * k + 10.0))
    )
    values: dict[str, Any] = {
        "steps": tuple(StepCommitted(k, 10.0 * (k + 1)) for k in range(5)),
        "tokens_per_step": 1000,
        "timeline": (busy, busy, half, ()),
        "busy_s": (50.0, 50.0, 25.0, 0.0),
        "traffic_bytes": np.arange(16, dtype=np.int64).reshape(4, 4) * 1000,
        "events": (Happened(3.0, "left", 3, f"{EVIL} left"),),
        "duplicates": 0,
        "given_up": 0,
        "failures": (),
        "ending": Ending(at_s=51.0, wall_s=0.5, num_events=7),
        "trace_hash": "ab" * 16,
    }
    return SimResult(**values | changes)


def outcome(name: str = "ours", **changes: Any) -> Outcome:
    values: dict[str, Any] = {"placement": PLACEMENT, "predicted": COST, "result": result()}
    return Outcome(strategy=Strategy(name=name, layout="ours"), spec=RunSpec(), **values | changes)


# --- figures ---


def test_a_row_has_the_pace_and_what_was_expected() -> None:
    row = row_of(outcome())
    assert (row.steps, row.step_s, row.tokens_per_s) == (5, 10.0, 100.0)
    assert (row.predicted_tokens_per_s, row.measured_over_predicted) == (125.0, 0.8)
    assert row.bytes_per_step == 120_000 / 5
    assert row.bound_by == "computing, stage 1"
    assert row.stages == ((0, 1), (2,))


def test_idle_is_the_part_without_work_of_those_that_hold_a_stage() -> None:
    assert idle_share(outcome()) == pytest.approx((0 + 0 + 0.5) / 3)
    assert idle_share(outcome(result=result(timeline=((),) * 4))) is None


def test_without_a_prediction_the_row_says_what_was_seen() -> None:
    assert row_of(outcome(predicted=None, placement=None)).bound_by == "0 plans, 1 device lost"


def test_what_bounds_a_step() -> None:
    assert bound_by(Cost(seconds=9.0, bound=("commit", 0))) == "one step after the other"
    assert bound_by(Cost(seconds=9.0, bound=("card", 1))) == "the network of stage 1"
    assert bound_by(Cost.impossible("no path")) == "no path"
    assert bound_by(None) == ""


def test_what_did_not_work_says_why() -> None:
    none = row_of(outcome(placement=None, predicted=None, result=None, problem="no path"))
    assert (none.tokens_per_s, none.bound_by) == (None, "no path")
    dead = row_of(outcome(result=result(steps=(), failures=("n0 failed",))))
    assert (dead.tokens_per_s, dead.bytes_per_step, dead.bound_by) == (None, None, "n0 failed")
    slow = row_of(outcome(result=result(steps=(StepCommitted(0, 1.0),))))
    assert slow.bound_by == "1 step in 51 s"
    assert slow.tokens_per_s_below == pytest.approx(1000 / 50)
    assert cells(slow)[1:3] == ("< 20", "no second")
    ending = Ending(at_s=51.0, wall_s=0.5, num_events=7, standstill="no device was present any more")
    held_up = row_of(outcome(result=result(steps=(), ending=ending)))
    assert held_up.bound_by == "no steps in 51 s: no device was present any more"


def test_few_steps_have_a_figure_and_say_so() -> None:
    steps = tuple(StepCommitted(k, at_s) for k, at_s in enumerate((30.0, 40.0, 49.0)))
    three = row_of(outcome(result=result(steps=steps)))
    assert (three.step_s, three.tokens_per_s) == (9.0, pytest.approx(1000 / 9))
    assert three.note == ("of 3 steps 1 is counted and 1 left out as warm-up; from 4 steps on 2 are left out")
    assert three.idle_share is not None
    two = row_of(outcome(result=result(steps=steps[:2])))
    assert (two.step_s, two.note[:40]) == (10.0, "of 2 steps 1 is counted and none left ou")
    assert row_of(outcome()).note == ""


@pytest.mark.parametrize(
    "changes",
    [{}, {"predicted": None}, {"result": None, "problem": "no path"}, {"result": result(steps=())}],
)
def test_no_cell_is_empty_or_a_dash(changes: dict[str, Any]) -> None:
    for cell in cells(row_of(outcome(**changes))):
        assert cell.strip(" -")


# --- the table ---


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits(width: int) -> None:
    rows = [row_of(outcome(name)) for name in ("ours", "a strategy with a long name")]
    console = Console(width=width)
    with console.capture() as capture:
        table = Rows(console, COLUMNS, last=LAST)
        for row in rows:
            *figures, why = cells(row)
            table.row(*figures, last=why)
    lines = capture.get().splitlines()
    assert all(len(line) <= width + 20 for line in lines), "only a long name pushes a row"
    assert len(lines[0]) <= width
    assert "a strategy with a long name" in capture.get()
    assert "24 kB" in capture.get()
    assert "computing, stage 1" in capture.get()


def test_names_cannot_write_to_the_terminal() -> None:
    assert cells(row_of(outcome("\x1b[31mred[/]")))[0] == "?[31mred[/]"


def test_sizes_and_times_have_three_digits() -> None:
    assert [size(value) for value in (0.0, 999.0, 1234.0, 99_960_000, 999_960_000, 5.5e12)] == [
        "0 B",
        "999 B",
        "1.23 kB",
        "100 MB",
        "1,000 MB",
        "5.5 TB",
    ]
    assert [seconds(value) for value in (0.0123, 1.0, 99.96, 1234.0)] == ["12.3 ms", "1 s", "100 s", "1,234 s"]


# --- the timeline ---


def test_the_pause_before_a_step_is_a_wait() -> None:
    spans = [JobSpan("backward", 0.0, 4.0), JobSpan("step", 9.0, 10.0), JobSpan("forward", 12.0, 13.0)]
    assert gantt.with_waits(spans) == [
        ("backward", 0.0, 4.0),
        ("wait", 4.0, 9.0),
        ("step", 9.0, 10.0),
        ("forward", 12.0, 13.0),
    ]


def test_the_chart_shows_the_last_steps_by_stage(tmp_path: Path) -> None:
    chart = gantt.chart_of(result(), PLACEMENT, small(tmp_path).topology)
    assert (chart.start, chart.end) == (10.0, 50.0)
    assert [bar.stage for bar in chart.rows] == [0, 0, 1]
    assert unpacked(chart, 2) == [
        (kind, 10.0 * k + begin, 10.0 * k + end)
        for k in (1, 2, 3, 4)
        for kind, begin, end in (("backward", 0.0, 4.0), ("wait", 4.0, 9.0), ("step", 9.0, 10.0))
    ]


def test_a_chart_of_too_many_spans_shows_fewer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gantt, "SPANS_MAX", 9)
    chart = gantt.chart_of(result(), PLACEMENT, small(tmp_path).topology)
    assert (chart.start, chart.end) == (30.0, 50.0)


def test_of_many_devices_some_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gantt, "DEVICES_MAX", 2)
    chart = gantt.chart_of(result(), None, small(tmp_path).topology)
    assert len(chart.rows) == 2


def unpacked(chart: gantt.Chart, row: int) -> list[tuple[str, float, float]]:
    found, start = [], 0
    spans = chart.rows[row].spans
    for k in range(0, len(spans), 3):
        start += spans[k]
        begin_s = chart.start + start * chart.unit
        found.append((gantt.KINDS[spans[k + 2]], round(begin_s, 2), round(begin_s + spans[k + 1] * chart.unit, 2)))
    return found


def test_pace_is_between_commits_and_a_mean_in_long_runs() -> None:
    assert pace(result())[1] == (10.0, 20.0, 100.0)
    long = pace(result(steps=tuple(StepCommitted(k, float(k + 1)) for k in range(5001))))
    assert len(long) < 500
    assert long[0][0] == 0.0
    assert long[-1][1] == 5001.0
    assert all(rate == pytest.approx(1000.0) for _, _, rate in long)


# --- the page ---


def small(folder: Path, title: str = "Four") -> Scenario:
    text = (
        f"title = {json.dumps(title)}\n[network]\n"
        f"region = [{{ name = {json.dumps(title)}, count = 3 }}, {{ name = 'B', count = 1 }}]\n"
        "elsewhere = { latency_ms = 1, mbps = 100 }\n"
    )
    (folder / "four.toml").write_text(text)
    return find_scenario(str(folder / "four.toml"))


class Page(HTMLParser):
    """Elements with their attributes, and the text in each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, text: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(text)

    def all(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.elements if name == tag)


def page(folder: Path, title: str = "Four", name: str = "ours") -> tuple[str, Page]:
    outcomes = [outcome(name), outcome("none", placement=None, predicted=None, result=None, problem=EVIL)]
    text = render_html(small(folder, title), 0, outcomes, [row_of(o) for o in outcomes])
    return text, Page(text)


def data_of(text: str) -> Any:
    (raw,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(raw)


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    text, parsed = page(tmp_path)
    assert not [name for name, _ in parsed.elements if name in ("link", "img", "iframe", "object", "embed", "base")]
    assert not [
        value for _, attributes in parsed.elements for key, value in attributes.items() if key in ("src", "href")
    ]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|\bimport\b", text)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    (policy,) = [a["content"] for a in parsed.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")


def test_names_are_shown_and_never_markup(tmp_path: Path) -> None:
    text, parsed = page(tmp_path, title=EVIL, name="<b>ours</b>")
    assert [name for name, _ in parsed.elements].count("script") == 2
    assert not list(parsed.all("img"))
    assert not list(parsed.all("b"))
    assert parsed.texts["title"] == [EVIL]
    assert "".join(parsed.texts["h1"]) == EVIL
    assert data_of(text)["rows"][0][0] == "<b>ours</b>"
    assert EVIL not in text


def test_the_page_carries_everything_that_is_drawn(tmp_path: Path) -> None:
    text, _ = page(tmp_path)
    first, second = data_of(text)["strategies"]
    assert first["events"] == [[3.0, "left", f"{EVIL} left"]]
    assert [m["title"] for m in first["maps"]] == ["regions", "stages", "devices"]
    regions, stages, _ = first["maps"]
    assert regions["labels"] == ["Four", "B"]
    assert regions["bytes"] == [[9000.0, 4200.0], [7800.0, 3000.0]]
    assert stages["labels"] == ["stage 0", "stage 1", "spare"]
    assert sum(map(sum, stages["bytes"])) == 24_000.0
    assert first["layout"] == [[0, "0-1", 2, "2 Four"], [1, "2-5", 1, "1 Four"]]
    assert second["about"] == EVIL
    assert second["gantt"]["rows"] == []


@pytest.mark.skipif(not CHROMIUM.exists(), reason="no /usr/bin/chromium: apt-get install chromium")
def test_nothing_is_wider_than_a_phone_and_each_figure_has_its_name(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    text, _ = page(tmp_path)
    file = tmp_path / "page.html"
    file.write_text(text, encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM))
        shown = browser.new_context(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True).new_page()
        shown.goto(file.as_uri())
        assert shown.evaluate("document.documentElement.scrollWidth") <= 390
        label = "getComputedStyle(document.querySelectorAll('.cards td')[1], '::before').content"
        assert shown.evaluate(label) == '"tokens/s"'
        assert shown.inner_text("h1") == "Four"
        assert "seed 0" in shown.inner_text("#subtitle")
        assert EVIL in shown.inner_text("#strategies")
        assert "2 Four" in shown.inner_text("#layout")
        assert "4.20k" in shown.inner_text("#map")
        assert shown.evaluate("document.querySelector('#throughput svg').viewBox.baseVal.width") <= 390
        browser.close()
