"""Examines this machine and the way to a run; `examine` combines the probes' findings.

`diagnosis.py` concludes the faults. No probe takes longer than the same step of a join.
"""

import asyncio
import contextlib
import errno
import ipaddress
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from shoal.deploy.doctor import local
from shoal.deploy.doctor.findings import AddressFound, Dial, Findings, NetworkFound, PeerFound
from shoal.deploy.doctor.knock import why_refused
from shoal.deploy.run.directory_rules import record_rules
from shoal.deploy.state.spec_record import fetch_spec
from shoal.deploy.visitor.entrance import visiting
from shoal.protocol.access import Gate
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import RemoteError, RunNotFound, ShoalError, TransportError, Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, split_address
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.live.about import ask_about, reach
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.membership import Members
from shoal.protocol.messages import StatusRequest, SwarmStatus

_ASK_S = 10.0
_RECORD_S = 6.0
_DIAL_S = 5.0
"""The timeout of a TCP connection attempt, equal to the transport's."""
_NO_RUN = "doctor"
_PLACE = re.compile(r"^/(?:ip4|ip6|dns|dns4|dns6|dnsaddr)/([^/]+)/tcp/(\d{1,5})")
_WORTH_ASKING = (Dial.ANSWERS, Dial.UNTRIED)


async def examine(
    invite: Invite | None, *, folder: Path, wants_cuda: bool, listen: Sequence[str], more: Sequence[str]
) -> Findings:
    """Examine machine and network at the same time: importing torch is slow, and so is waiting for a dead address.

    Args:
        listen: multiaddrs on which the peer listens or will listen; the port is tested.
        more: addresses of other known peers of the run, to look for a second swarm.
    """
    machine, network = await asyncio.gather(
        asyncio.to_thread(local.machine, folder), examine_network(invite, listen=listen, more=more)
    )
    return Findings(machine=machine, network=network, invite=invite, wants_cuda=wants_cuda)


async def examine_network(invite: Invite | None, *, listen: Sequence[str], more: Sequence[str] = ()) -> NetworkFound:
    """Dial the invite's addresses. If one may lead to a peer, or there is no invite, start a daemon and ask peers.

    Args: listen: multiaddrs, to test their ports; more: addresses of other known peers of the run.
    """

    async def dialled(address: str) -> AddressFound:
        where, peer = split_address(address)
        host, port = host_and_port(where)
        outcome = await dial(host, port) if port else Dial.UNTRIED
        return AddressFound(peer=PeerID(peer), host=host, port=port, dial=outcome)

    own = local.own_addresses()
    addresses = tuple(await asyncio.gather(*map(dialled, invite.addresses if invite else ())))
    local_only = all(is_loopback(address.host) for address in addresses)
    found = NetworkFound(online=bool(own) or (bool(addresses) and local_only), own_addresses=own, addresses=addresses)
    if invite is not None and not any(address.dial in _WORTH_ASKING for address in addresses):
        return found
    return await _ask_around(found, invite, listen, more)


async def _ask_around(
    found: NetworkFound, invite: Invite | None, listen: Sequence[str], more: Sequence[str]
) -> NetworkFound:
    """Start a network daemon and ask the invite's peers. If one is in the run and admits us, get statuses and spec."""
    run, invited = (invite.run, invite.addresses) if invite else (_NO_RUN, ())
    async with contextlib.AsyncExitStack() as stack:
        folder = await stack.enter_async_context(visiting())
        identity = Identity.generate()
        try:
            members = invite.members_for(identity.peer_id) if invite else Members(run, identity.peer_id)
            transport = await LiveTransport.start(
                identity, members=members, state_dir=folder, listen=listen, initial_peers=more
            )
        except TransportError as error:
            return replace(found, daemon_error=str(error))
        stack.push_async_callback(transport.close)
        port = next((port for _, port in map(host_and_port, transport.addresses()) if port), None)
        guests = dict.fromkeys(address.peer for address in found.addresses if address.dial in _WORTH_ASKING)
        places = {guest: [at for at in invited if split_address(at)[1] == guest] for guest in guests}
        peers = await asyncio.gather(*(_peer(transport, guest, places[guest], port or 0) for guest in guests))
        found = replace(
            found,
            port=port,
            peers=tuple(peers),
            relayed=any("/p2p-circuit" in address for address in transport.addresses()),
        )
        of_the_run = [peer.peer for peer in peers if peer.is_in_run and peer.protocol_version == PROTOCOL_VERSION]
        if invite is None or not of_the_run:
            return found
        gate = Gate(members, identity.peer_id)
        if reason := await why_refused(transport, identity):
            return replace(found, refused=reason)
        directory = await LiveDirectory.start(transport, accept=record_rules(gate))
        stack.push_async_callback(directory.close)
        # Start above the sequence numbers that `why_refused` has used.
        since = int(1e6 * time.time())
        endpoint = Endpoint(identity, transport, run=run, gate=gate, first_sequence=since)
        asked = dict.fromkeys((*of_the_run, *sorted(await transport.connected())))
        statuses = await asyncio.gather(*(_status(endpoint, peer) for peer in asked))
        return replace(
            found,
            statuses=tuple(status for status in statuses if status is not None),
            record_found=await _has_record(directory, invite),
        )


async def _peer(transport: LiveTransport, peer: PeerID, addresses: Sequence[str], port: int) -> PeerFound:
    """Ask a peer for its version, run and time, with a short timeout; then ask whether the peer can connect to us."""
    asking = partial(ask_about, transport.daemon, peer, me=transport.peer_id, run=transport.run)
    reached = False
    try:
        await reach(transport.daemon, peer, addresses, timeout_s=_ASK_S)
        reached = True
        answered = await asking(timeout_s=_ASK_S)
    except Unreachable as error:
        return PeerFound(peer=peer, speaks=True, mute=error.why)
    except RemoteError as error:
        return PeerFound(peer=peer, speaks=reached, mute=str(error) if reached else "")
    called_back = None
    with contextlib.suppress(Unreachable, RemoteError):
        called_back = (await asking(port=port, timeout_s=12.0)).about.called_back
    return PeerFound(
        peer=peer,
        speaks=True,
        protocol_version=answered.about.protocol_version,
        shoal=answered.about.shoal,
        is_in_run=answered.about.is_in_run,
        ahead_s=answered.ahead_s,
        called_back=called_back,
    )


async def _status(endpoint: Endpoint, peer: PeerID) -> SwarmStatus | None:
    try:
        return await endpoint.ask(peer, StatusRequest(), SwarmStatus, timeout_s=_ASK_S)
    except ShoalError:
        return None


async def _has_record(directory: LiveDirectory, invite: Invite) -> bool:
    try:
        await fetch_spec(directory, invite, timeout_s=_RECORD_S)
        return True
    except RunNotFound:
        return False


# --- a TCP connection without libp2p: obstacles show at this level ---


async def dial(host: str, port: int) -> Dial:
    """Open a TCP connection and close it. Resolve the name first, to tell a silent DNS server from a silent peer."""
    try:
        async with asyncio.timeout(_DIAL_S):
            await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return Dial.NO_NAME
    try:
        async with asyncio.timeout(_DIAL_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError as error:  # TimeoutError is one
        return of_error(error)
    writer.close()
    return Dial.ANSWERS


def of_error(error: OSError) -> Dial:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return Dial.SILENT
    if isinstance(error, socket.gaierror):
        return Dial.NO_NAME
    if isinstance(error, ConnectionError):
        return Dial.REFUSED
    if error.errno in (errno.EHOSTUNREACH, errno.EHOSTDOWN):
        return Dial.SILENT  # a router reports that no machine is there
    return Dial.NO_ROUTE


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host and port at the start of a multiaddr; ("", 0) if the address has none or leads over a relay."""
    match = _PLACE.match(address)
    if match is None or "/p2p-circuit" in address or not 0 < int(match[2]) <= 65535:
        return "", 0
    return match[1], int(match[2])


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
