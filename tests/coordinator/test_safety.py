"""The first seventy-five seeds of `tests/soak/coordination.py`, shortened; and that it finds what it looks for."""

import importlib.util
import sys
from pathlib import Path

import pytest

from shoal.coordinator.chain import PlanChain
from shoal.coordinator.proposer import Ballot
from shoal.coordinator.store import PlanStore

pytestmark = pytest.mark.sim

BATCH = 25


@pytest.fixture(scope="module")
def coordination():
    path = Path(__file__).parents[1] / "soak" / "coordination.py"
    spec = importlib.util.spec_from_file_location("soak_coordination", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def play(coordination, seed):
    return coordination.Game(seed, duration_s=8.0, peers_max=5).play()


@pytest.mark.parametrize("first", range(0, 75, BATCH))
def test_live_plans_make_one_chain_whatever_happens(coordination, first):
    verdicts = [play(coordination, seed) for seed in range(first, first + BATCH)]
    assert {verdict.seed: verdict.flaws for verdict in verdicts if verdict.flaws} == {}
    assert sum(verdict.num_plans for verdict in verdicts) > BATCH, "else nothing was at stake"
    assert sum(verdict.num_falls for verdict in verdicts) > BATCH / 5


def test_a_seed_replays_exactly(coordination):
    traces = [play(coordination, seed).trace_hash for seed in (7, 7, 8)]
    assert traces[0] == traces[1]
    assert traces[0] != traces[2]


# A forgotten promise matters in one game of 400: the seeds begin shortly before one, which a message of another size
# moves elsewhere. `test_chain_safety.py`, without a network around the chain, finds it at once.
@pytest.mark.parametrize(
    ("forgotten", "first"),
    [("what was voted for", 100), ("to whom a term is promised", 0), ("everything on disk", 0)],
)
def test_a_chain_that_forgets_is_found_out(coordination, monkeypatch, forgotten, first):
    if forgotten == "what was voted for":
        monkeypatch.setattr(Ballot, "learn", lambda *_: None)
    elif forgotten == "to whom a term is promised":
        monkeypatch.setattr(PlanChain, "_claim", lambda *_: "")
    else:
        monkeypatch.setattr(PlanStore, "load", lambda *_: None)
    flaws = (flaw for seed in range(first, first + 100) for flaw in play(coordination, seed).flaws)
    assert any(word in flaw for flaw in flaws for word in ("two live plans", "does not follow", "and then"))
