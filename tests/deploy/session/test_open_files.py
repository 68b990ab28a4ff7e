"""How many files a peer may have open."""

import resource
from typing import Any

import pytest

from shoal.deploy.session.open_files import FILES_MIN, allow_open_files
from shoal.protocol.errors import LocalError


def test_the_soft_limit_is_raised_to_the_hard_one(monkeypatch: Any) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (24, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    allow_open_files()
    assert given == [(4096, 4096)]


def test_where_the_hard_limit_is_not_enough_it_says_how_many_are(monkeypatch: Any) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (24, 24))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    with pytest.raises(LocalError, match=rf"^this process may have 24 files open, and a peer needs {FILES_MIN}: raise"):
        allow_open_files()


def test_an_infinite_limit_that_the_system_refuses_leaves_the_soft_one(monkeypatch: Any) -> None:
    def refuse(which: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (FILES_MIN, resource.RLIM_INFINITY))
    allow_open_files()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (FILES_MIN - 1, resource.RLIM_INFINITY))
    with pytest.raises(LocalError):
        allow_open_files()
