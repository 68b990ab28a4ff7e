"""Counts how experts were placed in a demo, from the coordinators' statuses. Pure."""

from collections.abc import Mapping

import msgspec

from shoal.deploy.dashboard.picture import expert_views
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import SwarmStatus

_Places = Mapping[tuple[int, int], frozenset[PeerID]]
"""(stage, expert) -> the peers that the plan names."""


class ExpertFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of how experts were placed."""

    placements: int
    """How many plans, after the first, gave some expert to other peers."""
    copies: int
    """How many copies peers had to fetch for those plans."""
    holders_min: int
    """The fewest peers that any plan named for an expert."""
    holders_max: int
    """The most peers that any plan named for an expert."""
    load_max: float | None
    """The load of the busiest expert at the end, over an even share."""


class ExpertBook:
    def __init__(self) -> None:
        self._placements = self._copies = 0
        self._holders_min: int | None = None
        self._holders_max = 0
        self._places: _Places = {}
        self._load_max: float | None = None

    def see(self, status: SwarmStatus) -> bool:
        """Args: status: one that names all peers of its plan. Returns: whether experts are placed otherwise now."""
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
        """The figures; None: there were no experts that are placed."""
        if self._holders_min is None:
            return None
        return ExpertFigures(
            placements=self._placements,
            copies=self._copies,
            holders_min=self._holders_min,
            holders_max=self._holders_max,
            load_max=self._load_max,
        )
