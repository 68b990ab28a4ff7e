"""The first seeds of `tests/soak/insiders.py`, shortened; and that it finds what it looks for."""

import importlib
from pathlib import Path

import pytest

from shoal.coordinator.era import Certificates
from shoal.coordinator.voting import Electorate, Judge

pytestmark = pytest.mark.sim

SEEDS = 40


@pytest.fixture(autouse=True)
def certified():
    """Nothing is taken at its word here."""


@pytest.fixture
def insiders(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "soak"))
    return importlib.import_module("insiders")


def play(insiders, seed, **how):
    return insiders.InsiderGame(seed, duration_s=10.0, **how).play()


def test_one_liar_costs_the_others_nothing(insiders):
    verdicts = [play(insiders, seed) for seed in range(SEEDS)]
    assert {verdict.seed: verdict.flaws for verdict in verdicts if verdict.flaws} == {}
    assert sum(verdict.num_plans for verdict in verdicts) > 3 * SEEDS, "else nothing was at stake"


def test_a_third_of_the_members_that_lie_alike_cost_the_others_nothing(insiders):
    flaws = {seed: flaws for seed in range(SEEDS) if (flaws := play(insiders, seed, third=True).flaws)}
    assert flaws == {}


@pytest.mark.parametrize("seed", [9106, 10644])
def test_liars_who_say_that_they_accepted_a_plan_of_their_own_stop_no_run(insiders, seed):
    """Two of six electors: a candidate whose first majority has both must finish a plan that all others refuse."""
    assert insiders.InsiderGame(seed, third=True).play().flaws == []


def test_a_third_would_certify_what_it_likes_if_it_could_sign_alone(insiders, monkeypatch):
    monkeypatch.setattr(Electorate, "are_enough", lambda self, signed, signers: 2 * len(signed) > len(signers))
    flaws = [flaw for seed in range(SEEDS) for flaw in play(insiders, seed, third=True).flaws]
    assert any("certifies a forged version" in flaw for flaw in flaws)


def test_where_voters_look_at_nothing_a_liar_moves_the_run(insiders, monkeypatch):
    monkeypatch.setattr(Certificates, "layers", lambda self, age: None)
    monkeypatch.setattr("shoal.coordinator.core.certified_flaw", lambda *args, **named: "")
    monkeypatch.setattr(Judge, "flaw", lambda *args, **named: "")
    flaws = [flaw for seed in range(SEEDS) for flaw in play(insiders, seed).flaws]
    assert any("went back to version" in flaw for flaw in flaws)
