"""`shoal status --watch`: the same facts on a terminal."""

import asyncio
import io
import json

import pytest
from rich.console import Console

from shoal.deploy.dashboard.feed import Feed
from shoal.deploy.dashboard.terminal import render_view
from shoal.deploy.report import Obeys, Status
from shoal.deploy.status_watch import PEERS_PER_SECOND, Watch
from shoal.protocol.errors import LocalError
from shoal.protocol.sim.loop import run


def drawn(feed: Feed, status: Status, now_s: float) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(render_view(feed.view(now_s), status.status, feed.curves))
    return console.export_text()


def test_it_shows_the_figures_the_swarm_and_what_changed(feed, two_peers, id_of):
    feed.take(two_peers, 0.0)
    feed.take(Obeys(term=1, sequence=2, coordinator=id_of("a"), reason="bbbbbbbb joined", peers=2), 30.0)
    feed.take(two_peers, 85.0)
    text = drawn(feed, two_peers, 90.0)
    for part in (
        "step 10/100",
        "2:55 left",
        "3.250",
        "500 tokens/s",
        "0.50 steps",
        "8 kB/s between",
        "peer-a ★",
        "100 %",
    ):
        assert part in text
    assert "1:00 ago  peer-b joined  (plan 2, by peer-a)" in text


def test_before_the_first_step_there_are_no_figures(feed, make_status, make_peer):
    status = Status(status=make_status(make_peer("a", 0), make_peer("b", 1), step=0, loss=None, tokens_per_s=0.0))
    feed.take(status, 0.0)
    text = drawn(feed, status, 0.0)
    assert "computing the first step" in text
    assert "tokens/s" not in text


@pytest.fixture
def lines():
    return Console(width=200, file=io.StringIO())


def answers(*said):
    """An `ask` that says them one after the other, and then nothing more."""
    left = list(said)

    async def ask():
        if not left:
            await asyncio.Event().wait()
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return ask


def watched(watch: Watch, ask: object, seconds: float) -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await watch.run(ask)

    run(scenario())


def test_where_nothing_can_be_redrawn_each_answer_is_a_line(lines, make_status, make_peer):
    first, second = (make_status(make_peer("a"), step=step) for step in (10, 11))
    watched(Watch(first, lines, as_json=False), answers(LocalError("nobody is there"), second), 5.0)
    assert [line.split("  ")[0] for line in lines.file.getvalue().splitlines()] == ["step 10/100", "step 11/100"]


def test_for_a_script_each_answer_is_json(lines, make_status, make_peer):
    first, second = (make_status(make_peer("a"), step=step) for step in (10, 11))
    watched(Watch(first, lines, as_json=True), answers(second), 5.0)
    assert [json.loads(line)["step"] for line in lines.file.getvalue().splitlines()] == [10, 11]


def test_a_large_swarm_is_asked_more_rarely(lines, make_status, make_peer):
    crowd = make_status(*(make_peer("a") for _ in range(10 * PEERS_PER_SECOND)))
    watch = Watch(crowd, lines, as_json=False)
    watched(watch, answers(*[crowd] * 99), 35.0)
    assert len(lines.file.getvalue().splitlines()) == 1 + 3
