"""Decides when to tell a new invite. Pure: the caller says who is here and what time it is.

An invite cannot change once it is handed out, and the first one of a run names its host alone, since nobody else was
there: once the host is gone it leads nowhere. So there is another as soon as other members can be named, and again when
those that it names have gone.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from shoal.protocol.identity import PeerID

PEERS_NAMED: Final = 3
"""Any of them lets a newcomer in, so that all three must be gone before an invite is worth nothing."""
SETTLES_S: Final = 10.0
"""Peers come one after the other: an invite that could name more waits for so long for others."""
APART_S: Final = 60.0


@dataclass(slots=True)
class FreshInvite:
    me: PeerID
    _named: frozenset[PeerID] = field(init=False)
    """Those whom the invite that was told last names."""
    _stale_since_s: float | None = None
    _told_s: float = -math.inf

    def __post_init__(self) -> None:
        self._named = frozenset({self.me})

    def is_due(self, others: Collection[PeerID], now_s: float) -> bool:
        """Whether an invite should be told now. Args: others: the members here that an invite can name."""
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
        """An invite has been told that names these."""
        self._named, self._told_s, self._stale_since_s = frozenset(named), now_s, None
