"""Limits the connections of one address, and of one network, to the network daemon.

`p2pd` limits neither connections nor handshakes, waits 15 seconds for each stalled handshake, and computes a key and a
signature for each handshake that begins. It has no option for such limits, and a proxy in front of it would copy every
byte once more. So the kernel helps: a second socket listens on the daemon's port and never accepts, and a few
instructions (classic BPF on the port's SO_REUSEPORT group) send this socket the new connections of an address that has
too many. The second socket's queue is full after one connection; then the kernel drops further connections, and the
attacker waits for its own retries. Existing connections are untouched, and other peers lose no time.

Ten times a second we search the kernel's list for addresses that have or open too many connections. A half-open
connection (SYN_RECV) does not count, as its address may be forged. An address is shut out until it has been quiet for a
while. An IPv6 host counts by its /64, which is what one customer has. A public /24 (IPv6: /48) has limits of its own,
against a stranger that owns all its addresses. In private networks and on loopback only the number of existing
connections of each address is limited.
"""

import asyncio
import contextlib
import ctypes
import ipaddress
import logging
import socket
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

from shoal.protocol.ending import end_tasks
from shoal.protocol.limits import (
    CONNECTIONS_OF_ADDRESS_MAX,
    CONNECTIONS_OF_NETWORK_MAX,
    CONNECTIONS_OPENED_MAX,
    CONNECTIONS_OPENED_PER_S,
    SHUT_OUT_ADDRESSES_MAX,
    SHUT_OUT_S,
)
from shoal.protocol.live.allowance import Allowance
from shoal.protocol.live.listen import TCP
from shoal.protocol.live.sock_diag import list_sockets

logger = logging.getLogger(__name__)

_ATTACH: Final = 51
"""SO_ATTACH_REUSEPORT_CBPF, Linux 4.5; Python has no name for it."""
_NET: Final = -0x100000 & 0xFFFFFFFF
"""SKF_NET_OFF: added to a load's offset in a BPF program, it makes the offset count from the IP header."""
_LOAD, _AND, _JUMP_IF, _RETURN = 0x20, 0x54, 0x15, 0x06
_SOURCE4, _SOURCE6 = 12, 8
_DAEMON, _US = 0, 1
"""Indices of the daemon's socket and of ours in the SO_REUSEPORT group: ours began to listen second."""
_COUNTED: Final = frozenset(range(1, 12)) - {3, 6, 10}
"""TCP states of connections that count: all but TIME_WAIT, LISTEN, and SYN_RECV, which costs the daemon nothing."""
_ADDRESSES: Final = CONNECTIONS_OF_NETWORK_MAX // CONNECTIONS_OF_ADDRESS_MAX
"""Ratio of a network's limits to those of one address, for existing connections and for newly opened ones."""

Network = bytes
"""Address prefix: four bytes for an IPv4 address and three for a /24, eight for an IPv6 /64 and six for a /48."""
_WIDER: Final = {4: 3, 8: 6}
"""Bytes in an address's prefix (IPv4, or IPv6 /64) -> bytes in the prefix of its network (/24, or IPv6 /48)."""


class ConnectionLimit:
    """Limits connections to one running daemon, from `open` to `close`. Limits none if the kernel cannot help."""

    def __init__(self, listen: Sequence[str]) -> None:
        self._places = [match for match in map(TCP.match, listen) if match is not None and int(match[3]) > 0]
        self._sockets: list[tuple[int, socket.socket]] = []
        self._looking: asyncio.Task[None] | None = None
        self._shut_out: dict[Network, float] = {}
        """Shut-out address or network -> last time at which it was shut out, opened too many connections, or had more
        than half of its limit of connections."""
        self._opening = {
            is_network: Allowance[Network](
                CONNECTIONS_OPENED_MAX * (_ADDRESSES if is_network else 1),
                CONNECTIONS_OPENED_PER_S * (_ADDRESSES if is_network else 1),
            )
            for is_network in (False, True)
        }

    @property
    def shut_out(self) -> frozenset[Network]:
        return frozenset(self._shut_out)

    def shut_out_now(self, address: Network, now_s: float) -> None:
        """Shut `address` out for `SHUT_OUT_S`, however few connections it has; longer if it has or opens too many."""
        if address not in self._shut_out and len(self._shut_out) < SHUT_OUT_ADDRESSES_MAX:
            self._shut_out[address] = now_s
            logger.warning("%s sends too many requests: its new connections wait", _shown(address))
            self._divert_all()

    def open(self) -> None:
        ports = {int(place[3]) for place in self._places}
        try:
            seen = read_connections(ports)
            for place in self._places:
                self._sockets.append((int(place[1]), _second_listener(int(place[1]), place[2], int(place[3]))))
        except OSError as error:
            logger.info("floods of connections cannot be limited here: %s", error)
            self._close_sockets()
            return
        self._looking = asyncio.create_task(self._look_on(ports, seen), name="count connections")

    async def close(self) -> None:
        """Stop listening. Call it before the daemon's port must be free again. Safe to call twice."""
        await end_tasks(self._looking)
        self._looking = None
        self._close_sockets()

    def _close_sockets(self) -> None:
        for _, listener in self._sockets:
            listener.close()
        self._sockets.clear()

    async def _look_on(self, ports: Collection[int], seen: Mapping[Network, Set[bytes]]) -> None:
        loop, took_s = asyncio.get_running_loop(), 0.0
        while True:
            # In 0.1 s a flood of 1,000 a second opens 100 connections, in addition to the 128 that an address may have.
            # Reading a list of some hundred takes 0.3 ms; longer lists are read less often, for 5 % of a core at most.
            await asyncio.sleep(max(0.1, took_s / 0.05))
            begun_s, former = loop.time(), seen
            with contextlib.suppress(OSError):  # if there is no new list, the last one counts: no address is readmitted
                seen = await asyncio.to_thread(read_connections, ports)
            took_s = loop.time() - begun_s
            opened = {address: len(ends - former.get(address, set())) for address, ends in seen.items()}
            self.look({address: len(ends) for address, ends in seen.items()}, loop.time(), opened)

    def look(
        self, connections: Mapping[Network, int], now_s: float, opened: Mapping[Network, int] | None = None
    ) -> None:
        """Shut out addresses and networks that have or open too many connections; readmit those that were quiet for
        `SHUT_OUT_S`.

        Args:
            connections: address -> number of its existing connections.
            opened: address -> number of its connections that did not exist at the last call.
        """
        before = self.shut_out
        for address, number in (opened or {}).items():
            for network in self._opens_too_many(address, number, now_s):
                if network in self._shut_out or len(self._shut_out) < SHUT_OUT_ADDRESSES_MAX:
                    self._shut_out[network] = now_s
        found = count_networks(connections) + Counter(connections)
        for network in sorted(found, key=len):  # networks before addresses, since there may not be room for all
            if found[network] > _most(network) and len(self._shut_out) < SHUT_OUT_ADDRESSES_MAX:
                self._shut_out.setdefault(network, now_s)
        for network, since_s in tuple(self._shut_out.items()):
            if found[network] > _most(network) // 2:
                self._shut_out[network] = now_s
            elif now_s - since_s > SHUT_OUT_S:
                del self._shut_out[network]
        if before != self.shut_out:
            for network in self.shut_out - before:
                logger.warning(
                    "%s has or opens too many connections here (%d): new ones wait", _shown(network), found[network]
                )
            self._divert_all()

    def _opens_too_many(self, address: Network, number: int, now_s: float) -> Iterator[Network]:
        _, network = address_and_network(_ip(address))
        if network is not None and number:
            if not self._opening[False].takes(address, now_s, number):
                yield address
            elif not self._opening[True].takes(network, now_s, number):
                yield network

    def _divert_all(self) -> None:
        for version, listener in self._sockets:
            _divert(listener, version, self.shut_out)


def read_connections(ports: Collection[int]) -> dict[Network, set[bytes]]:
    """Return address -> kernel's ids of the connections that it has to our `ports`. Raises: OSError."""
    found: dict[Network, set[bytes]] = {}
    for each in list_sockets(*_COUNTED):
        if each.own_port in ports:
            found.setdefault(each.address.packed[:8], set()).add(each.id)
    return found


def count_networks(connections: Mapping[Network, int]) -> Counter[Network]:
    """Return the connections of each public network; an address adds at most `CONNECTIONS_OF_ADDRESS_MAX` of them."""
    found: Counter[Network] = Counter()
    for address, number in connections.items():
        _, network = address_and_network(_ip(address))
        if network is not None:
            found[network] += min(number, CONNECTIONS_OF_ADDRESS_MAX)
    return found


def address_and_network(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[Network, Network | None]:
    """Return (IPv4 address or IPv6 /64 of `ip`, /24 or /48 around it). The second is None if `ip` is not public."""
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    ip = mapped or ip
    address = ip.packed[:8]
    return address, address[: _WIDER[len(address)]] if ip.is_global else None


def _ip(address: Network) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address if len(address) == 4 else address + bytes(8))


def _most(network: Network) -> int:
    return CONNECTIONS_OF_ADDRESS_MAX if len(network) in _WIDER else CONNECTIONS_OF_NETWORK_MAX


def _shown(network: Network) -> str:
    if len(network) == 4:
        return str(ipaddress.ip_address(network))
    whole = network + bytes((4 if len(network) < 4 else 16) - len(network))
    return str(ipaddress.ip_network((whole, 8 * len(network))))


def _second_listener(version: int, host: str, port: int) -> socket.socket:
    """Open the socket that never accepts. Raises: OSError: another user has the port, or the kernel cannot help."""
    listener = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if version == 6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen(0)
        _divert(listener, version, ())
        _send_away_whoever_came(listener)
    except BaseException:
        listener.close()
        raise
    return listener


def _send_away_whoever_came(listener: socket.socket) -> None:
    """Reset the connections in our socket's queue: before the BPF program ran, the kernel put half of all new
    connections there, where they would hang. Their peers then dial again."""
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            came, _ = listener.accept()
            came.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            came.close()


def _divert(listener: socket.socket, version: int, networks: Iterable[Network]) -> None:
    """Divert new connections of `networks` to `listener`, all others to the daemon. Raises: OSError."""
    chosen = sorted(network for network in networks if (len(network) <= 4) == (version == 4))
    program = _of_ipv4(chosen) if version == 4 else _of_ipv6(chosen)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("@HP", len(program), ctypes.addressof(code)))


_Line = tuple[int, int, int, int]
"""One BPF instruction: operation, lines to skip if true, lines to skip if false, operand."""


def _of_ipv4(networks: Sequence[Network]) -> list[_Line]:
    lines: list[_Line] = [(_LOAD, 0, 0, _NET + _SOURCE4)]
    for network in sorted(networks, key=len, reverse=True):
        if len(network) == 3:
            lines.append((_AND, 0, 0, 0xFFFFFF00))  # changes the loaded address for good, so addresses come first
        lines += [(_JUMP_IF, 0, 1, int.from_bytes(network.ljust(4, b"\0"))), (_RETURN, 0, 0, _US)]
    return [*lines, (_RETURN, 0, 0, _DAEMON)]


def _of_ipv6(networks: Sequence[Network]) -> list[_Line]:
    lines: list[_Line] = []
    for network in networks:
        rest = [] if len(network) == 8 else [(_AND, 0, 0, 0xFFFF0000)]
        lines += [(_LOAD, 0, 0, _NET + _SOURCE6), (_JUMP_IF, 0, 3 + len(rest), int.from_bytes(network[:4]))]
        lines += [(_LOAD, 0, 0, _NET + _SOURCE6 + 4), *rest]
        lines += [(_JUMP_IF, 0, 1, int.from_bytes(network[4:].ljust(4, b"\0"))), (_RETURN, 0, 0, _US)]
    return [*lines, (_RETURN, 0, 0, _DAEMON)]
