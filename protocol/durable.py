"""Replaces small files: after a crash or a power cut, a file has either its old content or its new content."""

import contextlib
import logging
from pathlib import PurePosixPath
from typing import Final

from shoal.protocol.ports import Disk, Payload

logger = logging.getLogger(__name__)

RESERVED: Final = 2**36
"""Sequence numbers that a process reserves at its start: enough for nineteen hours at a million messages a second."""


def replace_file(disk: Disk, path: PurePosixPath, content: Payload) -> None:
    """Write `content` to a file beside `path` and rename it to `path`; durable on return. Raises: OSError."""
    beside = path.with_suffix(".new")
    disk.make_folder(path.parent)
    disk.write(beside, content)
    disk.replace(beside, path)
    disk.sync_folder(path.parent)


def next_incarnation(disk: Disk | None, path: PurePosixPath, *, wall_s: float) -> int:
    """Return this process's first sequence number, above all that this peer ever sent; reserve a range in `path`.

    Other peers refuse sequence numbers too far below this peer's highest. The wall clock alone (used if `disk` is None)
    would give too low a number after a restart with the clock set back.
    """
    first = int(wall_s * 1e6)
    if disk is None:
        return first
    with contextlib.suppress(OSError, ValueError):  # the file is missing or damaged: use the clock alone
        first = max(first, int(disk.read(path)))
    try:
        replace_file(disk, path, str(first + RESERVED).encode())
    except OSError as error:
        logger.warning("cannot write %s: %s: if the clock is set back, other peers will ignore us", path, error)
    return first
