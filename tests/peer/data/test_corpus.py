import os
import sysconfig
from pathlib import Path

import pytest

from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.data.plain_text import PROBE_BYTES
from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec


def load(path: Path, fraction: float = 0.2, context: int = 1) -> Corpus:
    return load_corpus(DataSpec(source=str(path), validation_fraction=fraction), context=context)


def parts(corpus: Corpus) -> tuple[bytes, bytes]:
    return corpus.training.numpy().tobytes(), corpus.validation.numpy().tobytes()


def write_files(folder: Path, texts: dict[str, bytes]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return folder


def numbered(count: int) -> dict[str, bytes]:
    return {f"{i:03}.txt": f"<{i:03}>".encode() * 20 for i in range(count)}


def test_the_tail_of_a_single_file_is_for_validation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(97, 122)) * 4)
    training, validation = parts(load(tmp_path / "a.txt"))
    assert training + validation == bytes(range(97, 122)) * 4 + b"\n"
    assert len(validation) == 20


def test_validation_is_whole_files_of_about_the_wanted_share(tmp_path: Path) -> None:
    texts = numbered(50)
    training, validation = parts(load(write_files(tmp_path, texts)))
    assert sorted((training + validation).splitlines()) == sorted(texts.values())
    assert set(training.splitlines()).isdisjoint(validation.splitlines())
    assert len(validation.splitlines()) == 10


def test_two_large_files_are_split_by_their_tail(tmp_path: Path) -> None:
    training, validation = parts(load(write_files(tmp_path, {"a": b"a" * 500, "b": b"b" * 500}), fraction=0.1))
    assert validation == b"b" * 99 + b"\n"
    assert training == b"a" * 500 + b"\n" + b"b" * 401


def test_a_huge_file_does_not_become_validation(tmp_path: Path) -> None:
    _, validation = parts(load(write_files(tmp_path, {"huge": b"h" * 100_000} | numbered(250))))
    assert b"h" not in validation
    assert 0 < len(validation) <= 0.2 * 125_251


def test_the_same_files_elsewhere_give_the_same_digest(tmp_path: Path) -> None:
    one = load(write_files(tmp_path / "one", numbered(9)))
    two = load(write_files(tmp_path / "other name", dict(reversed(numbered(9).items()))))
    assert one.digest == two.digest
    assert parts(one) == parts(two)
    assert len(one.digest) == 64


def test_the_digest_changes_with_a_byte_and_with_the_split(tmp_path: Path) -> None:
    folder = write_files(tmp_path, numbered(9))
    digests = {load(folder).digest, load(folder, fraction=0.4).digest}
    (folder / "004.txt").write_bytes(b"<005>" * 20)
    digests.add(load(folder).digest)
    assert len(digests) == 3


def test_binary_hidden_and_linked_files_are_left_out(tmp_path: Path) -> None:
    folder = write_files(
        tmp_path / "data",
        {
            "sub/ä.md": "größer\n".encode() * 9,
            "plain": b"plain\n" * 9,
            "image": b"\x89PNG\0\0" * 9,
            "latin": "größer".encode("latin-1"),
            "late": b"a" * PROBE_BYTES + b"\xff\xfe",
            ".hidden": b"secret",
            ".git/config": b"secret",
            "empty": b"",
        },
    )
    outside = write_files(tmp_path / "outside", {"x": b"outside"})
    (folder / "linked").symlink_to(outside)
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe")
    corpus = load(folder)
    training, validation = parts(corpus)
    assert corpus.account.sentences("it") == (
        "left out of it: 2 files: not UTF-8 (perhaps Latin-1 or Windows-1252) (late, latin)",
        "left out of it: 1 file: binary data, not text (image)",
    )
    assert training + validation == b"plain\n" * 9 + b"\n" + "größer\n".encode() * 9 + b"\n"


def test_a_character_across_the_probe_boundary_is_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * (PROBE_BYTES - 1) + "€".encode() * 10)
    assert load(tmp_path / "a").text_N.numel() == PROBE_BYTES + 30


def test_of_a_folder_rows_are_read_and_a_json_file_that_is_no_row_is_left_out(tmp_path: Path) -> None:
    files = {
        "a.csv": b"text,id\none,1\n" * 9,
        "b.json": b'[{"text": "two"}]',
        "c.json": b'{"name": "a package"}',
        "d.json": b'{"text": "three"}',
        "e.json": b"// of an editor\n{}",
        "f.md": b"four" * 9,
    }
    corpus = load(write_files(tmp_path, files))
    assert {*b"".join(parts(corpus)).split()} == {b"one", b"text", b"two", b"three", b"four" * 9}
    assert corpus.account.sentences("it") == (
        "left out of it: 1 row: no field `text`, but name (c.json line 1)",
        "left out of it: 1 row: not JSON (e.json row 1)",
    )


@pytest.mark.parametrize("name", ["g.json", "g.jsonl", "g.csv"])
def test_rows_of_a_folder_none_of_which_is_a_text_are_refused_and_not_left_to_its_readme(
    tmp_path: Path, name: str
) -> None:
    rows = b"story\none\ntwo\n" if name == "g.csv" else b'{"story": "one"}\n{"story": "two"}\n'
    with pytest.raises(
        DataError, match=rf"{name}: none of its first 2 rows .*no field `text`, but story\); set `field`"
    ):
        load(write_files(tmp_path, {"README.md": b"what this is\n" * 90, name: rows}))


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        ({}, "has no files"),
        ({"a.bin": b"\0\1\2" * 9}, "has no text"),
        ({"a": b""}, "has no text"),
        ({"a": b"short"}, "too little text"),
    ],
)
def test_a_folder_without_enough_text_is_one_clear_line(tmp_path: Path, texts: dict[str, bytes], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        load(write_files(tmp_path, texts), context=16)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_path_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file or folder .*nowhere"):
        load(tmp_path / "nowhere")


def test_the_python_library_is_there_and_without_its_tests() -> None:
    corpus = load_corpus(DataSpec(), context=256)
    assert corpus.text_N.numel() > 5_000_000
    assert 0.045 < corpus.validation.numel() / corpus.text_N.numel() <= 0.05
    text = corpus.text_N.numpy().tobytes()
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert (stdlib / "argparse.py").read_bytes() in text
    assert b"class BaseTestUUID" not in text
    assert corpus.digest == load_corpus(DataSpec()).digest
