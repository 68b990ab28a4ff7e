"""README and the guides as their readers take them: blocks, lines to type, samples of output, tables of messages."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = {path.stem: path for path in sorted((ROOT / "deploy" / "guides").glob("*.md"))}
PATH_OF_A_MICROBATCH = ROOT / "peer" / "MICROBATCH.md"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *GUIDES.values(), PATH_OF_A_MICROBATCH)
}
"""Path -> text of each page whose every command, file, message and link is checked."""
README = PAGES["README.md"]
SHELLS = {"", "sh", "bash", "shell", "console", "text"}


def guide(name: str) -> str:
    """The text of `deploy/guides/NAME.md`."""
    return GUIDES[name].read_text()


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of every fenced block."""
    for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2]


def typed(text: str, *, samples: bool = True) -> list[str]:
    """The command lines of all shell blocks, without prompts and folders, continued lines joined.

    Args: samples: also the commands of blocks in which a `$ ` prompt tells them from their output.
    """
    found: list[str] = []
    for language, content in blocks(text):
        if language not in SHELLS:
            continue
        lines = content.replace("\\\n", " ").splitlines()
        prompted = any(line.startswith("$ ") for line in lines)
        if prompted and not samples:
            continue
        for line in lines:
            if not line.strip() or line.lstrip().startswith("#") or (prompted and not line.startswith("$ ")):
                continue
            found.append(line.removeprefix("$ ").strip().removeprefix(".venv/bin/"))
    return found


def bare(line: str) -> str:
    """A command line without its comment."""
    return re.sub(r"\s+#.*$", "", line).strip()


def sample_of(line: str) -> list[str]:
    """The output of a command as the only page that has it shows it, without empty lines.

    It goes up to an empty line that another command follows, or to the end of the block.
    """
    (block,) = (content for page in PAGES.values() for _, content in blocks(page) if f"$ {line}\n" in content)
    shown = block.partition(f"$ {line}\n")[2].partition("\n$ ")[0]
    return [said for said in shown.splitlines() if said.strip()]


def messages(text: str) -> list[str]:
    """What the rows of the table below "When something is wrong" quote in their first cell."""
    section = text.partition("\n## When something is wrong\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]*`[^|]*) \|", section, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
