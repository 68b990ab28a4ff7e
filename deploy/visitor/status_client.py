"""Asks a run for its status without taking part in it, once or repeatedly (`shoal status`).

Any peer answers a `StatusRequest`, if need be by asking the coordinator.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from shoal.deploy.visitor.entrance import connecting
from shoal.protocol.errors import LocalError, Refused, RemoteError, Unreachable
from shoal.protocol.invite import Invite
from shoal.protocol.messages import StatusRequest, SwarmStatus

Ask = Callable[[], Awaitable[SwarmStatus]]
"""Asks the run once; raises LocalError if no peer can answer."""


async def ask_swarm(invite: Invite) -> SwarmStatus:
    """Ask the peers that the invite names or that this machine has met in the run.

    Raises: LocalError: none can answer; the sentence has the last reason.
    """
    async with asking(invite) as ask:
        return await ask()


@contextlib.asynccontextmanager
async def asking(invite: Invite) -> AsyncIterator[Ask]:
    """Yield `ask_swarm` on one connection: each call asks first the peer that answered last."""
    async with connecting(invite) as (endpoint, transport, peers):
        connected = await transport.connected()
        peers.sort(key=lambda peer: peer not in connected)

        async def ask() -> SwarmStatus:
            reason = refusal = ""
            for peer in tuple(peers):
                try:
                    status = await endpoint.ask(peer, StatusRequest(), SwarmStatus, timeout_s=10.0)
                except Refused as error:
                    refusal = error.reason
                except (Unreachable, RemoteError) as error:
                    reason = str(error)
                else:
                    peers.sort(key=lambda other: other != peer)
                    return status
            if refusal:
                raise LocalError(f"run {invite.run} is up and has no status yet: {refusal}")
            raise LocalError(
                f"no status of run {invite.run}: {reason or 'no address is known'}; "
                "`shoal doctor` with its invite says why"
            )

        yield ask
