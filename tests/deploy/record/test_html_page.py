"""`shoal report`: one page in one file that needs nothing else."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from record_lines import plan, step, validation
from shoal.deploy.cli import app
from shoal.deploy.record.html_page import POINTS_MAX, csv_of, render_page
from shoal.deploy.record.lines import Line, NoteLine, PeerLine, StartLine, encode_line
from shoal.deploy.record.reading import record_of
from shoal.deploy.state.run_folder import RunFolder, SavedStanding
from shoal.protocol.identity import PeerID

CHROMIUM = Path("/usr/bin/chromium")
NASTY = "</script><img src=x onerror=alert(1)>"
ID = "12D3KooWPR5YcCPCfQXh97CP1eL3xTUWZzZcYJNFbkoLswnk3Amr"


def start(name: str = "notes", run: str = "0123456789abcdef") -> StartLine:
    return StartLine(
        time=1.7e9,
        run=run,
        name=name,
        peer=PeerID(ID),
        peer_name="host",
        steps=100,
        tokens_per_step=10,
        num_parameters=180_800,
        num_layers=4,
        optimizer="nadam",
        version="0.1.0",
    )


def lines(name: str = "notes", run: str = "0123456789abcdef", steps: int = 30) -> list[Line]:
    made: list[Line] = [start(name, run), plan(time=1.7e9, reason="first plan: 2 peers")]
    made += [PeerLine(time=1.7e9, peer=PeerID(ID), name=NASTY, device="cpu", change="joined", stage=0)]
    made += [plan(time=1.7e9 + 9, sequence=2, reason="swnk3Amr joined"), plan(sequence=3, reason="hand-over from ana")]
    made += [
        step(n, time=1.7e9 + n, loss=6.0 / n**0.3, gradient_norm=1.0 / n, tokens_per_s=900.0 + n)
        for n in range(1, steps + 1)
    ]
    made += [validation(10, loss=3.0), validation(20, loss=2.5), NoteLine(time=1.7e9, text=NASTY)]
    return made


def text_of(made: list[Line]) -> bytes:
    return b"".join(map(encode_line, made))


def page_of(made: list[Line]) -> str:
    return render_page(record_of(map(encode_line, made)))


def data_of(page: str) -> Any:
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


def test_a_page_has_what_was_measured_and_fetches_nothing() -> None:
    page = page_of(lines())
    assert "$" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.findall(
        r"""(?:src|href)=["']?(?!data:|#)[^"'\s>]*//""", re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    )
    assert "import " not in page.split("class Charts")[1].split("</script>")[0]
    assert data_of(page)["step"] == 30


def test_what_peers_call_themselves_is_never_markup() -> None:
    page = page_of(lines(name=NASTY))
    assert NASTY not in page
    assert "&lt;img src=x" in page
    assert NASTY in data_of(page)["names"].values()
    assert page.count("</script>") == 3


def test_a_long_run_is_drawn_with_fewer_points_and_its_csv_has_all() -> None:
    made = lines(steps=3 * POINTS_MAX)
    data = data_of(page_of(made))
    assert POINTS_MAX / 2 < len(data["points"]) <= POINTS_MAX
    rows = csv_of(record_of(map(encode_line, made))).splitlines()
    assert len(rows) == 1 + 3 * POINTS_MAX + 2
    assert all(row.count(",") == rows[0].count(",") for row in rows)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for folder, name, run in (
        ("hosts/notes", "notes", "0123456789abcdef"),
        ("runs/ab12/peer-1", "tales", "ab12cd0123456789"),
    ):
        place = tmp_path / "state" / "shoal" / folder / run
        place.mkdir(parents=True)
        RunFolder(place.parent, run).keep_standing(SavedStanding(name=name, role="host", steps=100, used_s=1.0))
        (place / "record.jsonl").write_bytes(text_of(lines(name, run)))
    return tmp_path


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["report", *arguments])


@pytest.mark.parametrize(
    "wanted", ["notes", "0123", "state/shoal/hosts/notes", "state/shoal/hosts/notes/0123456789abcdef"]
)
def test_a_run_is_found_by_its_name_its_identifier_and_its_folder(home: Path, wanted: str) -> None:
    (home / "notes").mkdir()  # the text that the run reads, as in the README
    said = invoke(wanted, "--csv", "notes.csv")
    assert said.exit_code == 0, said.output
    assert "<title>notes</title>" in (home / "shoal-notes.html").read_text()
    assert (home / "notes.csv").read_text().startswith("step,time,loss")
    assert "shoal-notes.html" in said.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nobody"], "no run 'nobody' is on this machine: `shoal runs` lists them"),
        (["notes", "-o", "/nowhere/x.html"], "cannot write /nowhere/x.html"),
        (["."], "there is no record.jsonl in ."),
    ],
)
def test_what_cannot_be_reported_is_said_in_a_line(home: Path, arguments: list[str], says: str) -> None:
    if arguments == ["."]:
        (home / "empty").mkdir()
        arguments = ["empty"]
        says = "there is no record.jsonl in empty"
    said = invoke(*arguments)
    assert said.exit_code == 2
    assert says in said.output
    assert len(said.output.strip().splitlines()) == 1


def test_a_run_without_a_step_says_so(home: Path) -> None:
    (home / "record.jsonl").write_bytes(text_of([start()]))
    said = invoke("record.jsonl")
    assert (said.exit_code, "no step is recorded" in said.output) == (2, True)


def test_two_runs_that_begin_alike_are_told_apart_by_more(home: Path) -> None:
    place = home / "state" / "shoal" / "hosts" / "other" / "0123999999999999"
    place.mkdir(parents=True)
    (place / "record.jsonl").write_bytes(text_of(lines("other", "0123999999999999")))
    said = invoke("0123")
    assert said.exit_code == 2
    assert "may mean" in said.output


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM))
        yield browser
        browser.close()


@pytest.mark.skipif(not CHROMIUM.exists(), reason="no /usr/bin/chromium: apt-get install chromium")
def test_on_a_phone_it_is_drawn_whole_smoothed_and_taken_home(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_of(lines()), encoding="utf-8")
    context = browser.new_context(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    assert page.locator("#curves canvas").count() == 5
    tiles = page.inner_text("#tiles")
    assert "of 100" in tiles
    assert "2.500" in tiles
    changes = page.inner_text("#changes")
    assert "first plan: 2 peers" in changes
    assert f"{NASTY} joined" in changes
    assert "hand-over from ana" not in changes
    assert NASTY in page.inner_text("#peers")
    assert "180,800" in page.inner_text("#facts")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert "loss" in page.inner_text("#chart-loss .u-legend")
    page.select_option("#measure", "perplexity")
    page.select_option("#across", "time")
    page.check("#log")
    page.eval_on_selector("#smooth", "node => { node.value = 0.8; node.dispatchEvent(new Event('input')); }")
    legend = page.inner_text("#chart-loss .u-legend")
    assert "perplexity" in legend
    assert "average" in legend
    for kind, begins in (("csv", b"step,time"), ("svg", b"<svg"), ("png", b"\x89PNG")):
        with page.expect_download() as download:
            page.click(f"#{kind}")
        taken = Path(download.value.path()).read_bytes()
        assert taken.startswith(begins)
        assert download.value.suggested_filename == f"notes.{kind}"
        if kind == "csv":
            assert len(taken.splitlines()) == 1 + 30 + 2
    context.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "blob:"))] == []
