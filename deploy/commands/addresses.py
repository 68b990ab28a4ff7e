"""Converts addresses typed by people into multiaddrs."""

import ipaddress
import re
from collections.abc import Sequence

from shoal.protocol.errors import LocalError
from shoal.protocol.limits import ADDRESSES_MAX

_MULTIADDR = re.compile(r"/(ip[46]|dns[46]?)/([^/]+)/tcp/([0-9]{1,5})")
_HOST_PORT = re.compile(r"(?:\[([^][]+)\]|([^][:/]*)):([0-9]{1,5})")
_NAME = re.compile(r"(?=.{1,253}$)([a-zA-Z0-9_-]{1,63}\.)*(?![0-9]+$)[a-zA-Z0-9_-]{1,63}")
"""Matches a host name. Its last label is not a number (RFC 3696, section 2): that would be a mistyped IP address."""


def listen_addresses(text: str) -> tuple[str, ...]:
    """Parse `HOST:PORT`, `:PORT` (all interfaces) or a multiaddr. Raises: LocalError: it is none of these."""
    kind, host, port = _parsed(text)
    if not kind.startswith("ip"):
        raise LocalError(
            f"--listen {text}: write HOST:PORT, :PORT or /ip4/ADDRESS/tcp/PORT, where HOST is an IP address of this "
            "machine and PORT is at most 65535"
        )
    return (f"/{kind}/{host}/tcp/{port}",)


def announced_addresses(texts: Sequence[str]) -> tuple[str, ...]:
    """Parse `HOST:PORT` with a name or an address, or multiaddrs without `/p2p/…`.

    Raises: LocalError: one of them is invalid, or there are too many.
    """
    if len(texts) > ADDRESSES_MAX:
        raise LocalError(f"--announce is given {len(texts)} times: others are told {ADDRESSES_MAX} addresses at most")
    return tuple(dict.fromkeys(map(_announced, texts)))


def _announced(text: str) -> str:
    kind, host, port = _parsed(text)
    if not kind or not host or not port:
        raise LocalError(f"--announce {text}: write HOST:PORT as others reach it, such as 84.12.33.7:4001")
    if kind.startswith("ip") and (ipaddress.ip_address(host).is_unspecified or ipaddress.ip_address(host).is_multicast):
        raise LocalError(f"--announce {text}: nobody can connect to {host}; write the address that others reach")
    return f"/{kind}/{host}/tcp/{port}"


def _parsed(text: str) -> tuple[str, str, int]:
    """Return (protocol, host, port) of an address typed by a person; the protocol is empty if `text` is no address."""
    multiaddr, host_port = _MULTIADDR.fullmatch(text), _HOST_PORT.fullmatch(text)
    if multiaddr is not None:
        kind, host, port = multiaddr[1], multiaddr[2], int(multiaddr[3])
    elif host_port is not None:
        kind, host, port = "", host_port[1] or host_port[2] or "0.0.0.0", int(host_port[3])
    else:
        return "", "", 0
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        found = kind or "dns"
        is_sound = found.startswith("dns") and _NAME.fullmatch(host) is not None
    else:
        host, found = str(address), f"ip{address.version}"
        is_sound = kind in ("", found) and "%" not in host
    return (found if is_sound and port <= 65535 else ""), host, port
