"""Serves the dashboard of a run while the process also writes to its terminal or parent."""

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.deploy.dashboard.address import Address
from shoal.deploy.dashboard.feed import Feed, RunFacts
from shoal.deploy.state.kept_addresses import KeptAddresses, keep_addresses, load_addresses

if TYPE_CHECKING:
    from shoal.deploy.dashboard.server import Dashboard


@contextlib.asynccontextmanager
async def serving(
    address: Address | None, facts: RunFacts, *, title: str, steers: bool = False, folder: Path | None = None
) -> AsyncIterator["Dashboard | None"]:
    """Serve the dashboard inside the context; without an address, yield None.

    A taken port is no error: the next free one is used, and `Dashboard.announcement` names it.

    Args:
        steers: print the page's key; a person with the key can pause this peer.
        folder: the peer's folder, which keeps port and key for the next start; None: they are not kept.
    Raises: LocalError: `address` is not this machine's.
    """
    if address is None:
        yield None
        return
    from shoal.deploy.dashboard.guard import Steering
    from shoal.deploy.dashboard.server import Dashboard, DashboardServer  # most peers need no web server

    kept = load_addresses(folder) if folder is not None else KeptAddresses()
    steering = Steering(key=kept.dashboard_key) if kept.dashboard_key else Steering()
    feed = Feed(facts, title=title, wall_minus_clock_s=time.time() - time.monotonic())
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
        dashboard.announcement = f"dashboard: {server.url}{key}{public}{taken}"
        yield dashboard
    finally:
        await server.close()
