"""Where experts are placed, peers write units of layers down; people get whole layers."""

from pathlib import Path, PurePosixPath

import msgspec
import pytest
import torch
from newest_snapshot import read_snapshot
from tiny_run import tiny_spec

from shoal.deploy.ship.found_snapshot import find_snapshots
from shoal.deploy.ship.sample import merge_snapshots
from shoal.peer.disk.snapshot import write_snapshot
from shoal.peer.model.state import initial_state
from shoal.protocol.errors import LocalError
from shoal.protocol.layers import all_layer_keys, expert_keys, held_keys, trunk_keys
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.spec import RunSpec

CPU = torch.device("cpu")


def placed(optimizer: str = "adamw") -> RunSpec:
    tables = msgspec.to_builtins(tiny_spec(steps=10, peers=4, stages=2))
    tables["model"] |= {"num_experts": 3}
    tables["optimizer"] |= {"name": optimizer}
    tables["swarm"] |= {"expert_slots": 2}
    return msgspec.convert(tables, RunSpec)


def write(folder: Path, spec: RunSpec, keys: tuple[str, ...]) -> None:
    layers = initial_state(spec, keys, CPU).layers
    write_snapshot(LiveDisk(folder), PurePosixPath(keys[0]), run="run", version=4, layers=layers, spec=spec)


def write_all(folder: Path, spec: RunSpec) -> None:
    """Both stages and their experts, each group in a folder of its own."""
    for first, last in ((0, 1), (1, 2)):
        write(folder, spec, trunk_keys(spec.model, first, last))
        for expert in range(3):
            write(folder, spec, expert_keys(first, last, expert))


def test_the_groups_of_a_run_hold_everything_once() -> None:
    model = placed().model
    groups = [trunk_keys(model, i, i + 1) for i in (0, 1)] + [
        expert_keys(i, i + 1, j) for i in (0, 1) for j in range(3)
    ]
    assert sorted(key for keys in groups for key in keys) == sorted(held_keys(model, placed=True))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_units_are_put_together_to_layers(tmp_path: Path, optimizer: str) -> None:
    spec = placed(optimizer)
    write_all(tmp_path / "peers", spec)
    whole = initial_state(spec, all_layer_keys(spec.model), CPU)
    found = find_snapshots(tmp_path / "peers")[0]
    assert all(torch.equal(found.read(key), layer.param_N) for key, layer in whole.layers.items())
    path = merge_snapshots(sorted((tmp_path / "peers").iterdir()), tmp_path / "merged")
    merged = read_snapshot(LiveDisk(path.parent), PurePosixPath(path.name))
    assert {key: layer.digest() for key, layer in merged.layers.items()} == {
        key: layer.digest() for key, layer in whole.layers.items()
    }


def test_an_expert_that_is_nowhere_is_named(tmp_path: Path) -> None:
    spec = placed()
    for first, last in ((0, 1), (1, 2)):
        write(tmp_path, spec, trunk_keys(spec.model, first, last))
        for expert in range(2):
            write(tmp_path, spec, expert_keys(first, last, expert))
    with pytest.raises(LocalError, match=r"layers\.0\.experts\.2, layers\.1\.experts\.2"):
        find_snapshots(tmp_path)
