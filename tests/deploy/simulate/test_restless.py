"""Members move all the time and others die: training goes on. `make soak-moves` does this for longer."""

import pytest

from restless import RestlessRun, play_restless


@pytest.mark.sim
@pytest.mark.parametrize(("seed", "s_max"), [(1, 1), (2, 0), (4, 1)])
def test_training_does_not_stand_still_while_everybody_moves(seed: int, s_max: int) -> None:
    result = play_restless(RestlessRun(seed=seed, s_max=s_max, seconds=50.0))
    assert result.kills >= 4
    assert result.moves >= 3
    assert result.stall_s < 20.0
    assert result.steps > 30


@pytest.mark.sim
def test_a_seed_replays_exactly() -> None:
    first, second = (play_restless(RestlessRun(seed=5, seconds=12.0)) for _ in range(2))
    assert str(first) == str(second)
    assert first.kills == 1
