"""Vocabularies: bytes, or the tokens of a tokenizer.json.

Decoding an encoded text gives the text back. Unless `special` is set, no part of a text becomes a special token.
"""

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec

BYTES: Final = "bytes"
END_OF_TEXT: Final = "<|endoftext|>"
_ENDS: Final = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")
"""Names of the token that ends a document; the first that a vocabulary has is used."""
FILE_BYTES_MAX: Final = 256 << 20
"""The size limit of a tokenizer.json, far above any real one; the path may come from a stranger's run spec."""

Tokens = NDArray[Any]
"""uint8, uint16 or int32 [N], depending on the size of the vocabulary."""
Places = NDArray[np.int64]
"""int64 [N, 2], the characters [begin, end) that each token stands for."""


class ByteTokenizer:
    """A vocabulary in which token b is byte b. A model may have more than these 256 tokens; the others mean nothing."""

    vocab_size = 256
    digest = ""
    """BLAKE3 of the tokenizer.json; empty here, since there is none."""
    end_of_text: int | None = None
    dtype: np.dtype[Any] = np.dtype(np.uint8)
    beginning: Sequence[int] = ()
    """The tokens that the vocabulary puts before a document or a prompt; often none."""
    separator: Sequence[int] = b"\n"
    """The tokens put after a document: the vocabulary's end of text if it has one, else a newline."""

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[Tokens]:
        return [np.frombuffer(text.encode(errors="replace"), dtype=np.uint8) for text in texts]

    def encode_placed(self, texts: Sequence[str], *, special: bool = False) -> list[tuple[Tokens, Places]]:
        placed = []
        for tokens in self.encode(texts):
            begin = np.cumsum((tokens & 0xC0) != 0x80, dtype=np.int64) - 1  # the other bytes continue a character
            placed.append((tokens, np.stack((begin, begin + 1), axis=1)))
        return placed

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(_byte(token) for token in tokens).decode(errors="replace")


class FileTokenizer:
    """The vocabulary of a tokenizer.json with the content `data`; error messages call it `name`. It has the members of
    `ByteTokenizer`. Raises: DataError: the tokenizers library is not installed, or cannot read the file."""

    def __init__(self, data: bytes, *, name: str) -> None:
        library = _library(name)
        try:
            self._tokenizer = library.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{name} is not a tokenizer.json: {str(error).splitlines()[0]}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        tokens = self._tokenizer.get_vocab(with_added_tokens=True)
        if not tokens:
            raise DataError(f"{name} has no tokens")
        self.vocab_size = max(tokens.values()) + 1
        self.digest = blake3(data).hexdigest()
        self.end_of_text: int | None = next((tokens[end] for end in _ENDS if end in tokens), None)
        self.dtype: np.dtype[Any] = _dtype(self.vocab_size)
        around = self._tokenizer.encode("", add_special_tokens=True).ids  # some tokenizers add an end of text, too
        self.beginning: Sequence[int] = [token for token in around if token != self.end_of_text]
        self.separator: Sequence[int] = (
            self.encode(["\n"])[0].tolist() if self.end_of_text is None else [self.end_of_text]
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[Tokens]:
        """Encode texts. If `special`, the name of a special token becomes that token; not for strangers' texts."""
        self._tokenizer.encode_special_tokens = not special
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=self.dtype) for one in encoded]

    def encode_placed(self, texts: Sequence[str], *, special: bool = False) -> list[tuple[Tokens, Places]]:
        """Encode texts. Return the tokens of each text, and the place of each token in the text."""
        self._tokenizer.encode_special_tokens = not special
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(one.ids, dtype=self.dtype), np.array(one.offsets, dtype=np.int64).reshape(-1, 2))
            for one in encoded
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens. Invalid UTF-8 becomes U+FFFD; special tokens become their names."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


Tokenizer = ByteTokenizer | FileTokenizer


class Detokenizer:
    """Converts tokens to text one at a time; an incomplete character is held back until its last byte has come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: list[int] = []
        self._read = 0
        """The first `_read` of `_tokens` have been returned as text. They are kept because a token may decode
        differently at the start of a text."""

    def feed(self, token: int) -> str:
        if isinstance(self._tokenizer, ByteTokenizer):
            return self._bytes.decode(_byte(token))
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[: self._read])
        text = self._tokenizer.decode(self._tokens)
        # An unfinished character has at most four bytes, at worst one token each.
        if text.endswith("\ufffd") and len(self._tokens) - self._read < 8:
            return ""
        self._tokens = self._tokens[self._read :]
        self._read = len(self._tokens)
        return text[len(before) :]


def load_tokenizer(spec: DataSpec, *, path: Path | None = None) -> Tokenizer:
    """Load the vocabulary of a run: from the tokenizer.json at `path`, or at the spec's path if `path` is None.

    Raises: DataError: the file cannot be read, or is not the tokenizer.json that the spec names.
    """
    if spec.tokenizer == BYTES:
        return ByteTokenizer()
    data = read_tokenizer(path or Path(spec.tokenizer).expanduser())
    if spec.tokenizer_digest not in ("", blake3(data).hexdigest()):
        raise DataError(f"{path or spec.tokenizer} is not the tokenizer that this run uses")
    return FileTokenizer(data, name=str(path or spec.tokenizer))


def read_tokenizer(path: Path) -> bytes:
    """Read a tokenizer.json. Raises: DataError: the file does not exist, cannot be read, or is too large."""
    try:
        if not path.is_file():
            raise DataError(f"there is no tokenizer {path}")
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {path}: {error.strerror or error}") from error
    if len(data) > FILE_BYTES_MAX:
        raise DataError(f"{path} is too large to be a tokenizer.json")
    return data


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a byte-level BPE vocabulary, which encodes any text without loss. Returns: the content of a tokenizer.json.

    Raises: DataError: the tokenizers library is not installed. ValueError: `vocab_size` is below 257, too small for all
        bytes and the end of text.
    """
    if vocab_size < 257:
        raise ValueError(f"a vocabulary has at least 257 tokens (bytes and the end of a text), not {vocab_size}")
    library = _library("`shoal tokenizer train`")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str(pretty=True)).encode()


def byte_tokenizer_json() -> bytes:
    """Return a tokenizer.json in which token b is byte b: BPE without merges, with each byte written as the printable
    character that GPT-2 uses for it."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    table: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_letters())},
            "merges": [],
        },
    }
    return msgspec.json.format(msgspec.json.encode(table))


def _letters() -> list[str]:
    """Return the character of each byte: itself if it is printable Latin-1, else the next unused one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _byte(token: int) -> bytes:
    """Return the byte of a token; for a token above 255 return 0xFF, which no UTF-8 text contains."""
    return bytes((min(token, 0xFF),))


def _dtype(vocab_size: int) -> np.dtype[Any]:
    if vocab_size <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def _library(user: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(f"{user} needs the tokenizers library: pip install 'shoal[data]'") from error
    return tokenizers
