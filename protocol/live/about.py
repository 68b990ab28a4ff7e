"""Tells any caller, of any run or version, our version, our time, and if we can dial the caller.

The name of the handler contains neither run nor version, and unknown fields are ignored, so peers of all versions can
ask. A peer does not reveal its run, but a caller that knows a run's id may ask if the peer is in that run. The caller
chooses the port to which we dial back, but not the IP address: we use the one from which it has connected.
"""

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from blake3 import blake3
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError, P2PHandlerError
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID as HivemindPeerID
from hivemind.utils.multiaddr import Multiaddr

from shoal.protocol.errors import RemoteError, TransportError, Unreachable, first_line
from shoal.protocol.identity import PeerID
from shoal.protocol.invite import split_address
from shoal.protocol.limits import CONTROL_BYTES_MAX, PROTOCOL_VERSION
from shoal.protocol.live.daemon import Daemon
from shoal.protocol.live.tcp_queues import hosts_of

logger = logging.getLogger(__name__)

ABOUT_NAME = "/shoal/about"
_SOMEBODY_ELSE = "peer id mismatch"
"""Part of go-libp2p's error when the handshake shows another key than the one in the dialled address."""


_Name = Annotated[str, msgspec.Meta(max_length=64)]


class AboutRequest(msgspec.Struct, frozen=True):
    port: int = 0
    """TCP port of the caller, 1024 or higher, to which the peer tries to connect back; 0: it does not try."""
    run_mark: str = ""
    """Hash of the run about which the caller asks (`mark_of`); only peers that know the run's id recognise it."""


class About(msgspec.Struct, frozen=True):
    protocol_version: int
    is_in_run: bool = False
    """True if the peer is in the run that the request's `run_mark` names."""
    shoal: _Name = ""
    """The program's version, for people."""
    wall_s: float = 0.0
    """Seconds since 1970, by the peer's clock."""
    called_back: bool | None = None
    """True if a connection to the caller's port succeeded; None: it was not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutReply:
    about: About
    ahead_s: float
    """How far our clock is ahead of the peer's, accurate to half a round trip."""


class AboutAnswerer:
    """Answers any caller about one peer. Args: seen_at: returns the multiaddrs from which a peer has connected."""

    def __init__(self, *, run: str, seen_at: Callable[[PeerID], Awaitable[Sequence[str]]]) -> None:
        self._run = run
        self._wall_s = time.time
        self._shoal = importlib.metadata.version("shoal")
        self._seen_at = seen_at
        self._calling_back = 0

    async def answer(self, request: bytes, caller: HivemindPeerID) -> bytes:
        """Answer a request that the daemon passes on. Never raises on network input."""
        peer, asked = PeerID(caller.to_base58()), _asked(request)
        called_back = await self._call_back(asked.port, peer)
        is_in_run = asked.run_mark == mark_of(self._run, peer)
        about = About(PROTOCOL_VERSION, is_in_run, self._shoal, wall_s=self._wall_s(), called_back=called_back)
        return msgspec.json.encode(about)

    async def _call_back(self, port: int, caller: PeerID) -> bool | None:
        if not 1024 <= port <= 65535 or self._calling_back >= 4:
            return None
        self._calling_back += 1
        try:
            hosts = hosts_of(await self._seen_at(caller))
            return await _answers(hosts[0], port) if hosts else None
        finally:
            self._calling_back -= 1


def mark_of(run: str, asker: PeerID) -> str:
    """Return a mark of the run that differs for each asker, so that no peer can reuse another peer's mark."""
    return blake3(f"{run} {asker}".encode()).hexdigest(length=16)


def _asked(request: bytes) -> AboutRequest:
    """Decode a request. One that is unreadable, or longer than 256 bytes, counts as a request without fields."""
    try:
        return msgspec.json.decode(request, type=AboutRequest) if len(request) <= 256 else AboutRequest()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return AboutRequest()


async def _answers(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(3.0):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def reach(daemon: Daemon, peer: PeerID, addresses: Sequence[str], *, timeout_s: float) -> None:
    """Connect to `peer`, unless connected. Raises: Unreachable. RemoteError: another peer answers at its address."""
    try:
        async with asyncio.timeout(timeout_s):
            p2p: Any = await daemon.p2p()
            places = [Multiaddr(split_address(address)[0]) for address in addresses]
            await p2p._client.connect(HivemindPeerID.from_base58(peer), places)
    except TimeoutError as error:
        raise Unreachable(peer, f"no handshake in {timeout_s:g} s") from error
    except (TransportError, P2PDaemonError, OSError, EOFError, ValueError) as error:
        if _SOMEBODY_ELSE in str(error):
            raise RemoteError(peer, "is not at its address: another peer answers there") from error
        raise Unreachable(peer, first_line(error)) from error


async def ask_about(
    daemon: Daemon, peer: PeerID, *, me: PeerID, run: str, port: int = 0, timeout_s: float
) -> AboutReply:
    """Ask a connected peer of any run about itself. Raises: Unreachable. RemoteError: the answer is invalid."""
    request = msgspec.json.encode(AboutRequest(port, mark_of(run, me)))
    sent_s = time.time()
    try:
        async with asyncio.timeout(timeout_s):
            p2p: Any = await daemon.p2p()
            reply = await p2p._client.call_unary_handler(HivemindPeerID.from_base58(peer), ABOUT_NAME, request)
    except TimeoutError as error:
        raise Unreachable(peer, f"no answer in {timeout_s:g} s") from error
    except P2PHandlerError as error:  # its text comes from the peer, so it is not shown
        raise Unreachable(peer, "it failed to answer") from error
    except (TransportError, P2PDaemonError, OSError, EOFError) as error:
        raise Unreachable(peer, first_line(error)) from error
    middle_s = (sent_s + time.time()) / 2
    try:
        if len(reply) > CONTROL_BYTES_MAX:
            raise RemoteError(peer, "sent an answer that is too long")
        about = msgspec.json.decode(reply, type=About)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteError(peer, f"sent an unreadable answer about itself ({error})") from error
    if not about.shoal.isprintable():
        raise RemoteError(peer, "sent a version of its program that is not printable")
    return AboutReply(about=about, ahead_s=middle_s - about.wall_s)
