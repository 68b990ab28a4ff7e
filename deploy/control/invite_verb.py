"""What `shoal invite` asks of the peer that runs here: an invite by those who are there now."""

from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.deploy.state.known_peers import whom_to_name
from shoal.protocol.invite import Invite, InviteKey, split_address
from shoal.protocol.live.transport import LiveTransport, dialable


class InviteVerb:
    """Answers the control socket.

    Args:
        invite: what lets others in; its addresses are made anew each time.
    """

    def __init__(self, transport: LiveTransport, invite: Invite) -> None:
        self._transport, self._invite = transport, invite

    async def answer(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """`peers`: how many to name, us included. In return: the invite, the run, and how many it names."""
        addresses = await self._addresses(int(arguments.get("peers", 1)))
        return {
            "invite": msgspec.structs.replace(self._invite, addresses=addresses).encode(),
            "run": self._invite.run,
            "peers": len({split_address(address)[1] for address in addresses}),
        }

    async def _addresses(self, num_peers: int) -> tuple[str, ...]:
        connected, known = await self._transport.connected(), self._transport.known()
        others = {peer: dialable(known[peer]) for peer in connected if peer in known}
        return whom_to_name(self._transport.addresses(), others, num_peers=num_peers)

    async def with_key(self, key: InviteKey, num_peers: int) -> str:
        """The same invite with another key."""
        addresses = await self._addresses(num_peers)
        return msgspec.structs.replace(self._invite, addresses=addresses, key=key).encode()
