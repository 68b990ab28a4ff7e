"""Reads from the kernel how many bytes each connection has not delivered yet, and how long it was silent: the network
daemon's connections and this process's lanes (`lane.py`).

All connections are listed when a stream opens. Later only the connections in use are queried, so that the kernel need
not search its whole table.

Rejected: measuring by the credit of our own frames. Credit returns when a frame was handled, in lumps of up to 4 MiB,
and a busy processor at the receiver would look like a slow uplink.
"""

import contextlib
import ipaddress
import os
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from shoal.protocol.invite import only_direct
from shoal.protocol.live.sock_diag import TcpSocket, ask_kernel, list_sockets, look_at
from shoal.protocol.reconnection import Way
from shoal.protocol.uplink import UplinkConnection

_INFO: Final = struct.Struct("=16xI4xII20xII60xQ20xI")
"""Fields of `tcp_info` (the last is of Linux 4.6), at places that the kernel guarantees: segment size; unacknowledged
and selectively acknowledged segments; milliseconds since data and since an acknowledgement arrived; acknowledged bytes;
least round trip in microseconds."""
_BATCH: Final = 32
"""Number of sockets per query: the answers wait in a kernel buffer that has room for some 150 of them."""
_MULTIADDR: Final = re.compile(r"^/ip[46]/([^/]+)/tcp/(\d+)")


def name_of(multiaddr: str) -> str | None:
    """Return the name of the daemon's connection to this multiaddr; None: it lacks a valid IP address and TCP port."""
    match = _MULTIADDR.match(multiaddr)
    if match is None:
        return None
    try:
        address = ipaddress.ip_address(match[1])
    except ValueError:
        return None
    return f"{getattr(address, 'ipv4_mapped', None) or address} {match[2]}"


def hosts_of(multiaddrs: Iterable[str]) -> tuple[str, ...]:
    """Return the other ends' IP addresses of direct connections over TCP, each once."""
    names = map(name_of, only_direct(multiaddrs))
    return tuple(dict.fromkeys(name.split()[0] for name in names if name is not None))


def lane_name(there: str, port: int, own_port: int) -> str:
    """Return the name of a lane; it contains our own port too, since several lanes may lead to one remote port."""
    return f"{there.removeprefix('::ffff:')} {port} {own_port}"


class TcpQueues:
    """The sockets of one network daemon and of this process. Raises: OSError: the kernel does not show them."""

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._sockets: dict[str, TcpSocket] = {}
        self.list()
        self._kernel = ask_kernel()

    def close(self) -> None:
        self._kernel.close()

    def list(self) -> None:
        """List again the daemon's connections and this process's lanes to other machines. Raises: OSError."""
        of_daemon, of_us = _inodes(self._process_id), _inodes(os.getpid())
        there = [each for each in _sockets_of(of_daemon | of_us) if not each.is_local]
        self._sockets = {_name(each): each for each in there if each.inode in of_daemon}
        self._sockets |= {_name_as_lane(each): each for each in there if each.inode in of_us}

    def look(self, names: Collection[str]) -> Mapping[str, UplinkConnection]:
        """Return the kernel's present figures of the named connections that still exist. Raises: OSError."""
        asked = [self._sockets[name] for name in names if name in self._sockets]
        wanted, found = set(names), {}
        for start in range(0, len(asked), _BATCH):
            for each in look_at(self._kernel, asked[start : start + _BATCH]):
                as_lane = _name_as_lane(each)
                found[as_lane if as_lane in wanted else _name(each)] = _queue(each)
        return found


def ways_of(process_id: int) -> Mapping[str, Mapping[str, Way]]:
    """Return connection name -> kernel's id -> kernel's figures, for all connections of a network daemon, also within
    this machine. Two connections have one name if each end dialled from its listening port. Raises: OSError."""
    ways: dict[str, dict[str, Way]] = {}
    for each in _sockets_of(_inodes(process_id)):
        ways.setdefault(_name(each), {})[each.id.hex()] = _way(each)
    return ways


def _sockets_of(inodes: Collection[int]) -> Iterator[TcpSocket]:
    return (each for each in list_sockets() if each.inode in inodes and len(each.info) >= _INFO.size)


def _inodes(process_id: int) -> set[int]:
    found = set()
    for entry in os.scandir(f"/proc/{process_id}/fd"):
        with contextlib.suppress(OSError):  # the file was closed meanwhile
            target = os.readlink(entry.path)
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found


def _name(own: TcpSocket) -> str:
    return f"{own.address} {own.port}"


def _name_as_lane(own: TcpSocket) -> str:
    return lane_name(str(own.address), own.port, own.own_port)


def _way(own: TcpSocket) -> Way:
    _, unacked, _, data_ms, acknowledgement_ms, _, _ = _INFO.unpack_from(own.info)
    silent_s = min(data_ms, acknowledgement_ms) / 1e3
    return Way(is_owed=unacked > 0, silent_s=silent_s, local=str(own.own_address))


def _queue(own: TcpSocket) -> UplinkConnection:
    segment_bytes, _, sacked, _, _, acked_bytes, round_trip_us = _INFO.unpack_from(own.info)
    out_of_order = min(sacked * segment_bytes, own.queued_bytes)
    return UplinkConnection(
        delivered_bytes=acked_bytes + out_of_order,
        queued_bytes=own.queued_bytes - out_of_order,
        round_trip_s=round_trip_us / 1e6 if round_trip_us < 0xFFFFFFFF else 0.0,
    )
