"""Rows of a file, read as a stream: JSON lines, a JSON array, CSV or Parquet; all but Parquet may be gzipped.

Text is UTF-8, or UTF-16 with a byte order mark. A row that cannot be read has an `Unusable` as its value; a truncated
or damaged file is refused.
"""

import codecs
import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

from shoal.peer.data.account import Unusable
from shoal.protocol.errors import DataError

_JSON_LINES: Final = (".jsonl", ".ndjson")
_JSON: Final = (*_JSON_LINES, ".json")
_CSV: Final = (".csv", ".tsv")
PARQUET: Final = ".parquet"
GZIP: Final = b"\x1f\x8b"
UTF_16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ROW_MAX: Final = 64 << 20
"""The most characters of a row or cell: after an unclosed quote the rest of a CSV file is one cell."""
_CHUNK: Final = 1 << 20
_BETWEEN: Final = re.compile(r"[\s,]*")


class Row(NamedTuple):
    unit: Literal["line", "row"]
    """The unit of `number`, which counts from 1."""
    number: int
    value: Any
    """A JSON line as bytes, a CSV or Parquet row as a dict, an element of a JSON array, or an `Unusable`."""
    done: float
    """The share of the file read so far."""


def has_rows(path: Path) -> bool:
    """True if a file of this name has rows; every other file is a text."""
    return path.name.removesuffix(".gz").endswith((*_JSON, *_CSV, PARQUET))


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Read the rows of a file. `columns` are the fields that the caller needs; a row may have more.

    Raises: DataError: the file cannot be read to its end.
    """
    name = path.name.removesuffix(".gz")
    if name.endswith(PARQUET):
        yield from _parquet(path, columns)
        return
    try:
        if name.endswith(_CSV):
            yield from _csv(path)
        elif _has_json_lines(path, name):
            yield from _json_lines(path)
        else:
            yield from _json_values(path)
    except (OSError, EOFError, UnicodeError, zlib.error) as error:  # a truncated gzip raises EOFError
        raise DataError(f"cannot read {path}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return next(iter(reason.splitlines()), "") or type(error).__name__


class _Opened:
    """An open file: the decompressed content after the byte order mark."""

    def __init__(self, raw: IO[bytes], data: Any, size: int) -> None:
        self._raw, self._data, self._size = raw, data, max(1, size)
        start = data.read(len(codecs.BOM_UTF8))
        data.seek(len(start) if start == codecs.BOM_UTF8 else 0)
        self._encoding = "utf-16" if start.startswith(UTF_16) else "utf-8"

    def done(self) -> float:
        return min(1.0, self._raw.tell() / self._size)

    def lines(self) -> Iterator[bytes]:
        return self._data if self._encoding == "utf-8" else (line.encode() for line in self.text(newline="\n"))

    def text(self, newline: str) -> TextIOWrapper:
        """Decode the content; a byte that is not UTF-8 becomes a lone surrogate."""
        return TextIOWrapper(self._data, self._encoding, errors="surrogateescape", newline=newline)


@contextmanager
def _opened(path: Path) -> Iterator[_Opened]:
    with path.open("rb") as raw:
        is_packed = raw.read(len(GZIP)) == GZIP
        raw.seek(0)
        with gzip.open(raw) if is_packed else nullcontext(raw) as data:
            yield _Opened(raw, data, path.stat().st_size)


def _has_json_lines(path: Path, name: str) -> bool:
    """True if each line of a JSON file is a value of its own; False if the whole file is one array or one object."""
    with _opened(path) as opened:
        first = next((line for line in opened.lines() if line.strip()), b"").lstrip()
    if first.startswith(b"["):
        return False
    return name.endswith(_JSON_LINES) or (first.startswith(b"{") and _is_json(first))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _json_lines(path: Path) -> Iterator[Row]:
    with _opened(path) as opened:
        for number, line in enumerate(opened.lines(), 1):
            if line.strip():
                yield Row("line", number, line, opened.done())


def _json_values(path: Path) -> Iterator[Row]:
    """Yield the elements of a file's JSON array, or the file's single JSON value."""
    decoder = json.JSONDecoder()
    with _opened(path) as opened:
        text = opened.text(newline="")
        buffer = text.read(_CHUNK).lstrip()
        is_array, at, number = buffer.startswith("["), 0, 0
        at, is_whole = int(is_array), len(buffer) < _CHUNK
        while True:
            at = _BETWEEN.match(buffer, at).end()  # type: ignore[union-attr]
            if at < len(buffer) and buffer[at] == "]" and is_array:
                return
            try:
                value, end = decoder.raw_decode(buffer, at)
            except (ValueError, RecursionError):
                end = None
            if end is not None and (end < len(buffer) or is_whole):
                number += 1
                yield Row("row", number, value, opened.done())
                if not is_array:
                    return
                at = end
                continue
            if is_whole or len(buffer) - at > _ROW_MAX:
                reason = "not JSON" if is_whole else f"not JSON, or a value of more than {_ROW_MAX >> 20} MB"
                if number:
                    raise DataError(f"{path} is truncated or damaged after row {number}: {reason}")
                if at < len(buffer) or is_array:
                    yield Row("row", 1, Unusable(reason), 1.0)
                return
            more = text.read(max(_CHUNK, len(buffer) - at))
            buffer, at, is_whole = buffer[at:] + more, 0, not more


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_ROW_MAX)
    with _opened(path) as opened:
        text = opened.text(newline="")
        first = text.readline()
        delimiter = max(",;\t", key=first.count)
        names = next(csv.reader([first], delimiter=delimiter), [])
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        while True:
            number = reader.line_num + 2
            try:
                cells = next(reader, None)
            except csv.Error as error:
                if "end of data" in str(error) or "field limit" in str(error):
                    raise DataError(f"{path}, line {number}: a quoted cell is never closed") from error
                yield Row("line", number, Unusable("a quote inside a cell, which must be doubled"), opened.done())
                continue
            if cells is None:
                return
            value: Any = dict(zip(names, cells, strict=False))
            if len(cells) != len(names):
                value = Unusable(f"{len(cells)} cells, but the first line has {len(names)}")
            if cells:
                yield Row("line", number, value, opened.done())


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path} needs the pyarrow library: pip install 'shoal[data]'") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [name for name in columns if name in names]
            number, total = 0, max(1, file.metadata.num_rows)
            # If no needed column exists, the names of the others go into the message.
            for batch in file.iter_batches(batch_size=1024, columns=wanted or names):
                for value in batch.to_pylist():
                    number += 1
                    yield Row("row", number, value, number / total)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read {path}: {first_line(error)}") from error
