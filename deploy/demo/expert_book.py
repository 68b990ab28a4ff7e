"""Counts placements of experts in a demo, from the coordinators' statuses. Pure."""

from collections.abc import Mapping

import msgspec

from shoal.deploy.dashboard.picture import expert_views
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import SwarmStatus

_Places = Mapping[tuple[int, int], frozenset[PeerID]]
"""(stage, expert) -> peers named by the plan."""


class ExpertFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures about the placement of experts."""

    placements: int
    """The number of plans, after the first, that moved some expert."""
    copies: int
    """The number of copies that peers had to fetch for those plans."""
    holders_min: int
    """The fewest holders of an expert in any plan."""
    holders_max: int
    load_max: float | None
    """The load of the busiest expert at the end, relative to an even share."""


class ExpertBook:
    def __init__(self) -> None:
        self._placements = self._copies = 0
        self._holders_min: int | None = None
        self._holders_max = 0
        self._places: _Places = {}
        self._load_max: float | None = None

    def see(self, status: SwarmStatus) -> bool:
        """Take a status that names all peers of its plan. Returns: True if the placement has changed."""
        experts = expert_views(status)
        places = {
            (expert.stage, expert.expert): frozenset(status.peers[at].peer for at in (*expert.holders, *expert.coming))
            for expert in experts
        }
        loads = [expert.load for expert in experts if expert.load is not None]
        self._load_max = max(loads, default=self._load_max)
        before, self._places = self._places, places
        if not places or places == before:
            return False
        counts = [len(peers) for peers in places.values()]
        self._holders_min = min(counts) if self._holders_min is None else min(self._holders_min, *counts)
        self._holders_max = max(self._holders_max, *counts)
        if before:
            self._placements += 1
            self._copies += sum(len(peers - before.get(place, frozenset())) for place, peers in places.items())
        return True

    @property
    def figures(self) -> ExpertFigures | None:
        """The figures; None: no experts are placed."""
        if self._holders_min is None:
            return None
        return ExpertFigures(
            placements=self._placements,
            copies=self._copies,
            holders_min=self._holders_min,
            holders_max=self._holders_max,
            load_max=self._load_max,
        )
