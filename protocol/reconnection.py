"""Decides which connections are dead, and when to dial which peer again. Pure: the caller passes the time.

Nothing reports that a cable was pulled, a router forgot a connection, or a laptop moved to another network. TCP
retransmits after 0.2, 0.4, 0.8 ... seconds, so recovery may take as long again as the outage. A connection from a local
address that no longer exists never recovers, though it looks alive for minutes. A new connection takes only five round
trips. So a connection with one of these signs is dropped, and its peer is dialled until it answers:

| sign                                                                 | dead connections                          |
|----------------------------------------------------------------------|-------------------------------------------|
| nothing came back for `DEAD_S` although sent data is unacknowledged  | this connection: the peer's kernel would  |
|                                                                      | acknowledge even for a stopped process    |
| the local address is no longer one of this machine's                 | this connection                           |
| this process stood still, and nothing has come since                 | this connection                           |
| the machine was suspended                                            | all connections                           |
| the kernel shows no figures, and two calls went unanswered           | all of that peer                          |
| the peer reached us over a third peer (a carrier), so it has no      | all of that peer that are not new         |
| connection to us (`missed_by`)                                       |                                           |

If one connection of a peer is dead, all of that peer's are dropped: the daemon might next use the dead one.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from shoal.protocol.identity import PeerID

DEAD_S: Final = 3.0
"""Seconds without a byte from the peer, while sent data is unacknowledged, after which a connection is dead. Dropping
it loses the data in flight, but TCP itself would wait about as long again."""
STOOD_STILL_S: Final = 8.0
"""A process that stood still for this long was suspended, or its machine was: on a busy machine the event loop is late
by less."""
UNANSWERED_MAX: Final = 2
EVERY_S: Final = 1.0
EVERY_S_MAX: Final = 30.0
_SHARE: Final = 0.05
"""Time from the start of a dial to the next one, as a fraction of the peer's absence so far: 3 s after a minute."""
DIALS_MAX: Final = 16
PATIENCES_S: Final = (2, 2, 4)
"""Timeouts of successive dials, used in turn. A dial that lasts longer than libp2p's own limit of five seconds blocks
further dials of the address for over five seconds; a shorter dial does not."""
SECOND_AFTER_S: Final = 6.0
SECOND_EVERY_S: Final = 8.0
SECOND_PATIENCE_S: Final = 1
"""Timeout of dials by the end that dials second. If both ends notice a silence, one dials first (`goes_first`), and the
other dials late and briefly. libp2p dials from its listening port, so simultaneous dials would become one connection
that both ends opened; its handshake fails, and neither end dials again for five seconds."""
AFTER_A_MOVE_S: Final = 2.5
"""Pause after an unanswered dial from our new address. A peer behind a NAT cannot be dialled from an address that is
new to its NAT. Such a peer dials us once it notices the loss, and its dials fail while we dial."""
FRESH_S: Final = 5.0
LINGER_S: Final = 60.0
"""How long a peer is still dialled after the plan has removed it: perhaps it was removed because it was away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The kernel's figures of one connection to a peer, a way to reach it."""

    is_owed: bool
    """True if sent data is not acknowledged yet."""
    silent_s: float
    local: str


class DialOutcome(Enum):
    """How a dial ended."""

    REACHED = auto()
    REFUSED = auto()
    """A machine answers at the address, but nothing listens at the port, or a peer other than the dialled one does."""
    NO_ANSWER = auto()


@dataclass(slots=True, kw_only=True)
class _Absence:
    since_s: float
    dial_at_s: float
    is_second: bool = False
    is_our_move: bool = False
    tries: int = 0
    last: DialOutcome = DialOutcome.NO_ANSWER


@dataclass(frozen=True, slots=True, kw_only=True)
class Todo:
    drop: tuple[PeerID, ...] = ()
    dial: tuple[PeerID, ...] = ()


@dataclass(slots=True)
class Reconnection:
    """Tracks our connections to the peers to which we want to stay connected.

    Args:
        goes_first: returns True if we dial before the given peer when both ends have lost their connections.
        rng: for jitter.
    """

    goes_first: Callable[[PeerID], bool]
    rng: random.Random
    _wanted: dict[PeerID, float] = field(default_factory=dict)
    _absent: dict[PeerID, _Absence] = field(default_factory=dict)
    _back_s: dict[PeerID, float] = field(default_factory=dict)
    _unchanged: dict[PeerID, tuple[frozenset[str], float]] = field(default_factory=dict)
    _dialled: set[PeerID] = field(default_factory=set)
    _stalled_s: dict[str, float] = field(default_factory=dict)
    """Connection -> time since which it has had unacknowledged data and has received nothing."""
    _unanswered: dict[PeerID, int] = field(default_factory=dict)

    def want(self, peers: Collection[PeerID], now_s: float) -> None:
        """Stay connected to `peers` from now on, and for `LINGER_S` to the peers of earlier calls."""
        for peer, until_s in tuple(self._wanted.items()):
            if peer not in peers:
                self._wanted[peer] = min(until_s, now_s + LINGER_S)
        self._wanted.update(dict.fromkeys(peers, math.inf))

    def is_absent(self, peer: PeerID) -> bool:
        return peer in self._absent

    def may_be_there(self, peer: PeerID) -> bool:
        """True if we have no connection to the peer, but our last dial of it was not refused: it may come back."""
        absence = self._absent.get(peer)
        return absence is not None and absence.last is not DialOutcome.REFUSED

    def is_untried(self, peer: PeerID) -> bool:
        """True if we have not dialled an absent peer yet, and it is our turn to dial."""
        absence = self._absent.get(peer)
        return absence is not None and not absence.tries and absence.dial_at_s <= absence.since_s

    def is_fresh(self, peer: PeerID, now_s: float) -> bool:
        """True if the peer is absent or came back less than `FRESH_S` ago: a connection to it is new, thus alive."""
        return peer in self._absent or now_s < self._back_s.get(peer, -math.inf) + FRESH_S

    def heard(self, peer: PeerID) -> None:
        """Record that data of the peer has arrived."""
        self._unanswered.pop(peer, None)

    def unanswered(self, peer: PeerID) -> None:
        """Record that a call to the peer timed out."""
        self._unanswered[peer] = self._unanswered.get(peer, 0) + 1

    def missed_by(self, peer: PeerID, now_s: float) -> bool:
        """Record that the peer has no connection to us, since it used a carrier (a third peer). Return True if our
        connections to the peer are dead. New ones are not: the peer may have chosen the carrier before they existed."""
        _, since_s = self._unchanged.get(peer, (frozenset(), math.inf))
        if now_s < since_s + FRESH_S or self.is_fresh(peer, now_s):
            return False
        self.lost(peer, now_s)
        return True

    def refused(self, peer: PeerID, now_s: float) -> None:
        """Record that a dial by the network daemon, not by us, was refused at the peer's address."""
        if peer not in self._absent:
            self.lost(peer, now_s)
        if peer in self._absent:
            self._absent[peer].last = DialOutcome.REFUSED

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
        """Return the connections to drop and the peers to dial now.

        Args:
            connections: peer -> connection name -> the kernel's figures; None: the kernel shows none.
            known: peers with a known address.
            gone: addresses that this machine no longer has.
            stood_still_s: seconds for which this process has just stood still.
            was_suspended: True if the machine was suspended since the last call.
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
        """Record that we have no connection to the peer.

        Args:
            pause_s: seconds in which we do not dial, since the peer is expected to dial us.
            found_by_both: the peer also notices the loss, and will dial us.
            is_our_move: our own address has changed.
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
        """Record that a dial begins. Returns: the dial's timeout in seconds."""
        self._dialled.add(peer)
        absence = self._absent.get(peer)
        if absence is None:
            return PATIENCES_S[-1]
        return SECOND_PATIENCE_S if absence.is_second else PATIENCES_S[absence.tries % len(PATIENCES_S)]

    def dialled(self, peer: PeerID, outcome: DialOutcome | None, *, began_s: float, now_s: float) -> DialOutcome:
        """Record the end of a dial.

        Args:
            outcome: None: no address was dialled (no network, or libp2p still waits after an earlier failure).
        Returns: `outcome`; if that is None, the outcome of the last earlier dial (NO_ANSWER without one).
        """
        self._dialled.discard(peer)
        absence = self._absent.get(peer)
        if absence is None:
            if outcome is DialOutcome.REFUSED:
                self.refused(peer, now_s)
            return outcome or DialOutcome.NO_ANSWER
        absence.last = outcome or absence.last
        if absence.last is DialOutcome.REACHED:
            self._returned(peer, now_s)
            return DialOutcome.REACHED
        absence.tries += 1
        least_s = SECOND_EVERY_S if absence.is_second else EVERY_S
        every_s = min(max(least_s, _SHARE * (now_s - absence.since_s)), EVERY_S_MAX)
        jitter = 1.0 + 0.2 * (2.0 * self.rng.random() - 1.0)
        pause_s = AFTER_A_MOVE_S if absence.is_our_move and outcome is not None else 0.0
        absence.dial_at_s = max(now_s + pause_s, began_s + every_s * jitter)
        return absence.last


def goes_first(me: PeerID, peer: PeerID, *, ours: bool, theirs: bool) -> bool:
    """Return True if we dial first when both ends have lost their connections. If only one end can be dialled (`ours`:
    we can, `theirs`: the peer can), the end that cannot be dialled dials first; else the end with the lower PeerID."""
    return theirs if ours != theirs else me < peer
