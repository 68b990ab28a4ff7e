"""Read from the kernel what each connection of the network daemon, and each lane of this process (`lane.py`), has yet
to deliver, and how long it was silent.

The sockets are the daemon's, but the kernel shows them to any process of the network namespace (NETLINK_SOCK_DIAG,
Linux 3.3; `ss -ti` reads the same). All are listed when a stream opens; then only those of interest are queried, which
does not walk the kernel's whole table.

Lost: the credit of our own frames as the signal. It comes when a frame was handled, in lumps of up to 4 MiB, and a busy
processor at the receiver looks like a narrow line of ours.
"""

import contextlib
import ipaddress
import logging
import os
import re
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.protocol.live.lane import lane_name
from shoal.protocol.live.uplink import Uplink
from shoal.protocol.reconnection import Way
from shoal.protocol.uplink import UplinkConnection

logger = logging.getLogger(__name__)

_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_ERROR, _DONE = 2, 3
_REQUEST, _DUMP = 0x1, 0x300
_INFO = 2
_ESTABLISHED = 1
_HEADER: Final = struct.Struct("=IHHII")
_ASK: Final = struct.Struct("=BBBxI48s")
_ANSWER: Final = struct.Struct("=BBBB48sIIIII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_MSS: Final = struct.Struct("=16xI")
_UNACKED: Final = struct.Struct("=24xI")
_SACKED: Final = struct.Struct("=28xI")
_SILENT: Final = struct.Struct("=52xII")
"""Milliseconds since data arrived, and since an acknowledgement did."""
_BYTES_ACKED: Final = struct.Struct("=120xQ")
_MIN_RTT: Final = struct.Struct("=148xI")
"""Fields of `tcp_info`. The kernel guarantees its layout."""
_INFO_BYTES_MIN: Final = 152
"""Up to `tcpi_min_rtt`, Linux 4.6."""
_BATCH: Final = 32
"""Number of sockets per query: the answers wait in a kernel buffer that has room for some 150."""
_MULTIADDR: Final = re.compile(r"^/ip[46]/([^/]+)/tcp/(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Socket:
    family: int
    id: bytes
    """`inet_diag_sockid`: ports, addresses, interface and a cookie that is unique to this socket."""
    inode: int
    connection: UplinkConnection
    way: Way

    @property
    def name(self) -> str:
        (port,) = struct.unpack_from(">H", self.id, 2)
        return f"{self._address(20)} {port}"

    @property
    def name_as_lane(self) -> str:
        own_port, port = struct.unpack_from(">HH", self.id)
        return lane_name(str(self._address(20)), port, own_port)

    @property
    def is_local(self) -> bool:
        there = self._address(20)
        return there.is_loopback or there == self._address(4)

    def _address(self, at: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        return _address(self.family, self.id, at)


def name_of(multiaddr: str) -> str | None:
    """Return the name of the connection with that remote end; None: it is not over TCP, or unknown."""
    match = _MULTIADDR.match(multiaddr)
    if match is None:
        return None
    try:
        address = ipaddress.ip_address(match[1])
    except ValueError:
        return None
    return f"{getattr(address, 'ipv4_mapped', None) or address} {match[2]}"


def follow(uplink: Uplink, process_id: int) -> None:
    """Let `uplink` watch the sockets of the network daemon, if the kernel shows them."""
    try:
        uplink.follow(TcpQueues(process_id))
    except OSError as error:
        uplink.close()
        logger.info("the queue before the uplink cannot be read here: %s", error)


class TcpQueues:
    """The sockets of one daemon and of this process. Raises: OSError: the kernel shows none."""

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._sockets: dict[str, _Socket] = {}
        if not hasattr(socket, "AF_NETLINK"):
            raise OSError("only Linux shows the sockets")
        self._asked = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)
        self._asked.settimeout(0.5)
        try:
            self.list()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._asked.close()

    def list(self) -> None:
        """List anew the connections to other machines: the daemon's, and the lanes of this process. Raises: OSError."""
        of_daemon, of_us = _inodes(self._process_id), _inodes(os.getpid())
        found = [*self._dump(socket.AF_INET), *self._dump(socket.AF_INET6)]
        there = [each for each in found if not each.is_local]
        self._sockets = {each.name: each for each in there if each.inode in of_daemon}
        self._sockets |= {each.name_as_lane: each for each in there if each.inode in of_us}

    def ways(self) -> Mapping[str, Mapping[str, Way]]:
        """Return all of the daemon's connections, also within this machine, by name. Two may have one name, when each
        end has dialled from the port on which it listens. Raises: OSError."""
        own = _inodes(self._process_id)
        ways: dict[str, dict[str, Way]] = {}
        for each in (*self._dump(socket.AF_INET), *self._dump(socket.AF_INET6)):
            if each.inode in own:
                ways.setdefault(each.name, {})[each.id.hex()] = each.way
        return ways

    def look(self, names: Collection[str]) -> Mapping[str, UplinkConnection]:
        """Return the kernel's present data of those connections that still exist. Raises: OSError."""
        asked = [self._sockets[name] for name in names if name in self._sockets]
        batches = (asked[start : start + _BATCH] for start in range(0, len(asked), _BATCH))
        wanted = set(names)
        answers = (each for batch in batches for each in self._ask(batch))
        return {each.name_as_lane if each.name_as_lane in wanted else each.name: each.connection for each in answers}

    def _dump(self, family: int) -> "Iterator[_Socket]":
        self._send(_request(family, bytes(48), _REQUEST | _DUMP))
        while True:
            for kind, body in self._receive():
                if kind == _DONE:
                    return
                found = _read(body) if kind == _SOCK_DIAG_BY_FAMILY else None
                if found is not None:
                    yield found

    def _ask(self, asked: Collection[_Socket]) -> "Iterator[_Socket]":
        self._send(b"".join(_request(each.family, each.id, _REQUEST) for each in asked))
        answers = 0
        while answers < len(asked):
            for kind, body in self._receive():
                answers += 1
                found = _read(body) if kind == _SOCK_DIAG_BY_FAMILY else None
                if found is not None:
                    yield found

    def _send(self, request: bytes) -> None:
        self._asked.send(request)

    def _receive(self) -> "Iterator[tuple[int, bytes]]":
        datagram, at = self._asked.recv(1 << 16), 0
        while at + _HEADER.size <= len(datagram):
            length, kind, *_ = _HEADER.unpack_from(datagram, at)
            yield kind, datagram[at + _HEADER.size : at + length]
            at += length + 3 & ~3


def _inodes(process_id: int) -> set[int]:
    found = set()
    for entry in os.scandir(f"/proc/{process_id}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(entry.path)
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found


def _request(family: int, id_: bytes, flags: int) -> bytes:
    body = _ASK.pack(family, socket.IPPROTO_TCP, 1 << _INFO - 1, 1 << _ESTABLISHED, id_)
    return _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, flags, 0, 0) + body


def _address(family: int, id_: bytes, at: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(id_[at : at + 4])
    address = ipaddress.IPv6Address(id_[at : at + 16])
    return address.ipv4_mapped or address


def _read(body: bytes) -> _Socket | None:
    """Return None for a connection that is not established, or if the kernel shows too little."""
    if len(body) < _ANSWER.size:
        return None
    family, state, _, _, id_, _, _, queued_bytes, _, inode = _ANSWER.unpack_from(body)
    info = _attribute(body, _INFO)
    if state != _ESTABLISHED or info is None or len(info) < _INFO_BYTES_MIN:
        return None
    ((mss,), (unacked,), (sacked,), (acked_bytes,), (round_trip_us,)) = (
        field.unpack_from(info) for field in (_MSS, _UNACKED, _SACKED, _BYTES_ACKED, _MIN_RTT)
    )
    out_of_order = min(sacked * mss, queued_bytes)
    return _Socket(
        family=family,
        id=id_,
        inode=inode,
        connection=UplinkConnection(
            delivered_bytes=acked_bytes + out_of_order,
            queued_bytes=queued_bytes - out_of_order,
            round_trip_s=round_trip_us / 1e6 if round_trip_us < 0xFFFFFFFF else 0.0,
        ),
        way=Way(
            is_owed=unacked > 0,
            silent_s=min(_SILENT.unpack_from(info)) / 1e3,
            local=str(_address(family, id_, 4)),
        ),
    )


def _attribute(body: bytes, wanted: int) -> bytes | None:
    at = _ANSWER.size
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if kind == wanted:
            return body[at + _ATTRIBUTE.size : at + length]
        if length < _ATTRIBUTE.size:
            return None
        at += length + 3 & ~3
    return None
