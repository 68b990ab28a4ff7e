import random

import msgspec

from shoal.deploy.demo.step_book import StepBook
from shoal.deploy.record.report import StepDone
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport

STAGES = 3


def report(stage: int, step: int, *, era: int = 0, duplicates: int = 0, dissenting: int = 0) -> CommitReport:
    return CommitReport(
        era=era,
        stage=stage,
        step=step,
        members=2,
        microbatches=8,
        duplicates=duplicates,
        given_up=0,
        tokens=64,
        staleness_steps_mean=0.5 * stage,
        loss=float(step) if stage == STAGES - 1 else None,
        digest="d",
        dissenting=dissenting,
    )


def told(step: int, *, era: int = 0) -> StepDone:
    return StepDone(
        step=step,
        loss=10.0 + step,
        validation_loss=None,
        validation_step=None,
        tokens_per_s=1.0,
        staleness_mean=0.25,
        duplicates=1,
        given_up=0,
        dissenting=0,
        era=era,
        term=1,
        peers=4,
        coordinator=PeerID("c"),
    )


def book() -> StepBook:
    made = StepBook(lead_steps=2, patience_s=8.0)
    for era in range(2):
        made.obey(era, begins=0, num_stages=STAGES)
    return made


def numbers(steps: list[tuple[float, StepDone]]) -> list[tuple[int, int]]:
    return [(step.era, step.step) for _, step in steps]


def test_a_step_is_told_when_the_last_stage_has_spoken() -> None:
    steps = book()
    for stage in (2, 0):
        steps.commit(report(stage, 0), 1.0 + stage)
    assert steps.due(3.0) == []
    steps.commit(report(1, 0, duplicates=2, dissenting=1), 4.0)
    assert steps.due(4.0) == [
        (4.0, StepDone(step=0, era=0, loss=0.0, staleness_mean=0.5, duplicates=2, given_up=0, dissenting=1))
    ]
    assert steps.due(100.0, flush=True) == []


def test_a_step_waits_for_its_stages_and_not_for_its_experts() -> None:
    steps = book()
    for group in (0, 1, STAGES, STAGES + 5):
        steps.commit(report(group, 0, duplicates=1), 1.0)
    assert steps.due(1.0) == []
    steps.commit(report(2, 0), 1.0)
    assert numbers(steps.due(1.0)) == [(0, 0)]
    assert (steps.microbatches, steps.duplicates) == (5 * 8 + 4, 4)


def test_all_members_of_a_group_say_it_and_it_counts_once() -> None:
    steps = book()
    for _ in range(3):
        for stage in range(STAGES):
            steps.commit(report(stage, 0, duplicates=1), 1.0)
            steps.due(1.0)
    assert (steps.microbatches, steps.duplicates) == (3 * 9, 3)
    assert steps.due(100.0, flush=True) == []


def test_steps_come_in_order_whatever_the_order_of_the_words() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        words = [report(stage, step) for stage in range(STAGES) for step in range(6)]
        rng.shuffle(words)
        steps, seen = book(), []
        for word in words:
            steps.commit(word, 1.0)
            seen += numbers(steps.due(1.0))
        assert seen == [(0, step) for step in range(6)], seed


def test_a_word_that_never_comes_holds_the_others_up_for_a_while_only() -> None:
    steps = book()
    for stage in (0, 2):
        steps.commit(report(stage, 0), 1.0)
    for stage in range(STAGES):
        steps.commit(report(stage, 1), 2.0)
    assert steps.due(9.9) == []
    assert numbers(steps.due(10.0)) == [(0, 0), (0, 1)]
    steps.commit(report(1, 0, dissenting=1), 20.0)
    assert steps.due(20.0) == []
    assert steps.dissenting == 1, "what is found out late is found out"


def test_a_stage_that_stands_still_is_waited_for_until_the_run_goes_on() -> None:
    steps = book()
    for stage in range(STAGES):
        steps.commit(report(stage, 0), 1.0)
    steps.due(1.0)
    for stage in (0, 1):
        steps.commit(report(stage, 1), 2.0)
    assert steps.due(60.0) == [], "its last stage is suspended, not silent"
    steps.commit(report(2, 1), 61.0)
    ((_, step),) = steps.due(61.0)
    assert step.loss == 1.0


def test_a_stage_that_never_speaks_holds_nobody_up_for_long_once_the_run_has_gone_on() -> None:
    steps = book()
    for step, at_s in [(0, 1.0), (1, 2.0), (2, 3.0)]:
        for stage in (0, 1):
            steps.commit(report(stage, step), at_s)
    assert steps.due(10.9) == []
    ((_, first),) = steps.due(11.0)
    assert (first.step, first.loss) == (0, None)


def test_a_step_nobody_has_spoken_of_is_waited_for_as_well() -> None:
    steps = book()
    for stage in range(STAGES):
        steps.commit(report(stage, 1), 2.0)
    assert steps.due(9.9) == []
    assert numbers(steps.due(10.0)) == [(0, 1)]


def test_a_coordinators_word_stands_in_for_a_stage_that_is_none_of_ours() -> None:
    steps = book()
    steps.commit(report(0, 0), 1.0)
    steps.tell(told(0), 2.0)
    assert steps.due(9.9) == []
    ((at_s, step),) = steps.due(10.0)
    assert (step.loss, step.duplicates, at_s) == (10.0, 1, 1.0)


def test_steps_come_again_in_a_later_era() -> None:
    steps = book()
    for era, step in [(0, 0), (0, 1), (1, 1), (1, 2)]:
        for stage in range(STAGES):
            steps.commit(report(stage, step, era=era), 1.0)
    assert numbers(steps.due(9.0)) == [(0, 0), (0, 1), (1, 1), (1, 2)]


def test_at_the_end_what_has_a_loss_is_told_and_nothing_else() -> None:
    steps = book()
    steps.commit(report(STAGES - 1, 0), 1.0)
    steps.commit(report(0, 1), 1.0)
    steps.tell(told(2), 1.0)
    assert numbers(steps.due(1.0, flush=True)) == [(0, 0), (0, 2)]


def test_a_step_of_another_division_into_stages_waits_for_its_own_stages_and_follows_at_once() -> None:
    steps = book()
    steps.obey(1, begins=1, num_stages=2)
    for stage in range(STAGES):
        steps.commit(report(stage, 0), 1.0)
    assert numbers(steps.due(1.0)) == [(0, 0)]
    steps.commit(report(0, 1, era=1), 2.0)
    assert steps.due(2.0) == []
    steps.commit(msgspec.structs.replace(report(1, 1, era=1), loss=7.0), 2.0)
    ((_, step),) = steps.due(2.0)
    assert (step.era, step.step, step.loss) == (1, 1, 7.0)
