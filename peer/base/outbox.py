"""Messages that are resent, in order, until they reach their peer. A newer message replaces one with the same key."""

import asyncio
import logging
from collections.abc import Callable, Hashable

import msgspec

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Done

logger = logging.getLogger(__name__)


class Outbox:
    """One queue and one sender task per peer. A new message removes an unsent one under the same key and goes to the
    end of the queue, since it may refer to messages that were posted in between. Sending to an unreachable peer is
    retried until `forget` is called."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        expect: type[msgspec.Struct] = Done,
        on_reply: Callable[[PeerID, msgspec.Struct], None] | None = None,
        on_trouble: Callable[[PeerID], None] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._expect = expect
        self._on_reply = on_reply
        self._on_trouble = on_trouble
        self._queues: dict[PeerID, dict[Hashable, msgspec.Struct]] = {}
        self._senders: dict[PeerID, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def post(self, peer: PeerID, key: Hashable, message: msgspec.Struct) -> None:
        queue = self._queues.setdefault(peer, {})
        queue.pop(key, None)
        queue[key] = message
        if peer not in self._senders:
            task = asyncio.create_task(self._send(peer), name=f"outbox to {peer[-8:]}")
            task.add_done_callback(_raise_bugs)
            self._senders[peer] = task

    def is_empty(self, peer: PeerID) -> bool:
        """True if no message to `peer` waits in its queue; one message may still be on its way."""
        return not self._queues.get(peer)

    def forget(self, peer: PeerID) -> None:
        """Drop all messages to a peer that is gone. Cancel the call in progress, which would delay later messages."""
        self._queues.pop(peer, None)
        sender = self._senders.get(peer)
        if sender is not None and sender is not asyncio.current_task():
            del self._senders[peer]
            sender.cancel()
            self._ending.add(sender)
            sender.add_done_callback(self._ending.discard)

    async def flush(self, timeout_s: float) -> None:
        """Wait until all messages are sent, `timeout_s` at most."""
        if self._senders:
            await asyncio.wait(list(self._senders.values()), timeout=timeout_s)

    async def close(self) -> None:
        tasks = [*self._senders.values(), *self._ending]
        self._queues.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, peer: PeerID) -> None:
        try:
            while queue := self._queues.get(peer):
                key, message = next(iter(queue.items()))
                del queue[key]
                try:
                    reply = await self._endpoint.ask(peer, message, self._expect)
                except Unreachable:
                    if self._on_trouble:
                        self._on_trouble(peer)
                    if self._queues.get(peer) is queue:  # else the peer was forgotten meanwhile, with its messages
                        if key not in queue:  # else a later message under the same key has come
                            self._queues[peer] = {key: message} | queue
                        await asyncio.sleep(0.5)
                except (Refused, RemoteError) as error:
                    logger.debug("%s was declined: %s", type(message).__name__, error)
                else:
                    if self._on_reply:
                        self._on_reply(peer, reply)
        finally:
            if self._senders.get(peer) is asyncio.current_task():
                del self._senders[peer]
                if self._queues.get(peer) == {}:
                    del self._queues[peer]


def _raise_bugs(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        # No task awaits a sender, so errors of its callbacks would be lost with it.
        asyncio.get_running_loop().call_exception_handler({"message": "an outbox failed", "exception": error})
