"""Benchmarks, soaks, the lab and the oracle are run by hand: nobody would notice that one does not begin any more."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
RUNNERS = [HERE / "lab" / "run.py", HERE / "oracle" / "oracle.py"]
SCRIPTS = [*sorted((HERE / "bench").glob("*.py")), *sorted((HERE / "soak").glob("*.py")), *RUNNERS]


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_everything_that_it_imports_is_there_and_nothing_need_be_said(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(path, monkeypatch)
    parse = argparse.ArgumentParser.parse_args

    class Parsed(Exception):
        """From here on it would work for minutes."""

    def parse_nothing(parser: argparse.ArgumentParser, args: Sequence[str] | None = None) -> argparse.Namespace:
        parse(parser, [])
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_nothing)
    with pytest.raises(Parsed):  # `make bench`, `make soak` and `make lab` say nothing
        module.main()


def test_what_is_measured_on_a_card_runs_on_a_cpu_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, file = load(HERE / "bench" / "gpu.py", monkeypatch), tmp_path / "gpu.json"
    parts = ["layers", "last", "commit", "wire", "digests"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--tiny", "--json", str(file), "--only", *parts])
    module.main()
    figures = json.loads(file.read_text())["figures"]
    assert list(dict.fromkeys(figure["part"] for figure in figures)) == parts
    assert all(figure["value"] == 1.0 for figure in figures if figure["part"] == "digests")  # the same device twice
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(figures)


def test_without_a_card_it_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(HERE / "bench" / "gpu.py", monkeypatch)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_what_is_beside_shoal_is_counted_from_the_invitation_on(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(HERE / "bench" / "peers.py", monkeypatch)

    def outcome(contender: str, *step_at_s: float) -> Any:
        return module.Outcome(
            contender=contender,
            seconds=100.0,
            tokens_per_step=1000,
            step_at_s=step_at_s,
            first_step_s={"a": min(step_at_s, default=None), "b": None},
            loss=2.5,
            machine_busy=0.5,
        )

    ours, theirs = outcome("shoal", 20.0, 30.0, 40.0, 90.0), outcome("hivemind", 50.0, 98.0)
    assert (ours.tokens_per_s, ours.standstills_s, theirs.standstills_s) == (40.0, [50.0], [])
    assert outcome("shoal", 10.0, 20.0).standstills_s == [80.0], "until the end"
    shown = module.table([ours, theirs, outcome("alone")])
    assert "shoal       a 20.0 s, b -" in shown
    assert "shoal / hivemind: 2.00" in shown
    assert "shoal / alone" not in shown, "which has made no step"
