"""The text of a run, as tokens, with the part that training never sees.

`python-library` is the source of Python's standard library; anything else is a path, or a data set of the hub
(`documents.py`). Text files as bytes are read here; everything else is packed (`packing.py`). Files are taken in the
order of their names, so that every machine with the same files prepares the same tokens; `digest` says whether it did.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from shoal.peer.data.documents import HUB, Files, find_files, read_text
from shoal.peer.data.documents import PYTHON_LIBRARY as PYTHON_LIBRARY
from shoal.peer.data.packing import OnProgress, pack
from shoal.peer.data.tokenizer import BYTES, load_tokenizer
from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec, ModelSpec

SEPARATOR: Final = b"\n"
"""Between files; source files end in a newline already, so it reads as an empty line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens in memory, or mapped into it: uint8, uint16 or int32 [N]."""

    text_N: Tensor
    """Training text, then validation text."""
    num_training: int
    """Tokens [0, num_training) are for training."""
    num_files: int
    """Files, or documents where a file has several."""
    digest: str
    """BLAKE3 (64 hex digits) of the prepared tokens and of where they are split."""
    vocab_size: int = 256
    """Tokens are below it."""
    tokenizer_digest: str = ""
    """Of the tokenizer.json; empty for bytes."""

    @property
    def training(self) -> Tensor:
        return self.text_N[: self.num_training]

    @property
    def validation(self) -> Tensor:
        return self.text_N[self.num_training :]

    def check_fits(self, model: ModelSpec) -> None:
        """Raises: DataError: the model's vocabulary is too small for this text."""
        if self.vocab_size > model.vocab_size:
            raise DataError(
                f"the text has tokens up to {self.vocab_size - 1}: model.vocab_size must be at least "
                f"{self.vocab_size}, is {model.vocab_size}"
            )


def load_corpus(
    spec: DataSpec,
    *,
    context: int = 1,
    tokenizer: Path | None = None,
    cache: Path | None = None,
    on_progress: OnProgress | None = None,
) -> Corpus:
    """Read and split the text of `spec`.

    Validation is whole files or documents, chosen by a hash of their names or texts, until the share is reached; where
    no choice of whole ones comes near the share (one file, or few large ones), it is the tail of all text.

    Args:
        context: tokens of a sample; training and validation must each have at least one.
        tokenizer: where the tokenizer.json is on this machine, if not where the spec says.
        cache: where to keep what is packed; None keeps nothing.
    Raises: DataError: nothing there, no text in it, or too little.
    """
    is_hub = spec.source.startswith(HUB)
    files = None if is_hub else find_files(spec.source)
    where = spec.source if files is None else str(files.root)
    if files is not None and files.are_text and spec.tokenizer == BYTES and not spec.tokens_max:
        corpus = _read_bytes(files, spec.validation_fraction)
    else:
        corpus = _read_packed(spec, tokenizer, cache, on_progress, where)
    shortest = min(corpus.num_training, corpus.text_N.numel() - corpus.num_training)
    if shortest < context + 1:
        unit = "bytes" if spec.tokenizer == BYTES else "tokens"
        raise DataError(
            f"{where} has too little text: {corpus.text_N.numel()} {unit} leave {shortest} for training or "
            f"validation, a sample takes {context + 1}: set model.context lower, or give it more text"
        )
    return corpus


def _read_packed(
    spec: DataSpec, tokenizer_path: Path | None, cache: Path | None, on_progress: OnProgress | None, where: str
) -> Corpus:
    tokenizer = load_tokenizer(spec, path=tokenizer_path)
    tokens_N, packed = pack(spec, tokenizer, cache=cache, on_progress=on_progress)
    if not packed.num_documents:
        raise DataError(f"{where} has no text")
    return Corpus(
        text_N=torch.from_numpy(tokens_N),
        num_training=packed.num_training,
        num_files=packed.num_documents,
        digest=packed.digest,
        vocab_size=tokenizer.vocab_size,
        tokenizer_digest=tokenizer.digest,
    )


def _read_bytes(files: Files, validation_fraction: float) -> Corpus:
    named = [(files.name(path), text) for path in files.paths if (text := read_text(path)) is not None]
    if not named:
        root = files.root
        raise DataError(
            f"{root} has no text: nothing in it is UTF-8" if files.paths else f"the folder {root} has no files"
        )
    return _split(named, validation_fraction)


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
        vocab_size=int(text_N.max()) + 1,
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
