"""Parses the address of a dashboard: `--dashboard` alone, or followed by `:8640`, `192.168.1.7:8640`, `box.local:0`."""

import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.protocol.errors import LocalError

OPTION = "--dashboard"
DEFAULT = "127.0.0.1:8640"
PORT_MAX = 65535
BACKLOG = 64
"""The most connections that wait to be accepted. The event loop may accept all at once, each with an open file."""
PORTS_TRIED = 32
"""Ports to try from the given one upwards, so that several peers of one machine get predictable addresses."""
_LOOKS_LIKE_ONE = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:/\s]*):\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int
    """0: the system chooses a free port."""

    @property
    def names(self) -> tuple[str, ...]:
        """The host name of the address; empty if the host is an IP address."""
        return () if is_ip(self.host) else (self.host,)

    @property
    def is_public(self) -> bool:
        """True if other machines may reach the address."""
        return self.host != "localhost" and not (is_ip(self.host) and ipaddress.ip_address(self.host).is_loopback)

    def url(self, *, port: int) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else "::1" if self.host == "::" else self.host
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def bind(self, *, first: int = 0) -> socket.socket:
        """Return a listening socket on this port or the next free port: another peer's dashboard, maybe of another
        user, must not keep this peer from joining.

        Args: first: the port to try first, used at the last start; 0: none.
        Raises: LocalError: the address is not this machine's, or its ports are not allowed for this user.
        """
        ports = [*range(self.port, min(self.port + PORTS_TRIED, PORT_MAX + 1)), 0] if self.port else [0]
        if first and (not self.port or first in ports):
            ports.insert(0, first)
        for port in ports:
            try:
                family, _, _, _, where = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM)[0]
                return socket.create_server(where[:2], family=family, backlog=BACKLOG)
            except OSError as error:
                if error.errno == errno.EADDRINUSE and port:
                    continue
                reason = error.strerror or str(error)
                raise LocalError(
                    f"the dashboard cannot listen on {self.host}:{self.port}: {reason}; "
                    f"give it another address, as in {OPTION} 127.0.0.1:0"
                ) from error
        raise AssertionError("port 0 is never taken")


def parse_address(text: str) -> Address:
    """Parse `HOST:PORT`, or `:PORT` for loopback. Raises: LocalError: `text` has another form."""
    if not _LOOKS_LIKE_ONE.fullmatch(text):
        raise LocalError(f"{OPTION} {text}: write HOST:PORT, as in {DEFAULT}")
    host, _, port = text.rpartition(":")
    if int(port) > PORT_MAX:
        raise LocalError(f"{OPTION} {text}: ports end at {PORT_MAX}")
    return Address(host=host.strip("[]") or "127.0.0.1", port=int(port))


def with_default(args: Sequence[str]) -> list[str]:
    """Return the arguments with the default address after a bare `--dashboard`."""
    filled: list[str] = []
    for index, arg in enumerate(args):
        filled.append(arg)
        follows = args[index + 1] if index + 1 < len(args) else ""
        if arg == OPTION and not _LOOKS_LIKE_ONE.fullmatch(follows):
            filled.append(DEFAULT)
    return filled


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
