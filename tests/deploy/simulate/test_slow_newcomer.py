"""A newcomer whose line would take a quarter of an hour for its stage's state computes within three minutes."""

import pytest
from newcomer_run import COMES_S, first_microbatch_s, play


@pytest.mark.sim
def test_a_newcomer_to_a_billion_parameters_on_100_mbit_s_computes_within_three_minutes() -> None:
    result, moments = play(seconds=COMES_S + 600.0)
    assert result.failures == ()
    first_s = first_microbatch_s(result)
    assert first_s is not None
    assert first_s <= 180.0, "2 bytes a parameter take 165 s"
    assert moments.whole_s == [], "12 bytes a parameter take 990 s"
    made = [job for job in result.timeline[3] if job.kind == "forward"]
    assert len(made) >= 16, "a quarter of a step: it goes on computing, with the next versions' weights"
    assert len(moments.weights_s) >= 3
    assert (result.duplicates, result.given_up) == (0, 0)
