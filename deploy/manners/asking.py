"""Asks the owner, at the first `shoal join` on a machine, what a run may use of it; keeps the answers as settings."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import typer

from shoal.deploy.manners.config import config_path, write_limits
from shoal.deploy.manners.limits import GB, MBIT_S_MIN, Limits, parse_value, with_value
from shoal.deploy.terminal.plain import say
from shoal.peer.compute.cgroup import total_memory_bytes
from shoal.protocol.errors import LocalError

_BEGIN = """\
This is the first `shoal join` on this machine. What may the run use of it? Enter takes what is in brackets.
The computing yields to your other programs in any case."""


class Question(NamedTuple):
    name: str
    text: str
    default: str
    """The answer that Enter selects, as typed text."""
    hint: str
    """The text to show after an invalid answer, before the question is repeated."""


def questions(memory_bytes: float) -> tuple[Question, ...]:
    """Return the questions for a machine with `memory_bytes` of memory."""
    half_gb = str(max(1, round(memory_bytes / GB / 2)))
    upload = f"write 0, or a number from {MBIT_S_MIN:g} on"
    hours = "write hours such as 22:00-07:00 or 09:00-12:00, 13:00-17:00, or always"
    return (
        Question("compute_share", "share of the device's time, in percent", "100%", "write a percentage from 1 to 100"),
        Question("memory_gb", "memory in GB; 0: whatever is free", half_gb, "write a number, such as 8"),
        Question("upload_mbit_s", "upload in Mbit/s; 0: no limit", "0", upload),
        Question("hours", "hours of the day, such as 22:00-07:00", "always", hours),
        Question("only_when_idle", "only while nobody uses the machine, yes or no", "no", "write yes or no"),
    )


def may_ask(*, answered: bool) -> bool:
    """True if a person is at the terminal and there are no settings yet.

    Args: answered: True if the command line sets a limit, forbids questions or asks for JSON.
    """
    return not answered and sys.stdin.isatty() and sys.stdout.isatty() and not config_path().exists()


def ask(
    prompt: Callable[[str, str], str] = lambda text, default: str(typer.prompt(text, default=default)),
    *,
    say: Callable[[str], None] = say,
    memory_bytes: float | None = None,
) -> Limits:
    """Ask all questions, write the answers as settings, and say how to change them. Returns: the limits from now on.

    Args: prompt: (question, default) -> typed answer; memory_bytes: the machine's memory; None: look it up.
    Raises: LocalError: the settings cannot be written.
    """
    say(_BEGIN)
    answers: dict[str, Any] = {}
    for question in questions(total_memory_bytes() if memory_bytes is None else memory_bytes):
        while question.name not in answers:
            typed = prompt(f"  {question.text}", question.default)
            try:
                value = parse_value(question.name, typed)
                with_value(Limits(), question.name, value)
            except LocalError:
                say(f"  {question.hint}")
            else:
                answers[question.name] = value
    limits = write_limits(answers).limits
    say(f"kept in {config_path()}; `shoal config set NAME VALUE` changes one, `shoal config show` says what each means")
    return limits
