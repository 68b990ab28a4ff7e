"""The text of a run, as bytes, with the part that training never sees.

`python-library` is the source of Python's standard library; anything else is the path of a text file or of a folder.
Files are taken in the order of their names, so that every machine with the same files prepares the same bytes;
`digest` says whether it did.
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec

PYTHON_LIBRARY: Final = "python-library"
LIBRARY_FOLDERS_LEFT_OUT: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "__pycache__"}
)
SEPARATOR: Final = b"\n"
"""Between files; source files end in a newline already, so it reads as an empty line."""
UNDECODED_BYTES_MAX: Final = 3
"""A prefix of a UTF-8 file may end inside a character of up to four bytes."""
PROBE_BYTES: Final = 64 * 1024
"""How much of a file decides whether it is text: a folder may hold large binaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Byte tokens in memory: uint8 [N]."""

    text_N: Tensor
    """Training text, then validation text."""
    num_training: int
    """Bytes [0, num_training) are for training."""
    num_files: int
    digest: str
    """BLAKE3 (64 hex digits) of the prepared bytes and of where they are split."""

    @property
    def training(self) -> Tensor:
        return self.text_N[: self.num_training]

    @property
    def validation(self) -> Tensor:
        return self.text_N[self.num_training :]


def load_corpus(spec: DataSpec, *, context: int = 1) -> Corpus:
    """Read and split the text of `spec`.

    Validation is whole files, chosen by a hash of their names until the share is reached; where no choice of whole
    files comes near the share (one file, or few large ones), it is the tail of all text.

    Args:
        context: tokens of a sample; training and validation must each have at least one.
    Raises: DataError: nothing there, no text in it, or too little.
    """
    if spec.source == PYTHON_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _files(root, LIBRARY_FOLDERS_LEFT_OUT) if path.suffix == ".py"]
    else:
        root = Path(spec.source).expanduser()
        if not root.exists():
            raise DataError(f"there is no file or folder {root} to train on")
        paths = [root] if root.is_file() else list(_files(root, frozenset()))
    named = [(path.relative_to(root).as_posix(), text) for path in paths if (text := _read_text(path)) is not None]
    if not named:
        raise DataError(f"{root} has no text: nothing in it is UTF-8" if paths else f"the folder {root} has no files")
    corpus = _split(named, spec.validation_fraction)
    shortest = min(corpus.num_training, corpus.text_N.numel() - corpus.num_training)
    if shortest < context + 1:
        raise DataError(
            f"{root} has too little text: {corpus.text_N.numel()} bytes leave {shortest} for training or validation, "
            f"a sample takes {context + 1}"
        )
    return corpus


def _files(root: Path, folders_left_out: frozenset[str]) -> Iterator[Path]:
    """Regular files under `root` in the order of their names, without hidden ones and without linked folders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in folders_left_out)
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _read_text(path: Path) -> bytes | None:
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


def _is_text(text: bytes, *, whole: bool) -> bool:
    """Whether `text` is UTF-8 without NUL; a part of a file may end inside a character."""
    if b"\0" in text:
        return False
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return not whole and error.start >= len(text) - UNDECODED_BYTES_MAX
    return True


def _split(named: list[tuple[str, bytes]], validation_fraction: float) -> Corpus:
    """Prepare the text; empties `named` on the way."""
    sizes = [len(text) + len(SEPARATOR) for _, text in named]
    wanted = int(sum(sizes) * validation_fraction)
    chosen = _whole_files(named, sizes, wanted)
    text_N = np.empty(sum(sizes), dtype=np.uint8)
    end = 0
    for i in sorted(range(len(named)), key=lambda i: i in chosen):
        end = _put(text_N, end, named[i][1])
        end = _put(text_N, end, SEPARATOR)
        named[i] = ("", b"")  # free what is copied, so that the text is in memory once and not twice
    num_training = end - (sum(sizes[i] for i in chosen) if chosen else wanted)
    return Corpus(
        text_N=torch.from_numpy(text_N),
        num_training=num_training,
        num_files=len(sizes),
        digest=blake3(num_training.to_bytes(8)).update(text_N.data).hexdigest(),
    )


def _whole_files(named: Sequence[tuple[str, bytes]], sizes: Sequence[int], wanted: int) -> frozenset[int]:
    """Indices of the files that make validation; empty if they would be less than half of `wanted` bytes."""
    order = sorted(range(len(named)), key=lambda i: blake3(named[i][0].encode(errors="surrogateescape")).digest())
    chosen: set[int] = set()
    left = wanted
    for i in order:
        if sizes[i] <= left:
            chosen.add(i)
            left -= sizes[i]
    return frozenset(chosen) if left <= wanted / 2 else frozenset()


def _put(text_N: NDArray[np.uint8], start: int, text: bytes) -> int:
    end = start + len(text)
    text_N[start:end] = np.frombuffer(text, dtype=np.uint8)
    return end
