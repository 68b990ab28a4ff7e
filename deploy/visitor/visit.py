"""A command that asks a run something without taking part: its folder, and its end, whoever ends it.

Its network daemon has sockets in the system's temporary folder. A command that is told to end (SIGTERM, a closed
terminal) ends its daemon and removes them. What a killed one leaves is removed by the next shoal of this user: the
names of the sockets are in the folder, and the folder's lock is free.
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
_ASK_S = 2.0
_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.asynccontextmanager
async def visiting() -> AsyncIterator[Path]:
    """Give this process a folder while this lasts. SIGTERM and SIGHUP cancel the task that entered, where nobody else
    has an answer to them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_by_signals())
        try:
            lock = await asyncio.to_thread(places.claim_first_free, _visits(), _PREFIX)
        except LocalError as error:  # a state folder that cannot be written is for `shoal doctor` to find
            logger.info("%s", error)
            yield Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-visit-")))
            return
        stack.callback(lock.release)
        await sweep()
        yield lock.path


async def introduce(invite: Invite, me: PeerID) -> None:
    """Have the peer of this machine let in a command that goes by its note: the peer's invite may have expired."""
    await asyncio.to_thread(_introduce, invite, me)


def _introduce(invite: Invite, me: PeerID) -> None:
    for note in places.all_running():
        with contextlib.suppress(ShoalError):
            if note.folder and parse_invite(note.invite) == invite:
                ask(Path(note.folder), "guest", timeout_s=_ASK_S, peer=me)


async def sweep() -> None:
    """Remove what killed visitors have left. Of a peer's own folder that is seen to at its next start."""
    from shoal.protocol.live import leftovers

    for folder in sorted(_visits().glob(f"{_PREFIX}-*")):
        try:
            lock = places.claim_folder(folder)
        except LocalError:
            continue  # it is still there; or it is our own
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
