"""The README's code blocks are commands that exist and files that can be read; what takes seconds and no network runs.

A block is a shell session unless its fence says otherwise. In one with `$ ` prompts the other lines are output.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

SHELLS = {"", "sh", "bash", "shell", "console", "text"}
ELSEWHERE = {
    "cd",
    "curl",
    "docker",
    "git",
    "helm",
    "kubectl",
    "launchctl",
    "nvidia-smi",
    "pip",
    "python",
    "python3",
    "python3.11",
    "source",
    "sudo",
    "systemctl",
}
"""Programs that are not ours, and act on the world or need it: only the paths of ours that they name are checked."""
SAMPLES = {"shoal plan home-gpus --compare": 1, "shoal plan --cards": 0}
"""Commands of arithmetic, whose output README shows, and how many of the last columns are times of the machine. The
sample of `shoal simulate` takes minutes, and is compared by hand."""


def blocks(text: str = README) -> Iterator[tuple[str, str]]:
    """(language, content) of every fenced block."""
    for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2]


def typed(text: str = README) -> list[str]:
    """The command lines of all shell blocks, without prompts and folders, continued lines joined."""
    found: list[str] = []
    for language, content in blocks(text):
        if language not in SHELLS:
            continue
        lines = content.replace("\\\n", " ").splitlines()
        prompted = any(line.startswith("$ ") for line in lines)
        for line in lines:
            if not line.strip() or line.lstrip().startswith("#") or (prompted and not line.startswith("$ ")):
                continue
            found.append(line.removeprefix("$ ").strip().removeprefix(".venv/bin/"))
    return found


def bare(line: str) -> str:
    return re.sub(r"\s+#.*$", "", line).strip()


LINES = typed()


def test_there_is_something_to_type() -> None:
    assert any(line.startswith("shoal join") for line in LINES)


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_a_command_that_exists(line: str, parse_command: Callable[[str], None]) -> None:
    check(line, parse_command)


def check(line: str, parse_command: Callable[[str], None]) -> None:
    program, _, rest = line.partition(" ")
    if "=" in program:  # a variable for one command
        return check(rest, parse_command)
    if program == "shoal":
        return parse_command(line)
    if program == "make":
        (target, *_) = rest.split()
        assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        return None
    assert program in ELSEWHERE, f"{line!r}: what is {program!r}? Output needs a `$ ` before its block's commands"
    ours = [word for word in bare(rest).split() if re.match(r"^(deploy|tests|protocol|peer|coordinator)/", word)]
    assert [word for word in ours if not (ROOT / word).exists()] == []
    return None


def test_files_can_be_read() -> None:
    for language, content in blocks():
        read(language, content)


def read(language: str, content: str) -> None:
    if language == "toml":
        from shoal.protocol.spec import RunSpec

        msgspec.convert(tomllib.loads(content), RunSpec)
    elif language == "json":
        msgspec.json.decode(content)
    elif language == "python":
        compile(content, "README.md", "exec")
    elif language not in SHELLS | {"mermaid", "yaml", "ini", "diff"}:
        pytest.fail(f"say here how a block of {language!r} is checked")


@pytest.mark.parametrize(
    ("language", "content"),
    [("toml", "steps = = 3"), ("toml", "[training]\nstep = 3"), ("json", "{"), ("python", "def")],
)
def test_a_file_that_cannot_be_read_is_seen(language: str, content: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        read(language, content)


def printed_by(line: str, folder: Path) -> str:
    command = [sys.executable, "-m", "shoal.deploy.cli", *line.split()[1:]]
    environment = os.environ | {"XDG_STATE_HOME": str(folder), "COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("line", SAMPLES)
def test_a_sample_is_what_is_printed(line: str, tmp_path: Path) -> None:
    sample = sample_of(line)
    assert len(sample) > 5
    printed = [cells(said, SAMPLES[line]) for said in printed_by(line, tmp_path).splitlines()]
    assert [said for said in sample if cells(said, SAMPLES[line]) not in printed] == []


def sample_of(line: str) -> list[str]:
    """The output of a command as README shows it: up to an empty line that another command follows, or the end."""
    (block,) = (content for _, content in blocks() if f"$ {line}\n" in content)
    shown = block.partition(f"$ {line}\n")[2].partition("\n$ ")[0]
    return [said for said in shown.splitlines() if said.strip()]


def cells(line: str, num_times: int) -> list[str]:
    """The cells of a table's row, or the words of a sentence, but for its last `num_times`."""
    found = re.split(r"\s{2,}", line.strip())
    return found[:-num_times] if num_times and len(found) > num_times else " ".join(found).split()


def test_links_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", README)
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert local
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_the_path_of_a_microbatch_names_what_is_there() -> None:
    """Each `Class.method` and `function` of the table, in one of the files that it links."""
    section = README.partition("## The path of a microbatch")[2].partition("\n## ")[0]
    defined = {name for target in re.findall(r"\]\(([^)]+\.py)\)", section) for name in definitions(ROOT / target)}
    named = set(re.findall(r"`([A-Z]\w+(?:\.\w+)?|[a-z_]{3,})`", section))
    assert len(named) > 10
    assert named <= defined, sorted(named - defined)


def test_the_messages_of_the_table_are_said_somewhere() -> None:
    section = README.partition("## When something is wrong")[2].partition("\n## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(messages) > 8
    source = "".join(path.read_text() for house in ("deploy", "protocol", "coordinator") for path in sources(house))
    pieces = [piece.strip() for message in messages for piece in re.split(r"…|\b[01]\b", message) if len(piece) > 3]
    assert [piece for piece in pieces if piece not in source] == []


def sources(house: str) -> Iterator[Path]:
    return (ROOT / house).rglob("*.py")


def definitions(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{each.name}" for each in ast.walk(node) if isinstance(each, FUNCTIONS))


@pytest.mark.parametrize(
    "text",
    [
        "```\nshoal fly\n```\n",
        "```\nshoal join --nowhere X\n```\n",
        "```\nmake nothing\n```\n",
        "```\nmystery --x\n```\n",
        "```\ndocker build deploy/nowhere\n```\n",
        "```\n$ shoal fly \\\n  away\noutput\n```\n",
    ],
)
def test_an_offender_is_seen(text: str, parse_command: Callable[[str], None]) -> None:
    (line,) = typed(text)
    with pytest.raises((AssertionError, Exception), match=r"no command|No such option|nothing|mystery|nowhere"):
        check(line, parse_command)


def test_output_is_no_command(parse_command: Callable[[str], None]) -> None:
    (line,) = typed("```\n$ X=1 shoal plan home-gpus   # why\nlayout 3\n\n```\n")
    check(line, parse_command)
