"""README and the guides: their blocks are commands that exist and files that can be read, their messages are said.

What takes seconds and no network runs. A block is a shell session unless its fence says otherwise. In one with `$ `
prompts the other lines are output.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from pages import (
    GUIDES,
    PAGES,
    PATH_OF_A_MICROBATCH,
    README,
    ROOT,
    SHELLS,
    bare,
    blocks,
    guide,
    messages,
    sample_of,
    slug,
    typed,
)

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
HOUSES = ("kernels", "protocol", "coordinator", "peer", "deploy")
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
"""Commands of arithmetic, whose output a guide shows, and how many of the last columns are times of the machine. The
sample of `shoal simulate` takes minutes, and is compared by hand."""


LINES = [(page, line) for page, text in PAGES.items() for line in typed(text)]


def test_there_is_something_to_type() -> None:
    for page in ("README.md", *(f"deploy/guides/{name}.md" for name in GUIDES)):
        assert any(line.startswith("shoal ") for where, line in LINES if where == page), page


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_line_is_a_command_that_exists(page: str, line: str, parse_command: Callable[[str], None]) -> None:
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
    for text in PAGES.values():
        for language, content in blocks(text):
            read(language, content)


def read(language: str, content: str) -> None:
    if language == "toml":
        from shoal.protocol.spec import RunSpec

        msgspec.convert(tomllib.loads(content), RunSpec)
    elif language == "json":
        msgspec.json.decode(content)
    elif language == "python":
        compile(content, "a page", "exec")
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


def cells(line: str, num_times: int) -> list[str]:
    """The cells of a table's row, or the words of a sentence, but for its last `num_times`."""
    found = re.split(r"\s{2,}", line.strip())
    return found[:-num_times] if num_times and len(found) > num_times else " ".join(found).split()


def test_the_front_page_is_short_and_leads_to_every_guide() -> None:
    assert len(README.split()) <= 1200
    assert len(GUIDES) >= 5
    paths = [path.relative_to(ROOT) for path in (*GUIDES.values(), PATH_OF_A_MICROBATCH)]
    assert [path for path in paths if f"]({path})" not in README] == []


def test_the_guides_are_shipped() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "shoal.deploy"
    ]
    shipped = {path for pattern in patterns for path in (ROOT / "deploy").glob(pattern)}
    assert {*GUIDES.values()} <= shipped


MARKDOWN = [
    *ROOT.glob("*.md"),
    *(path for house in (*HOUSES, "tests") for path in sorted((ROOT / house).rglob("*.md"))),
]


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    assert [target for target in local_links(path) if not (path.parent / target.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_headings(path: Path) -> None:
    for target in local_links(path):
        file, _, anchor = target.partition("#")
        if anchor:
            text = (path.parent / file if file else path).read_text()
            assert anchor in map(slug, re.findall(r"^#+ (.*)$", text, re.MULTILINE)), target


def local_links(path: Path) -> list[str]:
    """Targets of a page's links and pictures that are not on another host."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", text)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def test_there_are_links_to_follow() -> None:
    assert len(local_links(ROOT / "README.md")) > 12
    assert all(local_links(path) for path in GUIDES.values())


def test_the_path_of_a_microbatch_names_what_is_there() -> None:
    """Each `Class.method` and `function` of the page, in one of the files that it links."""
    text, folder = PATH_OF_A_MICROBATCH.read_text(), PATH_OF_A_MICROBATCH.parent
    defined = {name for target in re.findall(r"\]\(([^)]+\.py)\)", text) for name in definitions(folder / target)}
    named = set(re.findall(r"`([A-Z]\w+(?:\.\w+)?|[a-z_]{3,})`", text))
    assert len(named) > 10
    assert named <= defined, sorted(named - defined)


@pytest.mark.parametrize("name", GUIDES)
def test_the_messages_of_a_guide_are_said_somewhere(name: str) -> None:
    quoted = messages(guide(name))
    assert len(quoted) > 5
    source = source_of_all()
    pieces = [piece.strip() for message in quoted for piece in re.split(r"…|\b[01]\b", message) if len(piece) > 3]
    assert [piece for piece in pieces if piece not in source] == []


@cache
def source_of_all() -> str:
    return "".join(path.read_text() for house in HOUSES for path in (ROOT / house).rglob("*.py"))


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
