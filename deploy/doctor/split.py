"""Detects two swarms that train the same run and do not know each other. Pure.

This happens when members are invited by peers that were never introduced, or when a healed network partition goes
unnoticed; `split_watch.py` looks for it.
"""

import itertools
from collections.abc import Sequence

from shoal.deploy.doctor.findings import SwarmView
from shoal.deploy.doctor.problem import Problem
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import SwarmStatus


def view_of(asked: PeerID, status: SwarmStatus) -> SwarmView:
    return SwarmView(
        asked=asked,
        coordinator=status.coordinator,
        term=status.term,
        members=frozenset(peer.peer for peer in status.peers),
    )


def split_of(views: Sequence[SwarmView]) -> Problem | None:
    """Return a problem if two of these views of one run have no member in common."""
    told = [view for view in views if view.members]
    for one, other in itertools.combinations(told, 2):
        if one.coordinator != other.coordinator and not one.members & other.members:
            return Problem(
                code="two-swarms",
                side="host",
                sentence=f"this run is trained by two swarms that do not know each other: {_called(one)}, and "
                f"{_called(other)}",
                remedy="let one peer leave and join again with an invite that names peers of both (`shoal invite` of "
                "either); what the smaller swarm has trained since is lost",
                fatal=False,
            )
    return None


def _called(view: SwarmView) -> str:
    count = len(view.members)
    return f"{count} peer{'' if count == 1 else 's'} around {view.coordinator[-8:]} (term {view.term})"
