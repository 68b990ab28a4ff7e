"""What `shoal invite` asks of the peer that runs here: an invite by those who are there now."""

from collections.abc import Mapping
from typing import Any

from shoal.deploy.known_peers import whom_to_name
from shoal.protocol.identity import PeerID
from shoal.protocol.invite import make_invite, split_address
from shoal.protocol.live.transport import LiveTransport, dialable


class InviteVerb:
    """For the control socket."""

    def __init__(self, transport: LiveTransport, *, run: str, owner: PeerID) -> None:
        self._transport, self._run, self._owner = transport, run, owner

    async def answer(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """`peers`: how many to name, us included. In return: the invite, the run, and how many it names."""
        connected, known = await self._transport.connected(), self._transport.known()
        others = {peer: dialable(known[peer]) for peer in connected if peer in known}
        addresses = whom_to_name(self._transport.addresses(), others, num_peers=int(arguments.get("peers", 1)))
        return {
            "invite": make_invite(self._run, self._owner, addresses),
            "run": self._run,
            "peers": len({split_address(address)[1] for address in addresses}),
        }
