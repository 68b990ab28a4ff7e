"""What a peer keeps and offers: a full disk costs a snapshot and a line a minute; what is damaged is not offered."""

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import msgspec
import pytest
import torch

from shoal.peer.disk.archive import ABANDONED_SNAPSHOTS, ERAS_KEPT, Archive
from shoal.peer.model.layout import all_layer_keys
from shoal.peer.model.state import LayerState, StageState, initial_state
from shoal.protocol.certificate import Certified
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan
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

    def reopen(self, spec: RunSpec = SPEC) -> None:
        self.archive = Archive(self.disk, run="run", spec=spec, clock=self.time, run_blocking=inline)
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


def test_layers_that_others_hold_by_now_are_removed_in_the_end(desk: Desk) -> None:
    interval = SPEC.swarm.snapshot_interval_steps
    here, elsewhere = KEYS[:2], KEYS[2:]
    desk.write(interval, keys=elsewhere)
    desk.write(2 * interval, keys=elsewhere)
    for number in range(3, 3 + ABANDONED_SNAPSHOTS):
        desk.write(number * interval, keys=here)
        assert (0, 2 * interval) in desk.held, "it may be wanted for a roll-back"
    desk.write((3 + ABANDONED_SNAPSHOTS) * interval, keys=here)
    kept = [(0, (number + ABANDONED_SNAPSHOTS) * interval) for number in (3, 2)]
    assert desk.held == kept
    desk.reopen()
    assert desk.held == kept


def test_a_new_snapshot_by_the_clock_removes_no_other_layers(desk: Desk) -> None:
    """Each member of a stage writes when it comes to a version: until the last one has, the one before is whole."""
    by_the_clock = msgspec.structs.replace(SPEC.swarm, snapshot_interval_steps=0, snapshot_interval_s=15.0)
    desk.reopen(msgspec.structs.replace(SPEC, swarm=by_the_clock))
    here, elsewhere = KEYS[:2], KEYS[2:]
    for keys in (here, elsewhere):
        desk.archive.want(10)
        desk.write(10, keys=keys)
    desk.write(13, keys=here)
    assert desk.read(0, 10).keys() == set(KEYS)


def certify(desk: Desk, era: int, version: int) -> None:
    """A plan is live that certifies this version."""
    plan = Plan(run="run", term=1, sequence=1, previous="", coordinator=PeerID("ana"), stages=())
    desk.archive.follow(msgspec.structs.replace(plan, certified=(Certified(era, version, ()),)))


def thin(desk: Desk, era: int, version: int) -> None:
    certify(desk, era, version)
    if desk.archive.may_thin((era, version)):
        asyncio.run(desk.archive.thin((era, version)))


def test_what_is_older_than_a_safe_snapshot_goes_whosever_layers(desk: Desk) -> None:
    others = KEYS[:2]
    for version in (40, 50, 100):
        desk.write(version)
        desk.write(version, keys=others)
    thin(desk, 0, 50)
    assert desk.held == [(0, 100), (0, 100), (0, 50), (0, 50)], "two are kept anyway"
    thin(desk, 0, 100)
    assert desk.held == [(0, 100), (0, 100)]
    desk.write(110)
    assert desk.held == [(0, 110), (0, 100), (0, 100)], "until the next is safe, too"


WEEK_S = 7 * 24 * 3600.0


def test_an_older_eras_last_snapshots_stay_for_a_week_and_until_the_new_one_has_its_own(desk: Desk) -> None:
    """Row 1 of the issue: the old era's were gone 100 steps later, and with them what had been trained."""
    interval = SPEC.swarm.snapshot_interval_steps
    others = KEYS[:2]
    for version in (50, 100):
        desk.write(version)
        desk.write(version, keys=others)
    for number in range(2 * ABANDONED_SNAPSHOTS):
        desk.write(number * interval + 5, era=1)
        thin(desk, 1, number * interval + 5)
    last = desk.held[0]
    old = [(0, 100), (0, 100), (0, 50), (0, 50)]
    assert desk.held == [last, *old]
    desk.time.now = WEEK_S - 1.0
    desk.reopen()
    certify(desk, *last)
    assert not desk.archive.may_thin(last), "it costs no look at the disk meanwhile"
    assert desk.held == [last, *old]
    desk.time.now = WEEK_S + 1.0
    assert desk.held == [last, *old], "nobody has said that the new era's are safe"
    thin(desk, *last)
    assert desk.held == [last]
    assert desk.disk.list(PurePosixPath("run", "snapshots")) == ("embed-head",), "nothing is in the others' any more"
    assert desk.read(*last).keys() == set(KEYS)


def test_of_many_older_eras_the_ones_that_came_least_far_make_room(desk: Desk) -> None:
    desk.write(1000)
    for era in range(1, 9):
        desk.write(10 * era, era=era)
        assert len({era for era, _ in desk.held}) <= ERAS_KEPT + 1
    assert desk.held == [(8, 80), (7, 70), (0, 1000)]


def test_a_torn_note_of_an_eras_end_costs_a_longer_wait_and_no_snapshot(desk: Desk) -> None:
    desk.write(100)
    desk.write(10, era=1)
    for torn in (b"", b"0 1", b"0 nonsense\n\xff 3\n", b"\xff" * 9):
        desk.disk.write(PurePosixPath("run", "past-eras"), torn)
        desk.time.now = WEEK_S / 2
        desk.reopen()
        thin(desk, 1, 10)
        assert desk.held == [(1, 10), (0, 100)]


def test_what_a_plan_certifies_stays_whatever_comes_after_it(desk: Desk) -> None:
    """Of a group of two the other may lie, and has us keep what it claims to be newer."""
    desk.write(50)
    certify(desk, 0, 50)
    for version in (4800, 4801, 4802):
        desk.write(version)
    assert desk.held == [(0, 4802), (0, 4801), (0, 50)]
    thin(desk, 0, 4801)
    assert desk.held[-1] == (0, 4801), "only a plan that certifies a newer one lets it go"


def test_a_safe_snapshot_that_is_newer_than_all_we_have_is_not_believed(desk: Desk) -> None:
    desk.write(50)
    desk.write(100)
    for safe in ((0, 101), (1, 1), (1 << 40, 1 << 40)):
        certify(desk, *safe)
        assert not desk.archive.may_thin(safe)
    assert not desk.archive.may_thin((0, 100)), "no plan certifies it"
    certify(desk, 0, 100)
    assert desk.archive.may_thin((0, 100))
    thin(desk, 0, 100)
    assert not desk.archive.may_thin((0, 100)), "there is nothing to do"
    assert desk.held == [(0, 100)]


def test_a_disk_that_cannot_remove_costs_a_line(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.write(50)
    desk.write(100)
    desk.disk.fail(times=math.inf)
    thin(desk, 0, 100)
    desk.disk.mend()
    assert "cannot remove old snapshots" in caplog.text
    desk.reopen()
    assert desk.held[0] == (0, 100)
    assert desk.write(150)


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


def test_what_is_damaged_is_left_out_before_a_plan_goes_by_it(desk: Desk) -> None:
    desk.write(10)
    desk.write(20)
    desk.rot(20, "head.safetensors")
    desk.reopen()
    assert (desk.held, desk.archive.has_lost_all) == ([(0, 10)], False)
    desk.rot(10, "embed.safetensors")
    desk.reopen()
    assert (desk.held, desk.archive.has_lost_all) == ([], True)
    desk.write(30)
    assert not desk.archive.has_lost_all


def test_a_disk_without_its_snapshots_is_known_to_have_had_some(desk: Desk) -> None:
    asyncio.run(desk.archive.note_era(0, 1))
    desk.reopen()
    assert not desk.archive.has_lost_all, "none was ever written"
    desk.write(10)
    desk.disk.remove_tree(PurePosixPath("run", "snapshots"))
    desk.reopen()
    assert desk.archive.has_lost_all


def restart(desk: Desk) -> None:
    desk.disk = desk.disk.crash()
    desk.reopen()


def test_once_it_is_under_way_an_era_is_not_begun_again_in_any_life(desk: Desk) -> None:
    assert desk.archive.begin_era(0)
    assert not desk.archive.begin_era(0), "as after a state that was not the mates'"
    asyncio.run(desk.archive.note_era(0, 1))
    restart(desk)
    assert not desk.archive.begin_era(0), "as after a restart under an old plan"
    assert desk.archive.version_noted(0) == 1
    assert desk.archive.begin_era(1)
    assert not desk.archive.begin_era(0)
    assert desk.archive.version_noted(1) == 0


def test_an_era_of_which_nothing_has_come_is_begun_again_by_who_restarts(desk: Desk) -> None:
    for era in (0, 1):
        for _ in range(3):
            assert desk.archive.begin_era(era, group=1)
            assert desk.archive.begin_era(era, group=2)
            assert not desk.archive.begin_era(era, group=1)
            restart(desk)
        asyncio.run(desk.archive.note_era(era, 9))


def test_who_came_to_an_era_by_its_mates_does_not_begin_it_elsewhere(desk: Desk) -> None:
    assert desk.archive.begin_era(0, group=1)
    asyncio.run(desk.archive.note_era(3, 5))
    assert not desk.archive.begin_era(3, group=2)


def test_a_disk_that_cannot_note_an_era_is_tried_again_by_the_next_step(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.disk.limit(0)
    assert desk.archive.begin_era(2)
    asyncio.run(desk.archive.note_era(2, 1))
    assert "era 2" in caplog.text
    assert not desk.archive.begin_era(2)
    desk.disk.limit(None)
    asyncio.run(desk.archive.note_era(2, 2))
    restart(desk)
    assert not desk.archive.begin_era(2)
