"""What connects one peer with its world."""

from dataclasses import dataclass

from shoal.peer.links.meter import LinkMeter
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.ports import Clock, Compute, Disk, RunBlocking, inline


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The ports of one peer: libp2p and a device, or a simulation."""

    endpoint: Endpoint
    compute: Compute
    clock: Clock
    meter: LinkMeter
    """Measures the links by the endpoint's calls and frames, if these pass through a `MeteredTransport`."""
    disk: Disk | None = None
    """Holds snapshots in the run's folder; None keeps none."""
    run_blocking: RunBlocking = inline
    """Runs a function that blocks on the disk: `asyncio.to_thread` in life, inline in virtual time."""
