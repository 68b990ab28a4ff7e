"""Sends tokens, or the report that a run of a microbatch has ended, to a holder of experts, until the holder answers or
another one is the better choice."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from shoal.peer.base.tasks import Tasks
from shoal.peer.experts.patience import Patience
from shoal.peer.services.services import Services
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Done, ExpertDone, ExpertOutput, ExpertTokens
from shoal.protocol.ports import Payload, Priority

logger = logging.getLogger(__name__)

_ASK_AGAIN_S: Final = (10.0, 20.0, 40.0)
"""Seconds to wait for an answer before a frame is sent again: the frame or the answer may be lost. After the third wait
another holder gets the frame, if there is one."""
_LOOK_S: Final = 0.5
"""Seconds between two checks for slow holders."""


@dataclass(slots=True, eq=False)
class _Asked:
    holder: PeerID
    step: int
    size: int
    sent_s: float
    answer: "asyncio.Future[Payload | None]"
    """Is set to the holder's answer, or to None if the holder refused or is lost."""

    def give_up(self) -> None:
        if not self.answer.done():
            self.answer.set_result(None)


class Asking:
    """Sends frames and messages to holders of experts while this peer is a member of one stage.

    Args: has_others: returns True if holders other than the given one could serve the whole frame.
    """

    def __init__(self, services: Services, *, has_others: Callable[[ExpertTokens, PeerID], bool]) -> None:
        self._s = services
        self._me = services.endpoint.peer_id
        self._has_others = has_others
        self._asked: dict[int, _Asked] = {}
        self._telling: dict[asyncio.Future[None], PeerID] = {}
        self._serials = itertools.count()
        self._patience = Patience()
        self._tasks = Tasks(services.failures.add)

    async def close(self) -> None:
        await self._tasks.cancel()

    @property
    def shunned(self) -> frozenset[PeerID]:
        """Holders to avoid at present, because their answers came far later than those of other holders."""
        return self._patience.shunned(self._s.clock.now_s())

    def next_serial(self) -> int:
        return next(self._serials)

    async def ask(self, holder: PeerID, meta: ExpertTokens, payload: Payload, *, size: int) -> Payload | None:
        """Send a frame and return its answer; None: try another holder. Args: size: bytes of a valid answer."""
        now_s = self._s.clock.now_s()
        asked = _Asked(holder, meta.step, size, now_s, asyncio.get_running_loop().create_future())
        self._asked[meta.serial] = asked
        try:
            for attempt in itertools.count():
                # Send in the background: to a peer that lost power it takes long, and would delay the next holder.
                self._tasks.spawn(self._send(asked, meta, payload), f"tokens of ({meta.step}, {meta.index})")
                await self._wait(asked, meta, _ASK_AGAIN_S[min(attempt, len(_ASK_AGAIN_S) - 1)])
                if asked.answer.done():
                    return asked.answer.result()
                if attempt >= len(_ASK_AGAIN_S) - 1 and self._has_others(meta, holder):
                    return None
            raise AssertionError("counts without end")
        finally:
            asked.give_up()
            del self._asked[meta.serial]

    def answered(self, source: PeerID, meta: ExpertOutput, payload: Payload) -> None:
        """Process an answer. Raises: RemoteError: the answer has the wrong size."""
        asked = self._asked.get(meta.serial)
        if asked is None or asked.holder != source or asked.answer.done():
            return  # the answer came too late, or twice
        if meta.refused:
            logger.info("%s refuses tokens: %s", source[-8:], meta.refused)
            asked.give_up()
            return
        if len(payload) != asked.size:
            asked.give_up()
            raise RemoteError(source, f"answered with {len(payload)} bytes of tokens instead of {asked.size}")
        self._patience.answered(source, asked.step, sent_s=asked.sent_s, now_s=self._s.clock.now_s())
        asked.answer.set_result(payload)

    async def tell(self, holder: PeerID, message: ExpertDone) -> bool:
        """Tell `holder` that a microbatch's run through it has ended. Return True if it accepted the message."""
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._telling[given_up] = holder
        telling = asyncio.ensure_future(self._s.endpoint.ask(holder, message, Done))
        either: set[asyncio.Future[Any]] = {telling, given_up}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                telling.result()
            return telling.done()
        except Unreachable as error:
            logger.info("cannot settle (%d, %d): %s", message.step, message.index, error)
            self._s.neighbours.unreachable(holder)
        except (Refused, RemoteError) as error:
            logger.info("cannot settle (%d, %d): %s", message.step, message.index, error)
        finally:
            telling.cancel()
            del self._telling[given_up]
        return False

    def give_up(self, peer: PeerID) -> None:
        """Stop waiting for the answers of a peer that is lost or no longer holds its experts."""
        for asked in self._asked.values():
            if asked.holder == peer:
                asked.give_up()
        for given_up, holder in self._telling.items():
            if holder == peer and not given_up.done():
                given_up.set_result(None)

    async def _send(self, asked: _Asked, meta: ExpertTokens, payload: Payload) -> None:
        priority = Priority.GRADIENT if meta.backward else Priority.ACTIVATION
        try:
            await self._s.endpoint.send(asked.holder, meta, payload, priority=priority)
        except Unreachable as error:
            logger.info("tokens of (%d, %d): %s; sending them elsewhere", meta.step, meta.index, error)
            self._s.neighbours.unreachable(asked.holder)
            asked.give_up()

    async def _wait(self, asked: _Asked, meta: ExpertTokens, for_s: float) -> None:
        """Wait for the answer at most `for_s` seconds. Give the holder up if other holders answer much faster."""
        until_s = self._s.clock.now_s() + for_s
        while (now_s := self._s.clock.now_s()) < until_s and not asked.answer.done():
            await asyncio.wait({asked.answer}, timeout=min(_LOOK_S, until_s - now_s))
            now_s = self._s.clock.now_s()
            if asked.answer.done() or asked.holder == self._me:
                continue  # others depend on our own tokens, too: never give ourselves up
            is_over = self._patience.is_over(asked.holder, asked.step, sent_s=asked.sent_s, now_s=now_s)
            if is_over and self._has_others(meta, asked.holder):
                after_s = now_s - asked.sent_s
                logger.info("nothing from %s after %.1f s; asking others", asked.holder[-8:], after_s)
                self._patience.gave_up(asked.holder, after_s=after_s, now_s=now_s)
                asked.give_up()
