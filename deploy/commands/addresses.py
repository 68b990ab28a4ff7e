"""Turns addresses as people write them into multiaddrs."""

import ipaddress
from collections.abc import Sequence

from shoal.protocol.errors import LocalError


def listen_addresses(text: str) -> tuple[str, ...]:
    """`HOST:PORT`, `:PORT` (all interfaces) or a multiaddr.

    Raises: LocalError: it is none of these.
    """
    if text.startswith("/"):
        return (text,)
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal():
        raise LocalError(f"cannot listen on {text!r}: write HOST:PORT, :PORT or /ip4/ADDRESS/tcp/PORT")
    host = host.strip("[]") or "0.0.0.0"
    return (f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}",)


def announced_addresses(texts: Sequence[str]) -> tuple[str, ...]:
    """`HOST:PORT` with a name or an address, or multiaddrs without `/p2p/…`.

    Raises: LocalError: one of them is none of these.
    """
    return tuple(map(_announced, texts))


def _announced(text: str) -> str:
    if text.startswith("/") and "/p2p/" not in text:
        return text
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise LocalError(f"cannot announce {text!r}: write HOST:PORT as others reach it, such as 84.12.33.7:4001")
    try:
        return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"
    except ValueError:
        return f"/dns/{host}/tcp/{port}"
