"""`shoal status`: asks a run for its status without taking part in it.

A throwaway identity that joins nothing: any peer answers a `StatusRequest`, by asking the coordinator if need be.
"""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, Refused, RemoteError, Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, split_address
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.messages import StatusRequest, SwarmStatus

_ASK_TIMEOUT_S = 10.0


async def ask_swarm(invite: Invite) -> SwarmStatus:
    """Raises: LocalError: nobody whom the invite names can say; the sentence has the last reason."""
    async with asking(invite) as ask:
        return await ask()


@contextlib.asynccontextmanager
async def asking(invite: Invite) -> AsyncIterator[Callable[[], Awaitable[SwarmStatus]]]:
    """What asks once each time it is called, first whom answered last. It raises: LocalError, as `ask_swarm`."""
    identity = Identity.generate()
    with tempfile.TemporaryDirectory(prefix="shoal-status-") as folder:
        transport = await LiveTransport.start(
            identity, run=invite.run, state_dir=Path(folder), initial_peers=invite.addresses
        )
        endpoint = Endpoint(identity, transport, run=invite.run)
        peers = _peers(invite)

        async def ask() -> SwarmStatus:
            reason = "it names nobody"
            for peer in tuple(peers):
                try:
                    status = await endpoint.ask(peer, StatusRequest(), SwarmStatus, timeout_s=_ASK_TIMEOUT_S)
                except Refused as error:
                    reason = error.reason
                except (Unreachable, RemoteError) as error:
                    reason = str(error)
                else:
                    peers.sort(key=lambda other: other != peer)
                    return status
            raise LocalError(f"no status of run {invite.run}: {reason}; `shoal doctor` with its invite says why")

        try:
            yield ask
        finally:
            await transport.close()


def _peers(invite: Invite) -> list[PeerID]:
    """Whom the addresses lead to, each once, in the invite's order."""
    return list(dict.fromkeys(PeerID(split_address(address)[1]) for address in invite.addresses))
