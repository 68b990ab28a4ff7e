"""Writes two texts that every Python includes, for `make demo-tune`: the sources of its library, and the
documentation of its language in English (`pydoc_data`, as in `help("topics")`). A part of both is held out for `shoal
eval`."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.peer.data.documents import PYTHON_LIBRARY, find_files
from shoal.protocol.errors import LocalError

_PROSE_FOLDER: Final = "pydoc_data"
"""Excluded from the sources: the documentation is a Python file in it."""
_HELD_OUT_BYTES: Final = 64 * 1024
"""The most held-out bytes of each text: seconds of `shoal eval` with a model of a million parameters."""
_EVERY: Final = {"code": 40, "prose": 8}
"""One in this many documents is held out. The prose has only some 80 topics, the library hundreds of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoCorpora:
    code: Path
    """A folder of Python files."""
    prose: Path
    """A folder of text files, one per topic."""
    held_out: tuple[Path, Path]
    """Files with the held-out code and prose, for `shoal eval`."""


def write_two_corpora(folder: Path) -> TwoCorpora:
    """Write both texts below `folder`. Raises: LocalError: this Python has no library sources or no documentation."""
    texts = {"code": list(_code()), "prose": list(_prose())}
    held_out = []
    for kind, documents in texts.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        kept: list[str] = []
        for number, (name, text) in enumerate(documents):
            if number % _EVERY[kind] == _EVERY[kind] // 2:
                kept.append(text)
            else:
                (folder / kind / f"{number:04}-{name}").write_text(text)
        held_out.append(folder / "held-out" / f"{kind}.txt")
        held_out[-1].parent.mkdir(exist_ok=True)
        held_out[-1].write_bytes(_within(kept))
    return TwoCorpora(code=folder / "code", prose=folder / "prose", held_out=(held_out[0], held_out[1]))


def _within(texts: Iterable[str]) -> bytes:
    """Return the texts that fit, at least the first one's beginning."""
    found = b""
    for text in texts:
        data = text.encode()
        if not found or len(found) + len(data) <= _HELD_OUT_BYTES:
            found += data[:_HELD_OUT_BYTES]
    return found.decode(errors="ignore").encode()


def _code() -> Iterator[tuple[str, str]]:
    files = find_files(PYTHON_LIBRARY)
    if not files.paths:
        raise LocalError(f"this Python has no sources of its library in {files.root}")
    for path in files.paths:
        if _PROSE_FOLDER not in path.parts:
            try:
                yield _plain(files.name(path)), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few files have another encoding


def _prose() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise LocalError("this Python has no pydoc_data, which is the documentation to tune on: install it") from error
    for name in sorted(topics):
        yield f"{_plain(name)}.txt", topics[name]


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)
