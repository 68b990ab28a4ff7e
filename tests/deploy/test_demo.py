"""Real peers on loopback, through the command line: a demo, a volunteer that joins it, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

SPEC = """
name = "small"
[model]
dim = 32
num_layers = 2
num_heads = 2
num_kv_heads = 1
ffn_dim = 64
context = 32
[data]
source = "{text}"
[optimizer]
warmup_steps = 2
[training]
steps = {steps}
microbatches_per_step = 4
microbatch_size = 2
validation_interval_steps = 5
[swarm]
stages = 2
min_peers = 2
heartbeat_s = 0.5
term_s = 3.0
snapshot_interval_steps = 5
"""

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


class World:
    """One test's own state folder, run spec and processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
        self.text = folder / "text.txt"
        self.text.write_text("".join(f"fish {i % 7} swims {i * i % 31} miles\n" for i in range(3000)))
        self.commands: list[Command] = []

    def spec(self, steps: int) -> Path:
        path = self.folder / "run.toml"
        path.write_text(SPEC.format(text=self.text, steps=steps))
        return path

    def shoal(self, *arguments: object) -> "Command":
        command = Command(self, len(self.commands), *map(str, arguments))
        self.commands.append(command)
        return command

    def status(self) -> dict[str, Any] | None:
        command = self.shoal("status", "--json")
        return dict(json.loads(command.output)) if command.wait(60) == 0 else None

    def ours(self) -> list[str]:
        """Command lines of processes of this test that run now, the children's daemons included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("XDG_STATE_HOME") == self.environment["XDG_STATE_HOME"]:
                    found.append(" ".join(process.cmdline()))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def until(self, condition: Callable[[], object], *, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come about: " + self.logs()
            os.sched_yield()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.rglob("*.log")))

    def close(self) -> None:
        for command in self.commands:
            command.process.kill()
            command.process.wait()
        self.until(lambda: not self.ours())


class Command:
    """A `shoal` command that runs, its output in files: a pipe that nobody reads would stop it."""

    def __init__(self, world: World, number: int, *arguments: str) -> None:
        self._world = world
        self._stdout = world.folder / f"command-{number}.out"
        self._stderr = world.folder / f"command-{number}.log"
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal.deploy.cli", *arguments],
                env=world.environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._stdout.read_text()

    @property
    def errors(self) -> str:
        return self._stderr.read_text()

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def line(self, prefix: str) -> str:
        """The first line of the output that begins so, once it is there."""

        def found() -> str | None:
            assert self.process.poll() is None, self.output + self._world.logs()
            whole, _, _ = self.output.rpartition("\n")
            return next((line for line in whole.splitlines() if line.startswith(prefix)), None)

        self._world.until(found)
        line = found()
        assert line is not None
        return line


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def test_a_small_demo_trains_reports_and_leaves_nothing(world: World) -> None:
    report = world.folder / "report.jsonl"
    demo = world.shoal("demo", "--spec", world.spec(30), "--peers", 2, "--stages", 2, "--json", report)
    assert demo.wait(200) == 0, demo.output + world.logs()

    *lines, summary = [json.loads(line) for line in report.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(30))
    assert summary["finished"]
    assert (summary["steps"], summary["peers"]) == (30, 2)
    assert summary["loss_last"] < summary["loss_first"] - 0.5
    assert summary["val_loss"] < summary["loss_first"]
    assert summary["tokens_per_s"] > 0
    assert summary["coordinator_terms"] >= 1
    assert (Path(summary["snapshot"]) / "manifest.json").is_file()
    assert summary["sample"].startswith("def ")
    assert "step 30/30" in demo.output
    assert "shoal join shoal1" in demo.output
    assert not world.ours()


def test_a_demo_without_text_says_why(world: World) -> None:
    demo = world.shoal("demo", "--data", world.folder / "none", "--peers", 2, "--stages", 2)
    assert demo.wait(100) == 2, demo.output
    assert demo.errors == f"shoal: there is no file or folder {world.folder}/none to train on\n"
    assert not world.ours()


def test_a_volunteer_joins_is_seen_and_leaves_and_ctrl_c_ends_the_demo(world: World) -> None:
    demo = world.shoal("demo", "--spec", world.spec(100_000), "--peers", 2, "--stages", 2)
    invite = demo.line("shoal join ").split()[2]
    demo.line("step ")

    volunteer = world.shoal("join", invite, "--name", "volunteer", "--data", world.text, "--listen", "127.0.0.1:0")

    def version() -> int:
        status = world.status()
        peers = status["peers"] if status else []
        return max((p["version"] for p in peers if p["name"] == "volunteer" and p["synced"]), default=0)

    world.until(version)
    before = version()
    world.until(lambda: version() > before)  # it takes part in the commits of its stage
    volunteer.process.send_signal(signal.SIGINT)
    assert volunteer.wait(60) == 0, world.logs()
    assert "leaving" in volunteer.output

    def goes_on_without() -> bool:
        status = world.status()
        return status is not None and len([p for p in status["peers"] if p["stage"] is not None]) == 2

    world.until(goes_on_without)
    demo.process.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130, demo.output + world.logs()
    assert not world.ours()


def test_a_killed_demo_takes_its_peers_along(world: World) -> None:
    demo = world.shoal("demo", "--spec", world.spec(100_000), "--peers", 2, "--stages", 2)
    demo.line("step ")
    demo.process.kill()
    demo.process.wait()
    world.until(lambda: not world.ours(), timeout_s=30)
