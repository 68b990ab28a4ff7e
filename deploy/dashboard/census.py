"""Tracks arrivals and departures of peers in the coordinator's table. Pure.

A peer counts as gone once two tables in a row lack it and some seconds have passed: a new coordinator does not know
every peer at first.
"""

from dataclasses import dataclass

from shoal.deploy.base.words import printable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PEER_NAME_CHARS_MAX
from shoal.protocol.messages import PeerStatus, SwarmStatus

GONE_AFTER_S = 4.0
NAMES_MAX = 4096
TEXT_CHARS_MAX = 240


def clean(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Return another peer's text without control characters, at most `chars_max` long."""
    shown = printable(text)
    return shown if len(shown) <= chars_max else shown[: chars_max - 1] + "…"


@dataclass(slots=True, kw_only=True)
class _Known:
    status: PeerStatus
    since_s: float
    seen_s: float
    missed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DepartedPeer:
    peer: PeerID
    name: str
    stage: int | None
    at_s: float


class Census:
    def __init__(self) -> None:
        self.departures: list[DepartedPeer] = []
        """Departures of peers that have not returned, oldest first."""
        self._known: dict[PeerID, _Known] = {}
        self._names: dict[PeerID, str] = {}
        self._by_ending: dict[str, str] = {}
        self._began = False

    def take(self, status: SwarmStatus, now_s: float) -> tuple[list[PeerStatus], list[PeerStatus], list[DepartedPeer]]:
        """Take a new table. Return (peers that are new in it, peers that changed their stage, peers that now count as
        gone). All peers of the first table are new."""
        joined, moved = [], []
        for peer in status.peers:
            known = self._known.get(peer.peer)
            if known is None:
                since_s = now_s if self._began else -float("inf")
                self._known[peer.peer] = _Known(status=peer, since_s=since_s, seen_s=now_s)
                joined.append(peer)
            else:
                if known.status.stage != peer.stage:
                    moved.append(peer)
                known.status, known.seen_s, known.missed = peer, now_s, 0
            self.name(peer.peer, peer.name)
        self._began = self._began or bool(status.peers)
        listed = {peer.peer for peer in status.peers}
        self.departures = [departure for departure in self.departures if departure.peer not in listed]
        gone = []
        for id_, known in list(self._known.items()):
            if id_ in listed:
                continue
            known.missed += 1
            if known.missed > 1 and now_s - known.seen_s >= GONE_AFTER_S:
                del self._known[id_]
                gone.append(DepartedPeer(peer=id_, name=self.name_of(id_), stage=known.status.stage, at_s=now_s))
        self.departures = (self.departures + gone)[-NAMES_MAX:]
        return joined, moved, gone

    def since_s(self, peer: PeerID) -> float:
        """Return when the peer came, on the clock of `take`; minus infinity for unknown peers and the first table's."""
        known = self._known.get(peer)
        return known.since_s if known else -float("inf")

    def name(self, peer: PeerID, name: str) -> None:
        """Remember the name that a peer gives itself, which may be empty or any text."""
        name = clean(name, PEER_NAME_CHARS_MAX)
        if name and (peer in self._names or len(self._names) < NAMES_MAX):
            self._names[peer] = name
            self._by_ending[peer[-8:]] = name

    def name_of(self, peer: PeerID) -> str:
        return self._names.get(peer) or peer[-8:]

    def named(self, ending: str) -> str:
        """Return the name of the peer with an identifier that ends in `ending`; `ending` itself if unknown."""
        return self._by_ending.get(ending, ending)
