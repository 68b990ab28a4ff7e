"""Curves in bounded memory."""

from hypothesis import given
from hypothesis import strategies as st

from record_lines import step
from shoal.deploy.dashboard.curves import POINTS_MAX, VALIDATIONS_MAX, Curves


@given(count=st.integers(1, 5 * POINTS_MAX))
def test_points_are_few_in_order_and_reach_to_the_end(count: int) -> None:
    curves = Curves()
    for number in range(count):
        curves.add(step(number))
    steps = [shown.step for shown in curves.points]
    assert len(steps) < POINTS_MAX
    assert steps == sorted(set(steps))
    assert count - 1 - steps[-1] <= 2 * count / len(steps)


def test_points_that_a_reader_has_stay_while_the_generation_does() -> None:
    curves, seen = Curves(), []
    generation = curves.generation
    for number in range(3 * POINTS_MAX):
        curves.add(step(number))
        if curves.generation != generation:
            generation = curves.generation
        else:
            assert curves.points[: len(seen)] == seen
        seen = list(curves.points)
    assert generation > 0


def test_a_validation_stands_at_its_version_and_when_that_was_made() -> None:
    curves = Curves()
    for number in range(1, 10):
        curves.add(step(number))
    curves.validate(1009.5, 6, 2.0)
    curves.validate(1009.6, 9, 1.5)
    assert [(known.at_s, known.step, known.loss) for known in curves.validations] == [
        (1006.0, 6, 2.0),
        (1009.0, 9, 1.5),
    ]


def test_validations_are_bounded_and_keep_the_last() -> None:
    curves = Curves()
    for number in range(5 * VALIDATIONS_MAX):
        curves.validate(float(number), number, 1.0)
    assert len(curves.validations) <= VALIDATIONS_MAX
    assert curves.validations[-1].step == 5 * VALIDATIONS_MAX - 1


def test_when_the_run_goes_back_what_does_not_hold_goes() -> None:
    curves = Curves()
    for number in range(1, 10):
        curves.add(step(number))
    curves.validate(9.0, 4, 2.0)
    curves.validate(9.0, 8, 2.0)
    generation = curves.generation
    curves.go_back(6)
    assert [shown.step for shown in curves.points] == [1, 2, 3, 4, 5]
    assert [known.step for known in curves.validations] == [4]
    assert curves.generation > generation


def test_what_was_between_two_points_is_in_their_mean() -> None:
    curves = Curves()
    for number in range(POINTS_MAX):
        curves.add(step(number, loss=float(number % 2), tokens_per_s=float(number % 2)))
    assert {shown.loss for shown in curves.points} == {0.5}
    assert {shown.tokens_per_s for shown in curves.points} == {0.5}
