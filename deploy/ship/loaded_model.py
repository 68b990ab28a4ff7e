"""A trained model in memory with its vocabulary, from a snapshot of a run or from a folder that transformers loads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.deploy.ship.found_snapshot import FoundSnapshot, find_snapshots
from shoal.deploy.ship.generate import load_writer
from shoal.deploy.ship.hf_config import model_of
from shoal.deploy.ship.import_model import FolderWeights, tokenizer_of
from shoal.deploy.ship.model_folder import own_file, read_json
from shoal.peer.data.tokenizer import Tokenizer, load_tokenizer
from shoal.peer.model.layout import all_layer_keys, layer_layout
from shoal.peer.model.llama import Params
from shoal.peer.snapshot_name import MANIFEST
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import DataSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights, on one device."""

    model: ModelSpec
    params_by_key: Mapping[str, Params]
    tokenizer: Tokenizer
    name: str
    """What it is, for people."""
    snapshot: FoundSnapshot | None
    """None: it is a folder, which does not say what it was trained on."""


def load_model(
    where: Path | None,
    *,
    device: torch.device,
    tokenizer: Path | None = None,
    base: Path | None = None,
    context: int | None = None,
) -> LoadedModel:
    """Read a model.

    Args:
        where: a snapshot, a folder with some, or a model's folder (with a config.json); None: the newest snapshot here.
        tokenizer: where a run's tokenizer.json is, if not where its spec says.
        base: where the model is that the run's adapters stand beside, if it has any and they are not found.
        context: the most tokens that a model's folder is to be asked about at once; None: at most 1,024.
    Raises: LocalError: there is none, or it is none that shoal knows. DataError: its tokenizer.
    """
    if where is not None and (where / "config.json").exists() and not (where / MANIFEST).exists():
        if base is not None:
            raise LocalError(f"{where} is a whole model, beside which no adapters stand: leave --base out")
        return _from_folder(where.expanduser().resolve(), device, context)
    writer = load_writer(find_snapshots(where), device=device, tokenizer=tokenizer, base=base)
    snapshot = writer.snapshot
    return LoadedModel(
        model=snapshot.spec.model,
        params_by_key=writer.params_by_key,
        tokenizer=writer.tokenizer,
        name=f"run {snapshot.run}, version {snapshot.version}",
        snapshot=snapshot,
    )


def _from_folder(folder: Path, device: torch.device, context: int | None) -> LoadedModel:
    model = model_of(read_json(own_file(folder, "config.json")), context=context, untie=True)
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
