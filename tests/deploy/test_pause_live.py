"""`shoal pause` and Ctrl-Z on real processes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

STEPS = 100_000
"""More than there is time for: the test ends first."""


class Peer:
    """A running command, by what it reports."""

    def __init__(self, command: Any, folder: Path) -> None:
        self.command, self.folder = command, folder

    def said(self, event: str) -> list[dict[str, Any]]:
        whole, _, _ = self.command.output.rpartition("\n")
        return [found for line in whole.splitlines() if (found := json.loads(line))["event"] == event]

    @property
    def given(self) -> dict[str, Any]:
        """Its newest word on what it gives."""
        return (self.said("Contribution") or [{"synced": False, "microbatches_total": 0, "limits": None}])[-1]

    def heard_after(self, count: int) -> bool:
        """It has spoken of itself since it had done so `count` times."""
        return len(self.said("Contribution")) > count


@pytest.mark.process
def test_a_peer_pauses_answers_all_the_while_and_goes_on(world: Any) -> None:
    common = ("--json", "--threads", 1, "--limit", "compute_share=0.2")  # nobody waits for many steps here

    def start(name: str, *arguments: object) -> Peer:
        return Peer(world.shoal(*arguments, *common, "--state-dir", world.folder / name), world.folder / name)

    host = start("host", "host", world.spec(STEPS))
    world.until(lambda: host.said("Ready"))
    invite = host.said("Ready")[0]["invite"]
    peers = [host, *(start(f"peer{i}", "join", invite) for i in range(2))]
    steps = lambda: max((report["report"]["step"] for report in host.said("Committed")), default=-1)  # noqa: E731
    # Whichever of the two holds the second stage (the text of the first they have not): the other holds it too, or is a
    # spare that comes in its place.
    world.until(lambda: steps() > 2 and any(peer.given["synced"] for peer in peers[1:]))
    paused = next(peer for peer in peers[1:] if peer.given["synced"])

    asked = world.shoal("pause", "--state-dir", paused.folder)
    assert asked.wait(60) == 0, asked.errors
    assert "paused: you asked for it" in asked.output
    told = len(paused.said("Contribution"))
    world.until(lambda: paused.heard_after(told + 1))  # the job that ran has ended by then
    given, at = paused.given, steps()
    assert given["limits"]["paused"]
    world.until(lambda: steps() > at + 3)
    paused.command.process.send_signal(signal.SIGTSTP)
    assert paused.given["microbatches_total"] == given["microbatches_total"]
    assert all(peer.command.process.poll() is None for peer in peers)

    resumed = world.shoal("resume", "--json", "--state-dir", paused.folder)
    assert resumed.wait(60) == 0, resumed.errors
    (answer,) = json.loads(resumed.output)
    assert (answer["folder"], answer["paused"], answer["reasons"]) == (str(paused.folder), False, [])
    world.until(lambda: paused.given["microbatches_total"] > given["microbatches_total"])
    at = steps()
    world.until(lambda: steps() > at + 3)
    commits = [report["report"] for peer in peers for report in peer.said("Committed")]
    assert {(c["microbatches"], c["given_up"], c["dissenting"]) for c in commits} == {(4, 0, 0)}
