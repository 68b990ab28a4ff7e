"""Decides when to announce a new invite. Pure.

The first invite of a run names only its host, and is useless once the host is gone. So a new invite is due as soon as
there are other members to name, and again when named members have gone and there are new ones to name.
"""

import math
from collections.abc import Collection
from typing import Final

from shoal.protocol.identity import PeerID

PEERS_NAMED: Final = 3
"""How many peers an invite names. Each of them can let a newcomer in: the invite works until all three are gone."""
SETTLES_S: Final = 10.0
"""Seconds to wait for more peers before we announce an invite with fewer than `PEERS_NAMED`: peers come one by one."""
APART_S: Final = 60.0


class FreshInvite:
    """Tells when a new invite is due after the last announced one. Args: me: this peer; the first invite names it."""

    def __init__(self, me: PeerID) -> None:
        self._me = me
        self._named = frozenset({me})
        self._stale_since_s: float | None = None
        self._told_s = -math.inf

    def is_due(self, others: Collection[PeerID], now_s: float) -> bool:
        """True if a new invite should be announced now. Args: others: the members that an invite can name."""
        here = {self._me, *others}
        possible = min(PEERS_NAMED, len(here))
        if len(self._named & here) >= possible:
            self._stale_since_s = None
            return False
        if self._stale_since_s is None:
            self._stale_since_s = now_s
        waits_s = 0.0 if possible == PEERS_NAMED else SETTLES_S
        return now_s >= max(self._stale_since_s + waits_s, self._told_s + APART_S)

    def told(self, named: Collection[PeerID], now_s: float) -> None:
        """Record that an invite naming the peers `named` was announced."""
        self._named, self._told_s, self._stale_since_s = frozenset(named), now_s, None
