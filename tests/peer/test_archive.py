"""What a peer keeps and offers: a full disk costs a snapshot and a line a minute; what is damaged is not offered."""

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import pytest
import torch

from shoal.peer.archive import Archive
from shoal.peer.model.layout import all_layer_keys
from shoal.peer.pipeline.state import LayerState, StageState, initial_state
from shoal.protocol.sim.disk import SimDisk
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec

MODEL = ModelSpec(dim=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=12, context=8)
SPEC = RunSpec(seed=3, model=MODEL, swarm=SwarmSpec(stages=2))
KEYS = all_layer_keys(MODEL)


@dataclass
class Time:
    now: float = 0.0

    def now_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return self.now


async def inline(work: Callable[[], object]) -> object:
    return work()


@dataclass
class Desk:
    """A disk, and the archive of the process that uses it now."""

    disk: SimDisk = field(default_factory=lambda: SimDisk(random.Random(0)))
    time: Time = field(default_factory=Time)

    def __post_init__(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        self.archive = Archive(self.disk, run="run", spec=SPEC, clock=self.time, run_blocking=inline)
        asyncio.run(self.archive.open())

    def write(self, version: int, *, era: int = 0, keys: tuple[str, ...] = KEYS) -> bool:
        return asyncio.run(self.archive.write(state(version, keys), era=era))

    def read(self, era: int, version: int, keys: tuple[str, ...] = KEYS) -> dict[str, LayerState]:
        return asyncio.run(self.archive.read(era, version, keys))

    @property
    def held(self) -> list[tuple[int, int]]:
        return [(holding.era, holding.version) for holding in self.archive.holdings]

    def rot(self, version: int, name: str) -> None:
        folder = PurePosixPath("run", "snapshots")
        for group in self.disk.list(folder):
            for path in self.disk.list(folder / group):
                if f"-step-{version:08d}-" in path:
                    self.disk.rot(folder / group / path / name)


def state(version: int, keys: tuple[str, ...] = KEYS) -> StageState:
    first = initial_state(SPEC, keys, torch.device("cpu"))
    return StageState(version=version, layers=first.layers)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_what_was_written_is_held_by_the_next_process_too(desk: Desk) -> None:
    assert desk.write(10)
    assert desk.write(5, era=1)
    assert desk.held == [(1, 5), (0, 10)]
    desk.disk = desk.disk.crash()
    desk.reopen()
    assert desk.held == [(1, 5), (0, 10)]
    assert tuple(desk.read(1, 5)) == KEYS
    assert desk.read(1, 10) == {}


def test_a_full_disk_costs_the_snapshot_and_one_line_a_minute(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.write(10)
    desk.disk.limit(100)
    for version in range(20, 200):
        desk.time.now += 1.0
        assert not desk.write(version)
    assert desk.held == [(0, 10)]
    assert tuple(desk.read(0, 10)) == KEYS
    assert len(caplog.records) == 3
    assert "No space left on device: make room" in caplog.records[0].getMessage()
    desk.disk.limit(None)
    assert desk.write(200)
    assert desk.held == [(0, 200), (0, 10)]


def test_a_disk_that_only_fails_ends_nothing(desk: Desk) -> None:
    desk.write(10)
    desk.disk.fail(times=math.inf)
    assert not desk.write(20)
    assert desk.read(0, 10) == {}
    desk.disk.mend()
    assert desk.write(30)


def test_a_snapshot_found_damaged_is_not_offered_again_until_it_is_written_anew(desk: Desk) -> None:
    desk.write(10)
    desk.write(20)
    desk.rot(20, "head.safetensors")
    assert desk.held == [(0, 20), (0, 10)], "nobody has looked"
    assert desk.read(0, 20) == {}
    assert desk.held == [(0, 10)]
    desk.write(15, era=0, keys=KEYS[:2])  # another group of layers: everything is listed again
    assert (0, 20) not in desk.held
    desk.write(20)
    assert desk.held[0] == (0, 20)
    assert tuple(desk.read(0, 20)) == KEYS


def test_an_era_is_begun_once_in_all_lives(desk: Desk) -> None:
    assert asyncio.run(desk.archive.begin_era(0))
    assert not asyncio.run(desk.archive.begin_era(0)), "as after a state that was not the mates'"
    desk.disk = desk.disk.crash()
    desk.reopen()
    assert not asyncio.run(desk.archive.begin_era(0)), "as after a restart under an old plan"
    assert asyncio.run(desk.archive.begin_era(1))
    assert not asyncio.run(desk.archive.begin_era(0))


def test_a_disk_that_cannot_note_an_era_keeps_nobody_from_it(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.disk.limit(0)
    assert asyncio.run(desk.archive.begin_era(2))
    assert "era 2" in caplog.text
    assert not asyncio.run(desk.archive.begin_era(2))
