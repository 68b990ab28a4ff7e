"""Write-ahead for votes: makes a promise durable before it is sent.

With a full or broken disk a peer still obeys plans, and sends and answers heartbeats, because these promise nothing. It
casts no vote, grants no term, and requests none, because its own vote would count. A new peer that cannot write any
record does not start.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from shoal.coordinator.chain import ChainRecord
from shoal.coordinator.coordination_events import Ask, Command, Persist, Reply
from shoal.coordinator.store import PlanStore
from shoal.protocol.errors import LocalError
from shoal.protocol.messages import PlanOffer, PlanVote, Refusal, TermGrant, TermRequest
from shoal.protocol.ports import Clock

logger = logging.getLogger(__name__)

COMPLAIN_EVERY_S: Final = 60.0


class WriteAhead:
    """Saves the core's records, and holds back commands that depend on a record until it is saved."""

    def __init__(self, store: PlanStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._owed: ChainRecord | None = None
        """The record that is promised in memory and not durable yet. The core does not ask for it again."""
        self._complained_s = -math.inf

    def begin(self, first: ChainRecord) -> ChainRecord | None:
        """Read the promises from before a restart. If there are none, save `first`: a peer that cannot keep promises
        should fail before it takes part.
        Returns: the record; None: there was none.
        Raises: LocalError: the store is damaged, another run's, or cannot be written."""
        record = self._store.load(first.run)
        if record is None:
            self._store.save(first)
        return record

    def backed(self, commands: Iterable[Command]) -> Iterator[Command]:
        """Yield the commands that may be carried out, in order. A promise that cannot be saved becomes a refusal."""
        tried = False
        for command in commands:
            if isinstance(command, Persist):
                self._owed, tried = command.record, False
            elif self._owed is None or not _is_promise(command):
                yield command
                continue
            if not tried:
                self._save()
                tried = True
            if isinstance(command, Reply):
                yield Reply(message=Refusal(reason="cannot save its promise on disk")) if self._owed else command
            elif not isinstance(command, Persist) and self._owed is None:
                yield command

    def _save(self) -> None:
        assert self._owed is not None
        try:
            self._store.save(self._owed)
        except LocalError as error:
            now_s = self._clock.now_s()
            if now_s >= self._complained_s + COMPLAIN_EVERY_S:
                self._complained_s = now_s
                logger.error("this peer cannot vote: %s", error)
        else:
            self._owed = None


def _is_promise(command: Command) -> bool:
    message: msgspec.Struct | None = command.message if isinstance(command, Ask | Reply) else None
    match message:
        case TermGrant():
            return message.granted
        case PlanVote():
            return message.accepted
    return isinstance(message, TermRequest | PlanOffer)
