"""Majority rule of a plan's electors. Pure."""

from collections.abc import Collection

from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan


def is_quorum(voters: Collection[PeerID], plan: Plan, owner: PeerID) -> bool:
    """True if `voters` have more than half of the weight of the electors of `plan`.

    Any two majorities share an elector: two disjoint sets cannot both have more than half, and the owner breaks ties.
    Paxos needs nothing else of its quorums (Gifford, "Weighted voting for replicated data", 1979).
    """
    weights = plan.weights
    twice, total = 2 * sum(weight for peer, weight in weights.items() if peer in voters), sum(weights.values())
    if twice == total and len(weights) <= 4:  # so one of two peers can go on alone
        return owner in voters and owner in weights
    return twice > total
