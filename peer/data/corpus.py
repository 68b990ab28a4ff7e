"""The text of a run as tokens, split into training and validation.

Text files with bytes as tokens are read here; everything else is packed first (`packing.py`). Every machine with the
same files prepares the same tokens; peers compare `digest` to check this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from shoal.peer.data.account import Account
from shoal.peer.data.chat import load_template
from shoal.peer.data.documents import HUB, Files, find_files, printable, read_texts
from shoal.peer.data.documents import PYTHON_LIBRARY as PYTHON_LIBRARY
from shoal.peer.data.packing import OnProgress, PackedText, pack
from shoal.peer.data.samples import Blocks, Packs, Samples
from shoal.peer.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from shoal.protocol.errors import DataError
from shoal.protocol.spec import BETWEEN_DIGESTS, DataSpec, ModelSpec

SEPARATOR: Final = b"\n"
"""The separator between files; most files end in a newline, so it reads as an empty line."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """The tokens of a source. In a run with several sources this is the first source, and `others` has the others."""

    text_N: Tensor
    """uint8, uint16 or int32, in memory or mapped from disk: training text, then validation text."""
    num_training: int
    """Tokens [0, num_training) are for training."""
    num_files: int
    """The number of documents of this source: text files or rows."""
    digest: str
    """BLAKE3 (64 hex digits) of the tokens and the split; in a run with several sources the joined digests of all."""
    vocab_size: int = 256
    tokenizer_digest: str = ""
    """BLAKE3 of the tokenizer.json; empty if the tokens are bytes."""
    start_D: NDArray[np.int64] | None = None
    """The first token of each document, int64, if attention stays inside documents; else None."""
    packs: tuple[Packs, Packs] | None = None
    """The samples of a chat, for training and for validation; None: the source is a text, which is cut into blocks."""
    account: Account = field(default_factory=Account)
    others: tuple["Corpus", ...] = ()
    weights: tuple[float, ...] = (1.0,)
    """How often each source is sampled, relative to the others: this source, then each of `others`."""

    @property
    def sources(self) -> tuple["Corpus", ...]:
        return (self, *self.others)

    @property
    def learnt(self) -> float:
        """Return the share of this source's tokens that count as targets in the loss."""
        num = self.text_N.numel()
        if self.packs is not None:
            return sum(packs.num_learnt for packs in self.packs) / num
        return 1.0 if self.start_D is None else 1.0 - len(self.start_D) / num

    def samples(self, context: int, *, validates: bool = False) -> Samples:
        """Return the samples of this source alone. Raises: DataError: its text is too short for one sample."""
        if self.packs is not None:
            packs = self.packs[validates]
            assert packs.context == context, "the conversations were packed for another context"
            return packs
        text_N, start_D = self.validation if validates else self.training, self.start_D
        if start_D is not None:
            first = int(np.searchsorted(start_D, self.num_training))
            start_D = start_D[first:] - self.num_training if validates else start_D[:first]
        return Blocks(text_N, context, start_D)

    @property
    def training(self) -> Tensor:
        return self.text_N[: self.num_training]

    @property
    def validation(self) -> Tensor:
        return self.text_N[self.num_training :]

    def check_fits(self, model: ModelSpec) -> None:
        """Check the model's vocabulary. Raises: DataError: it is too small for the tokens of this text."""
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
    """Read and split the text of `spec`, or of each of its sources.

    The validation text consists of whole files or documents, chosen by a hash of their names or texts. If no choice of
    them comes near the wanted share of the text, the validation text is the tail of the text instead.

    Args:
        context: tokens of a sample; training and validation must each have at least one sample.
        tokenizer: the path of the tokenizer.json on this machine, if it differs from the spec's path.
        cache: the folder where packed tokens are kept for later runs; None: they are not kept.
    Raises: DataError: the source does not exist, has no text, or too little.
    """
    corpora = []
    for done, one in enumerate(spec.each):
        tell = None if on_progress is None else _part_of(on_progress, done, len(spec.each))
        corpora.append(_load_one(one, context, tokenizer, cache, tell))
    first, *others = corpora
    if not others:
        return first
    return replace(
        first,
        digest=BETWEEN_DIGESTS.join(corpus.digest for corpus in corpora),
        vocab_size=max(corpus.vocab_size for corpus in corpora),
        others=tuple(others),
        weights=tuple(one.weight for one in spec.sources),
    )


def _part_of(on_progress: OnProgress, done: int, parts: int) -> OnProgress:
    return lambda share: on_progress((done + share) / parts)


def _load_one(
    spec: DataSpec, context: int, tokenizer: Path | None, cache: Path | None, on_progress: OnProgress | None
) -> Corpus:
    is_hub = spec.source.startswith(HUB)
    files = None if is_hub else find_files(spec.source)
    where = spec.source if files is None else printable(str(files.root))
    is_plain = spec.tokenizer == BYTES and not spec.tokens_max and not spec.leaves_out_targets
    if files is not None and files.are_text and is_plain:
        corpus = _read_bytes(files, spec.validation_fraction)
    elif spec.format == "chat":
        return _read_chats(spec, context, tokenizer, cache, on_progress, where)
    else:
        vocabulary = load_tokenizer(spec, path=tokenizer)
        packed = pack(spec, vocabulary, cache=cache, on_progress=on_progress)
        corpus = _corpus_of(packed, vocabulary, start_D=packed.start_D if spec.masks_documents else None)
    shortest = min(corpus.num_training, corpus.text_N.numel() - corpus.num_training)
    if shortest < context + 1:
        unit = "bytes" if spec.tokenizer == BYTES else "tokens"
        few = (
            f"{where} has too little text: {corpus.text_N.numel()} {unit} leave {shortest} for training or "
            f"validation, a sample takes {context + 1}: set model.context lower, or give it more text"
        )
        raise DataError(corpus.account.behind(few))
    return corpus


def _read_chats(
    spec: DataSpec,
    context: int,
    tokenizer_path: Path | None,
    cache: Path | None,
    on_progress: OnProgress | None,
    where: str,
) -> Corpus:
    tokenizer = load_tokenizer(spec, path=tokenizer_path)
    is_bytes = spec.tokenizer == BYTES
    template = load_template(None if is_bytes else tokenizer_path or Path(spec.tokenizer).expanduser())
    packed = pack(spec, tokenizer, template=template, cache=cache, on_progress=on_progress)
    num, split = packed.about.num_documents, packed.about.num_training
    if num < 2:
        few = f"{where} has one conversation to learn: training and validation need one each"
        raise DataError(packed.about.account.behind(few))
    assert packed.counted_N is not None
    text_N, counted_N = torch.from_numpy(packed.token_N), torch.from_numpy(packed.counted_N)
    first = int(np.searchsorted(packed.start_D, split))
    parts = (slice(None, split), packed.start_D[:first]), (slice(split, None), packed.start_D[first:] - split)
    try:
        training, validation = (Packs(text_N[part], counted_N[part], starts_D, context) for part, starts_D in parts)
    except DataError as error:
        raise DataError(packed.about.account.behind(f"{where}: {error}")) from error
    return replace(_corpus_of(packed, tokenizer), packs=(training, validation))


def _corpus_of(packed: PackedText, tokenizer: Tokenizer, start_D: NDArray[np.int64] | None = None) -> Corpus:
    return Corpus(
        text_N=torch.from_numpy(packed.token_N),
        num_training=packed.about.num_training,
        num_files=packed.about.num_documents,
        digest=packed.about.digest,
        vocab_size=tokenizer.vocab_size,
        tokenizer_digest=tokenizer.digest,
        start_D=start_D,
        account=packed.about.account,
    )


def _read_bytes(files: Files, validation_fraction: float) -> Corpus:
    account = Account()
    named = read_texts(files, account)
    sizes = [len(text) + len(SEPARATOR) for _, text in named]
    wanted = int(sum(sizes) * validation_fraction)
    chosen = _whole_files(named, sizes, wanted)
    text_N = np.empty(sum(sizes), dtype=np.uint8)
    end = 0
    for i in sorted(range(len(named)), key=lambda i: i in chosen):
        for part in (named[i][1], SEPARATOR):
            text_N[end : end + len(part)] = np.frombuffer(part, dtype=np.uint8)
            end += len(part)
        named[i] = ("", b"")  # free it now, so that the text is never in memory twice
    num_training = end - (sum(sizes[i] for i in chosen) if chosen else wanted)
    return Corpus(
        text_N=torch.from_numpy(text_N),
        num_training=num_training,
        num_files=len(sizes),
        digest=blake3(num_training.to_bytes(8)).update(text_N.data).hexdigest(),
        vocab_size=int(text_N.max()) + 1,
        account=account,
    )


def _whole_files(named: Sequence[tuple[str, bytes]], sizes: Sequence[int], wanted: int) -> frozenset[int]:
    """Choose validation files of `wanted` / 2 to `wanted` bytes in all. Return their indices; empty: no choice."""
    order = sorted(range(len(named)), key=lambda i: blake3(named[i][0].encode(errors="surrogateescape")).digest())
    chosen: set[int] = set()
    left = wanted
    for i in order:
        if sizes[i] <= left:
            chosen.add(i)
            left -= sizes[i]
    return frozenset(chosen) if left <= wanted / 2 else frozenset()
