"""Does a run go on where it was? Real processes are told to stop in every order, and started again; `make soak-stops`.

A host and a volunteer, one replica a stage, no snapshots by steps. Each case stops both at some step, in its own way,
starts them again with the commands of before (the invite is yesterday's), and says at which step the run goes on. The
last case cuts the power: both are killed, after so long that the clock has made a snapshot.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from peer_processes import SPEC, PeerProcess, start_peer

READY_S = 120.0
END_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    step: int
    order: tuple[str, ...] = ("host", "guest")
    number: signal.Signals = signal.SIGINT
    apart_s: float = 0.0
    again: tuple[str, ...] = ("host", "guest")
    """In which order they are started again."""


CASES = (
    Case(name="Ctrl-C to both", step=17),
    Case(name="Ctrl-C to the host, 5 s later to the volunteer", step=17, apart_s=5.0, again=("guest", "host")),
    Case(name="Ctrl-C to the volunteer, 5 s later to the host", step=17, order=("guest", "host"), apart_s=5.0),
    Case(name="SIGTERM to both", step=17, number=signal.SIGTERM, again=("guest", "host")),
    Case(name="SIGTERM to the host, 5 s later to the volunteer", step=17, number=signal.SIGTERM, apart_s=5.0),
    Case(name="logout (SIGHUP to both)", step=17, number=signal.SIGHUP),
    Case(name="Ctrl-C to both", step=100, again=("guest", "host")),
    Case(name="SIGTERM to both", step=100, number=signal.SIGTERM),
    Case(
        name="SIGTERM to the volunteer, 5 s later to the host",
        step=100,
        order=("guest", "host"),
        number=signal.SIGTERM,
        apart_s=5.0,
    ),
    Case(name="logout (SIGHUP to both)", step=100, number=signal.SIGHUP, again=("guest", "host")),
)


class Life:
    """A peer in one life, and what it has said."""

    def __init__(self, process: PeerProcess) -> None:
        self.process, self.popen = process, process.popen
        self._events: list[dict[str, Any]] = []

    def events(self, kind: str) -> list[dict[str, Any]]:
        self._events += self.process.fresh()
        return [event for event in self._events if event["event"] == kind]

    @property
    def committed(self) -> dict[int, list[int]]:
        """By stage: the steps whose commit this process has seen, in order."""
        steps: dict[int, list[int]] = {}
        for event in self.events("Committed"):
            steps.setdefault(event["report"]["stage"], []).append(event["report"]["step"])
        return steps


class Machine:
    """The two commands, as their owners type them day after day."""

    def __init__(self, folder: Path, *, interval_s: float | None = None) -> None:
        self.folder = folder
        self.spec = folder / "run.toml"
        text = SPEC.format(name="stops", layers=4, stages=2, peers=2)
        self.spec.write_text(text + (f"snapshot_interval_s = {interval_s}\n" if interval_s is not None else ""))
        self.invite = ""
        self._lives = 0

    def start(self, who: str) -> Life:
        self._lives += 1
        words = ("host", str(self.spec)) if who == "host" else ("join", self.invite)
        life = Life(start_peer(self.folder, who, *words, "--verbose", life=f"{self._lives}-"))
        if who == "host":
            until(lambda: life.events("Ready"), [life], READY_S)
            self.invite = self.invite or life.events("Ready")[0]["invite"]
        return life


class Stuck(Exception):
    """What was waited for did not come."""


def until(condition: Any, processes: Sequence[Life], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise Stuck("\n".join(process.process.log.read_text()[-1500:] for process in processes))
        time.sleep(0.05)


def whole_steps(processes: Sequence[Life]) -> int:
    """Steps that both stages have committed."""
    newest: dict[int, int] = {}
    for process in processes:
        for stage, steps in process.committed.items():
            newest[stage] = max(newest.get(stage, 0), steps[-1] + 1)
    return min(newest.values()) if len(newest) == 2 else 0


def play(case: Case, folder: Path) -> tuple[int, int, float, float]:
    """Returns: (steps when the first was told to stop, step at which the run goes on, seconds until both had ended,
    seconds from the first command of the next day to its first commit)."""
    machine = Machine(folder)
    running = {who: machine.start(who) for who in ("host", "guest")}
    try:
        until(lambda: whole_steps(list(running.values())) >= case.step, list(running.values()), READY_S)
        had = whole_steps(list(running.values()))
        told_s = time.monotonic()
        for who in case.order:
            running[who].popen.send_signal(case.number)
            time.sleep(case.apart_s)
        for process in running.values():
            process.popen.wait(END_S)
        ended_s = time.monotonic() - told_s
        begun_s = time.monotonic()
        running = {}
        for who in case.again:
            running[who] = machine.start(who)
        until(lambda: whole_steps(list(running.values())) > 0, list(running.values()), READY_S)
        goes_on = min(steps[0] for process in running.values() for steps in process.committed.values())
        return had, goes_on, ended_s, time.monotonic() - begun_s
    finally:
        end(running)


def cut_power(folder: Path, interval_s: float, after_s: float) -> tuple[float, float]:
    """Returns: (seconds of training that are lost, seconds a step takes)."""
    machine = Machine(folder, interval_s=interval_s)
    running = {who: machine.start(who) for who in ("host", "guest")}
    try:
        until(lambda: whole_steps(list(running.values())) > 0, list(running.values()), READY_S)
        began_s = time.monotonic()
        reached: dict[int, float] = {}
        while (now_s := time.monotonic()) < began_s + after_s:
            reached.setdefault(whole_steps(list(running.values())), now_s)
            time.sleep(0.05)
        end(running)
        cut_s = time.monotonic()
        running = {who: machine.start(who) for who in ("host", "guest")}
        until(lambda: whole_steps(list(running.values())) > 0, list(running.values()), READY_S)
        goes_on = min(steps[0] for process in running.values() for steps in process.committed.values())
        return cut_s - reached.get(goes_on, began_s), after_s / max(reached)
    finally:
        end(running)


def end(running: dict[str, Life]) -> None:
    for life in running.values():
        life.process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--power-s", type=float, default=420.0, help="when the power is cut; 0: never")
    parser.add_argument("--interval-s", type=float, default=300.0, help="between snapshots by the clock, in that case")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="by number; none: only the cut")
    options = parser.parse_args()
    failures = 0
    print(f"{'told to stop':52} {'had':>5} {'goes on':>8} {'ended after':>12} {'again after':>12}")
    for case in [CASES[number] for number in options.cases]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                had, goes_on, ended_s, again_s = play(case, Path(folder))
            except (Stuck, subprocess.TimeoutExpired) as error:
                failures += 1
                print(f"{case.name:52} FAILED: {error}", flush=True)
                continue
        failures += goes_on < had
        verdict = "" if goes_on >= had else "  LOST"
        print(f"{case.name:52} {had:5} {goes_on:8} {ended_s:10.1f} s {again_s:10.1f} s{verdict}", flush=True)
    if options.power_s:
        with tempfile.TemporaryDirectory() as folder:
            lost_s, step_s = cut_power(Path(folder), options.interval_s, options.power_s)
        failures += lost_s > options.interval_s + 10 * step_s + 10.0
        print(f"power cut after {options.power_s:.0f} s: {lost_s:.1f} s of training lost (a step takes {step_s:.2f} s)")
    print("FAILED" if failures else "all go on where they were")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
