"""Vocabularies: what is encoded comes back, and a byte is its own token everywhere."""

import sys
from pathlib import Path

import pytest
import tokenizers
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    Detokenizer,
    FileTokenizer,
    Tokenizer,
    byte_tokenizer_json,
    load_tokenizer,
    train_bpe,
)
from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec

TEXTS = [f"the {i % 7}th fish of shoal {i % 13} schwimmt größer\n" for i in range(200)]
BPE_JSON = train_bpe(TEXTS, 290)
BPE = FileTokenizer(BPE_JSON, name="bpe")
BYTES_FILE = FileTokenizer(byte_tokenizer_json(), name="bytes")
AWKWARD = st.text(alphabet="fish 7\n\t\0\x7f\x85ßé€漢😀e\u0301\u200b\u2028\ufeff", max_size=40)
"""One to four bytes, combining, invisible, and what the vocabulary has merges for."""


@given(text=AWKWARD)
def test_a_byte_is_its_own_token_in_the_file_that_others_read(text: str) -> None:
    (tokens,) = BYTES_FILE.encode([text])
    assert tokens.tolist() == list(text.encode())
    assert BYTES_FILE.decode(tokens.tolist()) == text


def test_every_byte_has_a_token_also_where_no_text_has_it() -> None:
    library = tokenizers.Tokenizer.from_str(byte_tokenizer_json().decode())
    assert library.get_vocab_size() == 256
    names = [library.id_to_token(byte) for byte in range(256)]
    assert len(set(names)) == 256
    assert library.decode([0x61, 0xFF, 0xC3, 0x62]) == "a\ufffd\ufffdb"


@pytest.mark.parametrize("tokenizer", [BPE, BYTES_FILE, ByteTokenizer()], ids=["bpe", "byte file", "bytes"])
@given(texts=st.lists(AWKWARD, min_size=1, max_size=4))
def test_what_is_encoded_comes_back(tokenizer: Tokenizer, texts: list[str]) -> None:
    encoded = tokenizer.encode(texts)
    assert [tokenizer.decode(tokens.tolist()) for tokens in encoded] == texts
    assert all(tokens.dtype == tokenizer.dtype for tokens in encoded)


@pytest.mark.parametrize("tokenizer", [BPE, BYTES_FILE, ByteTokenizer()], ids=["bpe", "byte file", "bytes"])
@given(text=AWKWARD)
def test_a_text_told_token_by_token_is_the_text_and_never_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.feed(int(token)) for token in tokenizer.encode([text])[0]]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_what_never_becomes_a_character_is_told_as_such() -> None:
    assert "".join(map(Detokenizer(ByteTokenizer()).feed, [0x61, 0xC3, 0x62, 700, 0x63])) == "a\ufffdb\ufffdc"
    detokenizer = Detokenizer(BYTES_FILE)
    assert "".join(map(detokenizer.feed, [0x61, *[0xC3] * 20, 0x62])).count("\ufffd") == 20


def test_a_vocabulary_that_leaves_out_the_first_space_keeps_those_between_words() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    words.decoder = tokenizers.decoders.Metaspace()
    tokenizer = FileTokenizer(words.to_str().encode(), name="words")
    assert "".join(map(Detokenizer(tokenizer).feed, tokenizer.encode(["a b a b"])[0].tolist())) == "a b a b"


def test_training_makes_a_vocabulary_of_the_wanted_size_that_shortens_its_text() -> None:
    assert BPE.vocab_size == 290
    assert BPE.dtype == "uint16"
    assert train_bpe(TEXTS, 290) == BPE_JSON
    assert len(BPE.encode([TEXTS[0]])[0]) < len(TEXTS[0].encode()) / 2
    with pytest.raises(ValueError, match="at least 257"):
        train_bpe(TEXTS, 256)


def test_a_text_cannot_end_itself_but_a_prompt_may() -> None:
    assert BPE.end_of_text is not None
    assert list(BPE.separator) == [BPE.end_of_text]
    text = f"a{END_OF_TEXT}b"
    (as_text,), (as_special,) = BPE.encode([text]), BPE.encode([text], special=True)
    assert BPE.end_of_text not in as_text
    assert BPE.end_of_text in as_special
    assert BPE.decode(as_text.tolist()) == BPE.decode(as_special.tolist()) == text


def test_a_vocabulary_without_an_end_separates_by_a_newline() -> None:
    assert BYTES_FILE.end_of_text is None
    assert list(BYTES_FILE.separator) == [10]


def test_the_one_that_the_run_names_is_loaded_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(BPE_JSON)
    digest = blake3(BPE_JSON).hexdigest()
    assert load_tokenizer(DataSpec(tokenizer=str(path), tokenizer_digest=digest)).digest == digest
    elsewhere = DataSpec(tokenizer="/nowhere/tokenizer.json", tokenizer_digest=digest)
    assert load_tokenizer(elsewhere, path=path).digest == digest
    with pytest.raises(DataError, match="is not the tokenizer that this run uses"):
        load_tokenizer(DataSpec(tokenizer=str(path), tokenizer_digest="00"))
    with pytest.raises(DataError, match="there is no tokenizer /nowhere"):
        load_tokenizer(elsewhere)
    assert isinstance(load_tokenizer(DataSpec()), ByteTokenizer)


def test_a_file_that_is_no_tokenizer_is_one_clear_line() -> None:
    with pytest.raises(DataError, match=r"x\.json is not a tokenizer\.json") as caught:
        FileTokenizer(b'{"version": 3}', name="x.json")
    assert "\n" not in str(caught.value)


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'shoal\[data\]'"):
        FileTokenizer(BPE_JSON, name="x")
