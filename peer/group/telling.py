"""Decide when a replica's reports are sent: at once to the leader and later to the other members, or later to all.

If each contribution were reported to every member, thousands of microbatches a step in a group of dozens would make
hundreds of thousands of calls. Only the leader acts on reports, and a new leader gets all reports again anyway. The
leader acts only on a member's last report of a step, so earlier reports can wait. A call takes 2.5 ms of processor time
at both ends, which is long compared with a microbatch of a small model.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from shoal.peer.base.outbox import Outbox
from shoal.peer.replica.commands import Tell
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Digest, Progress, RoundStart

_GATHER_S: Final = 1.0
"""Seconds for which reports are gathered; the leader, too, may wait this long for a deferred report. If the leader and
a sender die together, the sender's reports of this time are lost; a timeout notices that (`../replica/losses.py`)."""
_GATHER_MATES: Final = 8
"""A group of up to this many members sends reports once in `_GATHER_S`. Each time, n members send n x n messages; so a
larger group gathers longer, by the square of the ratio of sizes, and sends no more messages a second."""

_Word = Progress | RoundStart | Digest


class Telling:
    """Sends one replica's messages. Args: audience: returns the members to which a message must be sent."""

    def __init__(self, me: PeerID, outbox: Outbox, audience: Callable[[_Word], Iterable[PeerID]]) -> None:
        self._me = me
        self._outbox = outbox
        self._audience = audience
        self._gathered: dict[tuple[type, int], Progress] = {}
        self._resting: dict[tuple[type, int], Progress] = {}  # deferred reports, not sent to the leader either
        self._timer: asyncio.TimerHandle | None = None
        self._leader_timer: asyncio.TimerHandle | None = None

    def tell(self, command: Tell) -> None:
        match command:
            case Tell(Progress() as message, can_wait=True, can_rest=True) if message.leader != "":
                self._rest(message)
            case Tell(Progress() as message, can_wait=True) if message.leader not in ("", self._me):
                self._the_leader(message.leader, message)
            case Tell(message, to=None):
                self._everybody(message, self._audience(message))
                if isinstance(message, Digest):  # reports on earlier steps are obsolete
                    for words in (self._gathered, self._resting):
                        for key in [key for key, word in words.items() if word.step < message.version]:
                            del words[key]
            case Tell(message, to=str() as mate):
                self._outbox.post(mate, _key(message), message)

    def _everybody(self, message: _Word, group_peers: Iterable[PeerID]) -> None:
        key = _key(message)
        self._gathered.pop(key, None)
        self._resting.pop(key, None)
        for mate in group_peers:
            self._outbox.post(mate, key, message)

    def _rest(self, message: Progress) -> None:
        """Defer a report: the leader gets it within `_GATHER_S`, the other members later."""
        if message.leader != self._me:
            self._resting[_key(message)] = message
            if self._leader_timer is None:
                self._leader_timer = asyncio.get_running_loop().call_later(_GATHER_S, self._tell_the_leader)
        self._gather(message)

    def _the_leader(self, leader: PeerID, message: Progress) -> None:
        """Send a report to the leader now, and to the other members later unless a newer report replaces it."""
        self._resting.pop(_key(message), None)
        self._outbox.post(leader, _key(message), message)
        self._gather(message)

    def _gather(self, message: Progress) -> None:
        self._gathered[_key(message)] = message
        if self._timer is None:
            crowd = sum(1 for _ in self._audience(message)) / _GATHER_MATES
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S * max(1.0, crowd * crowd), self._spread)

    def close(self) -> None:
        for timer in (self._timer, self._leader_timer):
            if timer is not None:
                timer.cancel()

    def _tell_the_leader(self) -> None:
        self._leader_timer = None
        words, self._resting = self._resting, {}
        for key, message in words.items():
            self._outbox.post(message.leader, key, message)

    def _spread(self) -> None:
        self._timer = None
        for message in list(self._gathered.values()):
            self._everybody(message, [mate for mate in self._audience(message) if mate != message.leader])


def _key(message: _Word) -> tuple[type, int]:
    return type(message), message.version if isinstance(message, Digest) else message.step
