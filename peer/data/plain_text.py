"""Plain text files: UTF-8, or UTF-16 with a byte order mark. Other files are refused; the error names the kind if
known.

A few lines that are not UTF-8 are skipped; a file with many of them has another encoding or is no text, and is refused.
"""

import codecs
import re
from pathlib import Path
from typing import Final

import msgspec

from shoal.peer.data.account import Unusable
from shoal.peer.data.rows import GZIP, UTF_16
from shoal.protocol.errors import DataError

PROBE_BYTES: Final = 64 * 1024
"""The bytes at the start of a file that decide whether it is text, so that large binaries are not read whole."""
_KINDS: Final = (
    (GZIP, "gzip", "unpack it"),
    (b"BZh", "bzip2", "unpack it"),
    (b"\xfd7zXZ\0", "xz", "unpack it"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unpack it"),
    (b"PK\x03\x04", "zip (as are .docx, .xlsx and .epub)", "extract its text"),
    (b"%PDF", "PDF", "extract its text"),
    (b"PAR1", "Parquet", "rename it to end in .parquet"),
    (codecs.BOM_UTF32_LE, "UTF-32", "save it as UTF-8"),
    (codecs.BOM_UTF32_BE, "UTF-32", "save it as UTF-8"),
)
_CONTROL: Final = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_ARRAY: Final = re.compile(rb'\s*\[\s*\{\s*"')


def read_text(path: Path) -> tuple[bytes, list[int]]:
    """Read a text file. Returns: (the text as UTF-8, the numbers of the skipped lines).

    Raises: Unusable: the file is not text. DataError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            text = file.read(PROBE_BYTES)
            is_whole = len(text) < PROBE_BYTES
            _check_kind(text)
            if not text.startswith(UTF_16) and not is_whole:
                _bad_lines(text, is_whole=False)
            text += file.read()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if text.startswith(UTF_16):
        try:
            return text.decode("utf-16").encode(), []
        except UnicodeError as error:
            raise Unusable("damaged UTF-16", "save it as UTF-8") from error
    text = text.removeprefix(codecs.BOM_UTF8)
    bad = _bad_lines(text, is_whole=True)
    if bad:
        lines, chosen = text.split(b"\n"), set(bad)
        text = b"\n".join(line for number, line in enumerate(lines, 1) if number not in chosen)
    return text, bad


def check_is_prose(text: bytes) -> None:
    """Check that a text is not JSON. Raises: Unusable: it has rows of JSON, though the file's name does not say so."""
    line = text[:PROBE_BYTES].lstrip().partition(b"\n")[0]
    try:
        has_objects = line.startswith(b"{") and bool(msgspec.json.decode(line))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        has_objects = False
    if has_objects:
        raise Unusable("JSON lines in a file without that suffix", "rename it to end in .jsonl")
    if _ARRAY.match(text[:PROBE_BYTES]):
        raise Unusable("a JSON array in a file without that suffix", "rename it to end in .json")


def _check_kind(start: bytes) -> None:
    for mark, name, remedy in _KINDS:
        if start.startswith(mark):
            raise Unusable(name, remedy)
    for offset in (0, 1) if not start.startswith(UTF_16) else ():
        if len(start) > 1 and start[1 - offset :: 2].count(0) > len(start) // 4 and not start[offset::2].count(0):
            raise Unusable("UTF-16 without its byte order mark", "save it as UTF-8")


def _bad_lines(text: bytes, *, is_whole: bool) -> list[int]:
    """Return the numbers of the lines that are not UTF-8. Raises: Unusable: too many lines are not UTF-8."""
    if _is_text(text, is_whole=is_whole):
        return []
    lines = text.split(b"\n")
    last = len(lines)
    bad = [n for n, line in enumerate(lines, 1) if not _is_text(line, is_whole=is_whole or n < last)]
    good = sum(map(bool, lines)) - len(bad)
    # Nine valid lines must come with each invalid one, but a single invalid line needs a single valid one.
    if good < (9 * len(bad) if len(bad) > 1 else 1):
        if _CONTROL.search(text):
            raise Unusable("binary data, not text")
        raise Unusable("not UTF-8 (perhaps Latin-1 or Windows-1252)", "convert it with iconv -f WINDOWS-1252 -t UTF-8")
    return bad


def _is_text(text: bytes, *, is_whole: bool) -> bool:
    """True if `text` is UTF-8 without NUL. If not `is_whole`, its last character may be cut off."""
    if b"\0" in text:
        return False
    try:
        codecs.utf_8_decode(text, "strict", is_whole)
    except UnicodeDecodeError:
        return False
    return True
