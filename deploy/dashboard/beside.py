"""A dashboard beside whatever else a process says: every report goes to both."""

import contextlib
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from shoal.deploy.dashboard.address import Address
from shoal.deploy.dashboard.feed import Feed, RunFacts
from shoal.deploy.output import Output
from shoal.deploy.report import Report

if TYPE_CHECKING:
    from shoal.deploy.dashboard.server import Dashboard


class Showing:
    """Where a dashboard is, and what feeds it. Without an address there is none, and everything here does nothing."""

    def __init__(self, feed: Feed, dashboard: "Dashboard | None", announcement: str) -> None:
        self.announcement = announcement
        """Where it is, for a person; empty: there is none."""
        self._feed, self._dashboard = feed, dashboard

    @property
    def is_watched(self) -> bool:
        return self._dashboard is not None and self._dashboard.is_watched

    def take(self, report: Report) -> None:
        if self._dashboard is not None:
            self._feed.take(report, time.monotonic())

    def beside(self, output: Output) -> Output:
        return output if self._dashboard is None else _Both(output, self)


class _Both:
    """Implements `Output`."""

    def __init__(self, output: Output, board: Showing) -> None:
        self._output, self._board = output, board

    @property
    def polls(self) -> bool:
        return self._output.polls or self._board.is_watched

    def say(self, report: Report) -> None:
        self._board.take(report)
        self._output.say(report)

    def close(self) -> None:
        self._output.close()


@contextlib.asynccontextmanager
async def serving(address: Address | None, facts: RunFacts, *, title: str) -> AsyncIterator[Showing]:
    """Serve while this lasts. Raises: LocalError: not at that address."""
    feed = Feed(facts, title=title, wall_minus_clock_s=time.time() - time.monotonic())
    if address is None:
        yield Showing(feed, None, "")
        return
    from shoal.deploy.dashboard.server import Dashboard, DashboardServer  # most peers need no web server

    dashboard = Dashboard(feed, now_s=time.monotonic, names=address.names)
    server = DashboardServer(dashboard, address)
    await server.start()
    try:
        public = " (whoever reaches this address can read it)" if address.is_public else ""
        yield Showing(feed, dashboard, f"dashboard: {server.url}{public}")
    finally:
        await server.close()
