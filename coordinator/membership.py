"""Decides which newcomers may join the run, and keeps the orders that exclude members from it. Pure."""

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.exclusion import Exclusion, exclusion_holds, in_force, open_exclusion
from shoal.protocol.identity import PeerID, peer_id_of
from shoal.protocol.limits import (
    EXCLUSION_BYTES_MAX,
    EXCLUSIONS_MAX,
    OPEN_NEWCOMERS_MIN,
    OPEN_PER_NETWORK_MAX,
    OPEN_PROBATION_S,
)
from shoal.protocol.membership import Excluded, Members, invite_name
from shoal.protocol.messages import Advert
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.statement import VerifySignature

_IP = re.compile(r"^/ip[46]/([^/]+)/")
_UNDO = " (`shoal readmit` on the host undoes it)"
NAMED_MAX = 3
"""The most peers, keys or pairs that one sentence names: it must fit on a line. It only counts further ones."""


class Admission:
    """Admits newcomers. Invites limit them; an open run (`is_open`: its spec lets any peer join) takes few at a
    time."""

    def __init__(self, members: Members, now_s: Callable[[], float], *, is_open: bool) -> None:
        self._members, self._now_s, self._is_open = members, now_s, is_open
        self._let_in_s: dict[PeerID, float] = {}
        """Newcomer on probation in an open run -> the time at which it was let in."""

    def why_not(self, newcomer: PeerID, advert: Advert, present: Mapping[PeerID, Advert | None]) -> str:
        """Admit `newcomer` if it may join. Returns: why it may not; empty: it is admitted, or is `present` already."""
        if newcomer in present:
            return ""
        if not self._is_open or newcomer == self._members.owner:
            return self._members.why_not_enter(newcomer, present)
        now_s = self._now_s()
        self._let_in_s = {
            peer: since_s
            for peer, since_s in self._let_in_s.items()
            if now_s - since_s < OPEN_PROBATION_S and peer in present
        }
        if len(self._let_in_s) >= max(OPEN_NEWCOMERS_MIN, len(present) // 2):
            return f"{len(self._let_in_s)} others have just joined this open run: it admits you in a minute"
        network = network_of(advert)
        beside = sum(1 for other in present.values() if other is not None and network_of(other) == network)
        if beside >= OPEN_PER_NETWORK_MAX:
            return f"{beside} peers of your network are in this open run already, which is the limit"
        self._let_in_s[newcomer] = now_s
        return ""


def network_of(advert: Advert) -> str:
    """The /24 network (IPv6: /48) of the peer's first public address; empty: it has none, for instance behind a NAT."""
    for match in filter(None, map(_IP.match, advert.addresses)):
        with suppress(ValueError):
            ip = ipaddress.ip_address(match[1])
            if ip.is_global:
                return str(ipaddress.ip_network(f"{ip}/{24 if ip.version == 4 else 48}", strict=False))
    return ""


class Exclusions:
    """Holds the valid exclusion orders that this peer knows, and the votes for orders that need a majority.

    Args:
        owner: the run's owner; an order of the owner needs no votes.
        verify: checks a signature of an order.
        plans: returns the live plan, and its predecessor, under which some peers may still vote.
    """

    def __init__(self, *, owner: PeerID, verify: VerifySignature, plans: Callable[[], Sequence[SignedPlan]]) -> None:
        self._owner, self._verify, self._plans = owner, verify, plans
        self._orders: tuple[Exclusion, ...] = ()
        self._voted: dict[tuple[str, bytes], Exclusion] = {}
        """(digest of the electors' plan, signed bytes) -> the order with the votes so far."""
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
        return self._holds(order) and self._take(order)

    def proves(self, data: bytes) -> bool:
        """True if an order in an offered plan is valid."""
        try:
            order = open_exclusion(data, PeerID(""))
        except RemoteError:
            return False
        return order in self._orders or self._holds(order)

    def obeyed(self, plan: Plan) -> None:
        """Accept the orders in a live plan; the plan's voters have checked these."""
        for data in plan.exclusions:
            with suppress(RemoteError):
                self._take(open_exclusion(data, PeerID("")))

    def lacks(self, plan: Plan) -> tuple[bytes, ...]:
        """Return the orders that we know and `plan` lacks, because its coordinator does not know these orders."""
        return tuple(data for data in self.orders if data not in plan.exclusions)

    def told(self, name_of: Callable[[PeerID], str]) -> tuple[str, ...]:
        """Return a sentence for each order: the excluded keys, the signer, and the command that undoes it."""
        told, twice = [], set(self.excluded.keys)
        for order in self._orders:
            twice.difference_update(order.keys)
            keys = [key for key in order.keys if key in self.excluded.keys]
            names = [_said_key(key, order, name_of) for key in keys[:NAMED_MAX]]
            if len(keys) > NAMED_MAX:
                names.append(f"{len(keys) - NAMED_MAX} more")
            if names:
                by = "the owner" if order.signature else f"{len(order.votes)} members"
                told.append(f"excluded by {by}: {', '.join(names)}{_UNDO}")
        told += [
            f"excluded because two of its members are: the invite {invite_name(key)}{_UNDO}" for key in sorted(twice)
        ]
        return tuple(told)

    def _holds(self, order: Exclusion) -> bool:
        return exclusion_holds(order, owner=self._owner, plans=self._plans(), verify=self._verify)

    def _is_news(self, order: Exclusion) -> bool:
        """True if the order names a key that no known order names, or is the owner's newest order."""
        if not {key for known in self._orders for key in known.keys}.issuperset(order.keys):
            return True
        return bool(order.signature) and all(order.number > known.number for known in self._orders if known.signature)

    def _take(self, order: Exclusion) -> bool:
        """Add a valid order. Returns: whether it is new and there is room for it."""
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

    def _with_votes_so_far(self, order: Exclusion) -> Exclusion:
        """Return `order` with all its valid votes so far. Each vote is sent to every peer, so every peer can count."""
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
