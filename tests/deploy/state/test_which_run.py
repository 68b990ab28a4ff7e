"""Every command finds the same runs, by the same words."""

import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from typer.testing import CliRunner

from record_lines import step
from shoal.deploy import cli
from shoal.deploy.record.lines import encode_line
from shoal.deploy.ship.found_snapshot import find_snapshots
from shoal.deploy.state import places
from shoal.deploy.state.run_folder import RunFolder, SavedStanding
from shoal.deploy.state.runs import _size_of
from shoal.peer.disk.snapshot import write_snapshot
from shoal.peer.model.layout import all_layer_keys, init_layer
from shoal.peer.model.state import LayerState
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.spec import DataSpec, ModelSpec, OptimizerSpec, RunSpec, TrainingSpec

MODEL = ModelSpec(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=24, context=16)
NOTES, FISH = "aa11" * 4, "bb22" * 4


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run notes, hosted below `--state-dir`; fish, used before it, where a host's runs are."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("some words to learn from\n" * 1000)
    make(tmp_path / "disk", "notes", NOTES, used_s=2.0)
    make(places.state_root() / "hosts" / "fish", "fish", FISH, used_s=1.0)
    places.note_folder(tmp_path / "disk")
    return tmp_path


def make(peer: Path, name: str, run: str, *, used_s: float) -> None:
    spec = RunSpec(
        name=name,
        model=MODEL,
        data=DataSpec(source=str(Path("text").resolve())),
        training=TrainingSpec(steps=4),
        optimizer=OptimizerSpec(warmup_steps=1),
    )
    layers = {}
    for key in all_layer_keys(MODEL):
        param_N = init_layer(MODEL, key, 1)
        layers[key] = LayerState(param_N=param_N, moment1_N=param_N / 2, moment2_N=param_N.square())
    peer.mkdir(parents=True)
    folder = RunFolder(peer, run)
    write_snapshot(
        LiveDisk(folder.path / "snapshots"), PurePosixPath("x"), run=run, version=4, layers=layers, spec=spec
    )
    (folder.path / "record.jsonl").write_bytes(encode_line(step(4)))
    folder.keep_standing(SavedStanding(name=name, role="host", step=4, steps=4, used_s=used_s))


def shoal(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def commands(run: str) -> list[list[str]]:
    words = [run] if run else []
    return [
        ["generate", *words, "-n", "1", "--device", "cpu"],
        ["export", *words, "out"],
        ["eval", *words, "--text", "book.txt", "--device", "cpu"],
        ["report", *words],
    ]


@pytest.mark.parametrize("wanted", ["notes", NOTES, NOTES[:4], "disk", f"disk/{NOTES}"])
def test_each_command_finds_a_run_that_another_folder_has(home: Path, wanted: str) -> None:
    (home / "notes").mkdir()  # the run's text, as in the README: no run is in it
    (home / "book.txt").write_text("some words")
    for command in commands(wanted):
        said = shoal(*command)
        assert said.exit_code == 0, (command, said.output)
        assert NOTES in said.output, command
    for command in (["continue", wanted], ["runs", "remove", wanted, "--yes"]):
        said = shoal(*command)
        assert said.exit_code == 0, (command, said.output)
        assert NOTES in said.output, command


def test_without_a_name_each_takes_the_run_that_was_used_last_and_says_which_others_there_are(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "book.txt").write_text("some words")
    for command in commands(""):
        caplog.clear()
        said = shoal(*command)
        assert said.exit_code == 0, (command, said.output)
        assert f"this is run notes ({NOTES}), which was used last; there is also fish ({FISH}, step 4)" in caplog.text


def test_a_word_that_means_two_runs_is_refused_by_each(home: Path) -> None:
    make(places.state_root() / "hosts" / "notes", "notes", "cc33" * 4, used_s=3.0)
    for command in [*commands("notes"), ["continue", "notes"], ["runs", "remove", "notes"]]:
        said = shoal(*command)
        assert said.exit_code == cli.EXIT_USER_ERROR
        assert f"'notes' may mean notes ({'cc33' * 4}, step 4), notes ({NOTES}, step 4)" in said.output, command


def test_a_word_that_means_a_run_and_a_folder_with_another_is_refused(home: Path) -> None:
    make(home / "fish", "other", "dd44" * 4, used_s=3.0)
    said = shoal("export", "fish", "out")
    assert said.exit_code == cli.EXIT_USER_ERROR
    assert "say ./fish or the run's id" in said.output
    assert find_snapshots("./fish")[0].run == "dd44" * 4


def test_a_run_of_which_nothing_is_here_yet_is_named(home: Path) -> None:
    RunFolder(places.state_root() / "hosts" / "new", "ee55" * 4).keep_standing(
        SavedStanding(name="new", role="host", steps=4, used_s=9.0)
    )
    for command, what in zip(commands("new"), ("snapshot", "snapshot", "snapshot", "record"), strict=True):
        said = shoal(*command)
        assert said.exit_code == cli.EXIT_USER_ERROR
        assert f"run new ({'ee55' * 4}) has no {what} on this machine yet" in said.output


def test_a_folder_below_the_state_folder_is_found_too(home: Path) -> None:
    make(places.state_root() / "mine", "mine", "ff66" * 4, used_s=1.0)
    places.note_folder(places.state_root() / "mine")
    assert find_snapshots("mine")[0].run == "ff66" * 4


def test_a_folder_that_a_peer_removes_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stays", "goes"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "part").write_bytes(b"x" * 10)
    scandir = os.scandir

    def racing(path: Any) -> Any:
        if Path(path).name == "goes":
            (Path(path) / "part").unlink()
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", racing)
    assert _size_of(tmp_path / "run")[0] == 10
