import os

import pytest

from shoal.coordinator.chain import ChainRecord
from shoal.coordinator.store import PlanStore
from shoal.protocol.errors import LocalError

RECORD = ChainRecord(run="run", granted_term=3, granted_to="b", live=b"live", accepted=b"", accepted_term=0)


def test_what_was_saved_is_loaded_by_the_next_process(tmp_path):
    PlanStore(tmp_path / "plans").save(RECORD)
    assert PlanStore(tmp_path / "plans").load("run") == RECORD
    assert os.listdir(tmp_path) == ["plans"], "no temporary file stays"


def test_a_new_peer_has_no_record(tmp_path):
    assert PlanStore(tmp_path / "plans").load("run") is None


def test_memory_keeps_it_for_this_process_only():
    store = PlanStore()
    store.save(RECORD)
    assert store.load("run") == RECORD
    assert PlanStore().load("run") is None


def test_another_runs_record_is_refused(tmp_path):
    PlanStore(tmp_path / "plans").save(RECORD)
    with pytest.raises(LocalError, match="belongs to run run, not other"):
        PlanStore(tmp_path / "plans").load("other")


def test_a_damaged_record_is_refused(tmp_path):
    (tmp_path / "plans").write_bytes(b"\x81")
    with pytest.raises(LocalError, match="not a record of plans"):
        PlanStore(tmp_path / "plans").load("run")


def test_what_cannot_be_written_is_not_remembered(tmp_path):
    store = PlanStore(tmp_path / "missing" / "plans")
    with pytest.raises(LocalError, match="cannot write"):
        store.save(RECORD)
    assert store.load("run") is None


def test_the_old_record_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    store = PlanStore(tmp_path / "plans")
    store.save(RECORD)

    def power_cut(source, target):
        raise OSError(5, "power cut")

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(LocalError):
        store.save(ChainRecord(run="run", granted_term=4))
    assert PlanStore(tmp_path / "plans").load("run") == RECORD
