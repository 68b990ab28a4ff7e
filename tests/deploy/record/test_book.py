"""Each step comes out once, in order, as long as anybody knows of it."""

import math
from typing import Any

import pytest

from shoal.deploy.record.book import FIRST_S, PATIENCE_S, RATE_S, Book
from shoal.protocol.messages import CommitReport


def commit(stage: int, step: int, era: int = 0, **says: Any) -> CommitReport:
    usual: dict[str, Any] = {
        "members": 2,
        "microbatches": 8,
        "duplicates": 0,
        "given_up": 0,
        "tokens": 1000,
        "staleness_steps_mean": 0.5 * stage,
        "loss": 5.0 - 0.1 * step if stage == 1 else None,
        "digest": "",
        "gradient_norm": 3.0 + stage,
    }
    return CommitReport(stage=stage, step=step, era=era, **(usual | says))


def book(reached: tuple[int, int] | None = (0, 0), *, experts: int = 0) -> Book:
    made = Book(
        num_experts=experts,
        lead_steps=2,
        tokens_per_step=1000,
        learning_rate=lambda step: 0.1 * (step + 1),
        reached=reached,
    )
    made.begins(0, 0, 2)
    return made


def hear(made: Book, *reports: CommitReport, now_s: float = 0.0) -> list[tuple[int, int]]:
    for report in reports:
        made.note(report, now_s, now_s)
    return due(made, now_s)


def due(made: Book, now_s: float, *, flush: bool = False) -> list[tuple[int, int]]:
    """(era, step from 0) of the steps that come out."""
    return [(line.era, line.step - 1) for line in made.due(now_s, flush=flush)]


def test_a_step_comes_out_when_every_stage_has_reported_it() -> None:
    made = book()
    assert hear(made, commit(1, 0)) == []
    made.note(commit(0, 0, duplicates=1, given_up=2), 1.0, 1.0)
    (step,) = made.due(1.0)
    assert (step.step, step.time, step.learning_rate) == (1, 1.0, 0.1)
    assert (step.loss, step.gradient_norm, step.gradient_norms) == (5.0, 5.0, (3.0, 4.0))
    assert (step.staleness, step.peers, step.duplicates, step.given_up, step.unheard) == (0.25, 4, 1, 2, 0)
    assert hear(made, commit(0, 0), commit(1, 0)) == []
    assert made.reached == (0, 1)


def test_steps_come_out_in_order_whatever_the_order_of_the_reports() -> None:
    made = book()
    assert hear(made, *(commit(stage, step) for step in (2, 1) for stage in (0, 1))) == []
    assert hear(made, commit(1, 0), commit(0, 0)) == [(0, 0), (0, 1), (0, 2)]


def test_a_restart_goes_on_behind_the_record() -> None:
    made = book((0, 3))
    assert hear(made, *(commit(stage, step) for step in range(6) for stage in (0, 1))) == [(0, 3), (0, 4), (0, 5)]
    assert made.lost == 0


def test_a_step_whose_stage_has_only_not_committed_yet_is_waited_for() -> None:
    made = book()
    hear(made, commit(1, 0))
    assert due(made, 100 * PATIENCE_S) == []
    assert hear(made, commit(0, 0), now_s=100 * PATIENCE_S) == [(0, 0)]


def test_a_step_that_a_stage_has_passed_and_nobody_knows_comes_out_without_it() -> None:
    made = book()
    hear(made, commit(1, 0), commit(1, 1), commit(0, 1))
    assert made.missing() == ((0, 0), [0])
    assert due(made, PATIENCE_S - 0.1) == []
    steps = made.due(PATIENCE_S)
    assert [(line.step, line.unheard, line.gradient_norm) for line in steps] == [(1, 1, None), (2, 0, 5.0)]
    assert made.lost == 0


def test_a_step_without_a_loss_that_nobody_knows_is_lost_and_said() -> None:
    made = book()
    hear(made, commit(0, 0), commit(0, 1), commit(1, 1))
    assert due(made, PATIENCE_S) == [(0, 1)]
    assert made.lost == 1


def test_steps_of_which_nobody_knows_anything_are_a_gap() -> None:
    made = book((0, 5))
    hear(made, *(commit(stage, step) for step in (9, 10) for stage in (0, 1)))
    assert made.missing() == ((0, 5), [0, 1])
    assert due(made, PATIENCE_S - 0.1) == []
    assert due(made, PATIENCE_S) == [(0, 9), (0, 10)]
    assert made.lost == 4


def test_a_new_record_begins_with_the_oldest_step_that_anybody_knows() -> None:
    made = book(None)
    hear(made, *(commit(stage, step) for step in (50, 51) for stage in (0, 1)))
    assert due(made, FIRST_S - 0.1) == []
    assert due(made, FIRST_S) == [(0, 50), (0, 51)]
    assert made.lost == 0


def test_a_new_record_of_a_new_run_begins_at_once() -> None:
    assert hear(book(None), commit(0, 0), commit(1, 0)) == [(0, 0)]


def test_when_the_run_goes_back_steps_come_out_again() -> None:
    made = book()
    hear(made, *(commit(stage, step) for step in range(5) for stage in (0, 1)), commit(1, 5))
    made.begins(1, 3, 2)
    assert hear(made, *(commit(stage, step, 1) for step in (3, 4) for stage in (0, 1))) == [(1, 3), (1, 4)]
    assert hear(made, commit(0, 5)) == []  # of the old era: too late
    assert made.is_complete
    assert made.lost == 0


def test_an_era_whose_beginning_no_plan_has_told_is_waited_for_a_while() -> None:
    made = book((0, 5))
    reports = [commit(stage, step, 1) for step in (3, 4) for stage in (0, 1)]
    assert hear(made, *reports) == []
    assert due(made, PATIENCE_S) == [(1, 3), (1, 4)]


def test_another_division_into_stages_begins_where_the_one_before_ended() -> None:
    made = book()
    hear(made, *(commit(stage, step) for step in range(2) for stage in (0, 1)))
    made.begins(1, 2, 1)
    made.note(commit(0, 2, 1, loss=4.0), 1.0, 1.0)
    (step,) = made.due(1.0)
    assert (step.era, step.step, step.loss, step.gradient_norms, step.unheard) == (1, 3, 4.0, (3.0,), 0)
    assert made.lost == 0


def test_the_stages_of_an_era_that_no_plan_has_told_are_seen_by_who_knows_the_loss() -> None:
    made = book((0, 5))
    reports = [commit(stage, 3, 1, loss=4.0 if stage == 2 else None) for stage in range(3)]
    assert hear(made, *reports) == []
    (step,) = made.due(PATIENCE_S)
    assert (step.era, step.loss, len(step.gradient_norms)) == (1, 4.0, 3)


def test_at_the_end_all_comes_out_that_has_a_loss() -> None:
    made = book()
    hear(made, commit(1, 0), commit(0, 1))
    assert due(made, 0.0, flush=True) == [(0, 0)]


def test_who_is_asked_for_what() -> None:
    made = book((0, 4))
    assert made.wanted([0]) == (0, 4)
    hear(made, commit(0, 4), commit(0, 5), commit(1, 4))
    assert made.wanted([0]) == (0, 6)
    assert made.wanted([1]) == (0, 5)
    assert made.wanted([0, 1]) == (0, 5)


def test_an_experts_holders_count_for_the_norm_and_not_for_the_peers() -> None:
    made = book(experts=1)
    hear(made, commit(0, 0), commit(1, 0), commit(2, 0, gradient_norm=12.0))
    assert due(made, 0.0) == []
    made.note(commit(3, 0, gradient_norm=0.0), 0.0, 0.0)
    (step,) = made.due(0.0)
    assert step.gradient_norm == 13.0
    assert step.peers == 4


def test_tokens_a_second_are_of_the_last_while_with_what_stood_still() -> None:
    made = book()
    paces = []
    times = [*range(0, 60, 2), 58 + 60.0]
    for number, at_s in enumerate(times):
        for stage in (0, 1):
            made.note(commit(stage, number), at_s, at_s)
        paces += [step.tokens_per_s for step in made.due(at_s)]
    assert paces[0] is None
    assert paces[-2] == pytest.approx(500.0)
    assert paces[-1] == pytest.approx(1000 / 60)
    assert RATE_S < 60


@pytest.mark.parametrize(
    "lie",
    [
        {"stage": 9},
        {"stage": -1},
        {"tokens": 10**9},
        {"tokens": -1},
        {"members": -1},
        {"given_up": 10**9},
        {"staleness_steps_mean": math.nan},
    ],
)
def test_a_report_that_cannot_be_is_not_heard(lie: dict[str, Any]) -> None:
    made = book()
    assert hear(made, commit(0, 0), commit(**({"stage": 1, "step": 0} | lie))) == []
    assert hear(made, commit(1, 0)) == [(0, 0)]


@pytest.mark.parametrize("at_s", [math.nan, math.inf, 1.0, -1e12])
def test_a_time_that_cannot_be_is_not_heard(at_s: float) -> None:
    made = book()
    made.note(commit(0, 0), at_s, 0.0)
    assert made.is_complete


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_none_is_not_recorded(number: float) -> None:
    made = book()
    made.note(commit(0, 0, gradient_norm=number), 0.0, 0.0)
    made.note(commit(1, 0, loss=number), 0.0, 0.0)
    (step,) = made.due(0.0)
    assert (step.loss, step.gradient_norm) == (None, None)
