"""Small files that survive a crash or a power cut: each has either the old content or the new one afterwards."""

import contextlib
import logging
from pathlib import PurePosixPath
from typing import Final

from shoal.protocol.ports import Disk, Payload

logger = logging.getLogger(__name__)

RESERVED: Final = 2**36
"""Messages that one process may send: enough for nineteen hours at a million a second."""


def replace_file(disk: Disk, path: PurePosixPath, content: Payload) -> None:
    """Write `content` beside `path`, then rename; durable on return. Raises: OSError: for example, the disk is full."""
    beside = path.with_suffix(".new")
    disk.make_folder(path.parent)
    disk.write(beside, content)
    disk.replace(beside, path)
    disk.sync_folder(path.parent)


def next_incarnation(disk: Disk | None, path: PurePosixPath, *, wall_s: float) -> int:
    """Return this process's first sequence, above all that it has ever sent, and reserve a range in the file `path`.

    Others refuse a sequence at or below the highest they have seen from a peer. After a restart with the clock set
    back, the wall clock alone would begin too low.
    """
    first = int(wall_s * 1e6)
    if disk is None:
        return first
    with contextlib.suppress(OSError, ValueError):  # missing or torn: use the clock alone
        first = max(first, int(disk.read(path)))
    try:
        replace_file(disk, path, str(first + RESERVED).encode())
    except OSError as error:
        logger.warning("cannot write %s: %s: if the clock is set back, other peers will ignore us", path, error)
    return first
