"""Incarnation numbers: each start of a peer begins above every sequence that it has ever sent.

Others refuse a sequence at or below the highest they have seen from a peer. After a restart with the clock set back,
the wall clock alone would begin too low, so each start also reserves a range of sequences on disk.
"""

import contextlib
import logging
from pathlib import PurePosixPath
from typing import Final

from shoal.protocol.durable import replace_file
from shoal.protocol.ports import Disk

logger = logging.getLogger(__name__)

RESERVED: Final = 2**36
"""Messages that one process may send: enough for nineteen hours at a million a second."""


def next_incarnation(disk: Disk | None, path: PurePosixPath, *, wall_s: float) -> int:
    """Return this process's first sequence, and reserve a range from it in the file `path`."""
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
