"""Whether the network daemon on this disk is the one that hivemind ships: it holds a peer's key and connections.

`p2pd.sha256` beside this file has the digests that we know, as `sha256sum` writes them, with the machine in place of
the file. `pip` checks a wheel when it is installed; this notices what happened to the file since.
"""

import hashlib
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

from shoal.protocol.errors import TransportError

_KNOWN: Final = Path(__file__).with_name("p2pd.sha256")


def check_daemon(binary: Path, *, known: Path = _KNOWN) -> None:
    """Takes 10 ms. On a machine for which hivemind has no wheel its daemon was built there, so nothing is known of it.

    Raises: TransportError: `binary` is missing, or another file than hivemind's.
    """
    wanted = _digests(known).get(f"{sys.platform}-{platform.machine()}")
    if wanted is None:
        return
    command = f"pip install --force-reinstall --no-deps --no-cache-dir hivemind=={version('hivemind')}"
    again = f"install hivemind again: `{command}`"
    try:
        with binary.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TransportError(f"the network daemon {binary} cannot be read ({error.strerror}): {again}") from error
    if found not in wanted:
        raise TransportError(f"the network daemon {binary} is not the one that hivemind ships: {again}")


def _digests(known: Path) -> dict[str, set[str]]:
    """Read the known digests of each machine: more than one while two versions of hivemind are in use."""
    digests: dict[str, set[str]] = {}
    for line in known.read_text().splitlines():
        digest, _, machine = line.partition("  ")
        digests.setdefault(machine, set()).add(digest)
    return digests
