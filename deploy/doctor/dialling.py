"""Tries a TCP connection to an address, without libp2p: obstacles show at this level."""

import asyncio
import errno
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable

from shoal.deploy.doctor.findings import Dial

Dialler = Callable[[str, int], Awaitable[Dial]]

_TIMEOUT_S = 5.0
"""The transport's timeout of a dial."""
_PLACE = re.compile(r"^/(?:ip4|ip6|dns|dns4|dns6|dnsaddr)/([^/]+)/tcp/(\d{1,5})")


async def dial(host: str, port: int) -> Dial:
    """Connect and hang up. The name is resolved first, to tell a silent DNS from a silent peer."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return Dial.NO_NAME
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return Dial.SILENT
    except OSError as error:
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
        return Dial.SILENT  # a router reports that nobody is there
    return Dial.NO_ROUTE


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host and port at the start of a multiaddr; ("", 0) if it has none or leads over a relay."""
    match = _PLACE.match(address)
    if match is None or "/p2p-circuit" in address or not 0 < int(match[2]) <= 65535:
        return "", 0
    return match[1], int(match[2])


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
