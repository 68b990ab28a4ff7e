import math

import pytest

from shoal.coordinator.ledger import HISTORY_STEPS, PATIENCE_HEARTBEATS, Ledger
from shoal.protocol.messages import CommitReport, PaceMark, TransferLeadership, ValidationReport
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, SwarmSpec, TrainingSpec

MARKS = tuple(PaceMark(era=0, step=9 - age, age_s=6.0 * age, num_steps=1, tokens=5400) for age in reversed(range(10)))


class Believing(Ledger):
    """Whatever a lead reports, the members of its group confirm at once."""

    def note_commits(self, reports, now_s):
        flaws = super().note_commits(reports, now_s)
        for report in reports:
            if report.era == self.era and report.step < self._steps and not self._flaw(report):
                self.note_version(report.stage, report.step + 1)
        return flaws

    def note_validations(self, reports):
        for report in reports:
            self.note_version(0, report.step)
        super().note_validations(reports)


def made(kind, num_stages, *, steps=100, validates=False, num_experts=0):
    """A ledger of a run with eight microbatches and 1,000 tokens a step."""
    training = TrainingSpec(
        steps=steps, microbatches_per_step=8, microbatch_size=1, validation_interval_steps=10 * validates
    )
    spec = RunSpec(
        model=ModelSpec(context=125, num_experts=num_experts),
        training=training,
        optimizer=OptimizerSpec(warmup_steps=0),
        swarm=SwarmSpec(heartbeat_s=1.0, expert_slots=num_experts),
    )
    ledger = kind(spec)
    ledger.divide(num_stages)
    return ledger


def commit(stage, step, *, loss=None, tokens=1000, staleness=0.0, duplicates=0, given_up=0, **says):
    usual = {"members": 2, "microbatches": 8 - given_up, "digest": ""}
    return CommitReport(
        stage=stage,
        step=step,
        duplicates=duplicates,
        given_up=given_up,
        tokens=tokens,
        staleness_steps_mean=staleness,
        loss=loss,
        **(usual | says),
    )


@pytest.fixture
def ledger():
    return made(Believing, 3)


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


def test_a_step_is_told_after_a_while_though_a_stage_is_missing(ledger):
    ledger.note_commits([commit(2, 0, loss=5.5)], 0.0)
    for stage in (0, 1):
        ledger.note_version(stage, 1)
    assert tell(ledger, PATIENCE_HEARTBEATS - 0.01) == []
    assert [record.step for record in tell(ledger, PATIENCE_HEARTBEATS)] == [0]
    assert not ledger.has_reported(1), "it may still come"


def test_a_step_is_told_after_those_before_it(ledger):
    """A new coordinator heard all of step 1 while a report of step 0 had gone to the one before it."""
    ledger.note_commits([commit(2, 0, loss=5.5), *(commit(stage, 1, loss=5.0) for stage in range(3))], 0.0)
    for stage in range(3):
        ledger.note_version(stage, 2)
    assert tell(ledger, PATIENCE_HEARTBEATS - 0.01) == []
    assert [record.step for record in tell(ledger, PATIENCE_HEARTBEATS)] == [0, 1]


def test_a_new_coordinator_tells_no_step_before_those_that_went_to_the_previous_one(ledger):
    """Its first report was of step 86, whose reporter was quicker than the one that kept the reports of 63 to 78."""
    ledger.note_commits([commit(stage, 86, loss=5.0) for stage in range(3)], 0.0)
    assert tell(ledger, PATIENCE_HEARTBEATS - 0.01) == []
    ledger.note_commits([commit(stage, step, loss=5.0) for step in (63, 64) for stage in range(3)], 1.0)
    assert tell(ledger, 1.0) == [], "62 may still come"
    assert [record.step for record in tell(ledger, 1.0 + PATIENCE_HEARTBEATS)] == [63, 64, 86]
    ledger.note_commits([commit(stage, step, loss=5.0) for step in (65, 87) for stage in range(3)], 9.0)
    assert [record.step for record in tell(ledger, 99.0)] == [87], "65 came too late"


def test_a_stage_that_has_not_committed_a_step_yet_is_waited_for(ledger):
    ledger.note_commits([commit(2, 0, loss=5.5), commit(1, 0)], 0.0)
    assert tell(ledger, 100.0) == [], "stage 0 commits last, after a step of minutes where those are slow"
    ledger.note_commits([commit(0, 0, given_up=2)], 100.0)
    (record,) = tell(ledger, 100.0)
    assert record.given_up == 2


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
    assert ledger.version_max == 0


def test_the_pace_is_that_of_the_last_stage_from_when_it_committed(ledger):
    for step in range(40):
        ledger.note_commits([commit(0, step), commit(2, step, tokens=600)], 2.0 * step)
    assert ledger.pace.tokens_per_s(78.0) == pytest.approx(300.0)
    ledger.note_commits([commit(2, step, tokens=600, age_s=80.0 - 2.0 * (step - 40)) for step in range(40, 60)], 160.0)
    assert ledger.pace.tokens_per_s(160.0) == pytest.approx(100.0), (
        "of the last minute 10 steps, which waited for a coordinator"
    )


@pytest.mark.parametrize("age_s", [math.inf, math.nan, -5.0])
def test_an_age_that_cannot_be_does_no_harm(ledger, age_s):
    for step in range(4):
        ledger.note_commits([commit(2, step, age_s=age_s)], 2.0 * step)
    assert math.isfinite(ledger.pace.tokens_per_s(6.0))


def test_a_validation_is_told_once_with_the_next_step(ledger):
    ledger.note_validations([ValidationReport(step=20, loss=2.5, microbatches=4)])
    ledger.note_validations([ValidationReport(step=10, loss=9.0, microbatches=4)])
    for step in (20, 21):
        ledger.note_commits([commit(stage, step, loss=2.0) for stage in range(3)], 0.0)
    first, second = tell(ledger, PATIENCE_HEARTBEATS)
    assert (first.validation.loss, first.validation.step) == (2.5, 20)
    assert second.validation is None
    assert ledger.validation_loss == 2.5


def test_the_successor_knows_the_loss_until_it_hears_a_newer_one(ledger):
    ledger.take_over(TransferLeadership(plan=b"", roster=(), version=31, loss=3.3, validation_loss=3.4), 0.0)
    assert (ledger.loss, ledger.validation_loss) == (3.3, 3.4)
    ledger.note_commits([commit(2, 29, loss=9.9)], 0.0)
    assert ledger.loss == 3.3
    ledger.note_commits([commit(2, 31, loss=3.2)], 0.0)
    assert ledger.loss == 3.2


def test_memory_is_bounded():
    ledger = made(Believing, 1, steps=10**6)
    for step in range(3 * HISTORY_STEPS):
        ledger.note_commits([commit(0, step, loss=1.0)], float(step))
        tell(ledger, float(step))
    assert len(ledger._reports) <= HISTORY_STEPS
    ledger.note_commits([commit(0, 5, loss=1.0)], 1e6)
    assert tell(ledger, 1e9) == [], "told long ago"


def test_a_run_is_done_when_its_last_version_is_validated() -> None:
    ledger = made(Believing, 1, steps=2, validates=True)
    ledger.note_commits([commit(0, 0, loss=3.0), commit(0, 1, loss=2.0)], now_s=1.0)
    assert [record.step for record in ledger.tell(1.0, term=1, peers=1)] == [0]
    assert not ledger.done
    ledger.note_validations([ValidationReport(step=2, loss=1.5, microbatches=4)])
    assert ledger.done
    (last,) = ledger.tell(1.1, term=1, peers=1)
    assert (last.step, last.validation.loss, last.validation.step) == (1, 1.5, 2)


def test_a_successor_goes_on_from_what_it_was_told() -> None:
    ledger = made(Believing, 3, validates=True)
    ledger.take_over(
        TransferLeadership(
            plan=b"",
            roster=(),
            version=50,
            step=48,
            loss=2.0,
            validation_loss=2.5,
            pace=MARKS,
            staleness_steps_mean=0.5,
        ),
        70.0,
    )
    assert (ledger.step, ledger.loss, ledger.validation_loss) == (48, 2.0, 2.5)
    assert (ledger.pace.tokens_per_s(70.0), ledger.staleness_mean) == (900.0, 0.5)


@pytest.mark.parametrize(
    "bad",
    [
        commit(1, 3, microbatches=7),
        commit(1, 3, microbatches=9),
        commit(1, 3, microbatches=8, given_up=1),
        commit(1, 3, duplicates=-1),
        commit(1, 3, microbatches=9, given_up=-1),
        commit(1, 3, microbatches=-1, given_up=9),
    ],
)
def test_a_report_whose_microbatches_do_not_add_up_is_refused(ledger, bad):
    (flaw,) = ledger.note_commits([bad], 0.0)
    assert "step 3 of stage 1" in flaw
    assert ledger.version_max == 0
    assert ledger.note_commits([commit(1, 3, given_up=3, duplicates=2)], 0.0) == []
    assert ledger.version_max == 4


def test_the_ledger_goes_back_with_the_run(ledger):
    for step in range(60):
        ledger.note_commits([commit(stage, step, loss=float(step)) for stage in range(3)], float(step))
        tell(ledger, float(step))
    ledger.note_commits([commit(2, 60, loss=0.0)], 60.0)
    ledger.note_validations([ValidationReport(step=40, loss=4.0, microbatches=1)])
    rate = ledger.pace.tokens_per_s(60.0)
    ledger.rewind(1, 50, num_stages=3)
    assert (ledger.era, ledger.step, ledger.version_max) == (1, 50, 50)
    assert ledger.pace.tokens_per_s(60.0) == rate, "what was computed was computed"
    assert tell(ledger, 100.0, flush=True) == [], "the old era's step 60 did not happen"
    late = [commit(stage, 50, loss=9.9) for stage in range(3)]
    assert ledger.note_commits(late, 101.0) == [], "not wrong, only late"
    assert ledger.step == 50
    ledger.note_commits([commit(stage, 50, loss=5.0, era=1) for stage in range(3)], 102.0)
    (record,) = tell(ledger, 102.0)
    assert (record.step, record.loss, record.era) == (50, 5.0, 1)
    assert ledger.loss == 5.0
    assert record.validation.step == 40, "what was validated at or below the beginning still holds"


def test_a_validation_above_the_beginning_is_forgotten(ledger):
    ledger.note_validations([ValidationReport(step=60, loss=1.0, microbatches=1)])
    ledger.note_commits([commit(stage, 61, loss=1.0) for stage in range(3)], 0.0)
    assert tell(ledger, PATIENCE_HEARTBEATS)[0].validation.step == 60
    ledger.rewind(1, 50, num_stages=3)
    ledger.note_validations([ValidationReport(step=60, loss=9.0, microbatches=1)])
    ledger.note_validations([ValidationReport(step=60, loss=2.0, microbatches=1, era=1)])
    ledger.note_commits([commit(stage, 61, loss=1.0, era=1) for stage in range(3)], 1.0)
    (record,) = tell(ledger, 1.0 + PATIENCE_HEARTBEATS)
    assert (record.validation.loss, record.validation.step) == (2.0, 60)


def test_what_is_told_of_another_era_changes_nothing(ledger):
    ledger.rewind(2, 10, num_stages=3)
    ledger.take_over(TransferLeadership(plan=b"", roster=(), era=1, version=50, loss=1.0), 0.0)
    assert (ledger.step, ledger.loss) == (10, None)
    ledger.take_over(TransferLeadership(plan=b"", roster=(), era=2, version=50, step=48, loss=1.0), 0.0)
    assert (ledger.step, ledger.loss) == (48, 1.0)


def test_a_run_that_goes_back_is_not_done():
    ledger = made(Believing, 1, steps=2, validates=True)
    ledger.note_commits([commit(0, 1, loss=2.0)], 0.0)
    ledger.note_validations([ValidationReport(step=2, loss=1.5, microbatches=4)])
    assert ledger.done
    ledger.rewind(1, 1, num_stages=1)
    assert not ledger.done


def test_the_run_is_done_when_its_experts_have_the_last_step_too() -> None:
    ledger = made(Believing, 1, num_experts=2, steps=1)
    ledger.note_version(0, 1)
    ledger.note_version(1, 1)
    assert not ledger.done
    assert ledger.step == 1
    ledger.note_version(2, 1)
    assert ledger.done
    ledger.rewind(1, 0, num_stages=1)
    assert not ledger.done


def test_the_gradient_norm_of_a_step_is_of_all_stages_together(ledger):
    ledger.note_commits([commit(stage, 0, gradient_norm=norm) for stage, norm in enumerate((2.0, 3.0, 6.0))], 0.0)
    (record,) = tell(ledger, 0.0)
    assert record.gradient_norm == pytest.approx(7.0)


@pytest.mark.parametrize("norm", [None, float("nan"), float("inf"), -1.0])
def test_a_gradient_norm_is_unknown_if_a_stage_does_not_tell_a_number(ledger, norm):
    ledger.note_commits([commit(stage, 0, gradient_norm=n) for stage, n in enumerate((2.0, norm, 6.0))], 0.0)
    (record,) = tell(ledger, 0.0)
    assert record.gradient_norm is None


def test_a_gradient_norm_of_placed_experts_counts_their_groups_too():
    ledger = made(Believing, 1, num_experts=2, steps=9)
    ledger.note_commits([commit(group, 0, gradient_norm=norm) for group, norm in ((1, 3.0), (2, 6.0))], 0.0)
    ledger.note_commits([commit(0, 0, gradient_norm=2.0)], 0.0)
    (record,) = tell(ledger, 0.0)
    assert record.gradient_norm == pytest.approx(7.0)


def test_what_was_validated_comes_with_its_version_and_goes_when_the_run_goes_back(ledger):
    ledger.note_validations([ValidationReport(step=40, loss=4.5, microbatches=2)])
    assert (ledger.validation_loss, ledger.validation_step) == (4.5, 40)
    ledger.rewind(1, 30, num_stages=3)
    assert (ledger.validation_loss, ledger.validation_step) == (None, None)


def test_nobody_alone_moves_the_ledger_on():
    """Row 3 of the issue: one report of a far step hid all true ones, and its loss was shown from then on."""
    ledger = made(Ledger, 1, steps=100_000)
    for step in range(90_000, 90_000 + 3 * HISTORY_STEPS):
        ledger.note_commits([commit(0, step, loss=0.1)], 0.0)
    ledger.note_validations([ValidationReport(step=99_999, loss=0.1, microbatches=4)])
    assert tell(ledger, 100.0) == []
    ledger.note_commits([commit(0, 0, loss=5.0)], 100.0)
    ledger.note_version(0, 1)
    assert [record.step for record in tell(ledger, 100.0)] == [0]
    assert (ledger.loss, ledger.validation_loss, ledger.step) == (5.0, None, 1)
    assert len(ledger._reports) <= HISTORY_STEPS


def test_another_division_takes_nothing_from_the_ledger(ledger):
    for step in range(5):
        ledger.note_commits([commit(stage, step, loss=5.0 - step) for stage in range(3)], float(step))
    ledger.note_validations([ValidationReport(step=5, loss=4.0, microbatches=1)])
    assert ledger.has_reported(5)
    ledger.rewind(1, 5, num_stages=2)
    assert (ledger.era, ledger.step, ledger.version_max, ledger.loss) == (1, 5, 5, 1.0)
    assert [record.step for record in tell(ledger, 5.0)] == [0, 1, 2, 3, 4], "three stages reported each of them"
    assert (ledger.validation_loss, ledger.validation_step) == (4.0, 5)
    ledger.note_commits([commit(1, 5, loss=0.5, era=1)], 6.0)
    assert tell(ledger, 6.0) == []
    assert not ledger.has_reported(6)
    ledger.note_commits([commit(0, 5, era=1)], 6.0)
    (record,) = tell(ledger, 6.0)
    assert (record.step, record.loss, record.era) == (5, 0.5, 1)
    assert ledger.has_reported(6)


def test_a_version_is_reported_once_the_placed_experts_have():
    ledger = made(Believing, 2, num_experts=2, steps=9)
    ledger.note_commits([commit(0, 0), commit(1, 0, loss=5.0), *(commit(group, 0) for group in (2, 3, 5))], 0.0)
    assert len(tell(ledger, 0.0)) == 1, "a step is told without them"
    assert not ledger.has_reported(1)
    ledger.note_commits([commit(6, 0), commit(4, 0, era=1)], 0.0)
    assert not ledger.has_reported(1), "there is no group 6, and no era 1"
    ledger.note_commits([commit(4, 0)], 0.0)
    assert ledger.has_reported(1)
    ledger.rewind(1, 1, num_stages=1)
    assert ledger.has_reported(1)
    ledger.note_commits([commit(0, 1, era=1), commit(1, 1, era=1)], 0.0)
    assert not ledger.has_reported(2)
    ledger.note_commits([commit(2, 1, era=1)], 0.0)
    assert ledger.has_reported(2)


def test_what_had_not_been_confirmed_when_the_stages_changed_is_told(ledger):
    unbelieving = made(Ledger, 3)
    unbelieving.note_commits([commit(stage, 0, loss=5.0) for stage in range(3)], 0.0)
    assert tell(unbelieving, 0.0) == []
    unbelieving.rewind(1, 1, num_stages=2)
    assert [record.loss for record in tell(unbelieving, 1.0)] == [5.0]


def test_the_first_plan_says_how_many_stages_there_are(ledger):
    ledger.divide(2)
    ledger.note_commits([commit(stage, 0, loss=5.0) for stage in range(2)], 0.0)
    assert [record.step for record in tell(ledger, 0.0)] == [0]
    assert ledger.step == 1


def test_nothing_has_to_be_reported_of_the_beginning(ledger):
    assert ledger.has_reported(0)
