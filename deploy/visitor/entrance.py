"""Connects a visitor to a run: a throwaway identity on libp2p, the run's directory and its spec."""

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.deploy.state.spec_record import FIND_S, fetch_spec
from shoal.deploy.visitor.visit import introduce, visiting
from shoal.protocol.access import Gate
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, peers_of
from shoal.protocol.membership import renew
from shoal.protocol.ports import Directory
from shoal.protocol.spec import RunSpec

if TYPE_CHECKING:
    from shoal.protocol.live.transport import LiveTransport

NOBODY_S = 7.0
"""The time to look if no peer of the invite answered the first dial; redials within it may reach one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """A visitor's connection to a run, valid inside `entering`."""

    endpoint: Endpoint
    directory: Directory
    spec: RunSpec
    peers: tuple[PeerID, ...]
    """Peers named by the invite or met by this machine; connected ones first."""


@contextlib.asynccontextmanager
async def connecting(
    invite: Invite, *, owner: Identity | None = None
) -> AsyncIterator[tuple[Endpoint, "LiveTransport", list[PeerID]]]:
    """Connect a throwaway identity, with a certificate from the invite, to a run's network inside the context.

    Args: owner: the run's owner, if it is the visitor: for the owner an invite does not expire.
    Yields: its endpoint and transport, and the peers that the invite names or that this machine has met.
    """
    # Importing hivemind takes a second; only visits need it.
    from shoal.deploy.state.known_peers import ways_to
    from shoal.protocol.live.transport import LiveTransport, dialable

    async with visiting() as folder:
        identity = Identity.generate()
        await introduce(invite, identity.peer_id)
        gate = Gate(invite.members_for(identity.peer_id), identity.peer_id)
        if owner is not None and invite.key is not None:
            ends_s = int(time.time()) + 24 * 3600
            terms = invite.key.delegation
            gate.members.certificate = renew(owner, terms, identity.peer_id, run=invite.run, ends_s=ends_s)
        ways = dialable(ways_to(invite))
        transport = await LiveTransport.start(identity, members=gate.members, state_dir=folder, initial_peers=ways)
        try:
            yield Endpoint(identity, transport, run=invite.run, gate=gate), transport, peers_of(ways)
        finally:
            await transport.close()


@contextlib.asynccontextmanager
async def entering(invite: Invite, *, owner: Identity | None = None) -> AsyncIterator[Entrance]:
    """Connect as `connecting` does, and find the run. Raises: LocalError: the run cannot be found."""
    from shoal.deploy.run.directory_rules import record_rules
    from shoal.protocol.live.directory import LiveDirectory

    async with connecting(invite, owner=owner) as (endpoint, transport, named):
        directory = await LiveDirectory.start(transport, accept=record_rules(endpoint.gate))
        try:
            timeout_s = FIND_S if await transport.connected() else NOBODY_S
            spec, _ = await fetch_spec(directory, invite, timeout_s=timeout_s)
            connected = await transport.connected()
            peers = tuple(sorted(named, key=lambda peer: peer not in connected))
            yield Entrance(endpoint=endpoint, directory=directory, spec=spec, peers=peers)
        finally:
            await directory.close()
