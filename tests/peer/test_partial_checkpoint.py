"""Layers that a light member leaves to its next life."""

import asyncio
from collections.abc import Callable
from pathlib import PurePosixPath

import pytest
import torch

from shoal.peer.disk.archive import PARTIAL_FOLDER, Archive
from shoal.peer.model.state import LayerAt, initial_state
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.ports import Disk
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World
from shoal.protocol.spec import RunSpec

ERA = 3


async def at_once(work: Callable[[], object]) -> object:
    return work()


@pytest.fixture
def disk() -> Disk:
    return World(0, uniform(0.01, 1e7)).add_peer("a").disk


def kept(disk: Disk | None, spec: RunSpec) -> Archive:
    clock = World(0, uniform(0.01, 1e7)).add_peer("clock").clock
    return Archive(disk, run="run", spec=spec, clock=clock, run_blocking=at_once)


def test_the_next_life_has_them_once_each_at_its_version(tiny_spec: RunSpec, disk: Disk) -> None:
    keys = stage_layer_keys(tiny_spec.model, 0, tiny_spec.model.num_layers)
    state = initial_state(tiny_spec, keys, torch.device("cpu"))
    versions = dict(zip(keys, (5, 6, 5, 4, 6), strict=True))

    async def scene() -> None:
        await kept(disk, tiny_spec).keep_partial(ERA, {key: LayerAt(1, state.layers[key]) for key in keys})
        await kept(disk, tiny_spec).keep_partial(
            ERA, {key: LayerAt(versions[key], state.layers[key]) for key in keys[1:]}
        )
        taken = await kept(disk, tiny_spec).take_partial(ERA, keys[:3])
        assert {key: version for key, (version, _) in taken.items()} == {key: versions[key] for key in keys[1:3]}
        assert all(layer.secure_digest() == state.layers[key].secure_digest() for key, (_, layer) in taken.items())
        assert await kept(disk, tiny_spec).take_partial(ERA, keys) == {}

    asyncio.run(scene())


def test_what_is_of_another_era_or_damaged_is_not_taken(tiny_spec: RunSpec, disk: Disk) -> None:
    keys = stage_layer_keys(tiny_spec.model, 0, tiny_spec.model.num_layers)[:2]
    state = initial_state(tiny_spec, keys, torch.device("cpu"))
    layers = {key: LayerAt(4, state.layers[key]) for key in keys}

    async def scene() -> None:
        await kept(disk, tiny_spec).keep_partial(ERA, layers)
        assert await kept(disk, tiny_spec).take_partial(ERA + 1, keys) == {}
        await kept(disk, tiny_spec).keep_partial(ERA, layers)
        folder = PurePosixPath("run") / PARTIAL_FOLDER
        (name,) = (name for name in disk.list(folder) if not name.startswith("."))
        path = folder / name / f"{keys[0]}.moments.safetensors"
        data = bytearray(disk.read(path))
        data[-1] ^= 1
        disk.write(path, bytes(data))
        assert set(await kept(disk, tiny_spec).take_partial(ERA, keys)) == {keys[1]}

    asyncio.run(scene())


def test_without_a_disk_nothing_is_kept(tiny_spec: RunSpec) -> None:
    keys = stage_layer_keys(tiny_spec.model, 0, 1)
    state = initial_state(tiny_spec, keys, torch.device("cpu"))

    async def scene() -> None:
        await kept(None, tiny_spec).keep_partial(ERA, {key: LayerAt(4, state.layers[key]) for key in keys})
        assert await kept(None, tiny_spec).take_partial(ERA, keys) == {}

    asyncio.run(scene())


def test_a_disk_that_fails_is_as_none(tiny_spec: RunSpec, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = stage_layer_keys(tiny_spec.model, 0, 1)
    state = initial_state(tiny_spec, keys, torch.device("cpu"))

    def full(path: PurePosixPath, data: object) -> None:
        raise OSError(28, "No space left on device")

    async def scene() -> None:
        monkeypatch.setattr(disk, "write", full)
        await kept(disk, tiny_spec).keep_partial(ERA, {key: LayerAt(4, state.layers[key]) for key in keys})
        assert await kept(disk, tiny_spec).take_partial(ERA, keys) == {}

    asyncio.run(scene())
