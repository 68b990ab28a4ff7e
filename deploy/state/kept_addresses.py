"""Keeps this peer's ports and dashboard key, so that it listens at the same addresses after a restart.

Old invites then still lead to the run, even after all its peers were down, and bookmarks of the dashboard stay valid.
Ports in a command's options take precedence.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

FILE_NAME = "addresses.json"
_ANY_PORT = re.compile(r"^/ip([46])/.*/tcp/0$")
_PORT = re.compile(r"^/ip([46])/.*/tcp/([1-9]\d*)$")


class KeptAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """This peer's kept libp2p ports, and its dashboard's port and key. Port 0 or an empty key: nothing is kept yet."""

    ports: dict[str, int] = {}
    """IP version -> libp2p port that the system chose, as {"4": 43117}. Ports that the user named are not kept."""
    dashboard_port: int = 0
    dashboard_key: str = ""

    def fill(self, listen: Sequence[str]) -> tuple[str, ...]:
        """Return `listen` (multiaddrs) with the kept port in place of each port 0."""
        filled = []
        for address in listen:
            port = self.ports.get(match[1], 0) if (match := _ANY_PORT.match(address)) else 0
            filled.append(f"{address.removesuffix('0')}{port}" if port else address)
        return tuple(filled)

    def with_ports(self, asked: Sequence[str], listening: Sequence[str]) -> "KeptAddresses":
        """Return a copy with the ports in `listening`, for each IP version for which `asked` has port 0 (any)."""
        by_version = {match[1]: int(match[2]) for match in map(_PORT.match, listening) if match}
        any_port = {match[1] for match in map(_ANY_PORT.match, asked) if match}
        ports = {version: port for version, port in by_version.items() if version in any_port}
        return msgspec.structs.replace(self, ports=self.ports | ports)


def load_addresses(folder: Path) -> KeptAddresses:
    """Read the addresses kept in `folder`. Return empty ones if the file is missing or damaged; log damage."""
    try:
        return msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=KeptAddresses)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.warning("%s cannot be read and is not used: %s", folder / FILE_NAME, error)
    return KeptAddresses()


def keep_addresses(folder: Path, kept: KeptAddresses) -> None:
    """Write `kept` into `folder`, readable for this user only: it contains a key. A disk failure is only logged."""
    path = folder / FILE_NAME
    beside = path.with_suffix(".new")
    try:
        if load_addresses(folder) == kept:
            return
        beside.touch(mode=0o600)
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
        beside.replace(path)
    except OSError as error:
        logger.warning("a restart will listen elsewhere: %s", error)
