"""A number for each start of a peer, above all that it has ever put on a message.

Others refuse a sequence that is not above those they have seen from a peer, so a restart whose clock has been set back
would be heard by nobody. The wall clock is only the first guess; what an earlier start has reserved on disk is a bound.
"""

import contextlib
import logging
from pathlib import PurePosixPath
from typing import Final

from shoal.protocol.durable import replace_file
from shoal.protocol.ports import Disk

logger = logging.getLogger(__name__)

RESERVED: Final = 2**36
"""Messages that one process may send: at a million a second it would last for nineteen hours of nothing else."""


def next_incarnation(disk: Disk | None, path: PurePosixPath, *, wall_s: float) -> int:
    """Choose where this process's sequences begin, and keep that in the file `path`."""
    first = int(wall_s * 1e6)
    if disk is None:
        return first
    with contextlib.suppress(OSError, ValueError):  # not there, or torn: the clock has to do
        first = max(first, int(disk.read(path)))
    try:
        replace_file(disk, path, str(first + RESERVED).encode())
    except OSError as error:
        logger.warning("cannot write %s: %s: should the clock be set back, others would not hear us", path, error)
    return first
