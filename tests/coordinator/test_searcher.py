"""What a search brings back, whatever becomes of it."""

import asyncio

import pytest

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Layout, SwarmSnapshot
from shoal.coordinator.coordination_events import Searched
from shoal.coordinator.search_schedule import SearchJob
from shoal.coordinator.searcher import Searcher, inline
from shoal.protocol.errors import LocalError

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
        raise ImportError

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
    heard = []
    asyncio.run(Searcher(Scripted(outcome), inline, tell=heard.append).run(JOB))
    assert heard == [expected]


def test_a_search_that_breaks_down_is_told_in_one_line_and_prints_no_traceback(caplog):
    heard = []
    with caplog.at_level("INFO"):
        asyncio.run(Searcher(Scripted(ValueError("math domain error")), inline, tell=heard.append).run(JOB))
    ((told),) = heard
    assert (told.layout, told.is_bug, caplog.text) == (None, True, "")
    said = "a search for a layout failed, and the plan stays: ValueError: math domain error (test_searcher.py:"
    assert told.reason.startswith(said)
    assert "\n" not in told.reason


def test_what_cannot_be_prepared_is_left_for_the_search_to_say():
    asyncio.run(Searcher(Scripted((LAYOUT, "found")), inline, tell=print).prepare())
    asyncio.run(Searcher(GreedyAllocator(), inline, tell=print).prepare())


def test_a_search_runs_where_it_is_told_to():
    ran = []

    async def elsewhere(work):
        ran.append("began")
        await asyncio.sleep(0)
        work()

    heard = []
    asyncio.run(Searcher(Scripted((LAYOUT, "found")), elsewhere, tell=heard.append).run(JOB))
    assert ran == ["began"]
    assert heard[0].layout == LAYOUT
