import pytest

from shoal.coordinator.ledger import HISTORY_STEPS, PATIENCE_HEARTBEATS, Ledger
from shoal.protocol.messages import CommitReport, HandOver, ValidationReport


def commit(stage, step, *, loss=None, tokens=1000, staleness=0.0, duplicates=0, given_up=0):
    return CommitReport(
        stage=stage,
        step=step,
        members=2,
        microbatches=8,
        duplicates=duplicates,
        given_up=given_up,
        tokens=tokens,
        staleness_steps_mean=staleness,
        loss=loss,
        digest="",
    )


@pytest.fixture
def ledger():
    return Ledger(num_stages=3, steps=100, heartbeat_s=1.0, validates=False, lead_steps=2)


def tell(ledger, now_s, **how):
    return ledger.tell(now_s, term=2, peers=6, **how)


def test_a_step_is_told_when_all_stages_have_reported(ledger):
    ledger.note_commits([commit(2, 0, loss=5.5, staleness=0.0, duplicates=1)], 0.0)
    assert tell(ledger, 0.0) == []
    ledger.note_commits([commit(1, 0, staleness=0.3), commit(0, 0, staleness=0.6, given_up=2)], 0.5)
    (record,) = tell(ledger, 0.5)
    assert (record.step, record.loss, record.term, record.peers) == (0, 5.5, 2, 6)
    assert record.staleness_mean == pytest.approx(0.3)
    assert (record.duplicates, record.given_up) == (1, 2)
    assert tell(ledger, 10.0) == []
    assert list(ledger.history) == [record]


def test_a_step_is_told_after_a_while_though_a_stage_is_missing(ledger):
    ledger.note_commits([commit(2, 0, loss=5.5)], 0.0)
    assert tell(ledger, PATIENCE_HEARTBEATS - 0.01) == []
    assert [record.step for record in tell(ledger, PATIENCE_HEARTBEATS)] == [0]


def test_a_step_whose_loss_somebody_else_got_is_not_told_here(ledger):
    ledger.note_commits([commit(0, 0), commit(1, 0)], 0.0)
    assert tell(ledger, 100.0, flush=True) == []


def test_what_is_left_is_told_when_the_role_moves(ledger):
    ledger.note_commits([commit(2, 1, loss=4.0), commit(2, 0, loss=5.0)], 0.0)
    assert [record.step for record in tell(ledger, 0.0, flush=True)] == [0, 1]


def test_a_report_counts_once(ledger):
    for _ in range(3):
        ledger.note_commits([commit(stage, 0, loss=5.0, duplicates=1) for stage in range(3)], 0.0)
    (record,) = tell(ledger, 0.0)
    assert record.duplicates == 3
    ledger.note_commits([commit(2, 0, loss=9.0)], 5.0)
    assert tell(ledger, 50.0, flush=True) == []
    assert ledger.loss == 5.0


def test_the_run_is_done_when_every_stage_has_committed_its_last_step(ledger):
    ledger.note_commits([commit(stage, 99) for stage in (0, 1)], 0.0)
    assert not ledger.done
    assert ledger.step == 0
    ledger.note_version(2, 100)
    assert ledger.done
    assert ledger.step == 100


@pytest.mark.parametrize("bad", [commit(7, 0), commit(-1, 0), commit(0, 100), commit(0, 10**9)])
def test_reports_that_cannot_be_are_ignored(ledger, bad):
    ledger.note_commits([bad], 0.0)
    assert ledger.step == ledger.version_max == 0
    ledger.note_version(9, 50)
    ledger.note_version(None, 50)
    assert ledger.version_max == 0


def test_tokens_per_second_over_recent_commits(ledger):
    assert ledger.tokens_per_s == 0.0
    for step in range(40):
        ledger.note_commits([commit(2, step, tokens=500 if step < 20 else 1000)], 2.0 * step)
    assert ledger.tokens_per_s == pytest.approx(500.0)


def test_a_validation_is_told_once_with_the_next_step(ledger):
    ledger.note_validations([ValidationReport(step=20, loss=2.5, microbatches=4)])
    ledger.note_validations([ValidationReport(step=10, loss=9.0, microbatches=4)])
    for step in (20, 21):
        ledger.note_commits([commit(stage, step, loss=2.0) for stage in range(3)], 0.0)
    first, second = tell(ledger, 0.0)
    assert (first.validation_loss, first.validation_step) == (2.5, 20)
    assert (second.validation_loss, second.validation_step) == (None, None)
    assert ledger.validation_loss == 2.5


def test_the_successor_knows_the_loss_until_it_hears_a_newer_one(ledger):
    ledger.take_over(HandOver(plan=b"", roster=(), version=31, loss=3.3, validation_loss=3.4))
    assert (ledger.loss, ledger.validation_loss) == (3.3, 3.4)
    ledger.note_commits([commit(2, 29, loss=9.9)], 0.0)
    assert ledger.loss == 3.3
    ledger.note_commits([commit(2, 31, loss=3.2)], 0.0)
    assert ledger.loss == 3.2


def test_memory_is_bounded():
    ledger = Ledger(num_stages=1, steps=10**6, heartbeat_s=1.0, validates=False, lead_steps=2)
    for step in range(3 * HISTORY_STEPS):
        ledger.note_commits([commit(0, step, loss=1.0)], float(step))
        tell(ledger, float(step))
    assert len(ledger.history) == HISTORY_STEPS
    ledger.note_commits([commit(0, 5, loss=1.0)], 1e6)
    assert tell(ledger, 1e9) == [], "told long ago"


def test_a_run_is_done_when_its_last_version_is_validated() -> None:
    ledger = Ledger(num_stages=1, steps=2, heartbeat_s=1.0, validates=True, lead_steps=2)
    ledger.note_commits([commit(0, 0, loss=3.0), commit(0, 1, loss=2.0)], now_s=1.0)
    assert [record.step for record in ledger.tell(1.0, term=1, peers=1)] == [0]
    assert not ledger.done
    ledger.note_validations([ValidationReport(step=2, loss=1.5, microbatches=4)])
    assert ledger.done
    (last,) = ledger.tell(1.1, term=1, peers=1)
    assert (last.step, last.validation_loss, last.validation_step) == (1, 1.5, 2)


def test_a_successor_goes_on_from_what_it_was_told() -> None:
    ledger = Ledger(num_stages=3, steps=100, heartbeat_s=1.0, validates=True, lead_steps=2)
    ledger.take_over(
        HandOver(
            plan=b"", roster=(), version=50, loss=2.0, validation_loss=2.5, tokens_per_s=900.0, staleness_steps_mean=0.5
        )
    )
    assert (ledger.step, ledger.loss, ledger.validation_loss) == (48, 2.0, 2.5)
    assert (ledger.tokens_per_s, ledger.staleness_mean) == (900.0, 0.5)
