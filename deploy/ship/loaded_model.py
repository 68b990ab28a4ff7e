"""Loads a trained model and its tokenizer, from a run's snapshot or from a folder for transformers."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal.deploy.ship.base_model import base_of, whole_layer
from shoal.deploy.ship.found_snapshot import FoundSnapshot, has_snapshots, snapshots_in, use_first_sound
from shoal.deploy.ship.hf_config import model_of
from shoal.deploy.ship.import_model import FolderWeights, tokenizer_of
from shoal.deploy.ship.model_folder import own_file, read_json
from shoal.deploy.ship.predictor import Origin
from shoal.deploy.state.runs import look_for
from shoal.peer.data.labels import IGNORED
from shoal.peer.data.tokenizer import Tokenizer, load_tokenizer
from shoal.peer.disk.snapshot_name import MANIFEST
from shoal.peer.model import llama
from shoal.peer.model.generate import Sampler, stream
from shoal.peer.model.layout import HEAD, all_layer_keys, layer_layout
from shoal.peer.model.llama import Params
from shoal.peer.pipeline.fixed_stage import FixedStage
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import DataSpec, ModelSpec, RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Implements `Predictor` with all weights on one device."""

    model: ModelSpec
    params_by_key: Mapping[str, Params]
    tokenizer: Tokenizer
    name: str
    snapshot: FoundSnapshot | None
    """The snapshot with the weights; None: they come from a model's folder, which does not name a run."""

    @property
    def spec(self) -> RunSpec | None:
        return None if self.snapshot is None else self.snapshot.spec

    @property
    def origin(self) -> Origin | None:
        found = self.snapshot
        return None if found is None else Origin(found.run, found.era, found.version)

    @torch.inference_mode()
    def loss_sum(self, tokens_BT: Tensor, targets_BT: Tensor, begins_BT: Tensor | None = None) -> float:
        hidden_BTD = self._whole().run(tokens_BT, begins_BT=begins_BT)
        counted = int((targets_BT != IGNORED).sum())
        targets_BT = targets_BT.to(hidden_BTD.device)
        return (
            float(llama.loss_of_head(self.model, self.params_by_key[HEAD], hidden_BTD, targets_BT, counted)) * counted
        )

    @torch.inference_mode()
    def log_likelihoods(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        whole = self._whole()
        return whole.log_likelihoods(whole.run(tokens_BT), targets_BT)

    def stream(self, prompt: Sequence[int], sampler: Sampler) -> Iterator[int]:
        return stream(self.model, self.params_by_key, prompt, sampler)

    def _whole(self) -> FixedStage:
        norm = self.params_by_key[HEAD]["model.norm.weight"]
        rotary = llama.rotary_tables(self.model, norm.device)
        return FixedStage(self.model, self.params_by_key, rotary=rotary, device=norm.device, dtype=norm.dtype)


def load_model(
    wanted: str | os.PathLike[str] = "",
    *,
    device: torch.device,
    tokenizer: Path | None = None,
    base: Path | None = None,
    context: int | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        wanted: a run's name or id, or a folder with snapshots; or a model's folder, with a config.json; empty: the last
            used run that has snapshots.
        tokenizer: path of the run's tokenizer.json; None: the path in the spec.
        base: the user's path of the adapters' base model; None: search for it.
        context: with a model's folder, tokens of a sample; None: as many as the model allows, at most 1,024.
    Raises: LocalError: there is no model, or shoal does not support it. DataError: its tokenizer is missing or wrong.
    """
    folders = look_for("snapshot", os.fspath(wanted), has=lambda path: _is_model(path) or has_snapshots(path))
    if _is_model(folders[0]):
        if base is not None:
            raise LocalError(f"{folders[0]} is a whole model without adapters: leave --base out")
        return _from_folder(folders[0].resolve(), device, context)
    return first_sound(snapshots_in(folders), device=device, tokenizer=tokenizer, base=base)


def _is_model(folder: Path) -> bool:
    """True if `folder` has a model for `transformers`, not a snapshot."""
    return (folder / "config.json").exists() and not (folder / MANIFEST).exists()


def first_sound(
    snapshots: Sequence[FoundSnapshot], *, device: torch.device, tokenizer: Path | None = None, base: Path | None = None
) -> LoadedModel:
    """Load the first undamaged snapshot.

    Args:
        tokenizer: path of the run's tokenizer.json; None: the path in the spec.
        base: the user's path of the adapters' base model; None: search for it.
    Raises: LocalError: there is no snapshot, or all are damaged. DataError: its tokenizer is missing or wrong.
    """

    def load(snapshot: FoundSnapshot) -> LoadedModel:
        vocabulary = load_tokenizer(snapshot.spec.data, path=tokenizer)
        spec, beside = snapshot.spec, base_of(snapshot, base)
        flat = {key: whole_layer(spec, key, snapshot.read(key), beside).to(device) for key in snapshot.keys}
        return LoadedModel(
            model=spec.model.whole,
            params_by_key={key: layer_layout(spec.model.whole, key).views(flat_N) for key, flat_N in flat.items()},
            tokenizer=vocabulary,
            name=f"run {snapshot.run}, version {snapshot.version}",
            snapshot=snapshot,
        )

    return use_first_sound(snapshots, load)


def _from_folder(folder: Path, device: torch.device, context: int | None) -> LoadedModel:
    model = model_of(read_json(own_file(folder, "config.json")), context=context)
    weights = FolderWeights(folder, model)
    return LoadedModel(
        model=model,
        params_by_key={
            key: layer_layout(model, key).views(weights.layer(key).to(device)) for key in all_layer_keys(model)
        },
        tokenizer=load_tokenizer(DataSpec(tokenizer=tokenizer_of(folder, model))),
        name=str(folder),
        snapshot=None,
    )
