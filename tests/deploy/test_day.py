"""The volunteer's and the host's day as the README tells it: its lines, in its order, on real peers."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
STEPS = 100_000
"""More than there is time for: `shoal leave` ends it."""
SLOWLY = ("--limit", "compute_share=0.1")
"""The test is of what one types, and other tests want the processors."""


def lines(heading: str) -> list[str]:
    """The commands of shoal below a heading, without what they are for."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", README, re.M | re.S)
    found = [line for block in re.findall(r"^```\n(.*?)^```", section, re.M | re.S) for line in block.splitlines()]
    return [re.sub(r"\s+#.*$", "", line) for line in found if line.startswith("shoal ")]


def the_line(heading: str, start: str) -> str:
    """The first of them that begins so: the test fails where the README no longer says it."""
    return next(line for line in lines(heading) if line.startswith(f"shoal {start}"))


class Day:
    """Types the README's lines, with what stands for the reader's own things filled in."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.means: dict[str, str] = {"RUN.toml": str(world.spec(STEPS)), "run.toml": str(world.folder / "next.toml")}
        for name in ("my-model", "notes/"):
            self.means[name] = str(world.folder / name)
        self.means["./my-model"] = self.means["my-model"]
        (world.folder / "notes").mkdir()
        (world.folder / "notes" / "today.txt").write_text("fish swim\n" * 3000)
        tool = world.folder / "bin" / "systemctl"  # a test installs nothing on this machine
        tool.parent.mkdir()
        tool.write_text(f'#!/bin/sh\necho "$@" >> {world.folder}/told\n')
        tool.chmod(0o755)
        world.environment |= {"PATH": f"{tool.parent}:{world.environment['PATH']}"}

    def starts(self, line: str, *more: object) -> Any:
        words = [self.means.get(word, word) for word in shlex.split(line)[1:]]
        return self.world.shoal(*words, *more)

    def does(self, line: str, *more: object, code: int = 0) -> str:
        """What it prints."""
        command = self.starts(line, *more)
        assert command.wait(120) == code, f"{line}: {command.errors}"
        assert "Traceback" not in command.errors
        return str(command.output if code == 0 else command.errors)


@pytest.mark.process
def test_a_day(world: Any) -> None:
    day = Day(world)
    host = day.starts(the_line("Host a run", "host"), "--threads", 1, *SLOWLY)
    day.means["INVITE"] = host.line("shoal join ").split()[-1]
    assert "waiting for peers: 1 of 2 are here" in host.line("waiting for peers")
    assert "): waiting for peers: 1 of 2 are here\n" in day.does(the_line("Host a run", "status"))

    guest = day.starts(the_line("Lend a GPU", "join INVITE"), "--threads", 1, *SLOWLY)
    world.until(lambda: any(int(step) > 5 for step in re.findall(r"^step (\d+)/", host.output, re.M)))  # a snapshot
    assert "10% of the device's time" in guest.line("limits that you have set")

    assert "shoal pause volunteer" in day.does(the_line("Lend a GPU", "pause"), code=2)  # the host is here, too
    assert "paused" in day.does(the_line("Lend a GPU", "pause"), "volunteer")
    assert "computing" in day.does("shoal resume", "volunteer")
    assert "volunteer: at once" in day.does(the_line("Lend a GPU", "config set"))
    day.does("shoal config unset hours")  # by day they would compute nothing
    assert "installed" in day.does(the_line("Lend a GPU", "service install"))
    assert (world.folder / "told").read_text().endswith("enable --now shoal.service\n")
    assert "ok" in day.does(the_line("Lend a GPU", "doctor"))

    assert day.does(the_line("Host a run", "invite")).startswith("shoal1")
    assert "host" in day.does(the_line("Host a run", "status"))
    assert "the run's host" in day.does(the_line("Host a run", "readmit"), code=2)  # nor is anybody out
    asks = day.does(the_line("Host a run", "generate --swarm"), "--tokens", 5, "--json")
    assert json.loads(asks)["text"]
    day.means["notes/"] = str(world.text)  # that run's
    assert ", through its stages" in (said := day.does(the_line("Host a run", "eval --swarm"), "--samples", 8))
    assert "nats a token" in said
    day.means["notes/"] = str(world.folder / "notes")
    assert "nothing to recover" in day.does(the_line("Host a run", "recover"), code=2)

    day.does(the_line("Lend a GPU", "leave"), "volunteer")
    assert guest.wait(60) == 0
    host.process.terminate()
    assert host.wait(60) == 0
    assert "state and snapshots" in host.output

    assert "small" in day.does(the_line("Host a run", "runs"))
    day.means["notes"] = "small"  # the name of the test's run
    page = world.folder / "look-back.html"
    assert str(page) in day.does(the_line("Host a run", "report"), "-o", page)
    assert "<html" in page.read_text()
    assert day.does(the_line("Host a run", "generate"), "--tokens", 5).startswith("def ")
    day.means["notes/"] = str(world.text)  # that run's
    assert "nats" in day.does(the_line("Host a run", "eval"))
    day.means["notes/"] = str(world.folder / "notes")
    assert "transformers" in day.does(the_line("Host a run", "export"))
    assert "shoal host" in day.does(the_line("Host a run", "import"))


def test_every_line_of_the_day_is_typed() -> None:
    """Those that are not are another way of one that is."""
    typed = re.findall(r'the_line\("([^"]+)", "([^"]+)"\)', Path(__file__).read_text())
    other_ways = {"shoal join INVITE --dashboard --limit upload_mbit_s=5 --limit only_when_idle=true"}
    for heading in ("Lend a GPU", "Host a run"):
        starts = [f"shoal {start}" for where, start in typed if where == heading]
        missed = [line for line in lines(heading) if not any(line.startswith(start) for start in starts)]
        assert set(missed) <= other_ways, missed
