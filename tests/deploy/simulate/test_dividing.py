"""The stages' boundaries and number change while a run goes on, and nothing is lost; `tests/soak` plays more."""

from statistics import median

import pytest
from dividing import DividingRun, flaws_of, play_dividing

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("seed", range(20))
def test_a_run_whose_stages_change_while_peers_die_is_the_run_of_one_process(seed, record_property):
    run = DividingRun(seed=seed, peers=4, steps=14, microbatches=3, kill_every_s=4.0)
    result = play_dividing(run)
    record_property("divisions", result.divisions)
    record_property("kills", result.kills)
    assert flaws_of(run, result) == []
    assert result.rollbacks == 0, "a holder of each stage has lived all the while"


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_placed_experts_follow_their_layers_while_peers_die(seed, record_property):
    run = DividingRun(seed=seed, peers=4, steps=10, microbatches=2, experts=4, kill_every_s=4.0)
    result = play_dividing(run)
    record_property("divisions", result.divisions)
    record_property("kills", result.kills)
    assert flaws_of(run, result) == []
    assert result.divisions > 0
    assert result.kills > 0
    assert result.rollbacks == 0, "a holder of each stage and of each expert has lived all the while"


@pytest.mark.parametrize("seed", [0, 2])
def test_the_base_of_adapters_follows_their_layers_while_peers_die(seed, record_property):
    """One peer has it at first, and may die as any other."""
    run = DividingRun(seed=seed, peers=4, steps=14, microbatches=3, kill_every_s=4.0, base="int8")
    result = play_dividing(run)
    record_property("divisions", result.divisions)
    record_property("kills", result.kills)
    assert flaws_of(run, result) == []
    assert result.divisions > 0
    assert result.kills > 0
    assert result.rollbacks == 0, "a holder of each stage has lived all the while"


def test_what_was_fetched_ahead_is_what_its_holders_have(caplog):
    """Replayed steps make the same bits, so nothing is fetched a second time, and nobody cannot keep up."""
    run = DividingRun(seed=1, peers=4, steps=30, microbatches=3)
    with caplog.at_level("INFO", logger="shoal.peer"):
        result = play_dividing(run)
    assert flaws_of(run, result) == []
    said = [record.getMessage() for record in caplog.records]
    assert result.divisions > 0
    assert sum("of them fetched ahead" in line for line in said) > 0
    assert not [line for line in said if "is not what its holders have" in line or "cannot keep up" in line]


def test_another_division_costs_at_most_a_step_beyond_what_travels():
    """Heartbeats are longer than a step here, and nobody waits for one."""
    run = DividingRun(seed=1, peers=4, steps=30, microbatches=3, heartbeat_s=1.5)
    result = play_dividing(run)
    assert flaws_of(run, result) == []
    assert result.divisions == len(result.division_s) > 0
    assert max(result.division_s) < 2 * median(result.step_s)


@pytest.mark.parametrize("seed", range(6))
def test_a_tied_matrix_stays_one_at_both_ends_while_peers_die(seed, record_property):
    run = DividingRun(seed=seed, peers=4, steps=14, microbatches=3, kill_every_s=4.0, tied=True)
    result = play_dividing(run)
    assert result.compared > 5
    record_property("divisions", result.divisions)
    record_property("kills", result.kills)
    assert flaws_of(run, result) == []
    assert result.rollbacks == 0, "a holder of each stage has lived all the while"
