"""What is said of a source that is damaged or not what its owner takes it for, word for word."""

import codecs
import gzip
import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from shoal.peer.data.corpus import load_corpus
from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec

TEXTS = [f"the {i}th fish schwimmt größer" for i in range(30)]
TALKS = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"fish {i}"}] for i in range(30)]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f"}}]}
ASKED = {"role": "user", "content": "why?"}


def lines(*rows: object, good: bool = True) -> bytes:
    """Each row as JSON, or as it stands where it is bytes; 30 good texts stand before them."""
    told: list[object] = [{"text": text} for text in TEXTS] if good else []
    return b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in [*told, *rows]) + b"\n"


def chats(*messages: list[dict[str, object]], good: bool = True, **more: object) -> bytes:
    told = [{"messages": talk} for talk in TALKS] if good else []
    return lines(*told, *({"messages": talk} | more for talk in messages), good=False)


def prose(*bad: bytes) -> bytes:
    return "\n".join(TEXTS).encode() + b"\n" + b"\n".join(bad) + b"\n"


def parquet(**columns: object) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


TEXT_CASES = [
    ("bad-byte.txt", prose(b"caf\xe9"), ["left out of it: 1 line: not UTF-8 text (line 31)"]),
    ("nul.txt", prose(b"a\0b", b"fish", b"c\0"), ["left out of it: 2 lines: not UTF-8 text (line 31, line 33)"]),
    ("mark.txt", codecs.BOM_UTF8 + prose(), []),
    ("utf-16.txt", prose().decode().encode("utf-16"), []),
    (
        "no-mark.txt",
        "\n".join(["fish"] * 9).encode("utf-16-le"),
        "cannot train on IT: it is UTF-16 without its byte order mark; save it as UTF-8",
    ),
    (
        "latin.txt",
        "größer\nkleiner\nschöner\n".encode("latin-1"),
        "cannot train on IT: it is not UTF-8 (perhaps Latin-1 or Windows-1252); "
        "convert it with iconv -f WINDOWS-1252 -t UTF-8",
    ),
    ("packed.txt.gz", gzip.compress(prose()), "cannot train on IT: it is gzip; unpack it"),
    (
        "report.docx",
        b"PK\x03\x04" + bytes(90),
        "cannot train on IT: it is zip (as are .docx, .xlsx and .epub); extract its text",
    ),
    ("model.bin", bytes(range(9)) * 90, "cannot train on IT: it is binary data, not text"),
    (
        "rows.txt",
        lines(),
        "cannot train on IT: it is JSON lines in a file without that suffix; rename it to end in .jsonl",
    ),
    ("empty.txt", b"", "IT has no text"),
]

JSON_CASES = [
    ("mark.jsonl", codecs.BOM_UTF8 + lines(), []),
    ("utf-16.jsonl", lines().decode().encode("utf-16"), []),
    ("packed.jsonl", gzip.compress(lines()), []),
    ("array.json", json.dumps([{"text": text} for text in TEXTS], indent=1).encode(), []),
    ("strings.json", json.dumps(TEXTS).encode(), []),
    ("lines.json", lines(), []),
    ("torn.jsonl", lines(b'{"text": "a', b'{"text": "b"}'), ["left out of it: 1 row: not JSON (line 31)"]),
    ("byte.jsonl", lines(b'{"text": "caf\xe9"}'), ["left out of it: 1 row: not UTF-8 (line 31)"]),
    (
        "surrogate.jsonl",
        lines(b'{"text": "\\ud800"}', b'{"text": "b", "id": "\\ud800"}'),
        ["left out of it: 1 row: a lone surrogate, or a byte that is not UTF-8 (line 31)"],
    ),
    (
        "mixed.jsonl",
        lines({"text": 3}, {"text": None}, {"text": ""}, {}, {"id": 1}, [1], {"text": ""}, {"text": ""}),
        [
            "left out of it: 4 rows: an empty text (line 32, line 33, line 37, …)",
            "left out of it: 1 row: no text: Expected `str | null`, got `int` - at `$.text` (line 31)",
            "left out of it: 1 row: no field `text` (line 34)",
            "left out of it: 1 row: no field `text`, but id (line 35)",
            "left out of it: 1 row: not a JSON object (line 36)",
        ],
    ),
    (
        "other-field.jsonl",
        lines({"id": 1, "story": "a"}, {"id": 2, "story": "b"}, good=False),
        "cannot train on IT: none of its first 2 rows can be learnt (line 1: no field `text`, but id, story); "
        "set `field` below [data] to the one that has the text",
    ),
    (
        "chats.jsonl",
        chats(),
        "cannot train on IT: none of its first 30 rows can be learnt (line 1: a chat (messages)); "
        'set format = "chat" below [data]',
    ),
    (
        "chats.json",
        json.dumps([{"prompt": "a", "completion": "b"}] * 500).encode(),
        "cannot train on IT: none of its first 100 rows can be learnt (row 1: a chat (prompt, completion)); "
        'set format = "chat" below [data]',
    ),
    (
        "object.json",
        json.dumps({"data": [{"text": "a"}]}, indent=1).encode(),
        "cannot train on IT: its only row cannot be learnt (row 1: no field `text`, but data); "
        "set `field` below [data] to the one that has the text",
    ),
    ("nonsense.json", b"fish\n" * 9, "cannot train on IT: its only row cannot be learnt (row 1: not JSON)"),
    (
        "cut.json",
        json.dumps([{"text": text} for text in TEXTS]).encode()[:-9],
        "IT is truncated or damaged after row 29: not JSON",
    ),
    (
        "cut.jsonl.gz",
        gzip.compress(lines())[:-20],
        "cannot read IT: Compressed file ended before the end-of-stream marker was reached",
    ),
    ("empty.jsonl", b"\n\n", "IT has no text"),
    ("empty.json", b"[]", "IT has no text"),
]

TABLE_CASES = [
    ("good.csv", ("id,text\r\n" + "".join(f'{i},"{t}, ""so"""\r\n' for i, t in enumerate(TEXTS))).encode(), []),
    (
        "excel.csv",
        codecs.BOM_UTF8 + ("id;text\r\n" + "".join(f"{i};{t}\r\n" for i, t in enumerate(TEXTS))).encode(),
        [],
    ),
    ("good.tsv", ("id\ttext\n" + "".join(f"{i}\t{t}\n" for i, t in enumerate(TEXTS))).encode(), []),
    (
        "cells.csv",
        ("id,text\n" + "".join(f"{i},{t}\n" for i, t in enumerate(TEXTS)) + "1,a,b\n1,\n\n1,c\n").encode(),
        [
            "left out of it: 1 row: 3 cells, but the first line has 2 (line 32)",
            "left out of it: 1 row: an empty text (line 33)",
        ],
    ),
    (
        "bytes.csv",
        ("id,text\n" + "".join(f"{i},{t}\n" for i, t in enumerate(TEXTS))).encode() + b"1,caf\xe9\n" + b'1,"a"b\n',
        [
            "left out of it: 1 row: a lone surrogate, or a byte that is not UTF-8 (line 32)",
            "left out of it: 1 row: a quote inside a cell, which must be doubled (line 33)",
        ],
    ),
    (
        "other.csv",
        b"id,review\n1,good\n2,bad\n",
        "cannot train on IT: none of its first 2 rows can be learnt (line 2: no field `text`, but id, review); "
        "set `field` below [data] to the one that has the text",
    ),
    (
        "open.csv",
        ('id,text\n1,"' + "\n".join(TEXTS)).encode(),
        "IT, line 2: a quoted cell is never closed",
    ),
    (
        "other.parquet",
        parquet(id=[1, 2], content=["a", "b"]),
        "cannot train on IT: none of its first 2 rows can be learnt (row 1: no field `text`, but id, content); "
        "set `field` below [data] to the one that has the text",
    ),
    (
        "numbers.parquet",
        parquet(text=[1, 2]),
        "cannot train on IT: none of its first 2 rows can be learnt "
        "(row 1: no text: Expected `str | null`, got `int` - at `$.text`)",
    ),
    ("nulls.parquet", parquet(text=[*TEXTS, None, ""]), ["left out of it: 2 rows: an empty text (row 31, row 32)"]),
]

CHAT_CASES = [
    ("call.jsonl", chats([ASKED, CALL]), ["left out of it: 1 row: `tool_calls`, which are not read yet (line 31)"]),
    (
        "tools.jsonl",
        chats(TALKS[0], tools=[{"a": 1}]),
        ["left out of it: 1 row: `tools`, which are not read yet (line 31)"],
    ),
    (
        "thoughts.jsonl",
        chats([ASKED, {"role": "assistant", "content": "so", "reasoning_content": "hm"}]),
        ["left out of it: 1 row: `reasoning_content`, which is not read yet (line 31)"],
    ),
    (
        "empty.jsonl",
        chats(*([ASKED, {"role": "assistant", "content": text}] for text in ("", None, " \n", []))),
        ["left out of it: 4 rows: an empty answer (line 31, line 32, line 33, …)"],
    ),
    (
        "no-answer.jsonl",
        chats([ASKED], [ASKED, {"role": "assistant", "content": "no", "weight": 0}]),
        ["left out of it: 2 rows: no answer to learn (line 31, line 32)"],
    ),
    (
        "weight.jsonl",
        chats([ASKED, {"role": "assistant", "content": "no", "weight": 0.5}]),
        ["left out of it: 1 row: a `weight` that is neither 0 nor 1 (line 31)"],
    ),
    (
        "image.jsonl",
        chats([{"role": "user", "content": [{"type": "image"}]}, *TALKS[0][1:]]),
        ["left out of it: 1 row: a part of type 'image', and only text can be learnt (line 31)"],
    ),
    (
        "role.jsonl",
        chats([{"content": "hello"}]),
        ["left out of it: 1 row: no chat: Object missing required field `role` - at `$.messages[]` (line 31)"],
    ),
    (
        "words.jsonl",
        chats() + b'{"messages": "hello"}\n',
        ["left out of it: 1 row: no chat: Expected `array | null`, got `str` - at `$.messages` (line 31)"],
    ),
    (
        "all-calls.jsonl",
        chats([ASKED, CALL], [ASKED, CALL], good=False),
        "cannot train on IT: none of its first 2 rows can be learnt (line 1: `tool_calls`, which are not read yet)",
    ),
    (
        "one.jsonl",
        chats(TALKS[0], [ASKED, CALL], good=False),
        "IT has one conversation to learn: training and validation need one each; "
        "left out of it: 1 row: `tool_calls`, which are not read yet (line 2)",
    ),
    (
        "texts.jsonl",
        lines(),
        "cannot train on IT: none of its first 30 rows can be learnt (line 1: no `messages`, nor `prompt` and "
        '`completion`, but text); for texts, remove format = "chat" below [data]',
    ),
    (
        "sharegpt.json",
        json.dumps([{"conversations": [{"from": "human", "value": "a"}]}] * 3).encode(),
        "cannot train on IT: none of its first 3 rows can be learnt (row 1: no `messages`, nor `prompt` and "
        "`completion`, but conversations); shoal reads chats from these fields only: rename yours",
    ),
    (
        "half.csv",
        b"prompt,completion\n" + b"".join(b"%d?,%d!\n" % (i, i) for i in range(30)) + b"why?,\n",
        ["left out of it: 1 row: an empty answer (line 32)"],
    ),
    ("array.json", json.dumps([{"messages": talk} for talk in TALKS]).encode(), []),
    (
        "story.txt",
        prose(),
        "cannot train on IT: it is text, but a chat needs rows of JSON, CSV, Parquet or a data set; "
        'for text, remove format = "chat" below [data]',
    ),
]


@pytest.mark.parametrize(
    ("name", "data", "said", "is_chat"),
    [
        *((*case, False) for case in (*TEXT_CASES, *JSON_CASES, *TABLE_CASES)),
        *((*case, True) for case in CHAT_CASES),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[:20] and " " not in value else "",
)
def test_what_is_wrong_with_a_source_is_one_exact_sentence(
    tmp_path: Path, name: str, data: bytes, said: str | list[str], is_chat: bool
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    spec = DataSpec(source=str(path), format="chat" if is_chat else "text", validation_fraction=0.2)
    if isinstance(said, str):
        with pytest.raises(DataError) as caught:
            load_corpus(spec, context=64)
        assert str(caught.value).replace(str(path), "IT") == said
        return
    corpus = load_corpus(spec, context=64, cache=tmp_path / "cache")
    assert list(corpus.account.sentences("it")) == said
    read = bytes(corpus.text_N.tolist()).decode()
    assert all(
        (f"fish {i}" if name.endswith(".jsonl") else f"{i}") in read if is_chat else TEXTS[i] in read for i in range(30)
    )
    assert "\ufeff" not in read
    again = load_corpus(spec, context=64, cache=tmp_path / "cache")
    assert (again.account, again.digest) == (corpus.account, corpus.digest)
