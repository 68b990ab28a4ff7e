"""Where text comes from: files and folders of text, JSON lines or Parquet, and data sets of the Hugging Face hub; and
conversations, from all but files of plain text (`chat.py` writes them).

Each is read as a stream of documents in an order of its own, so that every machine with the same source reads the same
ones, and none is ever in memory as a whole.
"""

import gzip
import os
import sysconfig
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from shoal.peer.data.chat import FIELDS, ChatRow, ChatTemplate, Spans, read_row
from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec

PYTHON_LIBRARY: Final = "python-library"
HUB: Final = "hf:"
LIBRARY_FOLDERS_LEFT_OUT: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "__pycache__"}
)
JSON_LINES: Final = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PARQUET: Final = (".parquet",)
UNDECODED_BYTES_MAX: Final = 3
"""A prefix of a UTF-8 file may end inside a character of up to four bytes."""
PROBE_BYTES: Final = 64 * 1024
"""How much of a file decides whether it is text: a folder may hold large binaries."""
_ROWS: Final = 1024
"""Of a Parquet file, in memory at a time."""


class Document(NamedTuple):
    text: str
    done: float
    """Share of the source that has been read with it; 0 if nobody knows."""
    answers: Spans = ()
    """Of a conversation, what is learnt of it."""
    is_framed: bool = True
    """Whether it takes what the vocabulary puts around a document; a chat template writes all of that itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """`paths` are those of the regular files below `root`, or `root` itself."""

    root: Path
    paths: tuple[Path, ...]

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    @property
    def are_text(self) -> bool:
        """And nothing else."""
        return not any(path.name.endswith((*JSON_LINES, *PARQUET)) for path in self.paths)


def find_files(source: str) -> Files:
    """Raises: DataError: there is nothing."""
    if source == PYTHON_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        return Files(root=root, paths=tuple(p for p in _walk(root, LIBRARY_FOLDERS_LEFT_OUT) if p.suffix == ".py"))
    root = Path(source).expanduser()
    if not root.exists():
        raise DataError(f"there is no file or folder {root} to train on")
    return Files(root=root, paths=(root,) if root.is_file() else tuple(_walk(root, frozenset())))


def identify(spec: DataSpec) -> list[Any]:
    """What tells this source from another, and from itself after a change, without reading it.

    A data set of the hub is taken to stay what it is; the digest of what was read from it says whether it did.
    Raises: DataError.
    """
    if spec.source.startswith(HUB):
        return [spec.source, spec.subset, spec.split]
    files = find_files(spec.source)
    stats = [(files.name(path), path.stat()) for path in files.paths]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def read_documents(spec: DataSpec, template: ChatTemplate | None = None) -> Iterator[Document]:
    """Args: template: that of the run's vocabulary, where `spec` says that the source is a chat.

    Raises: DataError: something cannot be read; the line says where.
    """
    if spec.source.startswith(HUB):
        yield from _read_hub(spec, template)
        return
    files = find_files(spec.source)
    sizes = [path.stat().st_size for path in files.paths]
    total = max(1, sum(sizes))
    before = 0
    for path, size in zip(files.paths, sizes, strict=True):
        for document in _read_file(path, spec.field, template):
            if document.text:
                yield document._replace(done=(before + document.done * size) / total)
        before += size


def read_text(path: Path) -> bytes | None:
    """The file's bytes, or None if it is empty or not UTF-8 text.

    Raises: DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            text = file.read(PROBE_BYTES)
            if not _is_text(text, whole=False):
                return None
            text += file.read()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return text if text and _is_text(text, whole=True) else None


def _walk(root: Path, folders_left_out: frozenset[str]) -> Iterator[Path]:
    """Regular files under `root` in the order of their names, without hidden ones and without linked folders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in folders_left_out)
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _is_text(text: bytes, *, whole: bool) -> bool:
    """Whether `text` is UTF-8 without NUL; a part of a file may end inside a character."""
    if b"\0" in text:
        return False
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return not whole and error.start >= len(text) - UNDECODED_BYTES_MAX
    return True


def _read_file(path: Path, field: str, template: ChatTemplate | None) -> Iterator[Document]:
    """`done` is the share of this file."""
    if path.name.endswith(JSON_LINES):
        yield from _read_json_lines(path, field, template)
    elif path.name.endswith(PARQUET):
        yield from _read_parquet(path, field, template)
    elif template is not None:
        raise DataError(f"{path} has no chats: they are read from JSON lines (.jsonl), Parquet and data sets")
    elif (text := read_text(path)) is not None:
        yield Document(text.decode(), 1.0)


def _read_json_lines(path: Path, field: str, template: ChatTemplate | None) -> Iterator[Document]:
    """Only the wanted fields of a line are made; the others are skipped over."""
    line_type = ChatRow if template else msgspec.defstruct("Line", [("text", str | None)], rename={"text": field})
    decoder: Any = msgspec.json.Decoder(line_type)
    size = max(1, path.stat().st_size)
    try:
        with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else nullcontext(raw) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise DataError(f"{path}, line {number}: {_first_line(error)}") from error
                done = raw.tell() / size
                if template is None:
                    yield Document(row.text or "", done)
                else:
                    yield _chat(row, template, f"{path}, line {number}", done)
    except (OSError, EOFError) as error:  # gzip's errors are OSErrors too; a cut one ends in EOFError
        raise DataError(f"cannot read {path}: {_first_line(error)}") from error


def _chat(row: object, template: ChatTemplate, where: str, done: float) -> Document:
    """A conversation from a decoded line, or from a row as a dict."""
    try:
        said = row if isinstance(row, ChatRow) else msgspec.convert(row, ChatRow)
        text, answers, is_whole = read_row(said, template)
    except (msgspec.ValidationError, DataError) as error:
        raise DataError(f"{where}: {_first_line(error)}") from error
    return Document(text, done, answers, not is_whole)


def _read_parquet(path: Path, field: str, template: ChatTemplate | None) -> Iterator[Document]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path} needs the pyarrow library: pip install 'shoal[data]'") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in (FIELDS if template else (field,)) if name in names]
            if not columns:
                wanted = f"column {field}" if template is None else f"columns {', '.join(FIELDS)}"
                raise DataError(f"{path} has no {wanted}: it has {', '.join(names)}")
            number, rows = 0, max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    where, done = f"{path}, row {number}", number / rows
                    if template is None:
                        yield Document(_as_text(row[field], where, field), done)
                    else:
                        yield _chat(row, template, where, done)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read {path}: {_first_line(error)}") from error


def _read_hub(spec: DataSpec, template: ChatTemplate | None) -> Iterator[Document]:
    """Nothing is downloaded beyond what is read."""
    name = spec.source.removeprefix(HUB)
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{spec.source} needs the datasets library: pip install datasets") from error
    try:
        rows = iter(datasets.load_dataset(name, spec.subset or None, split=spec.split, streaming=True))
    except Exception as error:  # it passes on whatever its loaders and the network raise
        raise DataError(f"cannot open the data set {name}: {_first_line(error)}") from error
    number = 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:
            raise DataError(f"cannot read the data set {name} beyond row {number}: {_first_line(error)}") from error
        if row is None:
            return
        number += 1
        where = f"the data set {name}, row {number}"
        if template is not None:
            yield _chat({field: row[field] for field in FIELDS if field in row}, template, where, 0.0)
            continue
        if spec.field not in row:
            raise DataError(f"the data set {name} has no field {spec.field}: it has {', '.join(map(str, row))}")
        yield Document(_as_text(row[spec.field], where, spec.field), 0.0)


def _as_text(value: object, where: str, field: str) -> str:
    """A row may be without a text; then it has none."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: {field} is {type(value).__name__} and not text")
    return value


def _first_line(error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return next(iter(reason.splitlines()), "") or type(error).__name__
