"""What others, or files, have put into a text reaches no terminal as a control character, and no word is broken."""

import io
import logging
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from record_lines import step
from shoal.deploy import cli
from shoal.deploy.commands.options import start_logging
from shoal.deploy.commands.runs import _table
from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.planning.cards import LEGEND
from shoal.deploy.record.lines import PeerLine, encode_line
from shoal.deploy.record.report import Joined, Note, Obeys, Phase, Status, Summary
from shoal.deploy.state.run_folder import SavedStanding
from shoal.deploy.state.runs import FoundRun
from shoal.deploy.terminal.peer_output import PeerOutput
from shoal.deploy.terminal.plain import say, wrapped
from shoal.deploy.terminal.presenter import Presenter
from shoal.deploy.terminal.screen import open_console, tell
from shoal.deploy.visitor.status import show
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Comparison, PeerStatus
from statuses import swarm_status

EVIL = "\x1b[31m\x07bob\r\x9b2J\u202e\x00"
A = PeerID("12D3KooW" + 44 * "a")


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def harmless(shown: str) -> bool:
    bad = {letter for letter in shown if not letter.isprintable()} - {"\n"}
    assert not bad
    return "bob" in shown


def hostile_status() -> Status:
    usual = {"stage": 0, "version": 7, "synced": True, "draining": False, "seen_s_ago": 0.2, "forward_s": 0.01}
    peer = PeerStatus(peer=A, name=EVIL, device=EVIL, window=0, **usual)
    says = {"run": EVIL, "name": EVIL, "plan_reason": EVIL, "waits_for": EVIL, "risks": (EVIL,), "elapsed_s": 1.0}
    comparison = Comparison(foreseen_tokens_per_s=1.0, sentence=EVIL)
    return Status(status=swarm_status(coordinator=A, peers=(peer,), stages=((0, 2),), comparison=comparison, **says))


def test_a_swarm_that_is_shown_once() -> None:
    said = io.StringIO()
    show(hostile_status().status, Console(width=200, file=said))
    assert harmless(said.getvalue())


@pytest.mark.parametrize("redrawn", [False, True])
def test_a_peers_own_terminal(redrawn: bool) -> None:
    said = io.StringIO()
    console = Console(width=200, height=80, file=said)
    output = PeerOutput(RunFacts(name="n", steps=10, num_layers=2), title="shoal n", console=console)
    said_by_others = (
        Phase(name=EVIL),
        Obeys(term=1, sequence=1, coordinator=A, reason=EVIL, peers=1),
        Joined(peer=A, name="me", invite=""),
        hostile_status(),
        Note(text=EVIL),
        Summary(lines=(EVIL,)),
    )
    for report in said_by_others:
        output.say(report)
        if redrawn:
            console.print(output.presenter.panel())
    output.close()
    assert harmless(said.getvalue())


def test_runs_and_reports_of_names_in_files(tmp_path: Path) -> None:
    run = "0123456789abcdef"
    folder = tmp_path / "shoal" / "runs" / run / "peer-1" / run
    folder.mkdir(parents=True)
    standing = SavedStanding(name=EVIL, role="volunteer", step=1, steps=10, used_s=0.0)
    (folder / "standing.json").write_bytes(msgspec.json.encode(standing))
    lines = step(1), PeerLine(time=0.0, peer=A, name=EVIL, change="joined", stage=0)
    (folder / "record.jsonl").write_bytes(b"".join(map(encode_line, lines)))
    for arguments in (["runs"], ["report", "-o", str(tmp_path / "page.html")], ["runs", "remove", run, "--yes"]):
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0
        assert harmless(result.output), result.output


def test_an_error_and_a_warning(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(cli.app, ["runs", "remove", f"bob{EVIL}"])
    assert result.exit_code == cli.EXIT_USER_ERROR
    assert harmless(result.stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    start_logging(verbose=False)
    logging.getLogger("shoal").warning("%s", EVIL)
    assert harmless(capsys.readouterr().err)


def test_what_is_several_lines_stays_several_lines(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\ntwo\u202e")
    assert capsys.readouterr().out == "one\ntwo?\n"


# --- no word is broken ---

SENTENCE = "beware   nobody can connect to it: open a port, such as `sudo ufw allow 4001/tcp`, and join once more"


@pytest.mark.parametrize("width", [12, 30, 80])
def test_a_sentence_is_wrapped_at_blanks_below_its_label(width: int) -> None:
    first, *others = wrapped(SENTENCE, width)
    assert " ".join([first, *others]).split() == SENTENCE.split()
    assert any("`sudo ufw allow 4001/tcp`," in line for line in [first, *others]), "a command can be copied"
    if width > 20:
        assert all(len(line) <= max(width, 9 + 26) for line in [first, *others])
        assert all(line.startswith(9 * " ") and line[9] != " " for line in others)


def test_a_command_to_copy_and_a_short_line_stay_as_they_are() -> None:
    invite = "shoal1" + 200 * "q"
    assert wrapped(f"shoal join {invite}", 80) == [f"shoal join {invite}"]
    assert wrapped("  page         /a b", 80) == ["  page         /a b"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_only_a_terminal_wraps_sentences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    say(SENTENCE)
    file = io.StringIO()
    tell(Console(file=file, width=40, force_terminal=is_terminal, color_system=None), SENTENCE)
    lines = wrapped(SENTENCE, 40) if is_terminal else [SENTENCE]
    assert capsys.readouterr().out.splitlines() == file.getvalue().splitlines() == lines
    say(SENTENCE, whole=True)
    assert capsys.readouterr().out == SENTENCE + "\n"


def test_what_a_peer_says_begins_no_line_of_its_own() -> None:
    file = io.StringIO()
    Presenter(RunFacts(name="n", steps=10, num_layers=2), console=Console(file=file)).say(
        "plan 1: first\nshoal: send your key"
    )
    assert file.getvalue() == "plan 1: first?shoal: send your key\n"


def test_a_pipe_gets_the_explanation_of_a_table_unbroken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(cli.app, ["plan", "--cards"])
    assert LEGEND in result.output.splitlines()


def test_only_the_name_of_a_run_is_cut_at_80_columns() -> None:
    found = FoundRun(
        name="a-name-as-long-as-names-of-runs-may-become-in-practice",
        run="0123456789abcdef",
        role="volunteer",
        step=123_456,
        steps=200_000,
        loss=2.345,
        finished=True,
        size_bytes=123_400_000,
        used_s=0.0,
        running=False,
        folder="",
    )
    file = io.StringIO()
    Console(width=80, file=file).print(_table([found]))
    wide = io.StringIO()
    Console(width=200, file=wide).print(_table([found]))
    assert file.getvalue().splitlines()[1].split()[1:] == wide.getvalue().splitlines()[1].split()[1:]


def test_a_name_with_colons_is_no_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    tell(open_console(), "peer :skull: joined")
    assert capsys.readouterr().out == "peer :skull: joined\n"
