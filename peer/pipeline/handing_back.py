"""What a replica that pauses does not make goes back to whoever sent it, until that one has it."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from shoal.peer.pipeline.events import HandBack
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.tasks import Tasks
from shoal.protocol import messages
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import QUEUED_MICROBATCHES_MAX
from shoal.protocol.messages import Done

if TYPE_CHECKING:
    from shoal.peer.pipeline.driver import Upwards

logger = logging.getLogger(__name__)

_RETRY_S: Final = 0.2
_RETRIES: Final = 20
"""Who sent a microbatch and cannot be told for so long finds out by itself that we are gone, or is gone."""


class HandingBack:
    """Both sides of it, at one replica of stage `stage`."""

    def __init__(self, endpoint: Endpoint, stage: int, upwards: "Upwards", tasks: Tasks) -> None:
        self._endpoint = endpoint
        self._stage = stage
        self._upwards = upwards
        self._tasks = tasks
        self._check: Callable[[PeerID, Microbatch], None]
        self._on_back: Callable[[Microbatch, PeerID], None]

    def install(
        self, check: Callable[[PeerID, Microbatch], None], *, on_back: Callable[[Microbatch, PeerID], None]
    ) -> None:
        """Args:
        check: (source, microbatch); raises RemoteError if this run has no such microbatch.
        on_back: (microbatch, peer): that replica of the next stage will not make it.
        """
        self._check, self._on_back = check, on_back
        self._endpoint.on(messages.HandBack, self._on_hand_back)

    def close(self) -> None:
        """Take nothing back any more: whoever wants to give it then is told so, and does not take it for taken."""
        self._endpoint.off(self._on_hand_back)

    def send(self, commands: Sequence[HandBack]) -> None:
        """Tell whom it concerns, each once."""
        by_target: dict[PeerID | None, list[HandBack]] = {}
        for command in commands:
            by_target.setdefault(command.target, []).append(command)
        for target, told in by_target.items():
            items = tuple((c.microbatch.step, c.microbatch.index, c.begun) for c in told)
            message = messages.HandBack(stage=self._stage, items=items)
            self._tasks.spawn(self._tell(target, message), f"hand {len(items)} microbatches back")

    async def _tell(self, target: PeerID | None, message: messages.HandBack) -> None:
        if target is None:
            await self._tell_lead(message)
            return
        for _ in range(_RETRIES):
            try:
                await self._endpoint.ask(target, message, Done)
            except Unreachable as error:
                logger.debug("cannot hand back yet: %s", error)
                self._upwards.unreachable(target)
            except (Refused, RemoteError) as error:
                logger.debug("nothing to hand back: %s", error)  # it is elsewhere now, and waits for nothing of ours
                return
            else:
                return
            await asyncio.sleep(_RETRY_S)

    async def _tell_lead(self, message: messages.HandBack) -> None:
        """However long that takes: these are granted to us, and nobody else makes them. A lead that is ourselves has
        nobody to give them to until somebody else is open, or the pause is over."""
        while True:
            lead = self._upwards.lead
            if lead is not None and (lead != self._endpoint.peer_id or not self._upwards.is_paused):
                try:
                    await self._endpoint.ask(lead, message, Done)
                except (Unreachable, Refused, RemoteError) as error:
                    logger.debug("the lead does not take back: %s", error)
                else:
                    return
            await asyncio.sleep(_RETRY_S)

    async def _on_hand_back(self, source: PeerID, message: messages.HandBack) -> Done:
        if len(message.items) > QUEUED_MICROBATCHES_MAX:
            raise RemoteError(source, f"hands {len(message.items)} microbatches back at once")
        microbatches = [(Microbatch(step, index), begun) for step, index, begun in message.items]
        for microbatch, _ in microbatches:
            self._check(source, microbatch)
        for microbatch, begun in microbatches:
            if message.stage == self._stage + 1:
                self._on_back(microbatch, source)
            elif message.stage == self._stage == 0:
                self._upwards.handed_back(source, microbatch, begun=begun)
            else:
                raise Refused(self._endpoint.peer_id, f"is of stage {self._stage}, and sent nothing to {message.stage}")
        return Done()
