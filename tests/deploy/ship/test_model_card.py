"""Every export says where its model comes from."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from record_lines import step
from shoal.deploy.record.lines import PeerLine, encode_line
from shoal.deploy.ship.export import export
from shoal.deploy.ship.found_snapshot import find_snapshots
from shoal.deploy.ship.import_model import import_model
from shoal.deploy.ship.model_folder import name_and_licence
from shoal.deploy.ship.scores import Score, evaluations_of, keep_evaluation, source_names
from shoal.peer.data.chat import CHATML
from shoal.peer.disk.snapshot import write_snapshot
from shoal.peer.model.layout import all_layer_keys, init_layer
from shoal.peer.model.state import LayerState
from shoal.protocol.identity import PeerID
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.spec import DataSpec, ModelSpec, RunSpec, SourceSpec

MODEL = ModelSpec(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, context=8)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def write(folder: Path, spec: RunSpec, *, version: int = 7, run: str = "0099aabb00112233") -> Path:
    layers = {}
    for key in all_layer_keys(spec.model):
        param_N = init_layer(spec.model, key, 1)
        layers[key] = LayerState(param_N=param_N, moment1_N=param_N / 2, moment2_N=param_N.square())
    return folder / write_snapshot(
        LiveDisk(folder), PurePosixPath(), run=run, version=version, layers=layers, spec=spec
    )


def exported(tmp_path: Path, spec: RunSpec, name: str = "out") -> tuple[dict[str, Any], str, dict[str, Any]]:
    """(the card's front matter, the card, the facts)."""
    write(tmp_path / name / "peer", spec)
    export(find_snapshots(tmp_path / name / "peer"), tmp_path / name / "model")
    card = (tmp_path / name / "model" / "README.md").read_text()
    facts = json.loads((tmp_path / name / "model" / "shoal.json").read_text())
    return yaml.safe_load(card.split("---\n")[1]), card, facts


def test_a_run_from_scratch_says_its_run_steps_tokens_and_data(tmp_path: Path) -> None:
    data = DataSpec(
        digest="ab" * 32 + "+" + "cd" * 32,
        sources=(
            SourceSpec(source="/home/ana/secret folder/notes", weight=3.0),
            SourceSpec(source="hf:fish/chats", format="chat", split="train_sft"),
        ),
    )
    spec = RunSpec(name="notes | 1", model=MODEL, data=data)
    front, card, facts = exported(tmp_path, spec)
    assert front["library_name"] == "transformers"
    assert front["datasets"] == ["fish/chats"]
    assert "base_model" not in front
    assert "license" not in front
    assert (facts["run"], facts["steps"], facts["steps_planned"]) == ("0099aabb00112233", 7, 400)
    assert facts["tokens"] == 7 * spec.tokens_per_step
    assert [one["source"] for one in facts["sources"]] == ["notes", "hf:fish/chats"]
    assert [one["digest"] for one in facts["sources"]] == ["ab" * 32, "cd" * 32]
    assert facts["contributors"] is None
    assert "| steps | 7 of 400 |" in card
    assert "- `hf:fish/chats` (split train_sft, chats: answers alone are learnt, 25% of the samples)" in card
    assert "  - BLAKE3 of its tokens: `" + "cd" * 32 + "`" in card
    assert "secret" not in card + json.dumps(facts), "where somebody keeps a text is nobody's business"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model's folder with a card and a licence, as one from the hub."""
    write(tmp_path / "base-peer", RunSpec(name="base", model=MODEL), version=1, run="00")
    export(find_snapshots(tmp_path / "base-peer"), tmp_path / "Fish-7B")
    (tmp_path / "Fish-7B" / "README.md").write_text("---\ntags: [fish]\nlicense: apache-2.0\n---\n# license: mine\n")
    (tmp_path / "Fish-7B" / "LICENSE.txt").write_text("You may.")
    (tmp_path / "Fish-7B" / "NOTICE").write_text("By fish.")
    return tmp_path / "Fish-7B"


def test_base_and_its_licence_are_carried_along_into_every_export(tmp_path: Path, base: Path) -> None:
    spec = import_model(base)
    assert (spec.initial.name, spec.initial.licence) == ("Fish-7B", "apache-2.0")
    front, card, facts = exported(tmp_path, spec)
    assert (front["base_model"], front["license"]) == ("Fish-7B", "apache-2.0")
    assert facts["base"] == {"name": "Fish-7B", "licence": "apache-2.0", "digests": list(spec.initial.digests)}
    assert "apache-2.0, that of Fish-7B. Its terms go with this model." in card
    assert (tmp_path / "out" / "model" / "LICENSE.txt").read_text() == "You may."
    assert (tmp_path / "out" / "model" / "NOTICE").read_text() == "By fish."
    # On a volunteer's machine the base's folder is not there, and what the spec says of it is.
    base.rename(tmp_path / "elsewhere")
    front, _, _ = exported(tmp_path, spec, "volunteer")
    assert (front["base_model"], front["license"]) == ("Fish-7B", "apache-2.0")
    assert not (tmp_path / "volunteer" / "model" / "LICENSE.txt").exists()


def test_a_licence_that_nobody_has_said_is_not_made_up(tmp_path: Path, base: Path) -> None:
    (base / "README.md").unlink()
    front, card, _ = exported(tmp_path, import_model(base))
    assert "license" not in front
    assert "which its folder does not say: look there before you pass it on" in card


@pytest.mark.parametrize(
    ("front", "licence"),
    [
        ("license: other\nlicense_name: llama3.2\n", "llama3.2"),
        ("license: 'mit'\n", "mit"),
        ('license_name: x\nlicense:   "cc-by-4.0"   \n', "cc-by-4.0"),
        ("license_link: https://x\n", ""),
        ("license: " + "x" * 500 + "\n", "x" * 120),
        ("license: a\x1b[2Jb\n", "a[2Jb"),
    ],
)
def test_the_licence_is_read_from_the_front_of_a_card(tmp_path: Path, front: str, licence: str) -> None:
    folder = tmp_path / "models--fish--Small" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(f"---\n{front}---\nlicense: not this\n")
    assert name_and_licence(folder) == ("fish/Small", licence)


def test_contributors_are_those_in_the_record_on_this_machine(tmp_path: Path) -> None:
    for host, peers in (("a", "abc"), ("b", "a")):
        folder = tmp_path / "state" / "shoal" / "hosts" / host / "0099aabb00112233"
        folder.mkdir(parents=True)
        lines = [
            PeerLine(time=1.0, peer=PeerID(peer), name="volunteer", change=change)
            for peer in peers
            for change in ("joined", "left")
        ]
        (folder / "record.jsonl").write_bytes(b"".join(encode_line(line) for line in (step(1), *lines)))
    _, card, facts = exported(tmp_path, RunSpec(model=MODEL))
    assert facts["contributors"] == 3
    assert "| contributors | 3 |" in card


def test_scores_are_those_of_the_version_the_newest_of_each_name(tmp_path: Path) -> None:
    keep_evaluation("0099aabb00112233", 0, 6, [Score(name="validation", loss=9.0)])
    keep_evaluation(
        "0099aabb00112233", 0, 7, [Score(name="validation", loss=3.0), Score(name="arc acc", value=0.5, stderr=0.01)]
    )
    path = keep_evaluation("0099aabb00112233", 0, 7, [Score(name="validation", loss=2.5)])
    with path.open("ab") as file:
        file.write(b'{"run": "0099aabb00112233", "er')  # a crash
    assert [score.loss for score in evaluations_of("0099aabb00112233", 0, 7)] == [2.5, None]
    _, card, facts = exported(tmp_path, RunSpec(model=MODEL))
    assert [one["name"] for one in facts["evaluations"]] == ["validation", "arc acc"]
    assert "| validation | 2.5 |" in card
    assert "| arc acc |  |  |  | 0.5 ± 0.01 |" in card


def test_sources_of_one_name_are_told_apart() -> None:
    paths = ("/a/x.jsonl", "/b/x.jsonl", "hf:x.jsonl", "python-library", "/c/x.jsonl")
    data = DataSpec(sources=tuple(SourceSpec(source=path) for path in paths))
    assert source_names(data) == ["x.jsonl", "x.jsonl (2)", "hf:x.jsonl", "python-library", "x.jsonl (3)"]
    assert source_names(DataSpec()) == ["python-library"]


def test_a_run_of_bytes_that_learns_chats_is_exported_with_how_it_writes_them(tmp_path: Path) -> None:
    exported(tmp_path, RunSpec(model=MODEL, data=DataSpec(source="chat.jsonl", format="chat")))
    assert (tmp_path / "out" / "model" / "chat_template.jinja").read_text() == CHATML
