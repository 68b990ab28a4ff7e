"""Prepares the daemon's listen addresses: refuses ports in use, and keeps a port that the system chose."""

import ipaddress
import re
import socket
from collections.abc import Sequence

import psutil

from shoal.protocol.errors import TransportError

TCP = re.compile(r"^/ip([46])/([^/]+)/tcp/(\d+)$")
_OWN = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def refuse_ports_in_use(listen: Sequence[str]) -> None:
    """Refuse fixed ports in use: two p2pd would silently share a port (SO_REUSEPORT), and each get half the calls.

    Raises: TransportError: a port is in use, or this machine cannot listen on an address.
    """
    for address in listen:
        match = TCP.match(address)
        if match is None:
            raise TransportError(f"cannot listen on {address!r}: write it as /ip4/ADDRESS/tcp/PORT")
        version, host, port = match[1], match[2], int(match[3])
        if port > 65535:
            raise TransportError(f"cannot listen on {address!r}: ports end at 65535")
        if port == 0:
            continue
        with socket.socket(socket.AF_INET if version == "4" else socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore our own closed connections
            try:
                probe.bind((host, port))
            except OSError as error:
                why = error.strerror or str(error)
                raise TransportError(f"cannot listen on {host} port {port}: {why.lower()}") from error


def keep_ports(listen: Sequence[str], visible: Sequence[str]) -> tuple[str, ...]:
    """Replace each port 0 in `listen` by the port of the `visible` addresses, so that a restart keeps its address.

    Port 0 stays if the `visible` addresses of its IP version have no TCP port, or several different ones.
    """
    kept = []
    for address in listen:
        match = TCP.match(address)
        if match is not None and match[3] == "0":
            ports = {found[3] for found in map(TCP.match, visible) if found is not None and found[1] == match[1]}
            if len(ports) == 1:
                address = f"/ip{match[1]}/{match[2]}/tcp/{ports.pop()}"
        kept.append(address)
    return tuple(kept)


def from_this_machine(listen: Sequence[str]) -> tuple[str, ...]:
    """Return addresses at which this machine's processes reach a peer that listens on `listen`; port 0 is left out."""
    found = [match for match in map(TCP.match, listen) if match is not None and int(match[3]) > 0]
    return tuple(f"/ip{match[1]}/{_OWN.get(match[2], match[2])}/tcp/{match[3]}" for match in found)


def local_addresses() -> frozenset[str]:
    """Return the IP addresses of this machine's network cards, in `ipaddress` notation."""
    found = set()
    for of_card in psutil.net_if_addrs().values():
        for each in of_card:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                found.add(str(ipaddress.ip_address(each.address.partition("%")[0])))
    return frozenset(found)
