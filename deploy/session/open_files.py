"""Raises the limit on files and sockets that a peer keeps open."""

import contextlib
import sys

from shoal.protocol.errors import LocalError

FILES_MIN = 256
"""A peer needs at least this many open files: 28 when idle, and a few for each neighbour, transfer or snapshot."""


def allow_open_files() -> None:
    """Raise the soft limit to the hard limit, also for children. Raises: LocalError: the result is below FILES_MIN."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses an infinite limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft != resource.RLIM_INFINITY and soft < FILES_MIN:
        raise LocalError(
            f"this process may have {soft} files open, and a peer needs {FILES_MIN}: raise the limit "
            "(`ulimit -n`; LimitNOFILE of a systemd unit; `--ulimit nofile` of a container)"
        )
