"""Finds the base model of a snapshot's adapters on this machine, and merges the adapters into it."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from shoal.deploy.ship.found_snapshot import FoundSnapshot
from shoal.deploy.ship.import_model import FolderBase, open_copy
from shoal.peer.handoff.base_layers import FOLDER
from shoal.peer.handoff.initial import weights_digest
from shoal.peer.model import subspace
from shoal.peer.model.frozen import FrozenLayer, adapter_of, base_numel, seed_base
from shoal.peer.model.layout import all_layer_keys, layer_layout, state_layout
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import RunSpec
from shoal.protocol.tensors import adapter_names, magnitude_name


class BaseModel:
    """The base model of a run's adapters. Raises: LocalError: `folder` has no model of the base's shape.

    Args:
        near: folders of snapshots. The run folders that contain these may have base layers, too, and are searched.
        folder: the user's path of the model; None: search for it.
    """

    def __init__(self, spec: RunSpec, *, near: Iterable[Path], folder: Path | None = None) -> None:
        self._spec, self._said = spec, folder
        self._kept: list[Path] = []
        if folder is not None:
            self._copy = open_copy(spec, folder)
            return
        # The run's folder, which contains `FOLDER`, is at most four levels above a snapshot.
        above = (place for path in near for place in list(path.resolve().parents)[:4])
        self._kept = [place / FOLDER for place in dict.fromkeys(above) if (place / FOLDER).is_dir()]

    def layer(self, key: str) -> Tensor:
        """Return a base layer as `stored_base` encodes it. Raises: LocalError: no copy here has the right digest."""
        digests = self._spec.initial.digests
        if not digests:
            return seed_base(self._spec, key)
        wanted = digests[all_layer_keys(self._spec.model).index(key)]
        stored = next((found for found in self._found(key) if weights_digest(found) == wanted), None)
        if stored is None:
            where = f"{self._said} has another" if self._said is not None else "this machine does not have"
            raise LocalError(
                f"{where} {key} of the adapters' base model: say --base FOLDER, with the model "
                f"that was {self._spec.initial.source} on the host's machine"
            )
        return stored

    def _found(self, key: str) -> Iterator[Tensor]:
        for place in self._kept:
            try:
                data = (place / f"{key}.bin").read_bytes()
            except OSError:
                continue
            if len(data) == 4 * base_numel(self._spec, key):
                yield torch.frombuffer(bytearray(data), dtype=torch.float32)
        if self._copy is not None:
            yield self._copy.layer(key)

    @cached_property
    def _copy(self) -> FolderBase | None:
        """This machine's copy of the base model, from the user's folder, else from the folder in the run spec, else
        from the Hugging Face cache. None: none of them has it."""
        source = Path(self._spec.initial.source).expanduser()
        if source.is_dir():
            try:
                return FolderBase(source, self._spec)
            except LocalError:
                pass  # the host's path exists here too, with another content
        return open_copy(self._spec, None)


def base_of(snapshot: FoundSnapshot, folder: Path | None = None) -> BaseModel | None:
    """Find the base model of a snapshot with adapters; None if the snapshot contains the whole model.

    Args: folder: the user's path of the base; None: search for it.
    Raises: LocalError: `folder` has no model of the base's shape, or is given for a run without adapters.
    """
    if snapshot.spec.adapter is None:
        if folder is not None:
            raise LocalError("this run trains all weights of its model and has no base: leave --base out")
        return None
    parts = (part for parts in snapshot.parts.values() for part in parts)
    near = (Path(disk.where(path)) for disk, path in parts)
    return BaseModel(snapshot.spec, near=near, folder=folder)


def adapters_for_peft(spec: RunSpec, key: str, param_N: Tensor, base: BaseModel | None) -> dict[str, Tensor]:
    """Return {name that PEFT uses: tensor} of a layer's adapters, float32.

    A run trains DoRA's magnitude vector [rows] as a change of the base's row norms. PEFT stores norm plus change, so
    DoRA needs `base`. Raises: LocalError: the base is not on this machine.
    """
    adapters = state_layout(spec, key).views(param_N)
    if base is None or not adapters:
        return adapters
    frozen = FrozenLayer.of(spec, key, base.layer(key), device=torch.device("cpu"), dtype=torch.float32)
    changes = {magnitude_name(name): matrix for name, matrix in frozen.matrices.items()}
    return {
        name: changes[name].row_norms() + tensor if name in changes else tensor for name, tensor in adapters.items()
    }


def whole_layer(spec: RunSpec, key: str, param_N: Tensor, base: BaseModel | None) -> Tensor:
    """Return a layer of the trained model, float32 in the layout of `spec.model.whole`.

    Adapters are merged into the stored base. A subspace model's embedding and projections are multiplied by its basis.
    """
    if base is None:
        return subspace.whole_layer(spec, key, param_N)
    frozen = FrozenLayer.of(spec, key, base.layer(key), device=torch.device("cpu"), dtype=torch.float32)
    adapters = state_layout(spec, key).views(param_N)
    tensors = dict(frozen.vectors)
    for name, matrix in frozen.matrices.items():
        tensors[name] = matrix.dense(torch.float32)
        a, b = adapter_names(name)
        if a in adapters:
            tensors[name] = tensors[name] + adapter_of(spec).scale * (adapters[b] @ adapters[a])
        if (m := magnitude_name(name)) in adapters:
            norm_R = tensors[name].norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
            tensors[name] *= ((matrix.row_norms() + adapters[m]) / norm_R)[:, None]
    return layer_layout(spec.model, key).flatten(tensors)
