"""Put the stages' snapshots together and let the model write: the end of `shoal demo`.

A process of its own (`python -m shoal.deploy.sample`), because it needs torch and its parent must stay light. Prints
one `Sample` as JSON.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shoal.peer.model.generate import generate
from shoal.peer.model.layout import all_layer_keys, layer_layout
from shoal.peer.pipeline.state import LayerState
from shoal.peer.snapshot import Snapshot, list_snapshots, read_snapshot, write_snapshot
from shoal.protocol.errors import LocalError, ShoalError

PROMPT = "def "
TEMPERATURE = 0.6
"""Below 1, so that a small model's rarer slips do not hide what it has learned."""


class Sample(msgspec.Struct, frozen=True):
    snapshot: str
    version: int
    text: str
    """Prompt included."""


def merge_snapshots(folders: Iterable[Path], into: Path) -> Path:
    """Write one snapshot of the whole model from the newest version of which every layer is in some folder.

    Returns: its own folder, below `into`.
    Raises: LocalError: no version is whole.
    """
    by_version: dict[int, dict[str, LayerState]] = {}
    like: Snapshot | None = None
    for path in sorted(path for folder in folders for path in list_snapshots(folder)):
        part = read_snapshot(path)
        if like is not None and part.run != like.run:
            continue
        like = like or part
        by_version.setdefault(part.version, {}).update(part.layers)
    if like is None:
        raise LocalError("no peer has written a snapshot yet")
    keys = all_layer_keys(like.spec.model)
    whole = [version for version, layers in by_version.items() if set(layers) >= set(keys)]
    if not whole:
        raise LocalError("no version has a snapshot of every layer yet")
    version = max(whole)
    layers = {key: by_version[version][key] for key in keys}
    return write_snapshot(into, run=like.run, version=version, layers=layers, spec=like.spec)


def write_sample(path: Path, *, num_tokens: int, seed: int = 0) -> Sample:
    """Read the whole snapshot at `path` and continue `PROMPT`."""
    found = read_snapshot(path)
    model = found.spec.model
    params = {key: layer_layout(model, key).views(layer.param_N) for key, layer in found.layers.items()}
    text = generate(model, params, PROMPT.encode(), num_tokens, temperature=TEMPERATURE, seed=seed)
    return Sample(snapshot=str(path), version=found.version, text=PROMPT + text.decode(errors="replace"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="shoal.deploy.sample")
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
