"""Documents packed into one long array of tokens: first those for training, then those for validation.

Each document begins and ends with the tokens that the vocabulary asks for. Further files have the index of each
document's first token and, for chats, which tokens the loss counts. A hash of its text decides if a document is for
validation, so both copies of a duplicate are on the same side. The array is mapped from disk: it may be larger than
memory, and a restart does not tokenise again.
"""

import contextlib
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from shoal.peer.data.account import Account
from shoal.peer.data.chat import ChatTemplate
from shoal.peer.data.documents import Document, identify, read_documents
from shoal.peer.data.tokenizer import Tokenizer, Tokens
from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec

OnProgress = Callable[[float], None]
"""A callback that receives the share of the source that is done; 0 if unknown."""

_FORMAT: Final = 3
_TOKENS, _META = "tokens.bin", "meta.json"
_STARTS: Final = "documents.bin"
"""The file with the index of each document's first token, int64 [D]."""
_COUNTED: Final = "counted.bin"
"""The file with a 1 for each token that counts as a target, else 0, uint8 [N]; only for chats: in a text all count."""
_HASH_BYTES: Final = 8


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `meta.json` beside the tokens."""

    dtype: str
    num_tokens: int
    num_training: int
    """Tokens [0, num_training) are for training."""
    num_documents: int
    digest: str
    """BLAKE3 (64 hex digits) of the tokens and the split; with document masks also of the file `_STARTS`, and for chats
    of the file `_COUNTED`."""
    account: Account


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedText:
    """A data source's tokens, uint8, uint16 or int32 [N], its documents' starts, and 1 for tokens that count."""

    about: Packed
    token_N: NDArray[Any]
    start_D: NDArray[np.int64]
    counted_N: NDArray[np.uint8] | None


def pack(
    spec: DataSpec,
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    cache: Path | None = None,
    on_progress: OnProgress | None = None,
) -> PackedText:
    """Read and tokenise the source of `spec`, unless `cache` has it already.

    Args: template: renders the conversations of a chat; None: the source is a text.
    Returns: the tokens, mapped from files in `cache`; in memory if `cache` is None.
    Raises: DataError: the source cannot be read, or the disk is full.
    """
    source = _Source(spec, tokenizer, template)
    try:
        if cache is None:
            with tempfile.TemporaryDirectory(prefix="shoal-") as temporary:
                packed = _write(Path(temporary), source, on_progress)
                return _opened(Path(temporary), packed, mapped=False)
        folder = cache / _cache_key(source)
        packed = _known(folder) or _write_for_good(folder, source, on_progress)
        return _opened(folder, packed, mapped=True)
    except OSError as error:
        where = cache or tempfile.gettempdir()
        raise DataError(f"cannot store the prepared text in {where}: {error.strerror or error}") from error


def training_texts(
    spec: DataSpec, *, bytes_max: int, account: Account, on_progress: OnProgress | None = None
) -> Iterator[str]:
    """Yield documents for training, up to about `bytes_max` bytes, to train a vocabulary; `account` records skipped
    ones. If all documents are for validation, yield the first: the run then takes the tail of its text for validation.

    Raises: DataError: the source does not exist, or has no text.
    """
    size, kept_back = 0, ""
    for document in read_documents(spec, None, account):
        text = document.text
        if on_progress is not None:
            on_progress(max(document.done, min(1.0, size / bytes_max)))
        if _is_validation(text, spec):
            kept_back = kept_back or text
            continue
        size += len(text.encode())
        yield text
        if size >= bytes_max:
            return
    if not size:
        yield kept_back


@dataclass(frozen=True, slots=True)
class _Source:
    spec: DataSpec
    tokenizer: Tokenizer
    template: ChatTemplate | None


@dataclass(slots=True)
class _Side:
    tokens: IO[bytes]
    counted: IO[bytes] | None
    num_tokens: int = 0
    starts: "array[int]" = field(default_factory=lambda: array("q"))


def _opened(folder: Path, packed: Packed, *, mapped: bool) -> PackedText:
    def column(name: str, dtype: Any, count: int) -> NDArray[Any]:
        if not mapped or not count:
            return np.fromfile(folder / name, dtype=dtype)
        # Copy on write: torch wants writable memory, though it never writes.
        return np.memmap(folder / name, dtype=dtype, mode="c", shape=(count,))

    is_counted = (folder / _COUNTED).exists()
    return PackedText(
        about=packed,
        token_N=column(_TOKENS, packed.dtype, packed.num_tokens),
        start_D=column(_STARTS, np.int64, packed.num_documents),
        counted_N=column(_COUNTED, np.uint8, packed.num_tokens) if is_counted else None,
    )


def _cache_key(source: _Source) -> str:
    spec = source.spec
    about = [_FORMAT, identify(spec), spec.field, spec.validation_fraction, spec.tokens_max, source.tokenizer.digest]
    about += [spec.masks_documents, source.template.digest if source.template else ""]
    return blake3(msgspec.json.encode(about)).hexdigest(length=16)


def _known(folder: Path) -> Packed | None:
    """Return the record of the tokens that an earlier call has stored in `folder`; None if they are not complete."""
    try:
        packed = msgspec.json.decode((folder / _META).read_bytes(), type=Packed)
        size, starts = (folder / _TOKENS).stat().st_size, (folder / _STARTS).stat().st_size
        counted = (folder / _COUNTED).stat().st_size if (folder / _COUNTED).exists() else packed.num_tokens
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    is_whole = size == packed.num_tokens * np.dtype(packed.dtype).itemsize
    return packed if is_whole and starts == packed.num_documents * 8 and counted == packed.num_tokens else None


def _write_for_good(folder: Path, source: _Source, on_progress: OnProgress | None) -> Packed:
    """Pack the source into `folder`. If several processes do so at once, the result of the first to finish stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as unfinished:
        _write(Path(unfinished), source, on_progress)
        if _known(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(unfinished, folder)
            os.mkdir(unfinished)  # the context manager removes it
    found = _known(folder)
    if found is None:
        raise DataError(f"cannot store the prepared text in {folder}")
    return found


def _write(folder: Path, source: _Source, on_progress: OnProgress | None) -> Packed:
    spec, dtype = source.spec, source.tokenizer.dtype
    names = [_TOKENS, *([_COUNTED] if source.template else [])]
    with contextlib.ExitStack() as opened:

        def side(prefix: str) -> _Side:
            files = [opened.enter_context(open(folder / (prefix + name), "w+b")) for name in names]
            return _Side(files[0], files[1] if source.template else None)

        training, validation = side(""), side("validation-")
        account = Account()
        num_documents = _tokenise(source, training, validation, account, on_progress)
        for into, rest in ((training.tokens, validation.tokens), (training.counted, validation.counted)):
            if into is not None and rest is not None:
                rest.seek(0)
                shutil.copyfileobj(rest, into, 1 << 24)
                into.flush()
                os.fsync(into.fileno())
    for name in names:
        (folder / f"validation-{name}").unlink()
    total = training.num_tokens + validation.num_tokens
    start_D = np.concatenate(
        (np.array(training.starts, dtype=np.int64), np.array(validation.starts, dtype=np.int64) + training.num_tokens)
    )
    (folder / _STARTS).write_bytes(start_D.tobytes())
    num_training, wanted = training.num_tokens, int(total * spec.validation_fraction)
    if not wanted / 2 <= validation.num_tokens <= 2 * wanted:
        num_training = total - wanted  # few or large documents: take the tail, even if that cuts a document
        if source.template and num_documents > 1:  # but not inside a conversation
            at = int(np.searchsorted(start_D, num_training, side="right")) - 1
            num_training = int(start_D[max(1, at)])
    apart = [folder / name for name in (_STARTS if spec.masks_documents else "", *names[1:]) if name]
    packed = Packed(
        dtype=dtype.name,
        num_tokens=total,
        num_training=num_training,
        num_documents=num_documents,
        digest=_digest([folder / _TOKENS, *apart], num_training),
        account=account,
    )
    (folder / _META).write_bytes(msgspec.json.encode(packed))
    return packed


def _tokenise(
    source: _Source, training: _Side, validation: _Side, account: Account, on_progress: OnProgress | None
) -> int:
    """Tokenise the documents; write each to the training or the validation side. Returns: the number of documents."""
    spec, tokenizer = source.spec, source.tokenizer
    before, behind = (
        np.array(list(tokens), dtype=tokenizer.dtype) for tokens in (tokenizer.beginning, tokenizer.separator)
    )
    num_documents = num_tokens = 0
    for batch in _batches(read_documents(spec, source.template, account)):
        for document, tokens, counted in _encoded(batch, source):
            if spec.tokens_max and num_tokens >= spec.tokens_max:
                return num_documents
            side = validation if _is_validation(document.text, spec) else training
            row = np.concatenate((before, tokens, behind)) if document.is_framed else tokens
            side.starts.append(side.num_tokens)
            side.tokens.write(row.tobytes())
            if side.counted is not None:
                around = (len(before), len(behind)) if document.is_framed else (0, 0)
                # The end after a learnt text is learnt, too; the beginning before it is not.
                parts = (np.zeros(around[0], np.uint8), counted, np.full(around[1], counted.any(), np.uint8))
                side.counted.write(np.concatenate(parts).tobytes())
            side.num_tokens += len(row)
            num_documents += 1
            num_tokens += len(row)
        if on_progress is not None:
            on_progress(max(batch[-1].done, min(1.0, num_tokens / spec.tokens_max) if spec.tokens_max else 0.0))
    return num_documents


def _encoded(batch: list[Document], source: _Source) -> Iterator[tuple[Document, Tokens, NDArray[np.uint8]]]:
    """Yield (document, its tokens, flags). In a chat, the flag of a token is 1 if the token overlaps an answer, which
    counts in the loss. A text has no flags."""
    texts = [document.text for document in batch]
    if source.template is None:
        nothing = np.zeros(0, np.uint8)
        for document, tokens in zip(batch, source.tokenizer.encode(texts), strict=True):
            yield document, tokens, nothing
        return
    # A template writes special tokens as text. If a speaker writes the same text, it becomes a special token, too.
    for document, (tokens, place_N2) in zip(batch, source.tokenizer.encode_placed(texts, special=True), strict=True):
        counted_N = np.zeros(len(tokens), np.uint8)
        for begin, end in document.answers:
            counted_N[(place_N2[:, 0] < end) & (place_N2[:, 1] > begin)] = 1
        yield document, tokens, counted_N


def _is_validation(text: str, spec: DataSpec) -> bool:
    number = int.from_bytes(blake3(text.encode()).digest(length=_HASH_BYTES))
    return number < int(spec.validation_fraction * 256**_HASH_BYTES)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into batches that are large enough to occupy all cores."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= 1 << 20:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _digest(paths: list[Path], num_training: int) -> str:
    hasher = blake3(num_training.to_bytes(8))
    for path in paths:
        hasher.update_mmap(path)
    return hasher.hexdigest()
