"""A model folder that somebody packed to harm whoever imports it: a line within a second, and nothing else happens."""

import json
import os
import re
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.deploy.ship.hf_config import config_of
from shoal.deploy.ship.import_model import import_model
from shoal.deploy.ship.model_folder import FILES_MAX, HEADER_BYTES_MAX
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import ModelSpec

MODEL = ModelSpec(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=32, context=16)
TENSORS = "model.safetensors"
SECRET = "root:x:0:0"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that can be imported."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = config_of(MODEL, dtype="float32", begin_of_text=None, end_of_text=None)
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for key in all_layer_keys(MODEL):
        tensors |= layer_layout(MODEL, key).views(init_layer(MODEL, key, 1))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / TENSORS)
    return folder


def refused(folder: Path) -> str:
    """What is said of it."""
    begun_s = time.process_time()
    with pytest.raises(LocalError) as error:
        import_model(folder)
    assert time.process_time() - begun_s < 1.0
    said = str(error.value)
    assert len(said.splitlines()) == 1
    assert len(said) < 700
    assert said.isprintable()
    assert SECRET not in said
    return said


def configured(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def with_header(folder: Path, header: object, *, data: int = 64, length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    with (folder / TENSORS).open("wb") as file:
        file.write(struct.pack("<Q", len(raw) if length is None else length) + raw)
        file.truncate(file.tell() + data)


def changed(folder: Path, change: Callable[[torch.Tensor], torch.Tensor], name: str = "lm_head.weight") -> None:
    tensors = load_file(folder / TENSORS)
    save_file(tensors | {name: change(tensors[name])}, folder / TENSORS)


def test_the_folder_itself_can_be_imported(model: Path) -> None:
    assert import_model(model).model == MODEL


@pytest.mark.parametrize("name", ["config.json", TENSORS, "tokenizer.json"])
def test_a_link_out_of_the_folder_is_not_followed(model: Path, name: str, tmp_path: Path) -> None:
    outside = tmp_path / "passwd"
    outside.write_text(SECRET)
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(outside)
    assert "leads out of the folder" in refused(model)
    (model / name).unlink()
    (model / name).symlink_to(os.path.relpath(outside, model))
    assert "leads out of the folder" in refused(model)


@pytest.mark.parametrize("name", ["config.json", TENSORS, "tokenizer.json"])
def test_a_pipe_a_folder_and_a_link_to_itself_are_no_files(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert "is no file" in refused(model)
    (model / name).unlink()
    (model / name).mkdir()
    assert "is no file" in refused(model)
    (model / name).rmdir()
    (model / name).symlink_to(name)
    assert "cannot read" in refused(model)


def test_a_hugging_face_cache_is_read_though_it_is_links(model: Path, tmp_path: Path) -> None:
    cached = tmp_path / "models--ours--small"
    (cached / "blobs").mkdir(parents=True)
    (cached / "snapshots" / "0123").mkdir(parents=True)
    for name in ("config.json", TENSORS):
        (model / name).rename(cached / "blobs" / name)
        (cached / "snapshots" / "0123" / name).symlink_to(Path("..", "..", "blobs", name))
    assert import_model(cached / "snapshots" / "0123").model == MODEL


def test_pickles_and_archives_are_never_opened(model: Path, tmp_path: Path) -> None:
    harm = f"cposix\nmkdir\n(V{tmp_path / 'harmed'}\ntR.".encode()  # a pickle that makes a folder when it is opened
    archive = tmp_path / "bomb.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data.pkl", b"\0" * (64 << 20))
    for raw in (harm, archive.read_bytes(), b"", b"\0" * 8, b"\xff" * 100):
        (model / TENSORS).write_bytes(raw)
        assert "safetensors" in refused(model)
        (model / TENSORS).unlink()
        (model / "pytorch_model.bin").write_bytes(raw)
        assert "its weights are pickled" in refused(model)
    assert not (tmp_path / "harmed").exists()


ABSURD = {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 64]}


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({"lm_head.weight": ABSURD}, None),
        ({"lm_head.weight": ABSURD | {"shape": [2**63, 2, 0]}}, None),
        ({"lm_head.weight": ABSURD | {"shape": [4] * 100_000}}, None),
        ({"lm_head.weight": ABSURD | {"shape": [-4, -4]}}, None),
        ({"lm_head.weight": ABSURD | {"shape": [4, 4], "data_offsets": [64, 0]}}, None),
        ({"lm_head.weight": ABSURD | {"shape": [4, 4], "data_offsets": [2**63, 2**64]}}, None),
        ({f"tensor {i}\n\x1b[2J": ABSURD | {"shape": [0], "data_offsets": [0, 0]} for i in range(1000)}, None),
        (b"{" + b"[" * 100_000, None),
        ({}, 2**64 - 1),
        ({}, 10_000_000),
        (b"{" + b" " * HEADER_BYTES_MAX, None),
    ],
    ids=["shape", "overflow", "dims", "negative", "backwards", "far", "names", "deep", "length", "longer", "huge"],
)
def test_a_header_that_lies(model: Path, header: object, length: int | None) -> None:
    with_header(model, header, length=length)
    refused(model)


def test_a_sparse_file_of_a_terabyte_is_not_read(model: Path) -> None:
    rows = 4_194_304
    configured(model, vocab_size=rows, hidden_size=65_536, head_dim=None)
    names = [name for key in all_layer_keys(MODEL) for name in layer_layout(MODEL, key).names]
    header = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    size = rows * 65_536 * 4  # a terabyte
    header["model.embed_tokens.weight"] = {"dtype": "F32", "shape": [rows, 65_536], "data_offsets": [0, size]}
    try:
        with_header(model, header, data=size)
    except OSError:
        pytest.skip("this disk has no files of a terabyte")
    assert re.search("of memory left|Cannot allocate memory", refused(model))


def test_files_without_number(model: Path) -> None:
    for number in range(FILES_MAX + 1):
        (model / f"model-{number}.safetensors").touch()
    assert f"shoal reads {FILES_MAX} at most" in refused(model)


def test_a_file_whose_name_speaks_to_the_terminal(model: Path) -> None:
    (model / TENSORS).rename(model / "a\n\x1b[2Jerror: run this.safetensors")
    with (model / "a\n\x1b[2Jerror: run this.safetensors").open("r+b") as file:
        file.truncate(4)
    assert "not in safetensors form" in refused(model)


HUGE = 10**15


@pytest.mark.parametrize(
    "fields",
    [
        *({name: HUGE} for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")),
        *({name: HUGE} for name in ("num_attention_heads", "num_key_value_heads", "head_dim")),
        {"head_dim": "aaaa", "num_attention_heads": 10**12},
        {"hidden_size": [1] * 1000},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 1e308},
        {"model_type": "mixtral", "num_local_experts": HUGE},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": HUGE},
        {"model_type": "x" * 100_000},
        {"model_type": ["llama"]},
        {"hidden_act": "\n\x1b[2J" * 1000},
        {"rope_parameters": {"rope_type": "\n" * 1000}},
        {"rope_parameters": {"rope_theta": "nan"}},
        {"rope_parameters": {"rope_theta": "inf"}},
        {"rope_parameters": {"rope_theta": [1]}},
        {"rms_norm_eps": {"a": 1}},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_config_beyond_all_bounds(model: Path, fields: dict[str, Any]) -> None:
    configured(model, **fields)
    refused(model)


@pytest.mark.parametrize(
    "raw",
    [b"[" * 1_000_000, b'{"a":' * 100_000, b" " * (5 << 20), b"\xff", b"{}", b"[]", b'{"vocab_size": ' + b"9" * 5000],
)
def test_a_config_that_is_none(model: Path, raw: bytes) -> None:
    (model / "config.json").write_bytes(raw)
    refused(model)


def test_weights_that_are_none(model: Path) -> None:
    changed(model, lambda weight: weight.long())
    assert "I64" in refused(model)
    changed(model, lambda weight: torch.full(weight.shape, torch.nan))
    assert "no numbers" in refused(model)
    changed(model, lambda weight: torch.zeros((1,) * 40))
    assert "must have shape" in refused(model)


@pytest.mark.parametrize("raw", [b"[" * 1_000_000, b"\0" * 1000, b"{}", b"(dp0\n.", b'{"model": []}'])
def test_a_tokenizer_that_is_none(model: Path, raw: bytes) -> None:
    pytest.importorskip("tokenizers")
    (model / "tokenizer.json").write_bytes(raw)
    refused(model)
