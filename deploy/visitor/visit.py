"""Gives a command that only asks a run a folder of its own, and cleans up after it.

The command's network daemon has sockets in the system's temporary folder. On SIGTERM or a closed terminal the command
stops the daemon and removes them. If it was killed, the next shoal command of this user does so: the sockets' names are
in the folder, and the folder's lock is free.
"""

import asyncio
import contextlib
import logging
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from shoal.deploy.control.control_socket import ask
from shoal.deploy.state import places
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.identity import PeerID
from shoal.protocol.invite import Invite, parse_invite

logger = logging.getLogger(__name__)

_PREFIX = "visit"
_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.asynccontextmanager
async def visiting() -> AsyncIterator[Path]:
    """Give this process a folder inside the context. SIGTERM and SIGHUP, if unhandled, cancel the entering task."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_by_signals())
        try:
            lock = await asyncio.to_thread(places.claim_first_free, _visits(), _PREFIX)
        except LocalError as error:  # `shoal doctor` reports an unwritable state folder
            logger.info("%s", error)
            yield Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-visit-")))
            return
        stack.callback(lock.release)
        await sweep()
        yield lock.path


async def introduce(invite: Invite, me: PeerID) -> None:
    """Register `me` as a guest at this machine's peer if `invite` is its note's: that peer's own may have expired."""
    await asyncio.to_thread(_introduce, invite, me)


def _introduce(invite: Invite, me: PeerID) -> None:
    for note in places.all_running():
        with contextlib.suppress(ShoalError):
            if note.folder and parse_invite(note.invite) == invite:
                ask(Path(note.folder), "guest", timeout_s=2.0, peer=me)


async def sweep() -> None:
    """Remove what killed visitors have left. A peer's own folder is cleaned at its next start."""
    from shoal.protocol.live import leftovers

    for folder in sorted(_visits().glob(f"{_PREFIX}-*")):
        try:
            lock = places.claim_folder(folder)
        except LocalError:
            continue  # in use, maybe by us
        try:
            await leftovers.clear(folder)
        finally:
            lock.release()


def _visits() -> Path:
    return places.state_root() / "visits"


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    ours = [number for number in _ENDS if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in ours:
            loop.remove_signal_handler(number)
