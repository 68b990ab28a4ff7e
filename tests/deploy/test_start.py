"""Ctrl-C before there is a command that could say how it ends."""

import sys
from collections.abc import Sequence

import pytest

from shoal.deploy import start
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
