"""The orders that put keys out of the run, as far as this peer knows them, and the votes for orders of a majority.
Pure."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.exclusion import Exclusion, Holds, exclusion_holds, open_exclusion
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import EXCLUSIONS_MAX
from shoal.protocol.plan import Plan, SignedPlan


class Exclusions:
    """The orders of exclusion that hold.

    Args:
        owner: of the run; its order needs no votes.
        holds: checks a signature under an order.
        plans: the live plan, and the one before it while some peers still vote by that.
    """

    def __init__(self, *, owner: PeerID, holds: Holds, plans: Callable[[], Sequence[SignedPlan]]) -> None:
        self._owner, self._holds, self._plans = owner, holds, plans
        self._orders: tuple[Exclusion, ...] = ()
        self._voted: dict[tuple[str, tuple[bytes, ...]], Exclusion] = {}
        self.keys: frozenset[bytes] = frozenset()
        """All keys that are excluded."""

    @property
    def orders(self) -> tuple[bytes, ...]:
        """The orders that the next plan must carry."""
        return tuple(order.encode() for order in self._orders)

    def note(self, order: Exclusion) -> bool:
        """Take note of an order, or of a vote for one. Returns: whether it excludes keys that were not excluded
        before."""
        if self.keys.issuperset(order.keys):
            return False
        if not order.signature:
            order = self._with_votes_so_far(order)
        if not exclusion_holds(order, owner=self._owner, plans=self._plans(), holds=self._holds):
            return False
        return self._take(order)

    def proves(self, data: bytes) -> bool:
        """Whether an order holds that is in a plan for which we are asked to vote."""
        try:
            order = open_exclusion(data, PeerID(""))
        except RemoteError:
            return False
        known = order in self._orders
        return known or exclusion_holds(order, owner=self._owner, plans=self._plans(), holds=self._holds)

    def obeyed(self, plan: Plan) -> None:
        """A plan is live, so its voters have checked its orders."""
        for data in plan.exclusions:
            with suppress(RemoteError):
                self._take(open_exclusion(data, PeerID("")))

    def lacks(self, plan: Plan) -> tuple[bytes, ...]:
        """The orders that we know and the plan does not carry: its coordinator has not heard of them."""
        carried = set(plan.exclusions)
        return tuple(data for data in self.orders if data not in carried)

    def _take(self, order: Exclusion) -> bool:
        if self.keys.issuperset(order.keys):
            return False
        # The owner's orders name all that it ever excluded, so that a later one replaces those before.
        kept = tuple(known for known in self._orders if not set(known.keys).issubset(order.keys))
        if len(kept) >= EXCLUSIONS_MAX:
            return False
        self._orders = (*kept, order)
        self.keys = self.keys.union(order.keys)
        return True

    def _with_votes_so_far(self, order: Exclusion) -> Exclusion:
        """Add up votes. A peer that votes tells everybody, and everybody adds up."""
        bases = {plan.digest: plan.plan for plan in self._plans()}
        self._voted = {name: voted for name, voted in self._voted.items() if name[0] in bases}
        if order.base not in bases:
            return order
        electors = bases[order.base].electors
        name = (order.base, order.keys)
        votes = dict(self._voted[name].votes) if name in self._voted else {}
        for at, signature in order.votes[: len(electors)]:
            if 0 <= at < len(electors) and at not in votes and self._holds(electors[at], signature, order.body):
                votes[at] = signature
        summed = msgspec.structs.replace(order, votes=tuple(sorted(votes.items())))
        if votes and (name in self._voted or len(self._voted) < EXCLUSIONS_MAX):
            self._voted[name] = summed
        return summed
