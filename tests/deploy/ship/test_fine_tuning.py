"""From somebody's model to a run of real peers that goes on from it, and back to a model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import single_process
import torch
from typer.testing import CliRunner

from shoal.deploy import cli
from shoal.deploy.ship.import_model import FolderBase, FolderWeights
from shoal.peer.data.corpus import load_corpus
from shoal.peer.handoff.base_layers import FOLDER
from shoal.peer.model.layout import all_layer_keys
from shoal.protocol.toml.spec_file import load_spec

pytestmark = pytest.mark.process

transformers = pytest.importorskip("transformers")

STEPS = 6


def save_model(folder: Path) -> None:
    """Logits far from even, so that its loss is not that of any fresh model."""
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture
def does(world: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A `shoal` command in this process, which has imported torch: the peers are processes, what comes before and after
    them need not be. `../test_day.py` runs each of these commands by itself.
    """
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, world.environment[name])

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


def test_a_swarm_goes_on_from_a_model_and_what_it_learns_is_a_model_again(
    world: Any, does: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "model")
    base = world.spec(STEPS, exact=True)
    tuned = tmp_path / "tuned.toml"
    does("import", tmp_path / "model", tuned, "--spec", base)

    host = world.shoal("host", tuned, "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", 1, "--reports")
    invite = json.loads(host.line('{"event":"Ready"'))["invite"]
    joined = world.shoal("join", invite, "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", 1, "--reports")
    assert host.wait(120) == 0, world.logs()
    assert joined.wait(60) == 0, world.logs()

    spec = load_spec(tuned)
    weights = FolderWeights(tmp_path / "model", spec.model)
    monkeypatch.setattr(single_process, "init_layer", lambda model, key, seed: weights.layer(key))
    corpus = load_corpus(spec.data, context=spec.model.context)
    alone = [step.loss for step in single_process.train(spec, corpus, steps=STEPS)]
    lines = [json.loads(line) for line in host.output.splitlines() + joined.output.splitlines()]
    reports = {line["report"]["step"]: line["report"]["loss"] for line in lines if _has_loss(line)}
    assert [reports[step] for step in sorted(reports)] == pytest.approx(alone, abs=1e-4)

    assert json.loads(does("export", tmp_path / "learnt", "--json"))["version"] == STEPS
    assert FolderWeights(tmp_path / "learnt", spec.model).digests() != spec.initial.digests
    assert json.loads(does("generate", "--prompt", "fish ", "-n", 20, "--device", "cpu", "--json"))["text"]


def test_a_swarm_trains_adapters_beside_a_model_that_one_peer_has(
    world: Any, does: Callable[..., str], tmp_path: Path
) -> None:
    """And the other keeps what it got of the model."""
    save_model(tmp_path / "model")
    base = world.spec(STEPS, exact=True)
    tuned = tmp_path / "tuned.toml"
    argv = ("--spec", base, "--lora", 4, "--base", "int8")
    does("import", tmp_path / "model", tuned, *argv)

    host = world.shoal("host", tuned, "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", 1, "--reports")
    invite = json.loads(host.line('{"event":"Ready"'))["invite"]
    joined = world.shoal("join", invite, "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", 1, "--reports")
    assert host.wait(120) == 0, world.logs()
    assert joined.wait(60) == 0, world.logs()

    spec = load_spec(tuned)
    model = FolderBase(tmp_path / "model", spec)
    stored = {key: model.layer(key) for key in all_layer_keys(spec.model)}
    corpus = load_corpus(spec.data, context=spec.model.context)
    alone = [step.loss for step in single_process.train(spec, corpus, steps=STEPS, base=stored)]
    lines = [json.loads(line) for line in host.output.splitlines() + joined.output.splitlines()]
    reports = {line["report"]["step"]: line["report"]["loss"] for line in lines if _has_loss(line)}
    assert [reports[step] for step in sorted(reports)] == pytest.approx(alone, abs=1e-4)
    kept = {file.stem: file.read_bytes() for file in tmp_path.rglob(f"{FOLDER}/*.bin")}
    assert kept
    assert all(stored[key].numpy().tobytes() == data for key, data in kept.items())

    said = json.loads(does("export", tmp_path / "learnt", "--json"))
    assert (said["version"], said["form"], said["bytes"] < 50_000) == (STEPS, "peft", True)
    does("export", tmp_path / "merged", "--format", "hf", "--json")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    assert json.loads(does("generate", "--prompt", "fish ", "-n", 20, "--device", "cpu", "--json"))["text"]


def _has_loss(line: dict[str, Any]) -> bool:
    return line.get("event") == "Committed" and line["report"].get("loss") is not None
