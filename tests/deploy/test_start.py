"""Ctrl-C before there is a command that could say how it ends."""

import os
import subprocess
import sys
from collections.abc import Sequence

import click
import pytest
import typer

from shoal.deploy import cli, start
from shoal.deploy.commands.options import EXIT_INTERRUPTED


class Interrupted:
    """An import during which somebody presses Ctrl-C."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if name == "shoal.deploy.cli":
            raise KeyboardInterrupt


def test_ctrl_c_while_it_still_loads_is_no_error(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "shoal.deploy.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        start.main()
    assert ended.value.code == EXIT_INTERRUPTED
    assert capsys.readouterr() == ("", "")


def test_it_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shoal", "--version"])
    with pytest.raises(SystemExit) as ended:
        start.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("shoal ")


def shoal(*arguments, **environment):
    """The command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from shoal.deploy.start import main; main()", *arguments],
        env=os.environ | environment,
        capture_output=True,
        check=False,
    )


def test_a_locale_that_knows_no_letters_but_ascii_is_no_hindrance(tmp_path):
    settings = tmp_path / "shoal" / "config.toml"
    settings.parent.mkdir()
    settings.write_text("# größe\n[limits]\nnice = 7\n", encoding="utf-8")
    own = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    done = shoal("config", "set", "wandb_project", "größe", **own, LC_ALL="C", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, b"")
    assert "größe".encode() in done.stdout
    assert 'wandb_project = "größe"' in settings.read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are UTF-8")
@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}])
def test_a_folder_whose_name_is_not_utf8_works_or_is_one_line(tmp_path, locale):
    folder = os.path.join(os.fsencode(tmp_path), b"\xff")
    own = {"XDG_CONFIG_HOME": os.fsdecode(folder), "XDG_STATE_HOME": str(tmp_path), "PYTHONUTF8": "0"} | locale
    assert shoal("config", "set", "nice", "3", **own).returncode == 0
    assert os.path.exists(os.path.join(folder, b"shoal", b"config.toml"))
    (tmp_path / "run.toml").write_text("")
    done = shoal("host", tmp_path / "run.toml", "--state-dir", folder, **own)
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line == f"shoal: cannot use the state folder {tmp_path}/?: its path is not UTF-8; name another one"


def test_any_other_path_that_is_not_utf8_is_one_line(capsys):
    group = typer.main.get_group(cli.app)
    group.commands = {"break": click.Command("break", callback=lambda: "\udcff".encode())}
    with pytest.raises(SystemExit) as ended:
        group(["break"], prog_name="shoal")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "shoal: '\\udcff' is not UTF-8: name a path that is\n"
