"""The host names the run's text and vocabulary; a volunteer reads only what its user names."""

import json
import os
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from shoal.deploy import cli
from shoal.deploy.run.run_file import dump_spec, with_changes
from shoal.deploy.run.run_text import find_corpus, load_own_corpus, text_in_words
from shoal.deploy.state import places
from shoal.peer.data import documents
from shoal.peer.data.tokenizer import FileTokenizer
from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec, ModelSpec, RunSpec, SourceSpec
from shoal.protocol.toml.spec_file import load_spec

TEXTS = [f"the {i % 7}th fish of shoal {i % 13} schwimmt größer" for i in range(300)]


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"story": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path, stories: Path) -> Path:
    """Through the command, as a person would."""
    out = tmp_path / "tokenizer.json"
    arguments = ["tokenizer", "train", str(stories), str(out), "--vocab-size", "280", "--field", "story"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "280 tokens" in result.stdout
    return out


@pytest.fixture
def hosted(stories: Path, tokenizer: Path) -> RunSpec:
    """What a host's spec becomes when it has read its text."""
    data = DataSpec(source=str(stories), field="story", tokenizer=str(tokenizer))
    return load_own_corpus(RunSpec(model=ModelSpec(vocab_size=280, context=16), data=data))[0]


def test_the_host_names_the_digests_of_text_and_vocabulary(hosted: RunSpec, tokenizer: Path) -> None:
    assert hosted.data.tokenizer_digest == FileTokenizer(tokenizer.read_bytes(), name="t").digest
    again, corpus = load_own_corpus(hosted)
    assert again == hosted
    assert corpus.digest == hosted.data.digest
    assert list((places.cache_root() / "text").glob("*/tokens.bin"))
    with pytest.raises(DataError, match="is not the text that this run trains on: it was changed"):
        load_own_corpus(with_changes(hosted, {"data.digest": "00"}))
    with pytest.raises(DataError, match="vocab_size must be at least 280, is 256"):
        load_own_corpus(with_changes(hosted, {"model.vocab_size": 256}))


def test_a_spec_with_all_of_this_survives_its_file(hosted: RunSpec, tmp_path: Path) -> None:
    digests = tuple(f"{i:032x}" for i in range(hosted.model.num_layers + 2))
    spec = with_changes(hosted, {"initial.source": '/a "strange" folder', "initial.digests": digests})
    (tmp_path / "run.toml").write_text(dump_spec(spec))
    assert load_spec(tmp_path / "run.toml") == spec


def test_a_volunteer_who_names_text_and_vocabulary_has_the_run(hosted: RunSpec, stories: Path, tokenizer: Path) -> None:
    stranger = with_changes(hosted, {"data.source": "/host/only", "data.tokenizer": "/host/tokenizer.json"})
    found = find_corpus(stranger, data=str(stories), tokenizer=str(tokenizer))
    assert found is not None
    assert found.digest == hosted.data.digest


def test_a_volunteer_names_all_of_several_sources_in_their_order(stories: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": f"{i}!"}) + "\n" for i in range(60)))
    sources = (
        SourceSpec(source=str(stories), field="story"),
        SourceSpec(source=str(chats), format="chat", weight=2.0),
        SourceSpec(source="python-library"),
    )
    hosted, corpus = load_own_corpus(RunSpec(model=ModelSpec(context=16), data=DataSpec(sources=sources)))
    assert len(hosted.data.digests) == len(corpus.sources) == 3
    words = text_in_words(hosted, corpus)[-1]
    assert words.startswith("data passes in 400 steps: ")
    assert [part.split()[-1] for part in words.split(", ")] == ["stories.jsonl", "chats.jsonl", "python-library"]
    elsewhere = msgspec.structs.replace(hosted, data=hosted.data.found_at(("/host/a", "/host/b", "python-library")))
    assert find_corpus(elsewhere) is None
    found = find_corpus(elsewhere, data=f"{stories},{chats},python-library")
    assert found is not None
    assert found.digest == hosted.data.digest
    with pytest.raises(DataError, match=r"reads 3 sources, and --data names 1: name all, in the order of"):
        find_corpus(elsewhere, data=str(stories))
    with pytest.raises(DataError):
        find_corpus(elsewhere, data=f"{chats},{stories},python-library")


def test_the_host_hears_of_each_source_what_is_learnt_and_what_is_left_out(tmp_path: Path, stories: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    answers = [*(f"{i}!" for i in range(60)), "", "so " * 20]
    rows = [{"prompt": f"{i}?", "completion": answer} for i, answer in enumerate(answers)]
    rows.append({"prompt": "so " * 20, "completion": "late"})
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stories.write_text(stories.read_text() + "nonsense\n")
    sources = (SourceSpec(source=str(stories), field="story"), SourceSpec(source=str(chats), format="chat"))
    said = text_in_words(*load_own_corpus(RunSpec(model=ModelSpec(context=32), data=DataSpec(sources=sources))))
    assert said[:-1] == (
        "stories.jsonl: 300 texts, 12,669 bytes, of which 97.6% are learnt",
        "left out of stories.jsonl: 1 row: not JSON (line 301)",
        "chats.jsonl: 62 conversations, 529 bytes, of which 49.1% are learnt",
        "left out of chats.jsonl: 1 row: an empty answer (line 61)",
        "cut in chats.jsonl: the ends of 1 that are longer than model.context 32",
        "left out of chats.jsonl: 1 with their answers beyond model.context 32",
    )


def test_names_of_files_that_are_not_utf_8_are_read_and_shown(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    Path(os.fsdecode(bytes(folder) + b"/caf\xe9.txt")).write_bytes(b"the fish\n" * 90 + b"caf\xe9\n")
    Path(os.fsdecode(bytes(folder) + b"/caf\xe9.bin")).write_bytes(bytes(90))
    for tokens_max in (0, 10_000):  # as it is, and packed
        spec = RunSpec(model=ModelSpec(context=16), data=DataSpec(source=str(folder), tokens_max=tokens_max))
        said = text_in_words(*load_own_corpus(spec))
        assert said[1:3] == (
            r"left out of data: 1 file: binary data, not text (caf\xe9.bin)",
            r"left out of data: 1 line: not UTF-8 text (caf\xe9.txt line 91)",
        )


def test_a_volunteer_who_names_nothing_reads_nothing(hosted: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the spec names files that are there: a stranger has chosen them."""
    monkeypatch.setattr(documents, "find_files", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert find_corpus(hosted) is None
    assert find_corpus(with_changes(hosted, {"data.source": "hf:somebody/something"})) is None
    assert find_corpus(with_changes(hosted, {"data.source": "python-library"})) is None


def test_what_a_volunteer_names_and_is_not_the_runs_is_one_line(
    hosted: RunSpec, stories: Path, tokenizer: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"give its tokenizer.json with --tokenizer"):
        find_corpus(hosted, data=str(stories))
    other = tmp_path / "other.json"
    other.write_bytes(tokenizer.read_bytes() + b"\n")
    with pytest.raises(DataError, match="is not the tokenizer that this run uses"):
        find_corpus(hosted, data=str(stories), tokenizer=str(other))
    stories.write_text("".join(json.dumps({"story": text}) + "\n" for text in reversed(TEXTS)))
    with pytest.raises(DataError, match="is not the text that this run trains on"):
        find_corpus(hosted, data=str(stories), tokenizer=str(tokenizer))


def test_everybody_has_pythons_library_and_a_vocabulary_for_it_only_who_names_it(tmp_path: Path) -> None:
    plain = load_own_corpus(RunSpec())[0]
    assert plain.data.tokenizer_digest == ""
    corpus = find_corpus(plain)
    assert corpus is not None
    assert corpus.digest == plain.data.digest
    assert find_corpus(msgspec.structs.replace(plain, seed=3), tokenizer="/not/needed") is not None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("tokenizer", "train", "/nowhere", "OUT"), "there is no file or folder /nowhere"),
        (("tokenizer", "train", "EMPTY", "OUT"), "has no text"),
        (("tokenizer", "train", "EMPTY", "EMPTY"), "is there already"),
        (("export", "a", "b", "c"), "say at most two: a run, and the folder to make"),
        (("export", "OUT"), "no run on this machine has a snapshot"),
        (("import", "EMPTY", "OUT"), "cannot read"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    named = {"OUT": str(tmp_path / "out"), "EMPTY": str(tmp_path / "empty.jsonl")}
    result = CliRunner().invoke(cli.app, [named.get(word, word) for word in arguments])
    assert result.exit_code == cli.EXIT_USER_ERROR, result.output
    (line,) = result.stderr.splitlines()
    assert sentence in line
