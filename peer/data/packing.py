"""Documents packed into one long row of tokens: training first, then the part that training never sees.

Documents stand one behind the other with a separator between them (the vocabulary's end of text), and samples are cut
from the row wherever they fall. Which documents are for validation is decided by a hash of their text, so one that
comes twice is never on both sides.

What has been packed once is kept on disk and mapped from there: a corpus larger than memory is no trouble, and a
restart does not tokenise again.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from shoal.peer.data.documents import Document, identify, read_documents
from shoal.peer.data.tokenizer import Tokenizer
from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec

OnProgress = Callable[[float], None]
"""Told which share of the source is done; 0 while nobody knows."""

_FORMAT: Final = 1
_TOKENS, _META = "tokens.bin", "meta.json"
_BATCH_CHARACTERS: Final = 1 << 20
_HASH_BYTES: Final = 8


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """What `meta.json` says of the tokens beside it."""

    dtype: str
    num_tokens: int
    num_training: int
    """Tokens [0, num_training) are for training."""
    num_documents: int
    digest: str
    """BLAKE3 (64 hex digits) of the tokens and of where they are split."""


def pack(
    spec: DataSpec, tokenizer: Tokenizer, *, cache: Path | None = None, on_progress: OnProgress | None = None
) -> tuple[NDArray[Any], Packed]:
    """Read and tokenise the source of `spec`, unless `cache` has it already.

    Returns: the tokens, uint8, uint16 or int32 [N], mapped from `cache` (in memory without one); and what they are.
    Raises: DataError: the source cannot be read, or there is no room.
    """
    try:
        if cache is None:
            with tempfile.TemporaryDirectory(prefix="shoal-") as temporary:
                packed = _write(Path(temporary), spec, tokenizer, on_progress)
                return np.fromfile(Path(temporary, _TOKENS), dtype=packed.dtype), packed
        folder = cache / _cache_key(spec, tokenizer)
        packed = _known(folder) or _write_for_good(folder, spec, tokenizer, on_progress)
        # Copy on write: torch wants memory that it may write to, and never does.
        return np.memmap(folder / _TOKENS, dtype=packed.dtype, mode="c", shape=(packed.num_tokens,)), packed
    except OSError as error:
        where = cache or tempfile.gettempdir()
        raise DataError(f"cannot keep the prepared text in {where}: {error.strerror or error}") from error


def training_texts(spec: DataSpec, *, bytes_max: int, on_progress: OnProgress | None = None) -> Iterator[str]:
    """Documents that a run with this data would train on, until there are `bytes_max` of them, for a vocabulary.

    A single document would be for both sides, so it is given although it may be for validation as a whole.
    Raises: DataError: nothing there, or no text in it.
    """
    size, kept_back = 0, ""
    for text, done in read_documents(spec):
        if on_progress is not None:
            on_progress(max(done, min(1.0, size / bytes_max)))
        if _is_validation(text, spec):
            kept_back = kept_back or text
            continue
        size += len(text.encode(errors="replace"))
        yield text
        if size >= bytes_max:
            return
    if not size:
        if not kept_back:
            raise DataError(f"{spec.source} has no text")
        yield kept_back


def _cache_key(spec: DataSpec, tokenizer: Tokenizer) -> str:
    about = [_FORMAT, identify(spec), spec.field, spec.validation_fraction, spec.tokens_max, tokenizer.digest]
    return blake3(msgspec.json.encode(about)).hexdigest(length=16)


def _known(folder: Path) -> Packed | None:
    """What an earlier call has left, if it is whole."""
    try:
        packed = msgspec.json.decode((folder / _META).read_bytes(), type=Packed)
        size = (folder / _TOKENS).stat().st_size
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return packed if size == packed.num_tokens * np.dtype(packed.dtype).itemsize else None


def _write_for_good(folder: Path, spec: DataSpec, tokenizer: Tokenizer, on_progress: OnProgress | None) -> Packed:
    """Several processes may do so at once; the last one's stays, and all are the same."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as unfinished:
        packed = _write(Path(unfinished), spec, tokenizer, on_progress)
        if not packed.num_tokens:
            raise DataError(f"{spec.source} has no text")
        if _known(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody was faster
            os.rename(unfinished, folder)
            os.mkdir(unfinished)  # which the context manager wants to remove
    found = _known(folder)
    if found is None:
        raise DataError(f"cannot keep the prepared text in {folder}")
    return found


def _write(folder: Path, spec: DataSpec, tokenizer: Tokenizer, on_progress: OnProgress | None) -> Packed:
    with open(folder / _TOKENS, "w+b") as training, open(folder / "validation.bin", "w+b") as validation:
        num_documents = _tokenise(spec, tokenizer, training, validation, on_progress)
        itemsize = tokenizer.dtype.itemsize
        num_training, num_validation = training.tell() // itemsize, validation.tell() // itemsize
        validation.seek(0)
        shutil.copyfileobj(validation, training, 1 << 24)
        training.flush()
        os.fsync(training.fileno())
    (folder / "validation.bin").unlink()
    total = num_training + num_validation
    wanted = int(total * spec.validation_fraction)
    if not wanted / 2 <= num_validation <= 2 * wanted:
        num_training = total - wanted  # few documents, or large ones: the tail, wherever that cuts
    packed = Packed(
        dtype=tokenizer.dtype.name,
        num_tokens=total,
        num_training=num_training,
        num_documents=num_documents,
        digest=_digest(folder / _TOKENS, num_training),
    )
    (folder / _META).write_bytes(msgspec.json.encode(packed))
    return packed


def _tokenise(
    spec: DataSpec, tokenizer: Tokenizer, training: IO[bytes], validation: IO[bytes], on_progress: OnProgress | None
) -> int:
    """Returns: how many documents there were."""
    before, behind = (
        np.array(list(tokens), dtype=tokenizer.dtype).tobytes() for tokens in (tokenizer.beginning, tokenizer.separator)
    )
    num_documents = num_tokens = 0
    for batch in _batches(read_documents(spec)):
        for document, tokens in zip(batch, tokenizer.encode([document.text for document in batch]), strict=True):
            if spec.tokens_max and num_tokens >= spec.tokens_max:
                return num_documents
            into = validation if _is_validation(document.text, spec) else training
            into.writelines((before, tokens.tobytes(), behind))
            num_documents += 1
            num_tokens += len(tokenizer.beginning) + len(tokens) + len(tokenizer.separator)
        if on_progress is not None:
            on_progress(max(batch[-1].done, min(1.0, num_tokens / spec.tokens_max) if spec.tokens_max else 0.0))
    return num_documents


def _is_validation(text: str, spec: DataSpec) -> bool:
    number = int.from_bytes(blake3(text.encode(errors="replace")).digest(length=_HASH_BYTES))
    return number < int(spec.validation_fraction * 256**_HASH_BYTES)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Enough at a time that a tokenizer has something for all cores."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _digest(path: Path, num_training: int) -> str:
    hasher = blake3(num_training.to_bytes(8))
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            hasher.update(block)
    return hasher.hexdigest()
