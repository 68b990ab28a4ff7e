"""The questions of the first join: in words a person types, kept once, and never where nobody can answer."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.deploy.manners import config
from shoal.deploy.manners.asking import ask, may_ask
from shoal.deploy.manners.limits import Limits


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def answering(typed: dict[str, list[str]], said: list[str]) -> Limits:
    """Args: typed: what is typed at the questions with a word in them, one after the other; Enter elsewhere."""
    left: dict[str, Iterator[str]] = {word: iter(answers) for word, answers in typed.items()}

    def prompt(text: str, default: str) -> str:
        word = next((word for word in left if word in text), "")
        return next(left[word]) if word else default

    return ask(prompt, say=said.append, memory_bytes=8e9)


def test_enter_everywhere_gives_the_device_and_half_of_the_memory():
    said: list[str] = []
    assert answering({}, said) == config.load_settings().limits == Limits(memory_gb=4.0)
    assert str(config.config_path()) in said[-1]
    assert "shoal config set" in said[-1]


@pytest.mark.parametrize(("typed", "share"), [("50", 0.5), ("50%", 0.5), ("0.5", 0.5), ("1", 1.0), ("1%", 0.01)])
def test_a_share_is_a_percentage_or_a_fraction(typed, share):
    assert answering({"percent": [typed]}, []).compute_share == share


def test_answers_are_what_a_person_types():
    typed = {"memory": ["2 GB"], "upload": ["5 Mbit/s"], "hours": ["22:00-07:00"], "nobody": ["Y"]}
    limits = answering(typed, [])
    assert limits == Limits(memory_gb=2.0, upload_mbit_s=5.0, hours="22:00-07:00", only_when_idle=True)
    assert config.load_settings().limits == limits


def test_what_cannot_be_is_said_and_asked_again():
    said: list[str] = []
    limits = answering(
        {"percent": ["half", "0", "40"], "hours": ["at night", "always"], "nobody": ["maybe", "no"]}, said
    )
    assert limits == Limits(compute_share=0.4, memory_gb=4.0)
    assert said[1:-1] == [
        "  write a percentage from 1 to 100",
        "  write a percentage from 1 to 100",
        "  write hours such as 22:00-07:00 or 09:00-12:00, 13:00-17:00, or always",
        "  write yes or no",
    ]


def test_a_program_and_who_was_asked_before_are_not_asked(monkeypatch):
    for terminal, answered, asked in ((True, False, True), (True, True, False), (False, False, False)):
        for name in ("stdin", "stdout"):
            monkeypatch.setattr(sys, name, Stream(terminal))
        assert may_ask(answered=answered) is asked
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, Stream(True))
    answering({}, [])
    assert not may_ask(answered=False)


class Stream:
    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
