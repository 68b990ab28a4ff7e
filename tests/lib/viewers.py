"""A dashboard on a socket, and those who look at it."""

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import httpx

from shoal.deploy.dashboard.address import parse_address
from shoal.deploy.dashboard.server import Dashboard, DashboardServer


@contextlib.asynccontextmanager
async def served(dashboard: Dashboard) -> AsyncIterator[DashboardServer]:
    server = DashboardServer(dashboard, parse_address("127.0.0.1:0"))
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def looking(url: str, headers: Mapping[str, str] | None = None) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    """Yield a function that waits for the next update of `/live`; EOFError: it has ended."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=30.0) as client,
        client.stream("GET", "live", headers=headers) as answer,
    ):
        assert answer.status_code == 200, answer.status_code
        lines = answer.aiter_lines()

        async def update() -> Any:
            async for line in lines:
                if line:
                    return json.loads(line.removeprefix("data: "))
            raise EOFError

        yield update
