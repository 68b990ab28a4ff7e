"""Counts placements of experts in a demo, from the coordinators' statuses. Pure."""

from collections.abc import Mapping

import msgspec

from shoal.deploy.dashboard.picture import expert_views
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import SwarmStatus

_Places = Mapping[tuple[int, int], frozenset[PeerID]]
"""(stage, expert) -> peers that hold the expert, and peers that the plan tells to fetch it."""


class ExpertFigures(msgspec.Struct, kw_only=True):
    """Figures about the placement of experts."""

    placements: int = 0
    """How often a new plan has changed the holders of at least one expert; the first plan is not counted."""
    copies: int = 0
    """How many copies of experts these changes have made peers fetch."""
    holders_min: int
    """The smallest number of holders that any expert had in any plan."""
    holders_max: int = 0
    load_max: float | None = None
    """The load of the busiest expert at the end, divided by the mean load; None: unknown."""


class ExpertBook:
    def __init__(self) -> None:
        self.figures: ExpertFigures | None = None
        """The figures up to now; None: the run does not place experts on single peers."""
        self._places: _Places = {}

    def see(self, status: SwarmStatus) -> bool:
        """Take a status that names all peers of its plan. Returns: True if the experts' placement has changed."""
        experts = expert_views(status)
        places = {
            (expert.stage, expert.expert): frozenset(status.peers[at].peer for at in (*expert.holders, *expert.coming))
            for expert in experts
        }
        before, self._places = self._places, places
        if not places:
            return False
        counts = [len(peers) for peers in places.values()]
        self.figures = figures = self.figures or ExpertFigures(holders_min=min(counts))
        figures.load_max = max((each.load for each in experts if each.load is not None), default=figures.load_max)
        if places == before:
            return False
        figures.holders_min = min(figures.holders_min, *counts)
        figures.holders_max = max(figures.holders_max, *counts)
        if before:
            figures.placements += 1
            figures.copies += sum(len(peers - before.get(place, frozenset())) for place, peers in places.items())
        return True
