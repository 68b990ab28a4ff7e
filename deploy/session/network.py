"""Connects one process to a run: its network daemon, its directory, and the peers that it has met."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.deploy.run.directory_rules import record_rules
from shoal.deploy.session.background import ending
from shoal.deploy.state.kept_addresses import keep_addresses, load_addresses
from shoal.deploy.state.known_peers import KnownPeers, keep, whom_to_try
from shoal.deploy.visitor.entrance import sweep
from shoal.protocol.access import Gate
from shoal.protocol.errors import TransportError
from shoal.protocol.identity import Identity
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.live.listen import refuse_ports_in_use
from shoal.protocol.live.loop import LoopClock
from shoal.protocol.live.throttle import Throttle
from shoal.protocol.live.transport import LiveTransport, dialable
from shoal.protocol.live.uplink import Uplink
from shoal.protocol.membership import Members
from shoal.protocol.token_bucket import RateLimits

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionNetwork:
    identity: Identity
    gate: Gate
    transport: LiveTransport
    directory: LiveDirectory


@contextlib.asynccontextmanager
async def open_network(
    identity: Identity,
    members: Members,
    *,
    folder: Path,
    listen: Sequence[str],
    announce: Sequence[str],
    rates: RateLimits,
    invited: Sequence[str],
) -> AsyncIterator[SessionNetwork]:
    """Keep the network up inside the context, and meanwhile note connected peers on disk.

    Args:
        members: decides on admission to the run.
        folder: the peer's folder, locked by this process.
        listen, announce: addresses to listen at and to tell other peers, as multiaddrs without `/p2p/…`.
        invited: the addresses in an invite. The network dials them and peers that it met earlier in the run.
    Raises: TransportError: the network daemon does not start, or cannot listen at `listen`.
    """
    async with contextlib.AsyncExitStack() as stack:
        await sweep()
        file = KnownPeers(LiveDisk(folder), members.run)
        remembered = await asyncio.to_thread(file.read)
        kept = await asyncio.to_thread(load_addresses, folder)
        transport = await LiveTransport.start(
            identity,
            members=members,
            state_dir=folder,
            listen=_where_free(kept.fill(listen), listen),
            announce=announce,
            initial_peers=dialable(whom_to_try(invited, remembered, me=identity.peer_id)),
            throttle=Throttle(rates, Uplink()),
        )
        stack.push_async_callback(transport.close)
        await asyncio.to_thread(keep_addresses, folder, kept.with_ports(listen, transport.daemon.listening))
        gate = Gate(members, identity.peer_id)
        directory = await LiveDirectory.start(transport, accept=record_rules(gate))
        stack.push_async_callback(directory.close)
        keeping = keep(file, transport, LoopClock(), run_blocking=asyncio.to_thread)
        await stack.enter_async_context(ending(asyncio.create_task(keeping, name="keep the known peers")))
        yield SessionNetwork(identity=identity, gate=gate, transport=transport, directory=directory)


def _where_free(kept: Sequence[str], asked: Sequence[str]) -> Sequence[str]:
    """Return `kept`, the last start's addresses, if their ports are free, else `asked`; if they are equal, raise."""
    try:
        refuse_ports_in_use(kept)
    except TransportError as error:
        if kept == tuple(asked):
            raise
        logger.warning("listening at other addresses than last time: %s", error)
        return asked
    return kept
