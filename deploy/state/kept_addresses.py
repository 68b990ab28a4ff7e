"""Where others find this peer, kept in its state folder: a restart listens where it listened yesterday.

Then an invite of yesterday leads to the run of today, also when everybody was off in between, and the dashboard is at
the address that the browser remembers. What the user asks for by option comes first.
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
    """Ports are 0, and the key is empty, where nothing is kept yet."""

    ports: dict[str, int] = {}
    """The ports of libp2p by IP version: {"4": 43117}. The system chose them, since the user named none."""
    dashboard_port: int = 0
    dashboard_key: str = ""

    def fill(self, listen: Sequence[str]) -> tuple[str, ...]:
        """`listen` (multiaddrs) with the kept port in place of each port 0."""
        return tuple(self._filled(address) for address in listen)

    def _filled(self, address: str) -> str:
        match = _ANY_PORT.match(address)
        port = self.ports.get(match[1], 0) if match else 0
        return f"{address.removesuffix('0')}{port}" if port else address

    def with_ports(self, asked: Sequence[str], listening: Sequence[str]) -> "KeptAddresses":
        """Args: asked: what the user wants to listen on; listening: what that has become."""
        by_version = {match[1]: int(match[2]) for match in map(_PORT.match, listening) if match}
        any_port = {match[1] for match in map(_ANY_PORT.match, asked) if match}
        ports = {version: port for version, port in by_version.items() if version in any_port}
        return msgspec.structs.replace(self, ports=self.ports | ports)


def load_addresses(folder: Path) -> KeptAddresses:
    """Read the file. Nothing is kept where it is missing or damaged, which the log says."""
    try:
        return msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=KeptAddresses)
    except FileNotFoundError:
        return KeptAddresses()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.warning("%s cannot be read and is not used: %s", folder / FILE_NAME, error)
        return KeptAddresses()


def keep_addresses(folder: Path, kept: KeptAddresses) -> None:
    """Write the file, which only this user may read, since it has a key. A peer takes part even if the disk fails."""
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
