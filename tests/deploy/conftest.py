"""One test's own world of real processes, started through the command line."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from peer_processes import deliver_signals

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


LOOK_S = 0.05
"""The time between two looks at a condition: without it the test takes a processor from the peers that it waits for."""


class World:
    """One test's own state folder, run spec and processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Nobody stands back: on a busy machine a test would wait for those who do.
        (folder / "config" / "shoal").mkdir(parents=True, exist_ok=True)
        (folder / "config" / "shoal" / "config.toml").write_text("[limits]\nnice = 0\n")
        own = {"XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}
        self.environment = os.environ | own
        self.text = folder / "text.txt"
        self.text.write_text("".join(f"fish {i % 7} swims {i * i % 31} miles\n" for i in range(3000)))
        self.commands: list[Command] = []

    def spec(self, steps: int, *, exact: bool = False) -> Path:
        """`exact`: nothing stale, nothing rounded on the wire; its losses are those of one process."""
        path = self.folder / "run.toml"
        text = SPEC.format(text=self.text, steps=steps)
        if exact:
            text = (
                text.replace("[training]", '[training]\ns_max = 0\ncompute = "fp32"') + '[wire]\nactivations = "fp32"\n'
            )
        path.write_text(text)
        return path

    def report(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
        """What a demo wrote to `report.jsonl`: (steps, faults, summary)."""
        *lines, summary = [json.loads(line) for line in (self.folder / "report.jsonl").read_text().splitlines()]
        faults = [line for line in lines if line.get("event") == "fault"]
        return [line for line in lines if line not in faults], faults, summary

    def shoal(self, *arguments: object, first: str = "", script: Path | None = None) -> "Command":
        """`first`: Python that the command's process runs before it; `script`: what runs in place of `shoal`."""
        command = Command(self, len(self.commands), *map(str, arguments), first=first, script=script)
        self.commands.append(command)
        return command

    def free_port(self) -> int:
        """A port for a process that has yet to start: the system hands out higher ones, so nobody gets it meanwhile."""
        while True:
            port = random.randrange(20_000, 32_000)
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                return port

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
            time.sleep(LOOK_S)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.rglob("*.log")))

    def coordination(self) -> str:
        """What the peers' logs say of plans, terms and losses, by time: short enough to be printed as a whole."""
        lines = {
            line.replace("INFO shoal.coordinator.driver: ", f"{path.stem} ")
            for path in self.folder.rglob("*.log")
            for line in path.read_text().splitlines()
            if "coordinator.driver" in line or "has no holder" in line
        }
        return "\n".join(sorted(lines))

    def close(self) -> None:
        for command in self.commands:
            command.process.kill()
            command.process.wait()
        self.until(lambda: not self.ours())


class Command:
    """A `shoal` command that runs, its output in files: a pipe that nobody reads would stop it."""

    def __init__(self, world: World, number: int, *arguments: str, first: str = "", script: Path | None = None) -> None:
        patched = ["-c", f"{first}\nfrom shoal.deploy.cli import app\napp(prog_name='shoal')"]
        program = [str(script)] if script else patched if first else ["-m", "shoal.deploy.cli"]
        self._world = world
        self._stdout = world.folder / f"command-{number}.out"
        self._stderr = world.folder / f"command-{number}.log"
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                env=world.environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=deliver_signals,
            )

    @property
    def output(self) -> str:
        return self._stdout.read_text()

    @property
    def errors(self) -> str:
        return self._stderr.read_text()

    def wait(self, timeout_s: float) -> int:
        """Its exit status. Raises: AssertionError: it still runs; with what it and its peers have said."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            said = self.output[-2000:] + self._world.logs()
            raise AssertionError(f"it still runs after {timeout_s} s: {said}") from None

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
