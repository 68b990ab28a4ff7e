"""Documents from files and folders of text or rows (`rows.py`), and from data sets of the Hugging Face hub.

A source is a stream of documents in the same order on every machine. Unusable rows are skipped and counted
(`account.py`); a source is refused if none of its first rows is usable.
"""

import json
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from shoal.peer.data.account import Account, Unusable
from shoal.peer.data.chat import FIELDS, ChatRow, ChatTemplate, Spans, read_row
from shoal.peer.data.plain_text import check_is_prose, read_text
from shoal.peer.data.rows import Row, first_line, has_rows, read_rows
from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec

PYTHON_LIBRARY: Final = "python-library"
HUB: Final = "hf:"
LIBRARY_FOLDERS_LEFT_OUT: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "__pycache__"}
)
ROWS_TRIED: Final = 100
"""A source is refused if none of its first ROWS_TRIED rows is usable: its owner has named a wrong field or format."""
_NO_CHATS: Final = Unusable(
    "text, but a chat needs rows of JSON, CSV, Parquet or a data set", 'for text, remove format = "chat" below [data]'
)
_FIELDS_NAMED: Final = 6
_INDEX: Final = re.compile(r"\[[^]]*\]")
_PROSE: Final = ("", ".txt", ".text")
"""Suffixes of files that should contain prose; files without a suffix are among them."""


class Document(NamedTuple):
    text: str
    done: float
    """The share of the source read so far; 0 if unknown."""
    answers: Spans = ()
    """The ranges of `text` that are answers, in a conversation: only these count in the loss."""
    is_framed: bool = True
    """True: the tokens that begin and end a document must be added. False: the chat template has written them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A text source: the regular files below `root`, or `root` itself."""

    root: Path
    paths: tuple[Path, ...]

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def shown(self, path: Path) -> str:
        """Return a file's printable path relative to `root`; if the file is `root` itself, its name."""
        return printable(path.name if path == self.root else self.name(path))

    @property
    def are_text(self) -> bool:
        """True if every file is one text: none has rows (JSON, CSV or Parquet)."""
        return not any(map(has_rows, self.paths))


def find_files(source: str) -> Files:
    """List the files of a source. Raises: DataError: there is no such file or folder."""
    if source == PYTHON_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        return Files(root=root, paths=tuple(p for p in _walk(root, LIBRARY_FOLDERS_LEFT_OUT) if p.suffix == ".py"))
    root = Path(source).expanduser()
    if not root.exists():
        raise DataError(f"there is no file or folder {root} to train on")
    return Files(root=root, paths=(root,) if root.is_file() else tuple(_walk(root, frozenset())))


def identify(spec: DataSpec) -> list[Any]:
    """Return a key for a source and its content: each file's name, size and time of change, or the name of a data set
    of the hub, assumed not to change. Raises: DataError: there is no such file or folder."""
    if spec.source.startswith(HUB):
        return [spec.source, spec.subset, spec.split]
    files = find_files(spec.source)
    stats = [(files.shown(path), path.stat()) for path in files.paths]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def read_documents(spec: DataSpec, template: ChatTemplate | None, account: Account) -> Iterator[Document]:
    """Read the documents of one source in order.

    Args:
        template: the chat template of the run's vocabulary, if the source is a chat; else None.
        account: records skipped rows and files.
    Raises: DataError: a file cannot be read, or nothing is usable; its message is one sentence about the cause.
    """
    reader = _Reader(spec.field, template)
    has_any = False
    if spec.source.startswith(HUB):
        for document in _documents(_read_hub(spec), reader, account, spec.source, is_alone=True):
            has_any = True
            yield document
        if not has_any:
            raise DataError(f"{spec.source} has no text")
        return
    files = find_files(spec.source)
    is_alone = files.root.is_file()
    sizes = [path.stat().st_size for path in files.paths]
    total = max(1, sum(sizes))
    before = 0
    for path, size in zip(files.paths, sizes, strict=True):
        if has_rows(path):
            rows, name = read_rows(path, reader.columns), printable(str(path))
            where = "" if is_alone else files.shown(path)
            found = _documents(rows, reader, account, name, where, is_alone=is_alone)
        elif template is None:
            found = (Document(text.decode(), 1.0) for _, text in _texts([path], files, account))
        else:
            _leave_out_file(path, files, account, _NO_CHATS)
            found = iter(())
        for document in found:
            has_any = True
            yield document._replace(done=(before + document.done * size) / total)
        before += size
    if not has_any:
        raise _nothing(files, account)


def read_texts(files: Files, account: Account) -> list[tuple[str, bytes]]:
    """Return (name, text) of each text file. Raises: DataError: a file cannot be read, or no file has text."""
    named = list(_texts(files.paths, files, account))
    if not named:
        raise _nothing(files, account)
    return named


def printable(name: str) -> str:
    """Return a file's name with each byte that is not UTF-8 written as \\xff."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _walk(root: Path, folders_left_out: frozenset[str]) -> Iterator[Path]:
    """Yield the regular files under `root` in the order of their names, without hidden files and linked folders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in folders_left_out)
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _texts(paths: Sequence[Path], files: Files, account: Account) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        try:
            text, bad = read_text(path)
            if path.suffix in _PROSE:
                check_is_prose(text)
        except Unusable as why:
            _leave_out_file(path, files, account, why)
            continue
        where = "" if path == files.root else f"{files.shown(path)} "
        for number in bad:
            account.leave_out("line", "not UTF-8 text", f"{where}line {number}")
        if text:
            yield files.name(path), text


def _leave_out_file(path: Path, files: Files, account: Account, why: Unusable) -> None:
    """Record a skipped file. Raises: DataError: the file is the whole source."""
    if path == files.root:
        raise DataError(f"cannot train on {printable(str(path))}: it is {why}") from why
    account.leave_out("file", why.reason, files.shown(path))


def _nothing(files: Files, account: Account) -> DataError:
    root = printable(str(files.root))
    if not files.paths:
        return DataError(f"the folder {root} has no files")
    return DataError(account.behind(f"{root} has no text"))


class _Reader:
    """Converts a row to a document: the text in the row's field `field`, or a chat, rendered by the template."""

    def __init__(self, field: str, template: ChatTemplate | None) -> None:
        self._field, self._template = field, template
        text = msgspec.defstruct("Line", [("text", str | None)], rename={"text": field})
        self._type: Any = ChatRow if template else text
        self._decoder: Any = msgspec.json.Decoder(self._type)  # skips the other fields of a line
        self.columns = (*FIELDS, *(() if template else (field,)))

    def document(self, row: Row) -> Document:
        """Convert a row to a document. Raises: Unusable: the model cannot be trained on this row."""
        value = row.value
        if isinstance(value, Unusable):
            raise value
        if self._template is None:
            if isinstance(value, str):  # an element of an array of texts
                value = {self._field: value}
            text = self._decoded(value).text
            if not text:
                raise Unusable("an empty text")
            document = Document(text, row.done)
        else:
            said = self._decoded(value)
            if said.messages is None and None in (said.prompt, said.completion):
                raise self._lacks(_names(value))
            text, answers, is_whole = read_row(said, self._template)
            document = Document(text, row.done, answers, not is_whole)
        if not _has_characters(text):
            raise Unusable("a lone surrogate, or a byte that is not UTF-8")
        return document

    def _decoded(self, value: Any) -> Any:
        try:
            if isinstance(value, bytes):
                try:
                    return self._decoder.decode(value)
                except msgspec.ValidationError:
                    raise
                except (msgspec.DecodeError, UnicodeDecodeError):
                    value = _lenient(value)  # a lone surrogate or NaN in another field does no harm
            return msgspec.convert(value, self._type)
        except msgspec.ValidationError as error:
            names = _names(value)
            if self._template is None and self._field not in names:
                raise self._lacks(names) from error
            what, why = "no text" if self._template is None else "no chat", _INDEX.sub("[]", first_line(error))
            raise Unusable(f"{what}: {why}") from error

    def _lacks(self, names: Sequence[str]) -> Unusable:
        only = ", ".join(name[:40] for name in names[:_FIELDS_NAMED]) + (", …" if len(names) > _FIELDS_NAMED else "")
        but = f", but {only}" if names else ""
        if self._template is not None:
            reason = f"no `messages`, nor `prompt` and `completion`{but}"
            if self._field in names:
                return Unusable(reason, 'for texts, remove format = "chat" below [data]')
            return Unusable(reason, "shoal reads chats from these fields only: rename yours")
        if "messages" in names or {"prompt", "completion"} <= set(names):
            return Unusable(f"a chat ({only})", 'set format = "chat" below [data]')
        return Unusable(f"no field `{self._field}`{but}", "set `field` below [data] to the one that has the text")


def _documents(
    rows: Iterator[Row], reader: _Reader, account: Account, source: str, where: str = "", *, is_alone: bool
) -> Iterator[Document]:
    """Convert rows to documents, and record the unusable rows. `where` stands before a row's number in messages.

    Raises: DataError: the rows cannot be read, or none of the first `ROWS_TRIED` is usable. Not raised if the only row
    of a file in a folder (not `is_alone`) is unusable: such a file often has settings, not data.
    """
    first: tuple[str, Unusable] | None = None
    tried = 0
    has_any = False
    for row in rows:
        tried += 1
        try:
            document = reader.document(row)
        except Unusable as why:
            place = f"{row.unit} {row.number}"
            account.leave_out("row", why.reason, f"{where} {place}".lstrip())
            first = first or (place, why)
            if tried == ROWS_TRIED and not has_any:
                break
            continue
        has_any = True
        yield document
    if first is not None and not has_any and (is_alone or tried > 1):
        place, reason = first
        none = "its only row cannot" if tried == 1 else f"none of its first {tried} rows can"
        remedy = f"; {reason.remedy}" if reason.remedy else ""
        raise DataError(f"cannot train on {source}: {none} be learnt ({place}: {reason.reason}){remedy}")


def _read_hub(spec: DataSpec) -> Iterator[Row]:
    """Stream a data set of the hub. The library downloads no more than is read."""
    name = spec.source.removeprefix(HUB)
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{spec.source} needs the datasets library: pip install datasets") from error
    try:
        rows = iter(datasets.load_dataset(name, spec.subset or None, split=spec.split, streaming=True))
    except Exception as error:  # the library passes on any error of its loaders and the network
        raise DataError(f"cannot open the data set {name}: {first_line(error)}") from error
    number = 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:
            raise DataError(f"cannot read the data set {name} after row {number}: {first_line(error)}") from error
        if row is None:
            return
        number += 1
        yield Row("row", number, row, 0.0)


def _names(value: object) -> list[str]:
    """Return the names of a row's fields. Raises: Unusable: the row is not a JSON object."""
    if isinstance(value, bytes):
        value = _lenient(value)
    if not isinstance(value, Mapping):
        raise Unusable("not a JSON object")
    return list(map(str, value))


def _lenient(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise Unusable("not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Unusable("not JSON") from error


def _has_characters(text: str) -> bool:
    """True if the text has no lone surrogates, which stand for no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
