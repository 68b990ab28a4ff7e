"""Decides which range of a layer is asked of which peer. Pure: `StateFetcher` sends the requests.

Three kinds of peers bring ranges. *Holders* have whole layers; each is asked for two ranges at a time, so that its line
does not idle. *Group peers* fetch the same layers at the same time: each range has an owner among all fetching peers,
and we ask a group peer for the ranges that it owns. *Carriers* fetch ranges of a layer with a single holder for us.
Group peers and carriers may be slow, so a holder with nothing else to send is asked for their ranges after a while.
"""

import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from shoal.protocol.identity import PeerID

_REFUSED_S = 1.0
"""Time after which a helper that refused a range is asked again."""
RELAY_WAIT_S = 2.0
"""The longest time that a group peer waits for a range that it is fetching; then it refuses the range for now. A group
peer that refuses sooner fetches another version, or nothing."""
_OTHERS_S_FIRST = 2.0
"""Seconds for which we do not ask a holder for ranges that helpers should bring, since it would send the same bytes
twice. A measured time replaces this value once the holder has sent us a range (`_leaves_to_others_s`)."""


@dataclass(frozen=True, slots=True)
class Range:
    """Elements [start, stop) of one tensor of one layer. `tensor`: 0 for the parameters, 1 and 2 for the moments."""

    key: str
    tensor: int
    start: int
    stop: int
    owner: PeerID
    """The fetching peer that gets this range from a holder, and passes it on."""


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """A request to `peer` for a range."""

    peer: PeerID
    wanted: Range
    at_s: float
    helps: bool = False
    """`peer` is a group peer or a carrier."""
    via: PeerID | None = None
    """The holder from which a carrier fetches the range."""


class RangeFetch:
    """The ranges that one fetch lacks, and the peers that may bring them. The caller sends each request that `due`
    returns, and reports its end by `came` or `failed`. Args: group_peers, carriers: helpers, see above."""

    def __init__(self, me: PeerID, group_peers: Collection[PeerID] = (), carriers: Sequence[PeerID] = ()) -> None:
        self._me, self._group_peers = me, frozenset(group_peers)
        carrying = [peer for peer in carriers if peer not in self._group_peers]
        self._helpers = [(peer, False) for peer in sorted(group_peers)] + [(peer, True) for peer in carrying[:32]]
        """(Peer, whether it is a carrier)."""
        self.sources: dict[str, list[PeerID]] = {}
        """Layer -> the holders that may be asked for it."""
        self.helped: dict[str, bool] = {}
        """Layer -> True: helpers were asked for a part of it, or an earlier fetch left a part; False: it failed the
        check of its digest, and is now fetched from holders only; absent: neither."""
        self.left: dict[Range, None] = {}
        """The ranges that have not arrived."""
        self._todo: dict[Range, None] = {}
        """The ranges that no peer is asked for now."""
        self._lent: dict[Range, None] = {}
        """The ranges that only a helper is asked for."""
        self._began_s = 0.0
        self._under_way = Counter[tuple[PeerID, bool]]()
        """(Peer, whether it is asked as a helper) -> number of requests under way."""
        self._rests_until_s: dict[PeerID, float] = {}
        """Helper that failed to bring a range -> time until which it is asked for none; inf: for good."""
        self._absent: set[PeerID] = set()
        """Group peers that are lost, or did not fetch what we fetch when they were last asked."""
        self._took_s: dict[PeerID, float] = {}
        """Holder -> seconds that its slowest range took."""

    def begin(
        self, key: str, ranges: Iterable[tuple[int, int, int]], here: Collection[tuple[int, int]], now_s: float
    ) -> None:
        """Fetch a layer. Args: ranges: (tensor, first element, end) of all of it. here: (tensor, first element) of the
        ranges that have arrived."""
        self._began_s = now_s
        group_peers = self._group_peers.difference(self.sources[key]) if self.helped.get(key, True) else ()
        fetching, numbers = sorted({self._me, *group_peers}), Counter[int]()
        for tensor, start, stop in ranges:
            owner = owner_of(key, tensor, numbers[tensor], fetching)
            numbers[tensor] += 1
            if (tensor, start) not in here:
                wanted = Range(key, tensor, start, stop, owner)
                self.left[wanted] = self._todo[wanted] = None

    @property
    def holders(self) -> list[PeerID]:
        return list(dict.fromkeys(peer for sources in self.sources.values() for peer in sources))

    def orphan(self) -> str | None:
        """Return a layer that cannot come any more: nothing is left but layers that have lost all holders."""
        keys = dict.fromkeys(wanted.key for wanted in self.left)
        return None if any(self.sources[key] for key in keys) else next(iter(keys), None)

    def due(self, now_s: float) -> list[RangeRequest]:
        """Return the requests to send now."""
        asks: list[RangeRequest] = []
        for holder in self.holders:
            while self._under_way[holder, False] < 2 and (wanted := self._of_holder(holder, now_s)) is not None:
                (self._lent if wanted in self._lent else self._todo).pop(wanted)
                self._under_way[holder, False] += 1
                asks.append(RangeRequest(holder, wanted, now_s))
        for peer, carries in self._helpers:
            while self._under_way[peer, True] < 2 and (wanted := self._of_helper(peer, carries, now_s)) is not None:
                self.helped[wanted.key] = True
                self._lent[wanted] = self._todo.pop(wanted)
                self._under_way[peer, True] += 1
                via = self.sources[wanted.key][0] if carries else None
                asks.append(RangeRequest(peer, wanted, now_s, helps=True, via=via))
        return asks

    def next_s(self, now_s: float) -> float:
        """Return when to call `due` again if no request ends before; inf: there is no need to."""
        idle = (peer for peer in self.holders if not self._under_way[peer, False])
        asked_s = (self._began_s + self._leaves_to_others_s(peer) for peer in idle)
        return min((at_s for at_s in (*asked_s, *self._rests_until_s.values()) if at_s > now_s), default=math.inf)

    def came(self, ask: RangeRequest, now_s: float) -> bool:
        """Note that a range has arrived. Returns: False: it had arrived before, from another peer."""
        self._under_way[ask.peer, ask.helps] -= 1
        if ask.helps:
            self._absent.discard(ask.peer)
        else:
            self._took_s[ask.peer] = max(now_s - ask.at_s, self._took_s.get(ask.peer, 0.0))
        is_new = ask.wanted in self.left
        for ranges in (self.left, self._todo, self._lent):
            ranges.pop(ask.wanted, None)
        return is_new

    def failed(self, ask: RangeRequest, now_s: float, *, is_lost: bool) -> None:
        """Note that a range has not arrived. Args: is_lost: the peer is asked for nothing more."""
        self._under_way[ask.peer, ask.helps] -= 1
        if ask.wanted in self.left and (not ask.helps or ask.wanted in self._lent):
            self._lent.pop(ask.wanted, None)
            self._todo[ask.wanted] = None
        if ask.helps:
            self._rests_until_s[ask.peer] = math.inf if is_lost else now_s + _REFUSED_S
            self._absent.discard(ask.peer)
            if is_lost or now_s < ask.at_s + RELAY_WAIT_S:
                self._absent.add(ask.peer)
        elif is_lost:
            for sources in self.sources.values():
                if ask.peer in sources:
                    sources.remove(ask.peer)

    def again(self, key: str) -> PeerID | None:
        """Note that a layer failed its check: it is fetched again, from holders only, and if they alone have sent it,
        without the first of them (of several, we cannot know which one lied). Returns: the single holder that sent the
        whole layer; None: no single peer is to blame."""
        sources, was_helped = self.sources[key], self.helped.get(key, False)
        self.helped[key] = False
        if not was_helped and len(sources) == 1:
            return sources[0]
        if not was_helped:
            del sources[0]
        return None

    # --- which range ---

    def _of_holder(self, holder: PeerID, now_s: float) -> Range | None:
        """Return the next range that we own, or else that an absent group peer owns. If there is none, return, after a
        while, the range that helpers would ask for last, or else the one that they were asked for first."""
        for owners in ({self._me}, self._absent):
            for wanted in self._todo:
                if wanted.owner in owners and holder in self.sources[wanted.key]:
                    return wanted
        if self._under_way[holder, False] or now_s < self._began_s + self._leaves_to_others_s(holder):
            return None
        others = (*reversed(self._todo), *self._lent)
        return next((wanted for wanted in others if holder in self.sources[wanted.key]), None)

    def _of_helper(self, helper: PeerID, carries: bool, now_s: float) -> Range | None:
        """Return the first range that a group peer owns, or for a carrier the last one with a single holder."""
        if now_s < self._rests_until_s.get(helper, 0.0):
            return None
        if not carries:
            return next((wanted for wanted in self._todo if wanted.owner == helper), None)
        for wanted in reversed(self._todo):  # we begin with the first
            sources = self.sources[wanted.key]
            if len(sources) == 1 and sources[0] not in (helper, self._me) and self.helped.get(wanted.key, True):
                return wanted
        return None

    def _leaves_to_others_s(self, holder: PeerID) -> float:
        took_s = self._took_s.get(holder)
        return _OTHERS_S_FIRST if took_s is None else (2 + len(self._group_peers)) * took_s


def owner_of(key: str, tensor: int, number: int, fetching: Sequence[PeerID]) -> PeerID:
    """Return the owner of a range: the peer that fetches it from a holder for all peers that fetch the layer.

    Args:
        number: the range's index within its tensor.
        fetching: the fetching peers, in an order that is the same for all of them.
    """
    return fetching[(zlib.crc32(f"{key}/{tensor}".encode()) + number) % len(fetching)]
