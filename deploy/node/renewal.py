"""Renews a member's certificate: the run's owner signs a new one, and the member keeps it on its disk.

A member of the current plan stays in when its certificate expires. It needs a new certificate to come back after an
absence, when no peer remembers its membership.
"""

import asyncio
import logging
from contextlib import suppress
from pathlib import PurePosixPath

import msgspec

from shoal.protocol.durable import replace_file
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.membership import Members
from shoal.protocol.messages import Refusal, Renew, Renewed
from shoal.protocol.ports import Disk

logger = logging.getLogger(__name__)

FILE_NAME = "certificate"
_LOOK_S = 60.0


def take_kept(members: Members, disk: Disk, me: PeerID) -> None:
    """Load this peer's certificate from `disk` into `members`, if it was issued for the invite that we have now."""
    with suppress(OSError, RemoteError):
        members.take_renewed(disk.read(PurePosixPath(members.run, FILE_NAME)), me)


class Renewal:
    """Asks the run's owner for new certificates; on the owner's own peer, issues them.

    Args: disk: keeps a new certificate; None: the certificate is lost when this process ends.
    """

    def __init__(self, endpoint: Endpoint, disk: Disk | None) -> None:
        self._endpoint, self._members, self._disk = endpoint, endpoint.members, disk
        if endpoint.peer_id == self._members.owner:
            endpoint.on(Renew, self._renew)

    async def keep(self) -> None:
        """Ask for a new certificate whenever one is due and this peer is in a plan."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._members.should_renew and self._endpoint.gate.is_planned(self._endpoint.peer_id):
                try:
                    await self.ask()
                except (Unreachable, Refused, RemoteError, OSError) as error:
                    logger.debug("no fresh certificate: %s", error)  # the owner is away; not urgent
                    await asyncio.sleep(600.0)

    async def ask(self) -> None:
        """Ask for a certificate once. Raises: Unreachable, Refused, RemoteError: none came; OSError: the disk fails."""
        members, me = self._members, self._endpoint.peer_id
        certificate = (await self._endpoint.ask(members.owner, Renew(), Renewed)).certificate
        members.take_renewed(certificate, me)
        if self._disk is not None:
            replace_file(self._disk, PurePosixPath(members.run, FILE_NAME), certificate)

    async def _renew(self, source: PeerID, message: Renew) -> msgspec.Struct:
        certificate = self._members.renew(self._endpoint.identity, source)
        return Renewed(certificate=certificate) if certificate else Refusal(reason="this run needs no certificate")
