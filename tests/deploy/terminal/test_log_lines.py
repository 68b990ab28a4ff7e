"""Warnings that repeat reach a person once, with a count later on."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from shoal.deploy.terminal import log_lines
from shoal.deploy.terminal.log_lines import REPEATS_S, LogLines


class Clock:
    now_s = 0.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(clock: Clock, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    handlers = {every: LogLines(every=every, now_s=lambda: clock.now_s) for every in (False, True)}

    def lines(template: str, *args: Any, every: bool = False) -> list[str]:
        """What is written of it."""
        handlers[every].handle(logging.LogRecord("shoal.test", logging.WARNING, "", 0, template, args, None))
        return capsys.readouterr().err.splitlines()

    return lines


def test_a_cause_is_said_once_whichever_peer_it_names(lines: Callable[..., list[str]], clock: Clock) -> None:
    assert lines("refused a call: %s", "of alice") == ["refused a call: of alice"]
    for step in range(44):
        clock.now_s += 2.0
        assert lines("refused a call: %s", f"of bob at {step}") == []
    assert lines("another cause") == ["another cause"]
    clock.now_s = REPEATS_S
    said = "refused a call: of carol (44 more such lines since the last one; --verbose shows each)"
    assert lines("refused a call: %s", "of carol") == [said]
    clock.now_s += REPEATS_S
    assert lines("refused a call: %s", "of carol") == ["refused a call: of carol"]


def test_a_sentence_that_comes_as_a_whole_is_a_cause_of_its_own(lines: Callable[..., list[str]]) -> None:
    assert lines("%s: %s", "one", "is wet") == ["one: is wet"]
    assert lines("%s: %s", "two", "is dry") == ["two: is dry"]
    assert lines("%s: %s", "one", "is wet") == []


def test_verbose_shows_each(lines: Callable[..., list[str]]) -> None:
    assert [lines("wet: %d", number, every=True) for number in (1, 2)] == [["wet: 1"], ["wet: 2"]]


def test_causes_without_end_are_not_kept(lines: Callable[..., list[str]]) -> None:
    for number in range(log_lines._CAUSES_MAX + 1):
        assert lines("%s", f"cause {number}") == [f"cause {number}"]
    assert lines("%s", "cause 0") == ["cause 0"]
    assert lines("%s", f"cause {log_lines._CAUSES_MAX}") == []
