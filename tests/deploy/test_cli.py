"""Bad input: one clear line on standard error, exit code 2, no traceback."""

import contextlib
import io
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.deploy import cli
from shoal.deploy.commands.options import data_source, start_logging
from shoal.deploy.state import places
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite, make_invite

RUN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def complaint(*arguments: object, stdin: str | None = None) -> str:
    """The one line that the command says."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin)
    assert result.exit_code == cli.EXIT_USER_ERROR, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("shoal: ")
    return line.removeprefix("shoal: ")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def an_invite() -> str:
    owner = Identity(bytes(32)).peer_id
    return make_invite(RUN, owner, (f"/ip4/127.0.0.1/tcp/9/p2p/{owner}",))


def test_version_is_said() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, "shoal 0.1.0\n")


@pytest.mark.parametrize("command", ["join", "status", "recover"])
def test_a_text_that_is_no_invite(command: str) -> None:
    assert "not a shoal invite" in complaint(command, "hello")


@pytest.mark.parametrize("command", ["join", "status", "recover"])
def test_an_invite_that_was_cut_short(command: str) -> None:
    assert "damaged or cut short" in complaint(command, an_invite()[:-3])


@pytest.mark.parametrize(
    "command",
    [
        ("join", "-"),
        ("status", "-"),
        ("recover", "-"),
        ("doctor", "-"),
        ("service", "install", "-"),
        ("generate", "--invite", "-"),
        ("eval", "--invite", "-"),
    ],
    ids=lambda words: words[0],
)
def test_an_invite_from_standard_input_is_checked_too(command: tuple[str, ...]) -> None:
    assert "damaged or cut short" in complaint(*command, stdin=an_invite()[:-3] + "\n")


@pytest.mark.parametrize(("version", "who"), [(0, "the host must upgrade"), (99, "you must upgrade")])
def test_an_invite_of_another_protocol_version(version: int, who: str) -> None:
    owner = Identity(bytes(32)).peer_id
    invite = Invite(version, RUN, owner, (f"/ip4/127.0.0.1/tcp/9/p2p/{owner}",)).encode()
    line = complaint("join", invite)
    assert f"protocol version {version}" in line
    assert who in line


def test_a_run_spec_that_is_not_there(tmp_path: Path) -> None:
    assert f"cannot read the run spec {tmp_path}/none.toml" in complaint("host", tmp_path / "none.toml")


def test_a_run_spec_that_is_not_toml(tmp_path: Path) -> None:
    path = written(tmp_path / "run.toml", "steps = = 3")
    assert str(path) in complaint("host", path)


def test_a_run_spec_with_an_unknown_field(tmp_path: Path) -> None:
    path = written(tmp_path / "run.toml", "[training]\nstep = 10\n")
    line = complaint("host", path)
    assert line == f"{path}: [training] has no 'step': did you mean steps?"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[training]\nsteps = -1\n", "steps must be positive"),
        ('[training]\nsteps = "many"\n', "training.steps must be a whole number, not a text"),
        ("[swarm]\nstages = 9\nmin_peers = 9\n", "swarm.stages 9 is more than model.num_layers 6"),
        ('[swarm]\nstages = "many"\n', "swarm.stages cannot be 'many': it is a whole number or auto"),
        ("[swarm]\nstages = 2.5\n", 'swarm.stages must be a whole number or "auto", not a fraction'),
        ("[swarm]\nstages = 0\n", 'stages must be "auto" or in [1, '),
        ("[model]\ndim = 100\nnum_heads = 3\n", "num_heads 3 does not divide dim 100"),
    ],
)
def test_a_run_spec_with_an_impossible_field(tmp_path: Path, text: str, field: str) -> None:
    assert field in complaint("host", written(tmp_path / "run.toml", text))


def test_a_number_of_stages_is_one_or_left_to_the_swarm() -> None:
    assert "a number from 1 to" in complaint("demo", "--stages", "many")
    assert "swarm.stages 7 is more than model.num_layers 6" in complaint("demo", "--stages", 7)


def test_a_data_folder_without_text(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "image").write_bytes(bytes(range(256)))
    path = written(tmp_path / "run.toml", f'[data]\nsource = "{folder}"\n')
    assert f"{folder} has no text" in complaint("host", path)


def test_a_data_folder_that_is_not_there(tmp_path: Path) -> None:
    path = written(tmp_path / "run.toml", f'[data]\nsource = "{tmp_path}/none"\n')
    assert f"no file or folder {tmp_path}/none" in complaint("host", path)


def test_a_run_spec_that_names_another_text(tmp_path: Path) -> None:
    text = written(tmp_path / "text", "some words to learn from\n" * 1000)
    path = written(tmp_path / "run.toml", f'[data]\nsource = "{text}"\ndigest = "00"\n')
    assert "is not the text that this run trains on" in complaint("host", path)


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1", "127.0.0.1:http"])
def test_an_address_that_is_none(listen: str) -> None:
    assert f"--listen {listen}: write HOST:PORT" in complaint("join", an_invite(), "--listen", listen)


def test_a_state_folder_in_use(tmp_path: Path) -> None:
    lock = places.claim_folder(tmp_path / "peer")
    try:
        assert "another shoal runs in" in complaint("join", an_invite(), "--state-dir", tmp_path / "peer")
    finally:
        lock.release()


def test_an_identity_that_is_none(tmp_path: Path) -> None:
    written(tmp_path / "identity.key", "not a key")
    assert "is not a shoal identity" in complaint("join", an_invite(), "--state-dir", tmp_path)


def test_status_with_no_run_up() -> None:
    assert "no run is up on this machine" in complaint("status")


def test_recover_with_no_run_up_names_itself() -> None:
    assert "`shoal recover INVITE`" in complaint("recover")


@pytest.mark.parametrize(
    "command",
    [
        ("join", an_invite(), "--data"),
        ("import", "model", "run.toml", "--data"),
        ("tokenizer", "train"),
        ("demo", "--data"),
    ],
)
def test_a_text_that_is_not_there(tmp_path: Path, command: tuple[str, ...]) -> None:
    more = (tmp_path / "out.json",) if command[0] == "tokenizer" else ()
    assert f"there is no file or folder {tmp_path}/none" in complaint(*command, tmp_path / "none", *more)


def test_a_source_is_a_path_or_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written(tmp_path / "text", "words").parent)
    assert data_source("text") == str(tmp_path / "text")
    assert [data_source(name) for name in ("", "python-library", "hf:a/b")] == ["", "python-library", "hf:a/b"]


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", "home-gpus", "--json"),
        ("simulate", "home-gpus", "--html"),
        ("demo", "--json"),
        ("import", "model"),
        ("tokenizer", "train", "python-library"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(tmp_path: Path, command: tuple[str, ...]) -> None:
    assert f"there is no folder {tmp_path}/none" in complaint(*command, tmp_path / "none" / "file")
    if "--json" in command or "--html" in command:
        assert "it is a folder" in complaint(*command, tmp_path)


def test_a_warning_is_one_plain_line_wherever_standard_error_goes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live view replaces `sys.stderr`, long after logging was set up."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    start_logging(False)
    elsewhere = io.StringIO()
    logging.getLogger("shoal.test").warning("the %s is wet", "fish")
    with contextlib.redirect_stderr(elsewhere):
        logging.getLogger("shoal.test").warning("still")
    assert capsys.readouterr().err == "shoal: the fish is wet\n"
    assert elsewhere.getvalue() == "shoal: still\n"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.mark.process
def test_a_port_in_use(tmp_path: Path, taken_port: int) -> None:
    text = written(tmp_path / "text", "some words to learn from\n" * 1000)
    path = written(tmp_path / "run.toml", f'[data]\nsource = "{text}"\n')
    line = complaint("host", path, "--listen", f"127.0.0.1:{taken_port}")
    assert f"cannot listen on 127.0.0.1 port {taken_port}: address already in use" in line


@pytest.mark.process
def test_the_console_script_ends_without_a_traceback() -> None:
    command = [sys.executable, "-m", "shoal.deploy.cli", "join", "hello"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.process
def test_light_commands_do_not_import_torch() -> None:
    light = "shoal.deploy.cli, shoal.deploy.demo.driver"
    # The package `hivemind` itself may be there, without its contents (`protocol/live/__init__.py`).
    heavy = "any(name == 'torch' or name.startswith('hivemind.') for name in sys.modules)"
    code = f"import sys, {light}; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("device", ["tpu", "gpu7", "mps:1", "cuda:", "cuda:one", ""])
@pytest.mark.parametrize("command", [("join", an_invite()), ("service", "show", an_invite()), ("generate",)])
def test_a_device_that_is_none_is_refused_before_anything_is_done(command: tuple[str, ...], device: str) -> None:
    assert f"--device {device}: shoal computes on cpu, cuda, rocm, xpu" in complaint(*command, "--device", device)


@pytest.mark.parametrize("device", ["cuda:99", "xpu:99"])
def test_a_device_that_is_not_there(tmp_path: Path, device: str) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text(f'[data]\nsource = "{__file__}"\n[model]\ncontext = 16\n')
    word = "devices of that kind"
    assert word in complaint("host", str(spec), "--device", device, "--state-dir", str(tmp_path / "state"))


@pytest.mark.parametrize("command", ["host", "join"])
def test_a_name_with_a_control_character(command: str, tmp_path: Path) -> None:
    line = complaint(command, tmp_path / "run.toml" if command == "host" else an_invite(), "--name", "a\x1b[31m")
    assert line == "--name 'a\\x1b[31m': a name has no control characters and no line breaks"
