"""The volunteer's and the host's day as the guides tell it: their lines, in their order, on real peers."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pages import README, bare, blocks, guide, sample_of, typed
from shoal.deploy.cli import app
from shoal.deploy.session import session
from shoal.peer.data.corpus import Corpus
from shoal.protocol.spec import RunSpec

STEPS = 100_000
"""More than there is time for: `shoal leave` ends it."""
SLOWLY = ("--limit", "compute_share=0.1")
"""The test is of what one types, and other tests want the processors."""


def lines(text: str) -> list[str]:
    """The commands of shoal on a page, without what they are for."""
    return [bare(line) for line in typed(text, samples=False) if line.startswith("shoal ")]


def the_line(name: str, start: str) -> str:
    """The first one of a guide that begins so: the test fails where the guide no longer says it."""
    return next(line for line in lines(guide(name)) if line.startswith(f"shoal {start}"))


def shape(line: str) -> str:
    """A line of output without what is another one in every run: numbers, ids, the run's name, the coordinator."""
    line = re.sub(r"shoal1\S*", "shoal1…", line).replace("★", "")
    line = re.sub(r"run \w+ \(\w+\)", "run ID (NAME)", line)
    line = re.sub(r"run: \w+", "run: ID", line)
    line = re.sub(r"takes part as (\w+) \(\w+\)", r"takes part as \1 (ID)", line)
    line = re.sub(r"coordinator \w+", "coordinator NAME", line)
    line = re.sub(r"\b[kMGT](FLOP/s|B)\b", r"\1", line)
    line = re.sub(r"(?<![\w.])(\d[\d.,:/-]*|-(?= ))( m?s\b)?", "N", line)
    return re.sub(r"N( N)+", "N", " ".join(line.split()))


def is_shown(sample: list[str], printed: str) -> None:
    """Assert that each line of a guide's sample has the shape of one that was printed."""
    assert len(sample) > 3
    shapes = {shape(line) for line in printed.splitlines()}
    assert [line for line in sample if shape(line) not in shapes] == [], printed


def host_sample() -> tuple[list[str], list[str]]:
    """What a host says of its run file and text, and what it says once it is up."""
    sample = sample_of("shoal host RUN.toml")
    up = sample.index("measuring this machine")
    return sample[:up], sample[up:]


class Day:
    """Types the guides' lines, with what stands for the reader's own things filled in."""

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
    host = day.starts(the_line("host", "host"), "--threads", 1, *SLOWLY)
    day.means["INVITE"] = host.line("shoal join ").split()[-1]
    assert "waiting for peers: 1 of 2 are here" in host.line("waiting for peers")
    assert "): waiting for peers: 1 of 2 are here\n" in day.does(the_line("host", "status"))

    guest = day.starts(the_line("volunteer", "join INVITE"), "--threads", 1, *SLOWLY)
    world.until(lambda: any(int(step) > 5 for step in re.findall(r"^step (\d+)/", host.output, re.M)))  # a snapshot
    assert "10% of the device's time" in guest.line("limits that you have set")
    is_shown(host_sample()[1], host.output)
    is_shown(sample_of("shoal join INVITE --limit compute_share=0.5"), guest.output)
    is_shown(sample_of("shoal status"), day.does(the_line("host", "status")))

    assert "shoal pause volunteer" in day.does(the_line("volunteer", "pause"), code=2)  # the host is here, too
    assert "paused" in day.does(the_line("volunteer", "pause"), "volunteer")
    assert "computing" in day.does("shoal resume", "volunteer")
    assert "volunteer: at once" in day.does(the_line("volunteer", "config set"))
    day.does("shoal config unset hours")  # by day they would compute nothing
    assert "installed" in day.does(the_line("volunteer", "service install"))
    assert (world.folder / "told").read_text().endswith("enable --now shoal.service\n")
    is_shown(sample_of("shoal doctor INVITE"), day.does(the_line("volunteer", "doctor")))

    assert day.does(the_line("host", "invite")).startswith("shoal1")
    assert "host" in day.does(the_line("host", "status"))
    assert "are called 'NAME'" in day.does(the_line("host", "readmit"), code=2)  # the host answers, and nobody is out
    asks = day.does(the_line("host", "generate --swarm"), "--tokens", 5, "--json")
    assert json.loads(asks)["text"]
    day.means["notes/"] = str(world.text)  # that run's
    assert ", through its stages" in (said := day.does(the_line("host", "eval --swarm"), "--samples", 8))
    assert "nats a token" in said
    day.means["notes/"] = str(world.folder / "notes")
    assert "nothing to recover" in day.does(the_line("host", "recover"), code=2)

    day.does(the_line("volunteer", "leave"), "volunteer")
    assert guest.wait(60) == 0
    host.process.terminate()
    assert host.wait(60) == 0
    assert "state and snapshots" in host.output

    assert "small" in day.does(the_line("host", "runs"))
    day.means["notes"] = "small"  # the name of the test's run
    page = world.folder / "look-back.html"
    assert str(page) in day.does(the_line("host", "report"), "-o", page)
    assert "<html" in page.read_text()
    assert day.does(the_line("host", "generate"), "--tokens", 5).startswith("def ")
    day.means["notes/"] = str(world.text)  # that run's
    assert "nats" in day.does(the_line("host", "eval"))
    day.means["notes/"] = str(world.folder / "notes")
    assert "transformers" in day.does(the_line("host", "export"))
    assert "shoal host" in day.does(the_line("host", "import"))


def test_every_line_of_the_day_is_typed() -> None:
    """Those that are not are another way of one that is."""
    typed = re.findall(r'the_line\("([^"]+)", "([^"]+)"\)', Path(__file__).read_text())
    other_ways = {"shoal join INVITE --dashboard --limit upload_mbit_s=5 --limit only_when_idle=true"}
    for name in ("volunteer", "host"):
        starts = [f"shoal {start}" for where, start in typed if where == name]
        missed = [line for line in lines(guide(name)) if not any(line.startswith(start) for start in starts)]
        assert set(missed) <= other_ways, missed


def test_a_host_says_of_the_guide_s_run_file_what_the_guide_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spec,) = [content for language, content in blocks(guide("host")) if language == "toml"]
    (tmp_path / "RUN.toml").write_text(spec)
    (tmp_path / "notes").mkdir()
    for number in range(120):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"{number:19}\n" * 1000)
    said: list[str] = []

    async def host_run(spec: RunSpec, corpus: Corpus, initial: object, options: session.Options) -> None:
        said.extend(options.first_said)

    monkeypatch.setattr(session, "host_run", host_run)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        app, ["host", "RUN.toml"], env={"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    )
    assert result.exit_code == 0, result.output
    assert said == host_sample()[0]


def test_the_front_page_types_what_the_guides_type() -> None:
    shown = lines(README)
    assert len(shown) > 4
    assert set(shown) <= {*lines(guide("volunteer")), *lines(guide("host"))}


def test_the_front_page_has_the_run_of_the_host_s_guide() -> None:
    ours, theirs = (
        [content for language, content in blocks(text) if language == "toml"] for text in (README, guide("host"))
    )
    assert [re.sub(r"\s+#.*", "", content) for content in ours] == [
        re.sub(r"\s+#.*", "", content) for content in theirs
    ]


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("run 57146e561a2c7c1c (notes), up 43 s", "run 0a46e561a2c7c1cc (small), up 1:08"),
        (
            "0     0-4    host ★       1      5   72.8 100 % 91.6 GFLOP/s training",
            "0 0-0 host 12 72.8 9 % 0.6 MFLOP/s training",
        ),
        (
            "step 1/1000  loss 6.0018  val -  - tokens/s  term 1, coordinator ana",
            "step 12/9 loss 5.1 val 6.0 371 tokens/s term 2, coordinator bo",
        ),
    ],
)
def test_a_shape_is_the_same_in_every_run(shown: str, printed: str) -> None:
    assert shape(shown) == shape(printed)
    assert shape(shown) != shape(printed.replace("training", "paused").replace("up ", "down ").replace("loss", "gain"))
