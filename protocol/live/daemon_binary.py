"""Checks that the network daemon's program is the one in hivemind's wheel, since the daemon gets the peer's key.

`p2pd.sha256` beside this file has the known digests in the format of `sha256sum`, with the machine type in place of the
file name. `pip` checks a wheel at installation; this check notices later changes of the file.
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
    """Check the program's digest, in 10 ms. If hivemind has no wheel for this type of machine, any digest is accepted.

    Raises: TransportError: `binary` is missing or differs from hivemind's.
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
    """Return machine type -> known digests; there are several if two versions of hivemind are in use."""
    digests: dict[str, set[str]] = {}
    for line in known.read_text().splitlines():
        digest, _, machine = line.partition("  ")
        digests.setdefault(machine, set()).add(digest)
    return digests
