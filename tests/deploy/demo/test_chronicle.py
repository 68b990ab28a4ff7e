"""From children's reports to what is told and summed up."""

import io
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from shoal.deploy.demo.chronicle import Chronicle
from shoal.deploy.demo.summary import FaultLine
from shoal.deploy.record.report import Committed, Left, Obeys, Status, StepDone, Validated
from shoal.deploy.run.run_file import DEMO_SPEC, with_changes
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, ValidationReport
from shoal.protocol.toml.spec_file import load_spec
from statuses import swarm_status

STAGES = 2
A, B = PeerID("12D3KooWA"), PeerID("12D3KooWB")


def commit(stage: int, step: int, *, duplicates: int = 0) -> Committed:
    report = CommitReport(
        stage=stage,
        step=step,
        members=2,
        microbatches=16,
        duplicates=duplicates,
        given_up=0,
        tokens=16,
        staleness_steps_mean=0.5,
        loss=5.0 - step if stage == STAGES - 1 else None,
        digest="d",
    )
    return Committed(report=report)


def plan(**says: Any) -> Obeys:
    usual = {"term": 1, "sequence": 1, "coordinator": A, "reason": "first plan", "peers": 4, "stages": STAGES}
    return Obeys(**(usual | says))


def status(term: int, sequence: int, coordinator: PeerID = A) -> Status:
    return Status(
        status=swarm_status(
            coordinator=coordinator,
            term=term,
            plan_sequence=sequence,
            stages=((0, 1), (1, 2)),
            peers=(),
            elapsed_s=0.0,
        )
    )


class Told:
    """A chronicle and what it wrote."""

    def __init__(self, folder: Path) -> None:
        self.text = io.StringIO()
        spec = with_changes(load_spec(DEMO_SPEC), {"swarm.stages": STAGES})
        self.chronicle = Chronicle(spec, Console(file=self.text, width=200, force_terminal=False), title="t")
        self.path = folder / "lines.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def close(told: Told) -> None:
    told.chronicle.sum_up(
        peers=4, chaos=True, watched_until_s=time.monotonic(), snapshot="", sample="", folder=Path("f")
    )


def test_steps_are_told_though_no_coordinator_says_a_word(told: Told) -> None:
    with told.chronicle.kept(told.path):
        told.chronicle.take("peer-1", plan(term=2, sequence=3, coordinator=B, reason="x left"))
        told.chronicle.take("peer-1", Validated(report=ValidationReport(step=0, loss=5.5, microbatches=4)))
        for step in range(2):
            for stage in range(STAGES):
                for name in ("peer-1", "peer-2"):
                    told.chronicle.take(name, commit(stage, step, duplicates=step))
        told.chronicle.take_fault(FaultLine(kind="kill", peer="peer-2", stage=1))
        told.chronicle.take("peer-1", Left(peer=A, state_dir="", finished=True))
        close(told)
    first, second, fault, summary = told.lines()
    assert (first["step"], first["loss"], first["val_loss"], first["duplicates"]) == (0, 5.0, 5.5, 0)
    assert (first["term"], first["coordinator"], first["peers"]) == (2, B, 4)
    assert (second["step"], second["loss"], second["val_loss"], second["duplicates"]) == (1, 4.0, None, 2)
    assert (fault["event"], fault["kind"], fault["peer"], fault["stage"]) == ("fault", "kill", "peer-2", 1)
    assert fault["seconds"] >= second["seconds"]
    assert (summary["finished"], summary["duplicates"], summary["loss_last"]) == (True, 2, 4.0)
    assert summary["duplicates_share"] == pytest.approx(2 / 66)
    assert summary["validations"] == {"0": 5.5}
    assert summary["chaos"]["kills"] == 1
    assert "chaos at" in told.text.getvalue()


def test_a_plan_is_noted_once_and_an_old_one_not_at_all(told: Told) -> None:
    plans = [
        Obeys(term=1, sequence=2, coordinator=A, reason="second", peers=4),
        Obeys(term=1, sequence=2, coordinator=A, reason="second", peers=4),
        Obeys(term=1, sequence=1, coordinator=A, reason="first", peers=4),
        Obeys(term=2, sequence=3, coordinator=B, reason="third", peers=4),
    ]
    for plan in plans:
        told.chronicle.take("peer-1", plan)
    assert told.text.getvalue().splitlines() == [
        "plan 2: second",
        f"term 2: the coordinator's role moved to {B[-8:]}",
        "plan 3: third",
    ]
    assert told.chronicle.record.terms == {1, 2}


def test_a_coordinator_of_an_earlier_plan_is_not_believed(told: Told) -> None:
    told.chronicle.take("peer-2", status(2, 5, B))
    told.chronicle.take("peer-1", status(1, 4, A))
    assert told.chronicle.status is not None
    assert told.chronicle.status.coordinator == B


def test_a_status_of_an_older_plan_than_a_peer_obeys_is_no_base_to_choose_a_victim_by(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s = time.monotonic()
    told.chronicle.take("peer-2", status(2, 5, B))
    told.chronicle.take("peer-1", Obeys(term=2, sequence=6, coordinator=B, reason="moved", peers=4))
    assert told.chronicle.status is None
    told.chronicle.take("peer-2", status(2, 6, B))
    assert told.chronicle.status is None, "another plan may be on its way"
    monkeypatch.setattr(time, "monotonic", lambda: began_s + 2.0)
    assert told.chronicle.status is not None


def test_a_status_grows_old(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    told.chronicle.take("peer-2", status(2, 5, B))
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 60.0)
    assert told.chronicle.status is None


def test_the_wait_for_a_step_that_never_comes_is_a_stall(told: Told) -> None:
    told.chronicle.take("peer-1", plan())
    for stage in range(STAGES):
        told.chronicle.take("peer-1", commit(stage, 0))
    last_s = told.chronicle.record.step_times_s[-1]
    assert told.chronicle.record.stall_s_max(last_s + 30.0) == pytest.approx(30.0)
    told.chronicle.take("peer-1", Left(peer=A, state_dir="", finished=True))
    assert told.chronicle.record.stall_s_max(last_s + 30.0) == 0.0


def test_a_coordinators_own_records_fill_in_at_the_end(told: Told) -> None:
    record = StepDone(
        step=0,
        loss=3.0,
        validation_loss=None,
        validation_step=None,
        tokens_per_s=1.0,
        staleness_mean=0.0,
        duplicates=0,
        given_up=0,
        dissenting=0,
        era=0,
        term=1,
        peers=4,
        coordinator=A,
    )
    told.chronicle.take("peer-1", plan())
    with told.chronicle.kept(told.path):
        told.chronicle.take("peer-1", commit(0, 0))
        told.chronicle.take("peer-1", record)
        told.chronicle.take("peer-1", msgspec.structs.replace(record, loss=9.0))
        told.chronicle.tell_steps(flush=True)
    assert [(line["step"], line["loss"]) for line in told.lines()] == [(0, 3.0)]


def test_a_path_that_cannot_be_written_is_the_users_to_mend(told: Told, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot write"), told.chronicle.kept(tmp_path / "no" / "folder"):
        pass
