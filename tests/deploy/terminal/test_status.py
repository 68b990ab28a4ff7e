"""`shoal status`, once and again and again: the dashboard's facts on a terminal."""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rich.console import Console

from shoal.deploy.visitor.status import PEERS_PER_SECOND, Watch, show
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PeerStatus, SwarmStatus
from shoal.protocol.sim.loop import run
from statuses import swarm_status

A = PeerID("12D3KooW" + 44 * "a")


def peer(stage: int = 0) -> PeerStatus:
    return PeerStatus(
        peer=A,
        name="ann",
        device="cpu",
        stage=stage,
        version=7,
        synced=True,
        draining=False,
        seen_s_ago=0.2,
        forward_s=0.01,
        window=0,
    )


def status(step: int, *peers: PeerStatus, **says: Any) -> SwarmStatus:
    usual: dict[str, Any] = {"step": step, "steps": 100, "loss": 3.25, "stages": ((0, 2),), "elapsed_s": 60.0}
    return swarm_status(coordinator=A, peers=peers or (peer(),), **(usual | says))


@pytest.fixture
def lines() -> Console:
    return Console(width=200, file=io.StringIO())


def said(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_once_it_is_a_head_and_tables(lines: Console) -> None:
    show(status(10, plan_reason="first plan"), lines)
    run_, phase, step, plan, *table = said(lines)
    assert (run_, phase, plan) == ("run r (n), up 1:00", "training", "plan 1: first plan")
    assert step.startswith("step 10/100  loss 3.2500")
    assert "ann ★" in table[1]


def answers(*said: SwarmStatus | Exception) -> Callable[[], Awaitable[SwarmStatus]]:
    """An `ask` that says them one after the other, and then nothing more."""
    left = list(said)

    async def ask() -> SwarmStatus:
        if not left:
            await asyncio.Event().wait()
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return ask


def watched(watch: Watch, ask: Callable[[], Awaitable[SwarmStatus]], seconds: float) -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await watch.run(ask)

    run(scenario())


def test_where_nothing_can_be_redrawn_each_answer_is_a_line(lines: Console) -> None:
    watched(Watch(status(10), lines, as_json=False), answers(LocalError("nobody is there"), status(11)), 5.0)
    assert [line.split("  ")[0] for line in said(lines)] == ["step 10/100", "step 11/100"]


def test_a_terminal_says_that_nobody_answers_and_forgets_it_when_somebody_does() -> None:
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    watched(Watch(status(10), console, as_json=False), answers(LocalError("nobody is there")), 2.5)
    assert "no answer now: nobody is there" in "\n".join(said(console))
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    watched(Watch(status(10), console, as_json=False), answers(LocalError("nobody is there"), status(11)), 3.5)
    last_frame = "\n".join(said(console)).rpartition("step 11/100")
    assert last_frame[1]
    assert "no answer now" not in last_frame[2]


def test_for_a_script_each_answer_is_json(lines: Console) -> None:
    watched(Watch(status(10), lines, as_json=True), answers(status(11)), 5.0)
    assert [json.loads(line)["step"] for line in said(lines)] == [10, 11]


def test_a_large_swarm_is_asked_more_rarely(lines: Console) -> None:
    crowd = status(10, *(peer() for _ in range(10 * PEERS_PER_SECOND)))
    watched(Watch(crowd, lines, as_json=False), answers(*[crowd] * 99), 35.0)
    assert len(said(lines)) == 1 + 3
