"""Writes a snapshot as a folder for `transformers`, or its adapters as a folder for `peft` (`shoal export`).

One layer is in memory at a time. The folder has a hidden name until it is complete.
"""

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from shoal.deploy.base.disk_error import or_say
from shoal.deploy.ship.base_model import BaseModel, adapters_for_peft, base_of, whole_layer
from shoal.deploy.ship.found_snapshot import FoundSnapshot, use_first_sound
from shoal.deploy.ship.hf_config import config_of
from shoal.deploy.ship.model_card import card_files
from shoal.deploy.ship.model_folder import own_file, read_bytes, read_json
from shoal.peer.data.chat import CHATML, TEMPLATE_FILE
from shoal.peer.data.packing import OnProgress
from shoal.peer.data.tokenizer import BYTES, byte_tokenizer_json, load_tokenizer, read_tokenizer
from shoal.peer.model.frozen import adapter_of
from shoal.peer.model.layout import layer_layout
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import RunSpec
from shoal.protocol.tensors import HEAD_MATRIX

_CARRIED: Final = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE)
"""Names of files that an export copies from the folder of tokenizer.json, because they belong to the tokenizer."""
_OF_CONFIG: Final = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""Fields copied from the initial model's config, as training does not change them; a too short context is not."""
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Form = Literal["hf", "peft"]


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """A folder written by an export: its path, the model version in it, and its size."""

    folder: str
    run: str
    era: int
    version: int
    parameters: int
    bytes: int
    shards: int
    form: Form = "hf"


def export(
    snapshots: Sequence[FoundSnapshot],
    out: Path,
    *,
    form: Form | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    base: Path | None = None,
    shard_bytes: int = 5_000_000_000,
    tokenizer: Path | None = None,
    on_progress: OnProgress = lambda share: None,
) -> Exported:
    """Write the first undamaged snapshot to the new folder `out`.

    Args:
        form: "hf": a whole model, with adapters merged; "peft": only adapters; None: "peft" if the run has adapters.
        dtype: the dtype of the exported weights; training has float32.
        base: the user's path of the adapters' base model; None: search for it.
        shard_bytes: the most bytes in a file of weights; only a single larger tensor makes a larger file.
        tokenizer: path of the run's tokenizer.json; None: the path in the spec.
    Raises: LocalError: `out` exists, the disk is full, or all snapshots are damaged. DataError: there is no tokenizer.
    """
    if out.exists():
        raise LocalError(f"{out} is there already: name a folder that is not")
    if form == "peft" and snapshots and snapshots[0].spec.adapter is None:
        raise LocalError("this run trains all weights of its model and has no adapters: leave --format peft out")

    def write_one(snapshot: FoundSnapshot) -> Exported:
        wanted = form or ("hf" if snapshot.spec.adapter is None else "peft")
        needs_base = wanted == "hf" or adapter_of(snapshot.spec).kind == "dora"
        beside = base_of(snapshot, base) if needs_base else None
        files = _small_files(snapshot.spec, dtype, tokenizer)
        files |= card_files(snapshot, library="peft" if wanted == "peft" else "transformers")
        if wanted == "peft":
            del files["config.json"], files["generation_config.json"]
            files["adapter_config.json"] = _json(_adapter_config(snapshot.spec))
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.parent / f".unfinished-{out.name}-{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            for name, data in files.items():
                (unfinished / name).write_bytes(data)
            if wanted == "peft":
                written = _write_adapters(snapshot, beside, unfinished, DTYPES[dtype], on_progress)
            else:
                written = _write_weights(snapshot, beside, unfinished, DTYPES[dtype], on_progress, shard_bytes)
            unfinished.rename(out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return Exported(
            folder=str(out),
            run=snapshot.run,
            era=snapshot.era,
            version=snapshot.version,
            parameters=written[0] // DTYPES[dtype].itemsize,
            bytes=written[0],
            shards=written[1],
            form=wanted,
        )

    with or_say(f"cannot write {out}"):
        return use_first_sound(snapshots, write_one)


def _small_files(spec: RunSpec, dtype: str, tokenizer_path: Path | None) -> dict[str, bytes]:
    """Return {file name: content} of all files in the folder but the weights and the model card."""
    tokenizer = load_tokenizer(spec.data, path=tokenizer_path)
    if spec.data.tokenizer == BYTES:
        vocabulary = byte_tokenizer_json()
    else:
        vocabulary = read_tokenizer(tokenizer_path or Path(spec.data.tokenizer).expanduser())
    begin, end = next(iter(tokenizer.beginning), None), tokenizer.end_of_text
    begin_text, end_text = (None if token is None else tokenizer.decode([token]) for token in (begin, end))
    tables: dict[str, dict[str, Any]] = {
        "config.json": config_of(spec.model, dtype=dtype, begin_of_text=begin, end_of_text=end),
        "generation_config.json": {
            "bos_token_id": begin,
            "eos_token_id": end,
            "do_sample": True,
            "temperature": 0.8,
            "top_p": 0.95,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": spec.model.context,
            "clean_up_tokenization_spaces": False,
            "bos_token": begin_text,
            "eos_token": end_text,
        },
    }
    if spec.data.tokenizer == BYTES:
        carried = {TEMPLATE_FILE: CHATML.encode()} if spec.data.has_chats else {}
    else:
        folder = (tokenizer_path or Path(spec.data.tokenizer).expanduser()).parent
        carried = _carried(folder, began_there=bool(spec.initial.digests))
        tables["config.json"] |= _config_carried(spec, folder)
    return {"tokenizer.json": vocabulary} | {name: _json(table) for name, table in tables.items()} | carried


def _carried(folder: Path, *, began_there: bool) -> dict[str, bytes]:
    """Return {file name: content} of the files in `folder` that belong to its tokenizer.json.

    Args: began_there: True: `folder` has the run's initial weights, so its generation config is added.
    Raises: LocalError: a file cannot be read.
    """
    names = (*_CARRIED, "generation_config.json") if began_there else _CARRIED
    return {name: read_bytes(own_file(folder, name)) for name in names if os.path.lexists(folder / name)}


def _config_carried(spec: RunSpec, folder: Path) -> dict[str, Any]:
    if not spec.initial.digests or not os.path.lexists(folder / "config.json"):
        return {}
    config = read_json(own_file(folder, "config.json"))
    found = {name: config[name] for name in _OF_CONFIG if config.get(name) is not None}
    longest = found.get("max_position_embeddings")
    if not isinstance(longest, int) or longest < spec.model.context:
        found.pop("max_position_embeddings", None)
    return found


def _adapter_config(spec: RunSpec) -> dict[str, Any]:
    adapter = adapter_of(spec)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _model_name(spec.initial.source),
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.targets_in(spec.model)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": adapter.kind == "dora",
    }


def _model_name(source: str) -> str:
    """Return the base's name on the Hugging Face hub if the path `source` is in the hub's cache, else `source`."""
    cached = next((part for part in Path(source).parts if part.startswith("models--")), None)
    return source if cached is None else cached.removeprefix("models--").replace("--", "/", 1)


def _write_adapters(
    snapshot: FoundSnapshot, base: BaseModel | None, folder: Path, dtype: torch.dtype, on_progress: OnProgress
) -> tuple[int, int]:
    """Write the adapters' file. Returns: (bytes of all tensors, number of files)."""
    tensors: dict[str, Tensor] = {}
    for number, key in enumerate(snapshot.keys, 1):
        views = adapters_for_peft(snapshot.spec, key, snapshot.read(key), base)
        tensors |= {f"base_model.model.{name}": view.to(dtype, copy=True) for name, view in views.items()}
        on_progress(number / len(snapshot.keys))
    file = folder / "adapter_model.safetensors"
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    shutil.copymode(folder / "adapter_config.json", file)  # safetensors makes it readable for its owner only
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()), 1


def _write_weights(
    snapshot: FoundSnapshot,
    base: BaseModel | None,
    folder: Path,
    dtype: torch.dtype,
    on_progress: OnProgress,
    shard_bytes: int,
) -> tuple[int, int]:
    """Write the weights' files. Returns: (bytes of all tensors, number of files)."""
    spec = snapshot.spec
    layouts = [layer_layout(spec.model.whole, key) for key in snapshot.keys]
    sizes = {
        name: math.prod(shape) * dtype.itemsize
        for layout in layouts
        for name, shape in zip(layout.names, layout.shapes, strict=True)
        if not _is_embedding_again(spec, name)
    }
    shards = _cut(sizes, shard_bytes)
    total, done = sum(sizes.values()), 0
    tensors = _tensors(snapshot, base, dtype)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        content: dict[str, Tensor] = {}
        for name in names:
            found, content[name] = next(tensors)
            assert found == name
            done += sizes[name]
            on_progress(done / total)
        safetensors.torch.save_file(content, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file)  # safetensors makes it readable for its owner only
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_bytes(_json(index))
    return total, len(shards)


def _tensors(snapshot: FoundSnapshot, base: BaseModel | None, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor), layer by layer. Each tensor is a copy, so that the layer can be freed."""
    spec = snapshot.spec
    for key in snapshot.keys:
        whole_N = whole_layer(spec, key, snapshot.read(key), base)
        for name, view in layer_layout(spec.model.whole, key).views(whole_N).items():
            if not _is_embedding_again(spec, name):
                yield name, view.to(dtype, copy=True)


def _is_embedding_again(spec: RunSpec, name: str) -> bool:
    """True if `name` is the head of a tied model; an export stores this matrix only once, as the embedding."""
    return spec.model.tied and name == HEAD_MATRIX


def _cut(sizes: dict[str, int], shard_bytes: int) -> list[list[str]]:
    """Distribute tensors, in order, over files of at most `shard_bytes`; a larger tensor gets its own file. Return the
    tensors' names, file by file. Args: sizes: name -> bytes."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, num_bytes in sizes.items():
        if shards[-1] and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards


def _json(table: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(table)) + b"\n"
