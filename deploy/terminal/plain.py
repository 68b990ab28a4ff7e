"""Prints plain lines for a person, in commands that draw nothing."""

import re
import shutil
import sys
from collections.abc import Iterable

import msgspec
import typer

from shoal.deploy.base.words import printable

_UNIT = re.compile(r"(\s*)((?:[^\s`]*`[^`]*`\S*)|shoal join \S+|\S+)")
"""Matches blanks and the next word. A command in backquotes, or `shoal join` with its invite, counts as one word."""
_LABEL = re.compile(r"\s*(?:\S+ {2,})?")
"""Matches the label at a line's beginning. Continuation lines are indented to the word after the label."""


def say(text: str, *, err: bool = False, whole: bool = False) -> None:
    """Print lines, wrapped at blanks on a terminal and unbroken elsewhere. Control characters, which other peers' texts
    and file names may contain, become `?`.

    Args: err: print to standard error. whole: do not wrap lines, because the text is a file to copy.
    """
    lines = [printable(line) for line in text.split("\n")]
    if not whole and (sys.stderr if err else sys.stdout).isatty():
        width = shutil.get_terminal_size().columns
        lines = [each for line in lines for each in wrapped(line, width)]
    typer.echo("\n".join(lines), err=err)


def say_or_report(sentences: Iterable[str], *, reports: bool) -> None:
    """Print sentences: as reports for a parent process if `reports`, else as plain lines for a person."""
    from shoal.deploy.record.report import Note, write_report  # other commands need no messages

    for sentence in sentences:
        if reports:
            write_report(Note(text=sentence.strip()))
        else:
            say(sentence)


def say_json(value: object) -> None:
    """Print a value as one line of JSON, for a script."""
    typer.echo(msgspec.json.encode(value).decode())


def say_result(value: object, words: Iterable[str], *, as_json: bool) -> None:
    """Print a command's result: `value` for a script, or the lines `words` for a person."""
    if as_json:
        say_json(value)
        return
    for line in words:
        say(line)


def wrapped(line: str, width: int) -> list[str]:
    """Break `line` at blanks. Words and commands longer than `width` stay whole."""
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
