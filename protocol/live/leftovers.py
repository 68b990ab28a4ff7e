"""Removes a killed peer's leftovers: a network daemon that is about to end, and socket files in the temporary folder.

While a daemon runs, its process id and the names of its socket files are stored in the state folder. The next process
in this folder waits for that daemon and removes its files. If the folder is a copy of a running peer's, the daemon has
a living parent and is not killed. No other file in the temporary folder is touched.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from shoal.protocol.errors import TransportError

logger = logging.getLogger(__name__)

_FILE = "p2pd.json"
_GRACE_S = 4.0
"""Seconds until we kill a leftover daemon. Normally the kernel ends it with its parent, or it ends after 1.6 s."""


def remember(state_dir: Path, process_id: int, sockets: Sequence[Path]) -> None:
    """Store a daemon's process id and the names of its socket files for the next process. Log a disk error."""
    record = json.dumps(
        {"process_id": process_id, "parent": os.getpid(), "sockets": [str(path) for path in sockets]},
    )
    try:
        (state_dir / _FILE).write_text(record)
    except OSError as error:
        logger.warning("cannot note the network daemon in %s: %s", state_dir, error.strerror or error)


def forget(state_dir: Path) -> None:
    (state_dir / _FILE).unlink(missing_ok=True)


async def clear(state_dir: Path) -> None:
    """Wait until the daemon of an earlier process has ended; kill it if it does not end in time. Then remove the
    daemon's socket files on which nobody listens.

    Raises: TransportError: the daemon belongs to a running peer.
    """
    try:
        record = json.loads((state_dir / _FILE).read_text())
        process_id, sockets = int(record["process_id"]), [Path(path) for path in record["sockets"]]
        parent = int(record["parent"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _GRACE_S
    while _is_daemon(process_id, sockets) and loop.time() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(0.1)  # the daemon is no child of ours, so we cannot wait for its end
    if _is_daemon(process_id, sockets):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if psutil.Process(process_id).ppid() == parent:  # an orphaned daemon would have another parent
                raise TransportError(
                    f"the peer of which {state_dir} is a copy runs on this machine, as process {parent}: stop that "
                    "one first, or give this one another --state-dir"
                )
            os.kill(process_id, signal.SIGKILL)
    for path in (path for path in sockets if path.name.startswith("hivemind-p2p")):
        while _connect(path) is None and loop.time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # a dying process loses its name earlier than its sockets
        if isinstance(_connect(path), ConnectionRefusedError):
            path.unlink(missing_ok=True)
    forget(state_dir)


def _is_daemon(process_id: int, sockets: Sequence[Path]) -> bool:
    """True if the process is still the daemon with these sockets: another process may have the daemon's id by now."""
    try:
        command = Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return False
    return any(str(path).encode() in command for path in sockets)


def _connect(path: Path) -> OSError | None:
    """Try to connect to a Unix socket. Return the error; None: a process listens on the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            return error
    return None
