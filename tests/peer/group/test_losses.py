"""When a group's lead suspects that something was lost, and what it asks for."""

from itertools import pairwise

import pytest

from shoal.peer.replica.commands import AskRepair
from shoal.peer.replica.losses import (
    STALL_S_BEGINNING,
    STALL_S_DEATH,
    STALL_S_FIRST,
    STALL_S_MIN,
    STALL_S_PIPELINE,
    STALL_STEPS,
    Losses,
)


def after_steps(*seconds: float, is_first: bool = False) -> tuple[Losses, float]:
    """Losses of a group whose steps took so long, and what time it is then."""
    losses, now_s = Losses(microbatches=4, is_first=is_first), 1.0
    losses.stepped(0, by_a_step=False, now_s=now_s)
    for version, step_s in enumerate(seconds, start=1):
        now_s += step_s
        losses.stepped(version, by_a_step=True, now_s=now_s)
    return losses, now_s


def test_before_a_step_has_shown_how_long_it_takes_patience_is_long_but_not_without_end() -> None:
    losses, now_s = after_steps(is_first=True)
    assert losses.suspect_at_s == now_s + STALL_S_FIRST


@pytest.mark.parametrize(
    ("is_first", "expected_s"),
    [(False, [STALL_S_DEATH, 5.0, 10.0, 20.0, 40.0, STALL_S_FIRST]), (True, [5.0, 10.0, 20.0, 40.0, 60.0, 60.0])],
)
def test_who_knows_of_a_death_asks_soon_and_then_ever_later(is_first: bool, expected_s: list[float]) -> None:
    losses, now_s = after_steps(is_first=is_first)
    losses.mate_died()
    asked_s = [now_s]
    for _ in expected_s:
        asked_s.append(losses.suspect_at_s)
        assert losses.ask(0, lambda step, index: True, now_s=asked_s[-1]) != []
    assert [later - sooner for sooner, later in pairwise(asked_s)] == expected_s


def test_after_a_death_it_does_not_wait_for_steps_that_took_minutes_unless_the_pipeline_is_all_that_it_misses() -> None:
    for is_first, patience_s in ((False, STALL_S_FIRST), (True, STALL_STEPS * 300.0)):
        losses, now_s = after_steps(300.0, 300.0, is_first=is_first)
        losses.mate_died()
        if not is_first:
            losses.ask(2, lambda step, index: True, now_s=now_s + STALL_S_DEATH)
            now_s += STALL_S_DEATH
        assert losses.suspect_at_s == now_s + patience_s


def test_stage_0_is_in_no_hurry_to_run_again_what_is_on_its_way() -> None:
    losses, now_s = after_steps(0.1, is_first=True)
    assert losses.suspect_at_s == now_s + STALL_S_PIPELINE


def test_who_comes_to_a_run_that_is_under_way_does_not_know_what_died_before() -> None:
    losses, now_s = after_steps()
    losses.stepped(7, by_a_step=False, now_s=now_s)
    assert losses.suspect_at_s == now_s + STALL_S_BEGINNING
    losses.mate_died()
    assert losses.suspect_at_s == now_s + STALL_S_DEATH


@pytest.mark.parametrize(("is_first", "patience_s"), [(True, STALL_S_FIRST), (False, STALL_S_BEGINNING)])
def test_at_the_beginning_of_an_era_only_stage_0_runs_nothing_again(is_first: bool, patience_s: float) -> None:
    """Another stage's lead may be one that has been restarted since, and what it had contributed died with it."""
    losses, now_s = after_steps(is_first=is_first)
    losses.begins_at = 7
    losses.stepped(7, by_a_step=False, now_s=now_s)
    assert losses.suspect_at_s == now_s + patience_s


@pytest.mark.parametrize(("steps_s", "patience_s"), [([0.1], STALL_S_MIN), ([3.0, 3.0], STALL_STEPS * 3.0)])
def test_patience_is_several_steps_but_no_less_than_seconds(steps_s: list[float], patience_s: float) -> None:
    losses, now_s = after_steps(*steps_s)
    assert losses.suspect_at_s == pytest.approx(now_s + patience_s)


def test_a_step_that_stalled_does_not_make_the_next_one_patient() -> None:
    losses, now_s = after_steps(4.0, 4.0, 4.0, 40.0)
    assert losses.suspect_at_s == pytest.approx(now_s + STALL_STEPS * 4.0)


def test_a_swarm_that_has_become_slow_is_believed() -> None:
    losses, now_s = after_steps(*[2.0] * 8, *[20.0] * 5)
    assert losses.suspect_at_s == pytest.approx(now_s + STALL_STEPS * 20.0)


def test_a_stall_asks_for_what_nobody_has_once_per_patience() -> None:
    losses, now_s = after_steps(1.0)
    due_s = losses.suspect_at_s
    asked = losses.ask(1, lambda step, index: index in (1, 3), now_s=due_s)
    assert asked == [AskRepair(1, bytes([0b1010]))]
    assert losses.ask(1, lambda step, index: True, now_s=due_s) == []
    assert losses.suspect_at_s > due_s > now_s
