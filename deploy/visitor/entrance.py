"""Gives a visitor (a command that does not take part in the run) a throwaway identity, the run's directory and spec.

Each visit has a folder, and its network daemon has sockets in the system's temporary folder. On SIGTERM or a closed
terminal the command stops the daemon and removes the sockets. If the command was killed, the next shoal command of this
user removes the sockets: it finds their names in the visit's folder. A free lock on this folder means that the visit
is over.
"""

import asyncio
import contextlib
import logging
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.deploy.control.control_socket import ask
from shoal.deploy.state import places
from shoal.deploy.state.spec_record import FIND_S, fetch_spec
from shoal.protocol.access import Gate
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, parse_invite, peers_of
from shoal.protocol.membership import renew
from shoal.protocol.ports import Directory
from shoal.protocol.spec import RunSpec

if TYPE_CHECKING:
    from shoal.protocol.live.transport import LiveTransport

logger = logging.getLogger(__name__)

_PREFIX = "visit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """A visitor's connection to a run, valid inside `entering`."""

    endpoint: Endpoint
    directory: Directory
    spec: RunSpec
    peers: tuple[PeerID, ...]
    """Peers of the run that the invite names or that this machine has met, the connected ones first."""


@contextlib.asynccontextmanager
async def connecting(
    invite: Invite, *, owner: Identity | None = None
) -> AsyncIterator[tuple[Endpoint, "LiveTransport", list[PeerID]]]:
    """Connect a throwaway identity, with a certificate from the invite, to a run's network inside the context.

    Args: owner: the run's owner, if the visitor is the owner; the owner may use an expired invite.
    Yields: (endpoint, transport, the peers that the invite names or that this machine has met).
    """
    # Importing hivemind takes a second; only visits need it.
    from shoal.deploy.state.known_peers import ways_to
    from shoal.protocol.live.transport import LiveTransport, dialable

    async with visiting() as folder:
        identity = Identity.generate()
        await asyncio.to_thread(_introduce, invite, identity.peer_id)
        gate = Gate(invite.members_for(identity.peer_id), identity.peer_id)
        if owner is not None and invite.key is not None:
            ends_s = int(time.time()) + 24 * 3600
            terms = invite.key.delegation
            gate.members.certificate = renew(owner, terms, identity.peer_id, run=invite.run, ends_s=ends_s)
        ways = dialable(ways_to(invite))
        transport = await LiveTransport.start(identity, members=gate.members, state_dir=folder, initial_peers=ways)
        try:
            yield Endpoint(identity, transport, run=invite.run, gate=gate), transport, peers_of(ways)
        finally:
            await transport.close()


@contextlib.asynccontextmanager
async def entering(invite: Invite, *, owner: Identity | None = None) -> AsyncIterator[Entrance]:
    """Connect a throwaway identity to the run's network, and find the run's spec and peers.

    Args: owner: the run's owner, if the visitor is the owner.
    Raises: LocalError: the run cannot be found.
    """
    from shoal.deploy.run.directory_rules import record_rules
    from shoal.protocol.live.directory import LiveDirectory

    async with connecting(invite, owner=owner) as (endpoint, transport, named):
        directory = await LiveDirectory.start(transport, accept=record_rules(endpoint.gate))
        try:
            timeout_s = FIND_S if await transport.connected() else 7.0  # enough for one redial
            spec, _ = await fetch_spec(directory, invite, timeout_s=timeout_s)
            connected = await transport.connected()
            peers = tuple(sorted(named, key=lambda peer: peer not in connected))
            yield Entrance(endpoint=endpoint, directory=directory, spec=spec, peers=peers)
        finally:
            await directory.close()


# --- the visit's folder ---


@contextlib.asynccontextmanager
async def visiting() -> AsyncIterator[Path]:
    """Yield a folder for this visit. Inside the context SIGTERM and SIGHUP cancel the current task, unless the process
    handles these signals itself."""
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


def _introduce(invite: Invite, me: PeerID) -> None:
    """Ask each running peer of this machine that has `invite` to admit `me`, even if the invite has expired."""
    for note in places.all_running():
        with contextlib.suppress(ShoalError):
            if note.folder and parse_invite(note.invite) == invite:
                ask(Path(note.folder), "guest", timeout_s=2.0, peer=me)


async def sweep() -> None:
    """Stop the network daemons that killed visitors left, and remove their sockets. (Peers clean up at their start.)"""
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
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in ours:
            loop.remove_signal_handler(number)
