"""Merges the stages' snapshots and generates a text, at the end of `shoal demo`.

This module runs as a separate process (`python -m shoal.deploy.ship.sample INTO FOLDER…`), because it needs torch and
the process of `shoal demo` must stay small. It prints one `GeneratedSample` as JSON.
"""

import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path, PurePosixPath

import msgspec
import torch

from shoal.deploy.ship.found_snapshot import snapshots_in, whole_versions
from shoal.deploy.ship.loaded_model import first_sound
from shoal.peer.disk.snapshot import DamagedSnapshot, list_snapshots, log_damage, write_snapshot
from shoal.peer.model.generate import Sampler
from shoal.peer.model.state import joined
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.live.disk import LiveDisk

PROMPT = "def "
TEMPERATURE = 0.6
"""Below 1, so that unlikely tokens do not hide what a small model has learned."""


class GeneratedSample(msgspec.Struct, frozen=True):
    snapshot: str
    version: int
    text: str
    """The generated text with the prompt."""


def merge_snapshots(folders: Iterable[Path], into: Path) -> Path:
    """Write a snapshot of the whole model, from the newest version that has an undamaged copy of every layer.

    Returns: the snapshot's folder, below `into`.
    Raises: LocalError: no version is whole.
    """
    found = [(disk, stored) for disk in map(LiveDisk, folders) for stored in list_snapshots(disk, PurePosixPath())]
    if not found:
        raise LocalError("no peer has written a snapshot yet")
    for whole in whole_versions([(disk, stored) for disk, stored in found if stored.run == found[0][1].run]):
        try:
            parts = {part: whole.state(part) for part in whole.parts}
        except DamagedSnapshot as damage:
            log_damage(damage)
            continue
        layers = {key: parts[key] if key in parts else joined(whole.spec, key, parts) for key in whole.keys}
        run, era, version, spec = whole.run, whole.era, whole.version, whole.spec
        target = LiveDisk(into), PurePosixPath()
        return into / write_snapshot(*target, run=run, era=era, version=version, layers=layers, spec=spec)
    raise LocalError("no version has a snapshot of every layer yet")


def write_sample(path: Path, *, num_tokens: int, seed: int = 0) -> GeneratedSample:
    """Load the whole model from the snapshot at `path`, and continue `PROMPT`."""
    (snapshot,) = snapshots_in([path])
    model = first_sound([snapshot], device=torch.device("cpu"))
    prompt = model.tokenizer.encode([PROMPT])[0].tolist()
    tokens = islice(model.stream(prompt, Sampler(temperature=TEMPERATURE, seed=seed)), num_tokens)
    text = PROMPT + model.tokenizer.decode(list(tokens))
    return GeneratedSample(snapshot=str(path), version=snapshot.version, text=text)


def main() -> int:
    into, *folders = map(Path, sys.argv[1:])
    try:
        sample = write_sample(merge_snapshots(folders, into), num_tokens=400)
    except ShoalError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(msgspec.json.encode(sample).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
