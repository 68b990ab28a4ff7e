"""What a search brings back, whatever becomes of it."""

import asyncio

import pytest

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Layout, SwarmSnapshot
from shoal.coordinator.coordination_events import Searched
from shoal.coordinator.driver import searched
from shoal.coordinator.search_schedule import SearchJob
from shoal.protocol.errors import LocalError
from shoal.protocol.ports import inline

JOB = SearchJob(
    snapshot=SwarmSnapshot(peers=(), layer_costs=(1.0,), num_stages=1),
    previous=None,
    swarm=(),
    seed=7,
)
LAYOUT = Layout(stages=(), spares=(), reason="found")


class Scripted(GreedyAllocator):
    def __init__(self, outcome):
        self.outcome = outcome

    def prepare(self):
        pass

    def search(self, snapshot, previous, *, seed):
        assert (snapshot, previous, seed) == (JOB.snapshot, None, 7)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ((LAYOUT, "found"), Searched(job=JOB, layout=LAYOUT, reason="found")),
        ((None, "stays"), Searched(job=JOB, reason="stays")),
        (LocalError("a sentence"), Searched(job=JOB, reason="no search: a sentence")),
    ],
)
def test_whatever_happens_the_core_hears_of_it(outcome, expected):
    assert asyncio.run(searched(Scripted(outcome), JOB, inline)) == expected


def test_a_search_that_breaks_down_is_told_in_one_line_and_prints_no_traceback(caplog):
    with caplog.at_level("INFO"):
        told = asyncio.run(searched(Scripted(ValueError("math domain error")), JOB, inline))
    assert (told.layout, told.is_bug, caplog.text) == (None, True, "")
    said = "a search for a layout failed, and the plan stays: ValueError: math domain error (test_searcher.py:"
    assert told.reason.startswith(said)
    assert "\n" not in told.reason


def test_a_search_runs_where_it_is_told_to():
    ran = []

    async def elsewhere(work):
        ran.append("began")
        await asyncio.sleep(0)
        work()

    told = asyncio.run(searched(Scripted((LAYOUT, "found")), JOB, elsewhere))
    assert ran == ["began"]
    assert told.layout == LAYOUT
