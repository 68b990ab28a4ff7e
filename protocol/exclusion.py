"""Exclusion: the owner, or a majority, puts a member's key or a whole invite's out of the run for good. Pure.

An order proves itself, so anybody may hand it on, and plans carry the orders of their run. The owner's orders name all
keys that it has ever excluded, and of these the ones that it has let in again: the newest order is enough. A majority's
is of the electors of one plan, for one set of keys; what the owner lets in again is in, whoever excluded it.

An order says by which invite each member came, because a member has a fresh key whenever it likes. The seat of an
excluded member stays taken, and the second exclusion of a member of one invite excludes the invite.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import EXCLUDED_KEYS_MAX, EXCLUSION_BYTES_MAX
from shoal.protocol.membership import Excluded
from shoal.protocol.plan import SignedPlan
from shoal.protocol.quorum import is_quorum
from shoal.protocol.statement import sign_statement

Holds = Callable[[PeerID, bytes, bytes], bool]
"""(signer, signature, body) -> whether that is the signer's `exclusion` statement about this run."""


class Exclusion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One order; `keys` are public Ed25519 keys of 32 bytes, sorted, of members and of invites."""

    keys: tuple[bytes, ...]
    signature: bytes = b""
    """The owner's; empty if a majority orders it."""
    base: str = ""
    """Digest of the plan whose electors have voted; empty if the owner orders it."""
    votes: tuple[tuple[int, bytes], ...] = ()
    """(position among that plan's electors, signature)."""
    invites: tuple[bytes, ...] = ()
    """The invites of `keys`, in the same order: the key of the one by which the member came, or an invite's own key;
    empty: unknown. An order of an earlier version has none at all."""
    readmitted: tuple[int, ...] = ()
    """Positions of those of `keys` that the owner lets in again, sorted."""
    number: int = 0
    """The owner's order with the highest number counts."""

    @property
    def body(self) -> bytes:
        """The bytes that are signed."""
        return exclusion_body(self)

    def encode(self) -> bytes:
        return _ENCODER.encode(self)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Exclusion)


def exclusion_body(order: Exclusion) -> bytes:
    terms = (order.invites, order.readmitted, order.number)
    return _ENCODER.encode((order.base, order.keys, *terms) if any(terms) else (order.base, order.keys))


def propose_exclusion(came_by: Mapping[bytes, bytes], *, base: str = "") -> Exclusion:
    """Make an order without a signature. Args: came_by: as `order_exclusion` has it; base: as `Exclusion` has it."""
    keys = tuple(sorted(came_by))
    return Exclusion(keys, base=base, invites=tuple(came_by[key] for key in keys))


def order_exclusion(
    owner: Identity, came_by: Mapping[bytes, bytes], *, run: str, readmitted: Iterable[bytes] = (), number: int = 0
) -> Exclusion:
    """Sign an order as the run's owner.

    Args:
        came_by: every key that was ever excluded -> as `Exclusion.invites`.
        readmitted: those among them that are let in again.
        number: above that of the owner's last order.
    """
    order = propose_exclusion(came_by)
    places = tuple(sorted(order.keys.index(key) for key in set(readmitted)))
    order = msgspec.structs.replace(order, readmitted=places, number=number)
    return msgspec.structs.replace(order, signature=sign_statement(owner, "exclusion", run=run, body=order.body))


def in_force(orders: Iterable[Exclusion]) -> Excluded:
    """Who is out by all of these orders, which hold. On one key the owner's newest order decides."""
    is_out: dict[bytes, bool] = {}
    came_by: dict[bytes, bytes] = {}
    for order in sorted(orders, key=lambda order: (bool(order.signature), order.number)):
        is_out |= {key: at not in order.readmitted for at, key in enumerate(order.keys)}
        came_by |= {key: invite for key, invite in zip(order.keys, order.invites, strict=False) if invite}
    out = {key for key, says in is_out.items() if says}
    readmitted = is_out.keys() - out
    members = {key: came_by[key] for key in out if came_by.get(key, key) != key}
    twice = {invite for invite, times in Counter(members.values()).items() if times > 1}
    return Excluded(frozenset(out | (twice - readmitted)), frozenset(readmitted), members)


def open_exclusion(data: bytes, source: PeerID) -> Exclusion:
    """Decode what `source` handed us; whether it holds is another question. Raises: RemoteError: it is no order."""
    try:
        if len(data) > EXCLUSION_BYTES_MAX:
            raise ValueError(f"it has {len(data)} bytes")
        order = _DECODER.decode(data)
        if not 0 < len(order.keys) <= EXCLUDED_KEYS_MAX or any(len(key) != 32 for key in order.keys):
            raise ValueError(f"it names {len(order.keys)} keys")
        if tuple(sorted(set(order.keys))) != order.keys:
            raise ValueError("its keys are not in order")
        if order.invites and (
            len(order.invites) != len(order.keys) or any(len(key) not in (0, 32) for key in order.invites)
        ):
            raise ValueError("it does not say by which invites they came")
        if order.readmitted and not order.signature:
            raise ValueError("only the owner lets anybody in again")
        if any(not 0 <= at < len(order.keys) for at in order.readmitted):
            raise ValueError("it lets in a key that it does not name")
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise RemoteError(source, f"sent something that is no exclusion ({error})") from error
    return order


def exclusion_holds(order: Exclusion, *, owner: PeerID, plans: Sequence[SignedPlan], holds: Holds) -> bool:
    """Whether the owner has signed the order, or a majority of the electors of the one of `plans` that it names."""
    if order.signature:
        return holds(owner, order.signature, order.body)
    base = next((plan for plan in plans if plan.digest == order.base), None)
    if base is None or len(order.votes) > len(base.plan.electors):
        return False
    voters = {base.plan.electors[at] for at, _ in order.votes if 0 <= at < len(base.plan.electors)}
    if not is_quorum(voters, base.plan, owner):
        return False
    return all(
        0 <= at < len(base.plan.electors) and holds(base.plan.electors[at], signature, order.body)
        for at, signature in order.votes
    )
