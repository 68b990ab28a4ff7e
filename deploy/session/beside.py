"""Serves a dashboard beside a process's other output: every report goes to both."""

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.deploy.dashboard.address import Address
from shoal.deploy.dashboard.feed import Feed, RunFacts
from shoal.deploy.record.report import Report
from shoal.deploy.session.output import Beside, Output
from shoal.deploy.state.kept_addresses import KeptAddresses, keep_addresses, load_addresses

if TYPE_CHECKING:
    from shoal.deploy.dashboard.server import Dashboard
    from shoal.deploy.dashboard.steering import Act, Steering
    from shoal.deploy.record.reading import Record


class Showing:
    """A dashboard and its feed. Without an address there is no dashboard and every method does nothing."""

    def __init__(
        self, feed: Feed, dashboard: "Dashboard | None", steering: "Steering | None", announcement: str
    ) -> None:
        self.announcement = announcement
        """A line that tells a person the address; empty: no dashboard."""
        self._feed, self._dashboard, self._steering = feed, dashboard, steering

    @property
    def is_watched(self) -> bool:
        return self._dashboard is not None and self._dashboard.is_watched

    @property
    def is_on(self) -> bool:
        """True if there is a dashboard, watched or not."""
        return self._dashboard is not None

    def restore(self, record: "Record") -> None:
        """Fill the curves from the run's record of earlier starts."""
        if self._dashboard is not None:
            self._feed.restore(record)

    def take(self, report: Report) -> None:
        if self._dashboard is not None:
            self._feed.take(report, time.monotonic())

    def steer(self, *, pause: "Act", resume: "Act") -> None:
        """Let holders of the key pause and resume from now on."""
        if self._steering is not None:
            self._steering.hand(pause=pause, resume=resume)

    def beside(self, output: Output) -> Output:
        """Return an output that also reports to the dashboard."""
        if self._dashboard is None:
            return output
        return Beside(hear=self.take, output=output, is_watched=lambda: self.is_watched)


@contextlib.asynccontextmanager
async def serving(
    address: Address | None, facts: RunFacts, *, title: str, steers: bool = False, folder: Path | None = None
) -> AsyncIterator[Showing]:
    """Serve inside the context. A taken port is no error: the next free one is used, as `Showing.announcement` says.

    Args: steers: `Showing.steer` will be called; folder: the peer's, which keeps port and key for its next start.
    Raises: LocalError: `address` is not this machine's.
    """
    feed = Feed(facts, title=title, wall_minus_clock_s=time.time() - time.monotonic())
    if address is None:
        yield Showing(feed, None, None, "")
        return
    from shoal.deploy.dashboard.server import Dashboard, DashboardServer  # most peers need no web server
    from shoal.deploy.dashboard.steering import Steering

    kept = load_addresses(folder) if folder is not None else KeptAddresses()
    steering = Steering(key=kept.dashboard_key) if kept.dashboard_key else Steering()
    dashboard = Dashboard(feed, now_s=time.monotonic, names=address.names, steering=steering)
    server = DashboardServer(dashboard, address)
    await server.start(first_port=kept.dashboard_port)
    if folder is not None:
        kept = load_addresses(folder)  # the network may have written its port meanwhile
        keep_addresses(folder, msgspec.structs.replace(kept, dashboard_port=server.port, dashboard_key=steering.key))
    try:
        public = " (everybody who reaches this address can read it)" if address.is_public else ""
        key = f"#{steering.key}" if steers else ""
        taken = f" (another program has port {address.port})" if address.port not in (0, server.port) else ""
        yield Showing(feed, dashboard, steering, f"dashboard: {server.url}{key}{public}{taken}")
    finally:
        await server.close()
