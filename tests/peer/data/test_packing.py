"""Documents from anywhere, packed into tokens of which training never sees the last part."""

import gzip
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch

from shoal.peer.data import packing, rows
from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.data.microbatch import microbatch, validation_microbatch
from shoal.peer.data.tokenizer import FileTokenizer, train_bpe
from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec, ModelSpec, RunSpec

TEXTS = [f"<{i:03} größer {'x' * (i % 9)}>" for i in range(400)]


def json_lines(path: Path, texts: list[str], field: str = "text") -> DataSpec:
    lines = "".join(json.dumps({"id": i, field: text, "url": None}) + "\n" for i, text in enumerate(texts))
    path.write_text(lines)
    return DataSpec(source=str(path), validation_fraction=0.2, field=field)


def parquet(path: Path, texts: list[str | None], field: str = "text") -> DataSpec:
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), field: texts}), path)
    return DataSpec(source=str(path), validation_fraction=0.2, field=field)


def documents(tokens_N: torch.Tensor) -> list[str]:
    *texts, last = bytes(tokens_N.tolist()).decode().split("\n")
    assert last == ""
    return texts


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A data set library that has one data set, and notes how it was opened."""
    opened: list[tuple[Any, ...]] = []

    def load_dataset(name: str, subset: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, object]]:
        opened.append((name, subset, split, streaming))
        if name != "fish/stories":
            raise FileNotFoundError("no such data set\nat all")
        return iter([{"text": text, "id": i} for i, text in enumerate(TEXTS)])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return opened


def test_the_same_documents_are_the_same_tokens_wherever_they_come_from(
    tmp_path: Path, hub: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_CHUNK", 7)
    lines = json_lines(tmp_path / "a.jsonl", TEXTS)
    table = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    (tmp_path / "e.json").write_text(json.dumps(table, indent=1))
    (tmp_path / "f.json").write_bytes(json.dumps(table, ensure_ascii=False).encode("utf-16"))
    (tmp_path / "g.csv").write_text("id,text\n" + "".join(f'{row["id"]},"{row["text"]}"\n' for row in table))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    other_field = json_lines(tmp_path / "c.ndjson", TEXTS, field="content")
    folder = tmp_path / "folder"
    folder.mkdir()
    json_lines(folder / "1.jsonl", TEXTS[:150])
    parquet(folder / "2.parquet", [*TEXTS[150:], None])
    specs = [
        lines,
        msgspec.structs.replace(lines, source=str(tmp_path / "b.jsonl.gz")),
        other_field,
        parquet(tmp_path / "d.parquet", [*TEXTS], field="content"),
        msgspec.structs.replace(lines, source=str(folder)),
        *(msgspec.structs.replace(lines, source=str(tmp_path / name)) for name in ("e.json", "f.json", "g.csv")),
        msgspec.structs.replace(lines, source="hf:fish/stories", subset="small", split="test"),
    ]
    corpora = [load_corpus(spec) for spec in specs]
    assert len({corpus.digest for corpus in corpora}) == 1
    assert hub == [("fish/stories", "small", "test", True)]
    training, validation = documents(corpora[0].training), documents(corpora[0].validation)
    assert sorted(training + validation) == TEXTS
    assert training == sorted(training)  # in the order of the source
    assert 0.1 < len(validation) / len(TEXTS) < 0.3
    assert corpora[0].num_files == len(TEXTS)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ('{"text": "%s"}' % ("x" * 9000), "row 1: not JSON, or a value of more than 0 MB"),
        ('[{"text": "a"}, {"text": "%s"}]' % ("x" * 9000), "after row 1: not JSON, or a value of more than 0 MB"),
    ],
)
def test_a_row_that_is_too_large_to_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, sentence: str
) -> None:
    monkeypatch.setattr(rows, "_CHUNK", 7)
    monkeypatch.setattr(rows, "_ROW_MAX", 1000)
    (tmp_path / "a.json").write_text(data.replace("{", "{\n", 1))
    with pytest.raises(DataError, match=sentence):
        load_corpus(DataSpec(source=str(tmp_path / "a.json")))


def test_a_document_that_comes_twice_is_never_on_both_sides(tmp_path: Path) -> None:
    corpus = load_corpus(json_lines(tmp_path / "a.jsonl", TEXTS + TEXTS))
    training, validation = documents(corpus.training), documents(corpus.validation)
    assert set(training).isdisjoint(validation)
    assert sorted(training + validation) == sorted(TEXTS + TEXTS)


def test_of_a_single_document_the_tail_is_for_validation(tmp_path: Path) -> None:
    corpus = load_corpus(json_lines(tmp_path / "a.jsonl", ["abcdefghi" * 11]))
    assert corpus.num_training == 80
    assert corpus.validation.numel() == 20


def test_reading_ends_with_the_document_that_reaches_the_wanted_tokens(tmp_path: Path) -> None:
    spec = json_lines(tmp_path / "a.jsonl", ["1234567"] * 50)
    assert load_corpus(msgspec.structs.replace(spec, tokens_max=33)).text_N.numel() == 40
    text = tmp_path / "text"
    text.mkdir()
    for name in "abcdef":
        (text / name).write_text("1234567")
    assert load_corpus(DataSpec(source=str(text), validation_fraction=0.2, tokens_max=17)).text_N.numel() == 24


class Counting:
    """How often something was packed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        write = packing._write

        def counted(*arguments: Any) -> Any:
            self.times += 1
            return write(*arguments)

        monkeypatch.setattr(packing, "_write", counted)


def test_what_was_packed_is_kept_until_the_source_or_the_recipe_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = Counting(monkeypatch)
    cache = tmp_path / "cache"
    spec = json_lines(tmp_path / "a.jsonl", TEXTS)
    first, again = (load_corpus(spec, cache=cache) for _ in range(2))
    assert packed.times == 1
    assert torch.equal(first.text_N, again.text_N)
    assert first.digest == again.digest == load_corpus(spec).digest
    assert packed.times == 2  # without a cache
    load_corpus(msgspec.structs.replace(spec, tokens_max=900), cache=cache)
    assert packed.times == 3
    json_lines(tmp_path / "a.jsonl", [*TEXTS, "another"])
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    assert load_corpus(spec, cache=cache).digest != first.digest
    assert packed.times == 4
    assert not list(cache.glob(".unfinished*"))


def test_a_torn_cache_is_made_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    spec = json_lines(tmp_path / "a.jsonl", TEXTS)
    digest = load_corpus(spec, cache=cache).digest
    (kept,) = cache.glob("*/tokens.bin")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert load_corpus(spec, cache=cache).digest == digest
    (cache / kept.parent.name / "meta.json").write_text("{")
    assert load_corpus(spec, cache=cache).digest == digest


def test_progress_is_told_and_ends_at_one(tmp_path: Path) -> None:
    told: list[float] = []
    spec = json_lines(tmp_path / "a.jsonl", ["x" * 200_000] * 12)
    load_corpus(spec, on_progress=told.append)
    assert len(told) > 1
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe(TEXTS, 300))
    return path


def bpe_corpus(tmp_path: Path, bpe: Path, cache: Path | None = None) -> Corpus:
    spec = msgspec.structs.replace(json_lines(tmp_path / "a.jsonl", TEXTS), tokenizer=str(bpe))
    return load_corpus(spec, context=8, cache=cache)


def test_a_tokenizer_packs_documents_with_its_end_of_text_between_them(tmp_path: Path, bpe: Path) -> None:
    tokenizer = FileTokenizer(bpe.read_bytes(), name="bpe")
    corpus = bpe_corpus(tmp_path, bpe)
    assert corpus.text_N.dtype == torch.uint16
    assert corpus.tokenizer_digest == tokenizer.digest
    tokens = corpus.text_N.tolist()
    assert tokens.count(tokenizer.end_of_text) == len(TEXTS)
    ends = [i for i, token in enumerate(tokens) if token == tokenizer.end_of_text]
    texts = [tokenizer.decode(tokens[a + 1 : b]) for a, b in zip([-1, *ends], ends, strict=False)]
    assert sorted(texts) == TEXTS
    assert tokens[corpus.num_training - 1] == tokenizer.end_of_text  # validation begins with a document


def test_a_vocabulary_that_begins_documents_has_its_way(tmp_path: Path, bpe: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(bpe))
    library.add_special_tokens(["<s>"])
    begin = library.token_to_id("<s>")
    template = tokenizers.processors.TemplateProcessing(
        single="<s> $A <|endoftext|>", special_tokens=[("<s>", begin), ("<|endoftext|>", 0)]
    )
    library.post_processor = template
    library.save(str(bpe))
    tokenizer = FileTokenizer(bpe.read_bytes(), name="bpe")
    assert (list(tokenizer.beginning), list(tokenizer.separator)) == ([begin], [0])
    tokens = bpe_corpus(tmp_path, bpe).text_N.tolist()
    assert tokens[:1] == [begin]
    assert tokens.count(begin) == tokens.count(0) == len(TEXTS)
    assert all(tokens[i + 1] == begin for i, token in enumerate(tokens[:-1]) if token == 0)


def test_microbatches_of_a_mapped_corpus_are_those_of_one_in_memory(tmp_path: Path, bpe: Path) -> None:
    spec = RunSpec(seed=4, model=ModelSpec(vocab_size=300, context=8))
    mapped, in_memory = bpe_corpus(tmp_path, bpe, tmp_path / "cache"), bpe_corpus(tmp_path, bpe)
    for step, index in ((0, 0), (3, 5), (1000, 7)):
        one, other = (microbatch(corpus, spec, step, index) for corpus in (mapped, in_memory))
        assert one[0].dtype == torch.int64
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1].targets_BT, other[1].targets_BT)
    tokens_BT, labels = validation_microbatch(mapped, spec, 1)
    assert torch.equal(tokens_BT[:, 1:], labels.targets_BT[:, :-1])


def test_a_model_with_too_small_a_vocabulary_is_refused(tmp_path: Path, bpe: Path) -> None:
    corpus = bpe_corpus(tmp_path, bpe)
    corpus.check_fits(ModelSpec(vocab_size=300))
    corpus.check_fits(ModelSpec(vocab_size=320))
    with pytest.raises(DataError, match=r"vocab_size must be at least 300, is 256"):
        corpus.check_fits(ModelSpec())
    (tmp_path / "ascii").write_text("abc" * 99)
    load_corpus(DataSpec(source=str(tmp_path / "ascii"))).check_fits(ModelSpec(vocab_size=128))


@pytest.mark.parametrize("lines", ["", '{"text": null}\n', "nonsense\n", '{"text": "a"}\n'])
def test_a_source_without_text_leaves_nothing_in_the_cache(tmp_path: Path, lines: str) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(DataError) as alone:
        load_corpus(DataSpec(source=str(tmp_path / "a.jsonl")), context=4)
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            load_corpus(DataSpec(source=str(tmp_path / "a.jsonl")), context=4, cache=tmp_path / "cache")
        assert str(caught.value) == str(alone.value)


def test_a_data_set_that_is_not_there_or_has_no_such_field_is_one_clear_line(hub: list[tuple[Any, ...]]) -> None:
    with pytest.raises(DataError, match=r"cannot open the data set no/where: no such data set$"):
        load_corpus(DataSpec(source="hf:no/where"))
    with pytest.raises(DataError, match=r"its first 100 rows .*no field `body`, but text, id\)"):
        load_corpus(DataSpec(source="hf:fish/stories", field="body"))


@pytest.mark.parametrize(
    ("library", "source", "install"),
    [("datasets", "hf:fish/stories", "pip install datasets"), ("pyarrow", "a.parquet", r"pip install 'shoal\[data\]'")],
)
def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, source: str, install: str
) -> None:
    if source.endswith(".parquet"):
        source = parquet(tmp_path / source, ["a"]).source
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=install):
        load_corpus(DataSpec(source=source))
