"""One process's connection to a run: its daemon, its directory, and who it has met."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.deploy.known_peers import KnownPeers, keep, whom_to_try
from shoal.deploy.record_rules import record_rules
from shoal.protocol.identity import Identity
from shoal.protocol.live.clock import LoopClock
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.live.throttle import Throttle
from shoal.protocol.live.transport import LiveTransport, dialable
from shoal.protocol.token_bucket import RateLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    identity: Identity
    transport: LiveTransport
    directory: LiveDirectory


@contextlib.asynccontextmanager
async def open_network(
    identity: Identity,
    run: str,
    *,
    folder: Path,
    listen: Sequence[str],
    announce: Sequence[str],
    rates: RateLimits,
    invited: Sequence[str],
) -> AsyncIterator[Network]:
    """Up while this lasts; who is connected is written down meanwhile.

    Args:
        folder: claimed by this process.
        listen, announce: multiaddrs without `/p2p/…`.
        invited: an invite's addresses; whoever was met in the run before is tried beside them.
    Raises: TransportError.
    """
    async with contextlib.AsyncExitStack() as stack:
        file = KnownPeers(LiveDisk(folder), run)
        remembered = await asyncio.to_thread(file.read)
        transport = await LiveTransport.start(
            identity,
            run=run,
            state_dir=folder,
            listen=listen,
            announce=announce,
            initial_peers=dialable(whom_to_try(invited, remembered, me=identity.peer_id)),
            throttle=Throttle(rates),
        )
        stack.push_async_callback(transport.close)
        directory = await LiveDirectory.start(transport, accept=record_rules(run))
        stack.push_async_callback(directory.close)
        keeping = asyncio.create_task(
            keep(file, transport, LoopClock(), run_blocking=asyncio.to_thread), name="keep the known peers"
        )
        stack.push_async_callback(_cancelled, keeping)
        yield Network(identity=identity, transport=transport, directory=directory)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
