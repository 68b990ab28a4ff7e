import errno
import itertools
import random
from pathlib import PurePosixPath

import msgspec
import pytest

from shoal.coordinator.chain import ChainRecord
from shoal.coordinator.store import PlanStore
from shoal.protocol.errors import LocalError
from shoal.protocol.sim.disk import PowerCut, SimDisk

RECORD = ChainRecord(run="run", granted_term=3, granted_to="b", live=b"live", accepted=b"", accepted_term=0)
PATH = PurePosixPath("run", "plans.msgpack")


@pytest.fixture
def disk():
    return SimDisk(random.Random(0))


def record(term):
    """The later, the larger or the smaller: a file that is overwritten in place would show both ends."""
    return ChainRecord(run="run", granted_term=term, granted_to="b", live=bytes([term % 256]) * (term * 37 % 400))


def test_what_was_saved_is_loaded_by_the_next_process(disk):
    PlanStore(disk, PATH).save(RECORD)
    assert PlanStore(disk, PATH).load("run") == RECORD
    assert disk.list(PATH.parent) == (PATH.name,), "no temporary file stays"


def test_a_new_peer_has_no_record(disk):
    assert PlanStore(disk, PATH).load("run") is None


def test_memory_keeps_it_for_this_process_only():
    store = PlanStore()
    store.save(RECORD)
    assert store.load("run") == RECORD
    assert PlanStore().load("run") is None


def test_what_is_there_already_is_not_written_again(disk):
    store = PlanStore(disk, PATH)
    store.save(RECORD)
    before = disk.num_operations
    store.save(msgspec.structs.replace(RECORD))
    assert disk.num_operations == before


def test_another_runs_record_is_refused(disk):
    PlanStore(disk, PATH).save(RECORD)
    with pytest.raises(LocalError, match="belongs to run run, not other"):
        PlanStore(disk, PATH).load("other")


def one_line(disk):
    with pytest.raises(LocalError) as caught:
        PlanStore(disk, PATH).load("run")
    assert "\n" not in str(caught.value)
    assert disk.where(PATH) in str(caught.value)
    return str(caught.value)


def test_no_flipped_bit_makes_another_record_of_it(disk):
    PlanStore(disk, PATH).save(RECORD)
    for bit in range(8 * len(disk.read(PATH))):
        disk.rot(PATH, bit=bit)
        assert "is not a record of plans (its checksum does not fit)" in one_line(disk)
        disk.rot(PATH, bit=bit)
    assert PlanStore(disk, PATH).load("run") == RECORD


def test_no_torn_record_is_read_and_none_is_taken_for_a_new_peers(disk):
    PlanStore(disk, PATH).save(RECORD)
    data = disk.read(PATH)
    for length in range(len(data)):
        disk.write(PATH, data[:length])
        assert "give shoal a new --state-dir" in one_line(disk)


def test_a_record_of_another_kind_is_refused(disk):
    PlanStore(disk, PATH).save(msgspec.structs.replace(RECORD, granted_term="three"))
    assert "is not a record of plans" in one_line(disk)


def test_a_record_that_cannot_be_read_is_not_taken_for_a_new_peers(disk):
    PlanStore(disk, PATH).save(RECORD)
    disk.fail(only={"read"})
    assert "Input/output error" in one_line(disk)


def test_what_cannot_be_written_is_not_remembered(disk):
    store = PlanStore(disk, PATH)
    disk.limit(0)
    with pytest.raises(LocalError, match=r"cannot keep votes in .* No space left on device: make room"):
        store.save(RECORD)
    assert store.load("run") is None
    disk.limit(1000)
    store.save(RECORD)
    assert PlanStore(disk, PATH).load("run") == RECORD


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_after_an_error_the_record_is_the_old_one_or_the_new_and_the_next_one_is_kept(code):
    failed = 0
    for after, seed in itertools.product(range(3), range(40)):  # write, replace, sync
        disk = SimDisk(random.Random(seed))
        store = PlanStore(disk, PATH)
        store.save(record(1))
        disk.fail(after=after, code=code)
        with pytest.raises(LocalError, match="cannot keep votes"):
            store.save(record(2))
        failed += 1
        assert PlanStore(disk.crash(), PATH).load("run") in (record(1), record(2))
        disk = SimDisk(random.Random(seed))
        store = PlanStore(disk, PATH)
        store.save(record(1))
        disk.fail(after=after, code=code)
        with pytest.raises(LocalError):
            store.save(record(2))
        store.save(record(1))  # what is on the disk is not known, so this one is written
        assert PlanStore(disk.crash(), PATH).load("run") == record(1)
    assert failed == 120


def test_a_power_cut_at_any_moment_loses_no_vote_that_was_cast(disk):
    """1,000 crash points, at every operation of the first save and of later ones, one process after the other."""
    store = PlanStore(disk, PATH)
    cast, num_crashes, went_through = 0, 0, 0
    for term in itertools.count(1):
        if num_crashes % 50 == 0:  # a new machine
            disk, cast = SimDisk(random.Random(num_crashes)), 0
            store = PlanStore(disk, PATH)
        disk.cut_power(after=random.Random(term).randrange(5))
        try:
            for vote in (3 * term, 3 * term + 1, 3 * term + 2):
                store.save(record(vote))
                cast = vote
        except PowerCut:
            num_crashes += 1
        disk = disk.crash()
        store = PlanStore(disk, PATH)
        found = store.load("run")
        allowed = [record(cast), record(vote)] if cast else [None, record(vote)]
        assert found in allowed, f"cast {cast}, found {found}"
        went_through += found == record(vote) and vote != cast
        cast = found.granted_term if found else 0
        if num_crashes == 1000:
            break
    assert went_through > 100, "no crash fell behind the rename"
