"""Makes a run with the weights of a Hugging Face folder as initial weights (`shoal import`).

Nothing is copied: the run spec names the folder and has a digest of every layer. When a peer asks for layers, the host
reads them from the folder, and the peer checks the digests. So the folder must stay in place until the run has started.
In a run with adapters the digests are those of the base's layers as the run stores them. A peer that already has the
same model on its disk compares the digests, and need not download it.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import safetensors
from torch import Tensor

from shoal.deploy.base.words import listed, printable
from shoal.deploy.ship.hf_config import is_tied, model_of
from shoal.deploy.ship.model_folder import cached_models, name_and_licence, own_file, read_json, tensor_files
from shoal.peer.compute.cgroup import free_memory_bytes
from shoal.peer.data.packing import OnProgress
from shoal.peer.data.tokenizer import BYTES, FileTokenizer, byte_tokenizer_json, read_tokenizer
from shoal.peer.handoff.initial import weights_digest
from shoal.peer.model.frozen import stored_base
from shoal.peer.model.layout import all_layer_keys, layer_layout
from shoal.protocol.errors import DataError, LocalError
from shoal.protocol.spec import AdapterSpec, InitialSpec, ModelSpec, OptimizerSpec, RunSpec, TrainingSpec
from shoal.protocol.tensors import EMBEDDING_MATRIX, HEAD_MATRIX
from shoal.protocol.toml.defaults import learning_rate_of, size_of, warmup_steps_of

_SMALLEST: Final = "layers.0"
"""Only this layer's digest is compared to find the base among models of its shape: embedding and head are larger."""
_FP32_BYTES: Final = 4
_DTYPES: Final = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")
"""The allowed dtypes of weights. Integers are refused: a conversion would silently give wrong weights."""


class FolderWeights:
    """Implements `InitialWeights` on a folder in Hugging Face's layout. A tied head is read from the embedding.

    Raises: LocalError: the folder's tensors do not fit `model`, or are not in safetensors format.
    """

    def __init__(self, folder: Path, model: ModelSpec) -> None:
        self._folder = folder
        self._model = model
        self._file_of = _tensor_files(folder)
        self._stored: dict[str, str] = {}
        """Our name of a tensor -> its name in the folder, where the two differ."""
        if has_tied_head(folder):
            self._stored[HEAD_MATRIX] = EMBEDDING_MATRIX
            if EMBEDDING_MATRIX in self._file_of:
                self._file_of[HEAD_MATRIX] = self._file_of[EMBEDDING_MATRIX]
        wanted = {name for key in all_layer_keys(model) for name in layer_layout(model, key).names}
        missing = sorted(wanted - set(self._file_of))
        # Older files contain the rotary frequencies too; we compute them from the config.
        unknown = sorted(name for name in set(self._file_of) - wanted if not name.endswith("rotary_emb.inv_freq"))
        if missing:
            raise LocalError(f"{folder} has not every weight of its config: {_some(missing)} missing")
        if unknown:
            raise LocalError(f"{folder} has weights that shoal's model has not: {_some(unknown)}")

    async def read(self, keys: Sequence[str]) -> Mapping[str, Tensor]:
        known = [key for key in keys if key in all_layer_keys(self._model)]
        return {key: await asyncio.to_thread(self.layer, key) for key in known}

    def layer(self, key: str) -> Tensor:
        """Return a layer, float32 [numel]. Raises: LocalError: a file cannot be read, or a shape or value is wrong."""
        layout = layer_layout(self._model, key)
        tensors: dict[str, Tensor] = {}
        if 2 * _FP32_BYTES * layout.numel > (free := free_memory_bytes()):
            raise LocalError(
                f"{key} of {self._folder} takes {2 * _FP32_BYTES * layout.numel >> 20:,} MiB to read, "
                f"and this machine has {free >> 20:,} MiB of memory left"
            )
        shape_of = dict(zip(layout.names, layout.shapes, strict=True))
        try:
            for file in sorted({self._file_of[name] for name in layout.names}):
                with safetensors.safe_open(file, framework="pt") as opened:
                    names = [name for name in layout.names if self._file_of[name] == file]
                    for name in names:
                        _check_tensor(name, opened.get_slice(self._stored.get(name, name)), shape_of[name])
                    tensors |= {name: opened.get_tensor(self._stored.get(name, name)) for name in names}
            flat_N = layout.flatten(tensors)
        except (OSError, RuntimeError, ValueError, safetensors.SafetensorError) as error:
            raise LocalError(f"cannot read {key} from {self._folder}: {error}") from error
        if not flat_N.isfinite().all():
            raise LocalError(f"{key} of {self._folder} has weights that are infinite or no numbers")
        return flat_N

    def digests(self, on_progress: OnProgress = lambda share: None) -> tuple[str, ...]:
        """Return the digest of each layer, in the order of `all_layer_keys`."""
        keys = all_layer_keys(self._model)
        found = []
        for number, key in enumerate(keys, 1):
            found.append(weights_digest(self.layer(key)))
            on_progress(number / len(keys))
        return tuple(found)


class FolderBase(FolderWeights):
    """Implements `InitialWeights` for a run with adapters: reads a folder's layers and encodes them for the run."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        super().__init__(folder, spec.model)
        self._spec = spec

    def layer(self, key: str) -> Tensor:
        """Return a layer, encoded by `stored_base`. Raises: LocalError: a file cannot be read, or a value is wrong."""
        return stored_base(self._spec, key, super().layer(key))


def import_model(
    folder: Path,
    *,
    base: RunSpec | None = None,
    source: str = "",
    format: Literal["text", "chat"] | None = None,
    context: int | None = None,
    stages: int | str | None = None,
    untie: bool = False,
    adapter: AdapterSpec | None = None,
    steps_of: Callable[[RunSpec], int] | None = None,
    on_progress: OnProgress = lambda share: None,
) -> RunSpec:
    """Return a run spec that has the weights in `folder` as initial weights.

    Args:
        base: a run spec for everything that the folder does not determine; None: defaults for fine-tuning.
        source: the training text; empty: the text of `base`.
        format: the text's format; None: the format of `base`.
        context: tokens of a sample; None: as many as the model allows, at most 1,024.
        stages: `swarm.stages`; None: as in `base`, or "auto".
        untie: if the head is tied to the embedding, make it a layer of its own, at first with the same values.
        adapter: the adapters to train; None: those of `base`; if `base` has none either, train all weights.
        steps_of: returns a number of steps that suits the run's text; it is called before the weights are read.
    Raises: LocalError: shoal cannot train this model; the text says why. DataError: its tokenizer is missing or wrong.
    """
    folder = folder.expanduser().resolve()
    adapts = adapter is not None or (base is not None and base.adapter is not None)
    model = model_of(read_json(own_file(folder, "config.json")), context=context, untie=untie)
    FolderWeights(folder, model)  # refuse a wrong folder before any text is read
    begun = base or RunSpec(
        name=(folder.name or "imported")[:64],
        model=model,
        training=TrainingSpec(microbatches_per_step=16, microbatch_size=1, validation_microbatches=16),
    )
    name, licence = name_and_licence(folder)
    data = msgspec.structs.replace(begun.data, tokenizer=tokenizer_of(folder, model), tokenizer_digest="", digest="")
    try:
        if source:
            data = msgspec.structs.replace(data, source=source)
        if format is not None:
            data = msgspec.structs.replace(data, format=format)
        swarm = begun.swarm if stages is None else msgspec.structs.replace(begun.swarm, stages=stages)
        spec = msgspec.structs.replace(
            begun, model=model, data=data, swarm=swarm, initial=InitialSpec(), adapter=adapter or begun.adapter
        )
        steps = spec.training.steps if steps_of is None else steps_of(spec)
        if base is None:
            spec = _with_steps(spec, steps, adapts=adapts)
        digests = weights_in(folder, spec).digests(on_progress)
        initial = InitialSpec(source=str(folder), digests=digests, name=name, licence=licence)
        return msgspec.structs.replace(spec, initial=initial)
    except ValueError as error:
        raise LocalError(f"no run can be made of {folder}: {error}") from error


def weights_in(folder: Path, spec: RunSpec) -> FolderWeights:
    """Open the folder's weights as the run stores them. Raises: LocalError: the weights do not fit the model."""
    return FolderWeights(folder, spec.model) if spec.adapter is None else FolderBase(folder, spec)


def open_initial(spec: RunSpec, on_progress: OnProgress = lambda share: None) -> FolderWeights | None:
    """Return the initial weights of the host's run, every layer checked; None if the seed determines them.

    Raises: LocalError: the weights are missing or changed.
    """
    if not spec.initial.digests:
        return None
    folder = Path(spec.initial.source).expanduser()
    weights = weights_in(folder, spec)
    if weights.digests(on_progress) != spec.initial.digests:
        what = "weights" if spec.adapter is None else f"weights as {spec.adapter.base}, which [adapter] names,"
        raise LocalError(f"the {what} in {folder} have changed since `shoal import`: import them again")
    return weights


def open_copy(spec: RunSpec, folder: Path | None) -> FolderBase | None:
    """Return this machine's copy of the run's base model; None: there is none. The caller must compare each
    layer that it reads with the run's digest.

    Args: folder: the copy's folder; None: search the Hugging Face cache for the model.
    Raises: LocalError: `folder` has no model of the base's shape, or is given for a run without a base.
    """
    if spec.adapter is None or not spec.initial.digests:
        if folder is not None:
            raise LocalError("this run has no base: its weights come from its members, leave --base out")
        return None
    if folder is not None:
        return FolderBase(folder.expanduser().resolve(), spec)
    for found in cached_models():
        try:
            copy = FolderBase(found, spec)
            digest = weights_digest(copy.layer(_SMALLEST))
        except LocalError:
            continue  # another model
        if digest == spec.initial.digests[all_layer_keys(spec.model).index(_SMALLEST)]:
            return copy
    return None


def has_tied_head(folder: Path) -> bool:
    """True if this folder's model has one matrix for embedding and head."""
    folder = folder.expanduser().resolve()
    return (folder / "config.json").exists() and is_tied(read_json(own_file(folder, "config.json")))


def _with_steps(spec: RunSpec, steps: int, *, adapts: bool) -> RunSpec:
    """Return `spec` with `steps` steps and AdamW for fine-tuning: a low learning rate, no weight decay."""
    tokens = float(spec.tokens_per_step)
    rate = learning_rate_of(
        size_of(spec.model), tokens_per_step=tokens, steps=steps, optimizer="adamw", tunes=True, adapts=adapts
    )
    optimizer = OptimizerSpec(name="adamw", learning_rate=rate, weight_decay=0.0, warmup_steps=0)
    warmup = warmup_steps_of(steps, beta2=optimizer.beta2)
    return msgspec.structs.replace(
        spec,
        training=msgspec.structs.replace(spec.training, steps=steps),
        optimizer=msgspec.structs.replace(optimizer, warmup_steps=warmup),
    )


def tokenizer_of(folder: Path, model: ModelSpec) -> str:
    """Return the spec's `data.tokenizer`: BYTES or a path. Raises: DataError: the tokenizer is missing or unfit."""
    path = folder / "tokenizer.json"
    if not os.path.lexists(path):
        if model.vocab_size == 256:
            return BYTES
        raise DataError(f"{folder} has no tokenizer.json: save its tokenizer there in that form")
    data = read_tokenizer(own_file(folder, path.name))
    if _is_bytes(data):
        return BYTES
    vocab_size = FileTokenizer(data, name=str(path)).vocab_size
    if vocab_size > model.vocab_size:
        raise DataError(f"{path} has {vocab_size} tokens, and the model's vocabulary {model.vocab_size}")
    return str(path)


def _is_bytes(data: bytes) -> bool:
    """True if the tokenizer is the byte tokenizer that `shoal export` writes, possibly re-saved."""
    try:
        ours, found = (msgspec.json.decode(text) for text in (byte_tokenizer_json(), data))
        return bool(found["model"]["vocab"] == ours["model"]["vocab"] and not found["model"]["merges"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return False


def _tensor_files(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in tensor_files(folder):
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), file)
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            raise LocalError(f"cannot read {file}: {error}") from error
    return found


def _check_tensor(name: str, said: Any, shape: tuple[int, ...]) -> None:
    """Check a tensor's shape and dtype before reading: a wrong tensor could exhaust the memory. Raises: ValueError."""
    if tuple(said.get_shape()) != shape:
        raise ValueError(f"{name} must have shape {shape}, has {tuple(said.get_shape()[:8])}")
    if said.get_dtype() not in _DTYPES:
        raise ValueError(f"{name} has weights of type {said.get_dtype()}, which shoal does not read")


def _some(names: Sequence[str]) -> str:
    return listed([printable(name[:80]) for name in names])
