"""Looks for a second swarm that trains this peer's run, and that this peer's swarm does not know.

Once a minute each peer asks some known peers that are not in its swarm for their status.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from shoal.deploy.doctor.diagnosis import members_of, split_of
from shoal.deploy.doctor.findings import Problem
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import ShoalError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import StatusRequest, SwarmStatus

if TYPE_CHECKING:
    from shoal.protocol.live.transport import LiveTransport

logger = logging.getLogger(__name__)

LOOK_S = 60.0
_ASKED_MAX = 4
"""The most peers to ask each time. It is small, since most known peers outside our swarm are dead."""


class SplitWatch:
    """Looks for a second swarm of the run.

    Args:
        endpoint: this peer's endpoint.
        around: the transport, which knows addresses of other peers and can connect to them.
        own_status: asks this peer's own swarm for its status.
        say: prints a sentence; called once for each split.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        around: "LiveTransport",
        *,
        own_status: Callable[[], Awaitable[SwarmStatus]],
        say: Callable[[str], None],
    ) -> None:
        self._endpoint, self._around, self._own_status, self._say = endpoint, around, own_status, say
        self._turn = 0
        self._said = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            problem = await self.look()
            if problem is not None and not self._said:
                logger.warning("%s; %s", problem.sentence, problem.remedy)
                self._say(f"{problem.sentence}; {problem.remedy}")
            self._said = problem is not None

    async def look(self) -> Problem | None:
        """Connect to a few peers outside our swarm and ask for their status. Returns: the split, if there is one."""
        try:
            ours = await self._own_status()
        except ShoalError:
            return None  # no peer answers while the swarm has no coordinator
        statuses = [ours]
        for peer in await self._strangers(members_of(ours)):
            try:
                await self._around.introduce(peer, self._around.known().get(peer, ()))
                statuses.append(await self._endpoint.ask(peer, StatusRequest(), SwarmStatus))
            except ShoalError as error:
                logger.debug("no other swarm at %s: %s", peer[-8:], error)
        return split_of(statuses)

    async def _strangers(self, ours: set[PeerID]) -> list[PeerID]:
        """Return at most `_ASKED_MAX` peers outside our swarm: connected ones, then known ones, others at each call."""
        connected = set(await self._around.connected())
        strange = sorted(set(self._around.known()) | connected)
        strange = [peer for peer in strange if peer not in ours and peer != self._endpoint.peer_id]
        near = [peer for peer in strange if peer in connected][:_ASKED_MAX]
        far = [peer for peer in strange if peer not in connected]
        count = min(_ASKED_MAX - len(near), len(far))
        self._turn += 1
        return near + [far[(self._turn * _ASKED_MAX + index) % len(far)] for index in range(count)]
