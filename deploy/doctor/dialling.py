"""Tries a TCP connection to an address, without libp2p: what stands in the way shows at this level."""

import asyncio
import errno
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable

from shoal.deploy.doctor.findings import Dial

Dialler = Callable[[str, int], Awaitable[Dial]]

_TIMEOUT_S = 5.0
"""The time that the transport gives a dial."""
_PLACE = re.compile(r"^/(?:ip4|ip6|dns|dns4|dns6|dnsaddr)/([^/]+)/tcp/(\d{1,5})")


async def dial(host: str, port: int) -> Dial:
    """Connect and hang up. A name is resolved first: a DNS that keeps silent is not a peer that does."""
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
        return Dial.SILENT  # our router, or its, says that nobody is there
    return Dial.NO_ROUTE


def host_and_port(address: str) -> tuple[str, int]:
    """The host and port of a multiaddr that begins with them and leads over no relay; ("", 0) of others."""
    match = _PLACE.match(address)
    if match is None or "/p2p-circuit" in address or not 0 < int(match[2]) <= 65535:
        return "", 0
    return match[1], int(match[2])


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
