"""Merges the stages' snapshots and generates a text, at the end of `shoal demo`.

It runs as a separate process (`python -m shoal.deploy.ship.sample`), because it needs torch and its parent must stay
small. It prints one `GeneratedSample` as JSON.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath

import msgspec

from shoal.deploy.ship.base_model import BaseModel, whole_layer
from shoal.peer.data.tokenizer import load_tokenizer
from shoal.peer.disk.snapshot import (
    DamagedSnapshot,
    StoredSnapshot,
    list_snapshots,
    log_damage,
    read_layers,
    read_snapshot,
    write_snapshot,
)
from shoal.peer.model.generate import Sampler, stream
from shoal.peer.model.layout import all_layer_keys, layer_layout
from shoal.peer.model.state import LayerState, joined
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.layers import held_keys
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.ports import Disk
from shoal.protocol.spec import RunSpec

PROMPT = "def "
TEMPERATURE = 0.6
"""Below 1, so that a small model's rare errors do not hide what it has learned."""


class GeneratedSample(msgspec.Struct, frozen=True):
    snapshot: str
    version: int
    text: str
    """The generated text with the prompt."""


def merge_snapshots(folders: Iterable[Path], into: Path) -> Path:
    """Write one snapshot of the whole model, of the newest version with an undamaged copy of every layer.

    Returns: its folder, below `into`.
    Raises: LocalError: no version is whole.
    """
    found = [(disk, stored) for disk in map(LiveDisk, folders) for stored in list_snapshots(disk, PurePosixPath())]
    if not found:
        raise LocalError("no peer has written a snapshot yet")
    first = found[0][1]
    ages = sorted({stored.age for _, stored in found if stored.run == first.run})
    for era, version in reversed(ages):
        parts = [part for part in found if part[1].run == first.run and part[1].age == (era, version)]
        layers = _merge(first.spec, parts)
        if layers is not None:
            target = LiveDisk(into)
            path = write_snapshot(
                target, PurePosixPath(), run=first.run, era=era, version=version, layers=layers, spec=first.spec
            )
            return into / path
    raise LocalError("no version has a snapshot of every layer yet")


def _merge(spec: RunSpec, parts: Sequence[tuple[Disk, StoredSnapshot]]) -> dict[str, LayerState] | None:
    """Take each layer (or each of its units) from its first undamaged copy; None if any has none."""
    keys = held_keys(spec.model, placed=spec.swarm.expert_slots > 0)
    if not set(keys) <= {key for _, stored in parts for key in stored.keys}:
        return None
    found: dict[str, LayerState] = {}
    for disk, stored in parts:
        for key in [key for key in stored.keys if key not in found]:
            try:
                found |= read_layers(disk, stored.path, [key])
            except DamagedSnapshot as damage:
                log_damage(damage)
    if not set(keys) <= set(found):
        return None
    return {key: found[key] if key in keys else joined(spec, key, found) for key in all_layer_keys(spec.model)}


def write_sample(path: Path, *, num_tokens: int, seed: int = 0) -> GeneratedSample:
    """Load the whole snapshot at `path` and continue `PROMPT`."""
    found = read_snapshot(LiveDisk(path.parent), PurePosixPath(path.name))
    model, base = found.spec.model.whole, BaseModel(found.spec, near=[path]) if found.spec.adapter is not None else None
    params = {
        key: layer_layout(model, key).views(whole_layer(found.spec, key, layer.param_N, base))
        for key, layer in found.layers.items()
    }
    tokenizer = load_tokenizer(found.spec.data)
    prompt = tokenizer.encode([PROMPT])[0].tolist()
    tokens = islice(stream(model, params, prompt, Sampler(temperature=TEMPERATURE, seed=seed)), num_tokens)
    return GeneratedSample(snapshot=str(path), version=found.version, text=PROMPT + tokenizer.decode(list(tokens)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="shoal.deploy.ship.sample")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--num-tokens", type=int, default=400)
    parser.add_argument("folders", nargs="+", type=Path)
    arguments = parser.parse_args()
    try:
        path = merge_snapshots(arguments.folders, arguments.into)
        sample = write_sample(path, num_tokens=arguments.num_tokens)
    except ShoalError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(msgspec.json.encode(sample).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
