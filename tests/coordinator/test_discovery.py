"""What is read in the directory."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.coordinator.discovery import Discovery
from shoal.protocol.errors import RemoteError


def test_a_record_that_does_not_count_is_no_warning_at_a_volunteers(caplog: pytest.LogCaptureFixture) -> None:
    """That of an excluded peer stays until it lapses, and everyone reads it every few seconds."""

    def refuse(data: bytes, *, source: str) -> Any:
        raise RemoteError(source, "is excluded from the run")

    async def get(key: str) -> dict[str, bytes]:
        return {"excluded": b"sealed"}

    endpoint: Any = SimpleNamespace(run="run", open_record=refuse)
    directory: Any = SimpleNamespace(get=get)
    clock: Any = None
    with caplog.at_level(logging.INFO):
        assert asyncio.run(Discovery(endpoint, directory, clock).adverts()) == {}
    assert [record.levelname for record in caplog.records] == ["INFO"]
