"""Plain lines for a person, from commands that draw nothing."""

import re
import shutil
import sys

import typer

from shoal.deploy.words import printable

_UNIT = re.compile(r"(\s*)((?:[^\s`]*`[^`]*`\S*)|shoal join \S+|\S+)")
"""Blanks and what follows them: a word, or a command that a person may copy."""
_LABEL = re.compile(r"\s*(?:\S+ {2,})?")
"""Later lines of a sentence begin below its first word, not below its label."""


def say(text: str, *, err: bool = False, whole: bool = False) -> None:
    """Print lines: wrapped at blanks on a terminal, unbroken anywhere else. What they name may be another peer's or a
    file's: their control characters are gone.

    Args: err: to standard error. whole: it is a file to copy, so no line of it is wrapped.
    """
    lines = [printable(line) for line in text.split("\n")]
    if not whole and (sys.stderr if err else sys.stdout).isatty():
        width = shutil.get_terminal_size().columns
        lines = [each for line in lines for each in wrapped(line, width)]
    typer.echo("\n".join(lines), err=err)


def wrapped(line: str, width: int) -> list[str]:
    """Break `line` at blanks. A word or a command that is longer than `width` stays whole."""
    if len(line) <= width:
        return [line]
    label = _LABEL.match(line)
    assert label is not None
    indent = " " * (label.end() if label.end() <= width // 2 else 0)
    lines = [""]
    for blanks, unit in _UNIT.findall(line):
        if lines[-1].strip() and len(lines[-1]) + len(blanks) + len(unit) > width:
            lines.append(indent + unit)
        else:
            lines[-1] += blanks + unit
    return lines
