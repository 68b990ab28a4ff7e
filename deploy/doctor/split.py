"""Detects two swarms that train the same run and do not know each other. Pure.

This happens when members are invited by peers that were never introduced, or when a healed network partition goes
unnoticed; `split_watch.py` looks for it.
"""

import itertools
from collections.abc import Sequence

from shoal.deploy.doctor.findings import Problem
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import SwarmStatus


def members_of(status: SwarmStatus) -> set[PeerID]:
    return {peer.peer for peer in status.peers}


def split_of(statuses: Sequence[SwarmStatus]) -> Problem | None:
    """Return a problem if two of these statuses of one run have no member in common."""
    told = [status for status in statuses if status.peers]
    for one, other in itertools.combinations(told, 2):
        if one.coordinator != other.coordinator and not members_of(one) & members_of(other):
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


def _called(status: SwarmStatus) -> str:
    count = len(members_of(status))
    return f"{count} peer{'' if count == 1 else 's'} around {status.coordinator[-8:]} (term {status.term})"
