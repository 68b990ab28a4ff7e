"""Decides when to announce a new invite. Pure: the caller passes the members and the time.

An invite cannot change once handed out. The first one of a run names only its host and is useless once the host is
gone. So a new one is due as soon as it can name other members, and again when the named ones have gone.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from shoal.protocol.identity import PeerID

PEERS_NAMED: Final = 3
"""Any named peer lets a newcomer in, so an invite works until all three are gone."""
SETTLES_S: Final = 10.0
"""Peers arrive one after the other: wait this long for more peers to name."""
APART_S: Final = 60.0


@dataclass(slots=True)
class FreshInvite:
    me: PeerID
    _named: frozenset[PeerID] = field(init=False)
    """The peers named by the last announced invite."""
    _stale_since_s: float | None = None
    _told_s: float = -math.inf

    def __post_init__(self) -> None:
        self._named = frozenset({self.me})

    def is_due(self, others: Collection[PeerID], now_s: float) -> bool:
        """True if a new invite should be announced now. Args: others: the members that an invite can name."""
        here = {self.me, *others}
        possible = min(PEERS_NAMED, len(here))
        if len(self._named & here) >= possible:
            self._stale_since_s = None
            return False
        if self._stale_since_s is None:
            self._stale_since_s = now_s
        waits_s = 0.0 if possible == PEERS_NAMED else SETTLES_S
        return now_s >= max(self._stale_since_s + waits_s, self._told_s + APART_S)

    def told(self, named: Collection[PeerID], now_s: float) -> None:
        """Note that an invite naming these peers was announced."""
        self._named, self._told_s, self._stale_since_s = frozenset(named), now_s, None
