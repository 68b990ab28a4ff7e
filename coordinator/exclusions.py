"""Collects the exclusion orders that this peer knows, and the votes for orders of a majority. Pure."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.exclusion import Exclusion, exclusion_holds, in_force, open_exclusion
from shoal.protocol.identity import PeerID, peer_id_of
from shoal.protocol.limits import EXCLUSION_BYTES_MAX, EXCLUSIONS_MAX
from shoal.protocol.membership import Excluded, invite_name
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.statement import VerifySignature

_UNDO = " (`shoal readmit` on the host undoes it)"
_NAMED_MAX = 4
"""Maximum number of names in one sentence; the remaining keys are counted."""


class Exclusions:
    """The valid exclusion orders.

    Args:
        owner: the run's owner, whose order needs no votes.
        verify: checks a signature of an order.
        plans: the live plan, and its predecessor while some peers still vote by that.
    """

    def __init__(self, *, owner: PeerID, verify: VerifySignature, plans: Callable[[], Sequence[SignedPlan]]) -> None:
        self._owner, self._verify, self._plans = owner, verify, plans
        self._orders: tuple[Exclusion, ...] = ()
        self._voted: dict[tuple[str, bytes], Exclusion] = {}
        self.excluded = Excluded()

    @property
    def orders(self) -> tuple[bytes, ...]:
        """The orders that the next plan must contain."""
        return tuple(order.encode() for order in self._orders)

    def note(self, order: Exclusion) -> bool:
        """Record an order, or a vote for one. Returns: whether the order is valid and new."""
        if not self._is_news(order):
            return False
        if not order.signature:
            order = self._with_votes_so_far(order)
        if not exclusion_holds(order, owner=self._owner, plans=self._plans(), verify=self._verify):
            return False
        return self._take(order)

    def proves(self, data: bytes) -> bool:
        """True if an order in an offered plan is valid."""
        try:
            order = open_exclusion(data, PeerID(""))
        except RemoteError:
            return False
        known = order in self._orders
        return known or exclusion_holds(order, owner=self._owner, plans=self._plans(), verify=self._verify)

    def obeyed(self, plan: Plan) -> None:
        """Take the orders of a live plan; its voters have checked them."""
        for data in plan.exclusions:
            with suppress(RemoteError):
                self._take(open_exclusion(data, PeerID("")))

    def lacks(self, plan: Plan) -> tuple[bytes, ...]:
        """Return the known orders that the plan does not contain, because its coordinator does not know them."""
        carried = set(plan.exclusions)
        return tuple(data for data in self.orders if data not in carried)

    def _is_news(self, order: Exclusion) -> bool:
        """True if the order names a new key, or is the owner's newest order."""
        if not {key for known in self._orders for key in known.keys}.issuperset(order.keys):
            return True
        return bool(order.signature) and all(order.number > known.number for known in self._orders if known.signature)

    def _take(self, order: Exclusion) -> bool:
        if not self._is_news(order):
            return False
        # Each order of the owner names every key that it ever excluded, so it replaces earlier ones. An order with a
        # key of its own stays: plans must never lose a key.
        kept = tuple(
            known
            for known in self._orders
            if not set(known.keys).issubset(order.keys) or (known.signature and known.number > order.number)
        )
        orders = (*kept, order)
        # A plan has room for EXCLUSIONS_MAX orders; one place is kept for the owner's.
        if len(orders) > EXCLUSIONS_MAX - (not order.signature):
            return False
        if sum(len(known.encode()) for known in orders) > EXCLUSION_BYTES_MAX:
            return False
        self._orders = orders
        self.excluded = in_force(self._orders)
        return True

    def told(self, name_of: Callable[[PeerID], str]) -> tuple[str, ...]:
        """Return a sentence for each order: the excluded keys, the signer, and the command that undoes it."""
        told, twice = [], set(self.excluded.keys)
        for order in self._orders:
            twice.difference_update(order.keys)
            keys = [key for key in order.keys if key in self.excluded.keys]
            names = [_said_key(key, order, name_of) for key in keys[:_NAMED_MAX]]
            if len(keys) > _NAMED_MAX:
                names.append(f"{len(keys) - _NAMED_MAX} more")
            if names:
                by = "the owner" if order.signature else f"{len(order.votes)} members"
                told.append(f"excluded by {by}: {', '.join(names)}{_UNDO}")
        told += [
            f"excluded because two of its members are: the invite {invite_name(key)}{_UNDO}" for key in sorted(twice)
        ]
        return tuple(told)

    def _with_votes_so_far(self, order: Exclusion) -> Exclusion:
        """Add up votes. Each vote is sent to every peer, so every peer can count."""
        bases = {plan.digest: plan.plan for plan in self._plans()}
        self._voted = {name: voted for name, voted in self._voted.items() if name[0] in bases}
        if order.base not in bases:
            return order
        electors = bases[order.base].electors
        name = (order.base, order.body)
        votes = dict(self._voted[name].votes) if name in self._voted else {}
        for at, signature in order.votes[: len(electors)]:
            if 0 <= at < len(electors) and at not in votes and self._verify(electors[at], signature, order.body):
                votes[at] = signature
        summed = msgspec.structs.replace(order, votes=tuple(sorted(votes.items())))
        if votes and (name in self._voted or len(self._voted) < EXCLUSIONS_MAX):
            self._voted[name] = summed
        return summed


def _said_key(key: bytes, order: Exclusion, name_of: Callable[[PeerID], str]) -> str:
    """Name an excluded key for people, in a form that `shoal readmit` accepts."""
    if order.invites and order.invites[order.keys.index(key)] == key:
        return f"the invite {invite_name(key)}"
    peer = peer_id_of(key)
    name = name_of(peer)
    return f"{name} ({peer[-8:]})" if name else peer[-8:]
