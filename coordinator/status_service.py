"""Says how the run is doing: a coordinator knows, and another peer asks it."""

import msgspec

from shoal.coordinator.core import CoordinationCore
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import ShoalError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Refusal, StatusRequest, SwarmStatus
from shoal.protocol.ports import Clock


class StatusService:
    """Answers questions for the swarm's status.

    Args: timeout_s: how long another peer's question may take us.
    """

    def __init__(self, *, endpoint: Endpoint, core: CoordinationCore, clock: Clock, timeout_s: float) -> None:
        self._endpoint, self._core, self._clock, self._timeout_s = endpoint, core, clock, timeout_s

    def serve(self) -> None:
        """Begin to answer."""
        self._endpoint.on(StatusRequest, self._answer)

    def status(self) -> SwarmStatus | None:
        """The swarm as this peer sees it, if it coordinates."""
        return self._core.status(self._clock.now_s())

    async def ask(self) -> SwarmStatus:
        """Ask the coordinator how it sees the swarm.

        Raises: Unreachable, Refused: there is no coordinator to ask, or it has no plan yet; RemoteError.
        """
        mine = self.status()
        if mine is not None:
            return mine
        return await self._endpoint.ask(self._core.coordinator, StatusRequest(), SwarmStatus)

    async def _answer(self, source: PeerID, message: StatusRequest) -> msgspec.Struct:
        mine = self.status()
        if mine is not None:
            return mine
        coordinator = self._core.coordinator
        if self._core.plan is None or coordinator in (source, self._endpoint.peer_id):
            return Refusal(reason="there is no plan yet")
        try:
            return await self._endpoint.ask(coordinator, message, SwarmStatus, timeout_s=self._timeout_s)
        except ShoalError as error:
            return Refusal(reason=f"cannot reach the coordinator ({error})")
