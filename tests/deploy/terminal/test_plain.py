"""What others, or files, have put into a text reaches no terminal as a control character."""

import io
import logging
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from record_lines import step
from shoal.deploy import cli
from shoal.deploy.commands.options import start_logging
from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.record.lines import PeerLine, encode_line
from shoal.deploy.report import Joined, Note, Obeys, Phase, Status, Summary
from shoal.deploy.state.run_folder import Standing
from shoal.deploy.terminal.peer_output import PeerOutput
from shoal.deploy.terminal.plain import say
from shoal.deploy.terminal.status import show
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
    standing = Standing(name=EVIL, role="volunteer", step=1, steps=10, used_s=0.0)
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
