"""A minute of what `make soak-fuzz` does for hours: every door, a fixed seed, and all that was ever found."""

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fuzz_engine
import fuzz_swarm
from fuzz_targets import TARGETS

RUNS = 1500
SWARM_RUNS = 400


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    fuzz_swarm.quiet()
    yield
    torch.set_num_threads(threads)
    logging.disable(disabled)


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_once_is_answered_now(name: str) -> None:
    with fuzz_engine.hang_watch() as begin:
        for data in fuzz_engine.kept(name):
            begin()
            TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_a_door_answers_whatever_comes_with_what_it_promises(name: str) -> None:
    fuzz_engine.play(TARGETS[name], runs=RUNS, seed=1, corpus=fuzz_engine.kept(name))


@pytest.mark.sim
@pytest.mark.parametrize("strangers", [True, False], ids=["strangers", "thieves"])
def test_a_swarm_outlives_messages_of_every_kind(strangers: bool) -> None:
    told = fuzz_swarm.Session(1, strangers=strangers).play(SWARM_RUNS)
    assert told.executions >= SWARM_RUNS
    assert not (strangers and told.answered), "a stranger was answered"


def test_the_soak_plays_every_target() -> None:
    path = Path(__file__).parent.parent / "soak" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("soak_fuzz", path)
    assert spec is not None
    assert spec.loader is not None
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    assert set(soak.SHARES) == {*TARGETS, *fuzz_engine.SWARMS}
    assert sum(soak.SHARES.values()) == 10_000_000
