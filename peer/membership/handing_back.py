"""Returns microbatches: a paused replica, or a learner (a member with weights alone) that lags, sends back the
microbatches that it will not compute."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from shoal.peer.base.tasks import Tasks
from shoal.peer.base.tolerating import Tolerating
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.commands import RejectMicrobatch
from shoal.peer.replica.core import ReplicaCore
from shoal.peer.replica.events import Event, HandedBack, WorkReturned
from shoal.peer.services.services import Services
from shoal.protocol import messages
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import QUEUED_MICROBATCHES_MAX
from shoal.protocol.messages import Done

logger = logging.getLogger(__name__)

_RETRY_S: Final = 0.2


class HandingBack:
    """Sends and receives returned microbatches, at one replica.

    Args:
        post: gives an event to the replica's core; raises Refused if the core declines it.
        check: called with (source, microbatch); raises RemoteError if this run has no such microbatch.
    """

    def __init__(
        self,
        services: Services,
        core: ReplicaCore,
        tasks: Tasks,
        *,
        post: Callable[[Event], None],
        check: Callable[[PeerID, Microbatch], None],
    ) -> None:
        self._endpoint, self._neighbours = services.endpoint, services.neighbours
        self._core = core
        self._stage = core.pipeline.stage
        self._tasks = tasks
        self._post = post
        self._check = check
        self._gathered: dict[PeerID | None, list[RejectMicrobatch]] = {}

    def install(self) -> None:
        self._endpoint.on(messages.Reject, self._on_hand_back)

    def close(self) -> None:
        """Accept no more returned microbatches: their senders get an error instead of an acknowledgement."""
        self._endpoint.off(self._on_hand_back)

    def soon(self, command: RejectMicrobatch) -> None:
        """Send a microbatch back. All that go to one peer in this turn of the event loop share one message."""
        if command.target not in self._gathered:
            self._gathered[command.target] = []
            self._tasks.spawn(self._tell(command.target), f"hand back to {command.target}")
        self._gathered[command.target].append(command)

    async def _tell(self, target: PeerID | None) -> None:
        told = self._gathered.pop(target)
        items = tuple((c.microbatch.step, c.microbatch.index, c.begun) for c in told)
        message = messages.Reject(stage=self._stage, items=items)
        if target is None:
            await self._tell_leader(message)
            return
        for _ in range(20):  # after these tries the sender has noticed our absence itself, or is gone
            try:
                await self._endpoint.ask(target, message, Done)
            except Unreachable as error:
                logger.debug("cannot return microbatches yet: %s", error)
                self._neighbours.unreachable(target)
            except (Refused, RemoteError) as error:
                logger.debug("the sender no longer needs the microbatches: %s", error)
                return
            else:
                return
            await asyncio.sleep(_RETRY_S)

    async def _tell_leader(self, message: messages.Reject) -> None:
        """Return granted microbatches to the leader, and retry without end: only the leader can give them to other
        members. If we lead, wait until our pause is over or another member leads."""
        while True:
            leader = self._core.group.leader
            if leader is not None and (leader != self._endpoint.peer_id or not self._core.is_paused):
                with Tolerating(logger.debug, "the leader takes no microbatches back"):
                    await self._endpoint.ask(leader, message, Done)
                    return
            await asyncio.sleep(_RETRY_S)

    async def _on_hand_back(self, source: PeerID, message: messages.Reject) -> Done:
        if len(message.items) > QUEUED_MICROBATCHES_MAX:
            raise RemoteError(source, f"returned {len(message.items)} microbatches in one message")
        microbatches = [(Microbatch(step, index), begun) for step, index, begun in message.items]
        for microbatch, _ in microbatches:
            self._check(source, microbatch)
        for microbatch, begun in microbatches:
            if message.stage == self._stage + 1:
                self._post(HandedBack(microbatch, source))
            elif message.stage == self._stage == 0:
                self._post(WorkReturned(source, microbatch, begun))
            else:
                raise Refused(self._endpoint.peer_id, f"is in stage {self._stage} and sends nothing to {message.stage}")
        return Done()
