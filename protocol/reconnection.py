"""Decides which connections are dead, and when to dial whom again. Pure: the caller says what time it is.

Nobody is told when a cable is pulled, when a router forgets a connection or when a laptop is carried into another
network. What was written then is sent again after 0.2, 0.4, 0.8 ... seconds, so that a connection comes back up to as
long after the cable as the cable was out; and one whose address has changed never does, though it looks alive for
minutes. A fresh connection takes five round trips. So a connection that is dead by one of these signs is dropped, and
the peer at its other end is dialled until it answers:

| sign                                                                 | which connections are dead                |
|----------------------------------------------------------------------|-------------------------------------------|
| nothing came back for `DEAD_S` although something is unacknowledged  | that one: the other's kernel answers even |
|                                                                      | where its process stands still            |
| the address at our end is no longer one of this machine's            | that one                                  |
| this process stood still, and nothing has come since                 | that one                                  |
| the machine was suspended                                            | all                                       |
| nobody can look into the kernel, and two calls went unanswered       | all of that peer                          |
| the peer has a stream carried to us, so it has none (`missed_by`)    | all of that peer that are not new         |

Any dead connection condemns all of its peer: the network daemon may choose it for what is sent next.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from shoal.protocol.identity import PeerID

DEAD_S: Final = 3.0
"""Three heartbeats. Losing a connection costs what is on its way in it; TCP itself would wait as long again."""
STOOD_STILL_S: Final = 8.0
"""A process that is woken after so long has been suspended, or its machine has; a busy machine's loop is late by less.
"""
UNANSWERED_MAX: Final = 2
EVERY_S: Final = 1.0
"""A peer that is away is dialled so often at first."""
EVERY_S_MAX: Final = 30.0
_SHARE: Final = 0.05
"""Later the pause is this share of the time for which it has been away: 3 s after a minute."""
_JITTER: Final = 0.2
DIALS_MAX: Final = 16
PATIENCES_S: Final = (2, 2, 4)
"""How long the first dials wait, and then again. libp2p does not dial an address again for five seconds and more once
its own five have run out, and that never happens to a dial that ends before."""
SECOND_AFTER_S: Final = 6.0
SECOND_EVERY_S: Final = 8.0
SECOND_PATIENCE_S: Final = 1
"""One of two ends that find out by silence goes first (`goes_first`), and the other dials as little as this. libp2p
dials from the port on which it listens. If both do so while the cable is out, or within a round trip, the two dials
become one connection that each end has opened: the handshake fails, and neither dials again for five seconds."""
AFTER_A_MOVE_S: Final = 2.5
"""Whoever has changed its address pauses for so long after each dial that nobody answered. A peer behind a NAT cannot
be dialled from an address that is new to it: it must dial, once it knows of the loss, and not while we do."""
FRESH_S: Final = 5.0
LINGER_S: Final = 60.0
"""A peer that is wanted no more is dialled for so long still: a plan may have left it out because it was away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One connection as the kernel sees it."""

    is_owed: bool
    """Whether the other end has yet to acknowledge something."""
    silent_s: float
    """The time since anything came from the other end."""
    local: str
    """The address of our end."""


class Outcome(Enum):
    """How a dial ended."""

    REACHED = auto()
    REFUSED = auto()
    """The machine is there and nobody listens, or another peer does."""
    NO_ANSWER = auto()
    """Nothing came back."""


@dataclass(slots=True, kw_only=True)
class _Absence:
    since_s: float
    dial_at_s: float
    is_second: bool = False
    is_our_move: bool = False
    tries: int = 0
    last: Outcome = Outcome.NO_ANSWER


@dataclass(frozen=True, slots=True, kw_only=True)
class Todo:
    drop: tuple[PeerID, ...] = ()
    dial: tuple[PeerID, ...] = ()


@dataclass(slots=True)
class Reconnection:
    """What is known of the connections to the peers that we want to be connected to.

    Args:
        goes_first: says whether we, and not that peer, dial when both of us miss the other.
        rng: for jitter.
    """

    goes_first: Callable[[PeerID], bool]
    rng: random.Random
    _wanted: dict[PeerID, float] = field(default_factory=dict)
    """Each with the time until which it is wanted."""
    _absent: dict[PeerID, _Absence] = field(default_factory=dict)
    _back_s: dict[PeerID, float] = field(default_factory=dict)
    """When each peer that had been away was there again."""
    _unchanged: dict[PeerID, tuple[frozenset[str], float]] = field(default_factory=dict)
    """The connections of each peer, and since when they are these."""
    _dialled: set[PeerID] = field(default_factory=set)
    _stalled_s: dict[str, float] = field(default_factory=dict)
    """The time since which a connection has owed us an acknowledgement, without a break."""
    _unanswered: dict[PeerID, int] = field(default_factory=dict)

    def want(self, peers: Collection[PeerID], now_s: float) -> None:
        """Stay connected to these from now on, and for a while to those of before."""
        for peer, until_s in tuple(self._wanted.items()):
            if peer not in peers:
                self._wanted[peer] = min(until_s, now_s + LINGER_S)
        self._wanted.update(dict.fromkeys(peers, math.inf))

    def is_absent(self, peer: PeerID) -> bool:
        return peer in self._absent

    def may_be_there(self, peer: PeerID) -> bool:
        """Whether it is worth waiting for a peer that is away: where it was, nothing has refused us."""
        absence = self._absent.get(peer)
        return absence is not None and absence.last is not Outcome.REFUSED

    def is_untried(self, peer: PeerID) -> bool:
        """Whether a peer that is away has not been dialled yet, and need not dial us first."""
        absence = self._absent.get(peer)
        return absence is not None and not absence.tries and absence.dial_at_s <= absence.since_s

    def is_fresh(self, peer: PeerID, now_s: float) -> bool:
        """Whether we had no connection to the peer a moment ago, so that those that we have now are alive."""
        return peer in self._absent or now_s < self._back_s.get(peer, -math.inf) + FRESH_S

    def heard(self, peer: PeerID) -> None:
        """Something of the peer has arrived."""
        self._unanswered.pop(peer, None)

    def unanswered(self, peer: PeerID) -> None:
        """A call of ours got no answer in its time."""
        self._unanswered[peer] = self._unanswered.get(peer, 0) + 1

    def missed_by(self, peer: PeerID, now_s: float) -> bool:
        """The peer has no connection with us, as it has had something carried to us. Returns: whether those that we
        have with it are dead, as they are not new: it may have looked before there was a new one."""
        _, since_s = self._unchanged.get(peer, (frozenset(), math.inf))
        if now_s < since_s + FRESH_S or self.is_fresh(peer, now_s):
            return False
        self.lost(peer, now_s)
        return True

    def refused(self, peer: PeerID, now_s: float) -> None:
        """The daemon has dialled a peer by itself and found nobody where that was."""
        if peer not in self._absent:
            self.lost(peer, now_s)
        if peer in self._absent:
            self._absent[peer].last = Outcome.REFUSED

    def look(
        self,
        connections: Mapping[PeerID, Mapping[str, Way | None]],
        known: Collection[PeerID],
        now_s: float,
        *,
        gone: Collection[str] = (),
        stood_still_s: float = 0.0,
        was_suspended: bool = False,
    ) -> Todo:
        """Say what to do now.

        Args:
            connections: of each connected peer, by name; None: the kernel does not say how it is.
            known: the peers of which we have an address.
            gone: addresses that this machine had and has no more.
            stood_still_s: how long this process stood still before.
        """
        dead, silent, moved = set(), set(), set()
        before, self._unchanged = self._unchanged, {}
        for peer, ways in connections.items():
            names = frozenset(ways)
            old_names, since_s = before.get(peer, (frozenset(), now_s))
            self._unchanged[peer] = (names, since_s if names == old_names else now_s)
        stalled_s, self._stalled_s = self._stalled_s, {}
        for peer, ways in connections.items():
            is_unknown = all(way is None for way in ways.values())
            if was_suspended:
                dead.add(peer)
            elif is_unknown and self._unanswered.get(peer, 0) >= UNANSWERED_MAX:
                silent.add(peer)
            for name, way in ways.items():
                if way is None:
                    continue
                if way.is_owed:
                    since_s = stalled_s.get(name, now_s)
                    self._stalled_s[name] = since_s if way.silent_s >= now_s - since_s else now_s
                stalls_s = now_s - self._stalled_s.get(name, now_s)
                if way.local in gone:
                    moved.add(peer)
                elif stood_still_s >= STOOD_STILL_S and way.silent_s >= DEAD_S:
                    dead.add(peer)
                elif stalls_s >= DEAD_S:
                    silent.add(peer)
        dead |= moved
        for peer in connections:
            if peer not in dead and peer not in silent:
                self._returned(peer, now_s)
        for peer in dead:
            self.lost(peer, now_s, is_our_move=peer in moved)
        for peer in silent - dead:
            self.lost(peer, now_s, found_by_both=True)
        self._wanted = {peer: until_s for peer, until_s in self._wanted.items() if now_s < until_s}
        self._back_s = {peer: back_s for peer, back_s in self._back_s.items() if now_s < back_s + FRESH_S}
        for peer in tuple(self._absent):
            if peer not in self._wanted or peer not in known:
                del self._absent[peer]
        for peer in self._wanted:
            if peer not in connections and peer not in self._absent and peer in known:
                self.lost(peer, now_s)
        due = (peer for peer, absence in self._absent.items() if now_s >= absence.dial_at_s)
        free = max(0, DIALS_MAX - len(self._dialled))
        return Todo(
            drop=tuple(sorted(dead | silent)), dial=tuple(peer for peer in due if peer not in self._dialled)[:free]
        )

    def lost(
        self,
        peer: PeerID,
        now_s: float,
        *,
        pause_s: float = 0.0,
        found_by_both: bool = False,
        is_our_move: bool = False,
    ) -> None:
        """There is no connection to the peer any more.

        Args:
            pause_s: it is expected to dial us within this time.
            found_by_both: it finds out, too, and dials us as we dial it.
            is_our_move: we have another address now.
        """
        self._unanswered.pop(peer, None)
        if peer in self._wanted:
            is_second = found_by_both and not self.goes_first(peer)
            dial_at_s = now_s + (SECOND_AFTER_S if is_second else pause_s)
            self._absent[peer] = _Absence(
                since_s=now_s, dial_at_s=dial_at_s, is_second=is_second, is_our_move=is_our_move
            )

    def _returned(self, peer: PeerID, now_s: float) -> None:
        if self._absent.pop(peer, None) is not None:
            self._back_s[peer] = now_s

    def dials(self, peer: PeerID) -> int:
        """We dial the peer now. Returns: for how many seconds."""
        self._dialled.add(peer)
        absence = self._absent.get(peer)
        if absence is None:
            return PATIENCES_S[-1]
        return SECOND_PATIENCE_S if absence.is_second else PATIENCES_S[absence.tries % len(PATIENCES_S)]

    def dialled(self, peer: PeerID, outcome: Outcome | None, *, began_s: float, now_s: float) -> Outcome:
        """A dial has ended. Args: outcome: None: nothing was dialled, because we have no network, or because libp2p had
        failed a moment before.

        Returns: what is known by it.
        """
        self._dialled.discard(peer)
        absence = self._absent.get(peer)
        if absence is None:
            if outcome is Outcome.REFUSED:
                self.refused(peer, now_s)
            return outcome or Outcome.NO_ANSWER
        absence.last = outcome or absence.last
        if absence.last is Outcome.REACHED:
            self._returned(peer, now_s)
            return Outcome.REACHED
        absence.tries += 1
        least_s = SECOND_EVERY_S if absence.is_second else EVERY_S
        every_s = min(max(least_s, _SHARE * (now_s - absence.since_s)), EVERY_S_MAX)
        jitter = 1.0 + _JITTER * (2.0 * self.rng.random() - 1.0)
        pause_s = AFTER_A_MOVE_S if absence.is_our_move and outcome is not None else 0.0
        absence.dial_at_s = max(now_s + pause_s, began_s + every_s * jitter)
        return absence.last


def goes_first(me: PeerID, peer: PeerID, *, ours: bool, theirs: bool) -> bool:
    """Whether we, and not that peer, dial when both of us miss the other: whoever cannot be dialled does, else the one
    whose name comes first.

    Args: ours, theirs: whether that end has an address that can be dialled from anywhere.
    """
    return theirs if ours != theirs else me < peer
