"""The ports of one peer: network, device, clock and disk."""

from dataclasses import dataclass

from shoal.peer.links.meter import LinkMeter
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.ports import Clock, Compute, Disk, RunBlocking, inline


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The ports of one peer, to libp2p and a real device or to a simulation."""

    endpoint: Endpoint
    compute: Compute
    clock: Clock
    meter: LinkMeter
    """Measures the links by the calls and frames of `endpoint`, if its transport is a `MeteredTransport`."""
    disk: Disk | None = None
    """Keeps the run's snapshots; None: none are kept."""
    run_blocking: RunBlocking = inline
    """Runs a function that blocks on the disk: `asyncio.to_thread` in a real peer, inline in virtual time."""
