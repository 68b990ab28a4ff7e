"""Exclusion orders: the owner, or a majority, removes a member's key or an invite's key from the run for good. Pure.

An order carries its own signatures, so any peer may forward it, and each plan carries the run's orders. The owner's
order names every key that the owner ever excluded and marks those that the owner has readmitted, so only the owner's
newest order is needed. A majority's order is signed by electors (voting members) of one plan, for one set of keys. The
owner can readmit any key.

A member can make a fresh key at any time, so an order also names each member's invite. An excluded member still counts
as one of the members that its invite allows (seats). If two members of an invite are excluded, so is the invite.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import EXCLUDED_KEYS_MAX, EXCLUSION_BYTES_MAX
from shoal.protocol.membership import Excluded
from shoal.protocol.plan import SignedPlan, is_quorum
from shoal.protocol.statement import VerifySignature, sign_statement


class Exclusion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One exclusion order; `keys` are the public Ed25519 keys (32 bytes) of members and invites, sorted."""

    keys: tuple[bytes, ...]
    signature: bytes = b""
    """The owner's signature; empty for a majority's order."""
    base: str = ""
    """Digest of the plan that names the electors; empty for the owner's order."""
    votes: tuple[tuple[int, bytes], ...] = ()
    invites: tuple[bytes, ...] = ()
    """The key of an invite for each of `keys`: of the member's invite for a member's key, the same key for an invite's
    key, empty bytes if unknown. The whole tuple is empty in orders of earlier versions."""
    readmitted: tuple[int, ...] = ()
    """Positions in `keys` of readmitted keys, sorted. Only the owner's orders have any."""
    number: int = 0
    """Serial number of the owner's orders; the order with the highest number applies."""

    @property
    def body(self) -> bytes:
        """The bytes that are signed."""
        terms = (self.invites, self.readmitted, self.number)
        return _ENCODER.encode((self.base, self.keys, *terms) if any(terms) else (self.base, self.keys))

    def encode(self) -> bytes:
        return _ENCODER.encode(self)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Exclusion)


def propose_exclusion(came_by: Mapping[bytes, bytes], *, base: str = "") -> Exclusion:
    """Return an unsigned exclusion order.

    Args:
        came_by: public key to exclude -> key of the member's invite (empty: unknown).
        base: digest of the plan that names the electors; empty for the owner's order.
    """
    keys = tuple(sorted(came_by))
    return Exclusion(keys, base=base, invites=tuple(came_by[key] for key in keys))


def order_exclusion(
    owner: Identity, came_by: Mapping[bytes, bytes], *, run: str, readmitted: Iterable[bytes] = (), number: int = 0
) -> Exclusion:
    """Return an exclusion order signed by the run's owner.

    Args:
        came_by: every key that was ever excluded -> key of the member's invite (empty: unknown).
        readmitted: the keys of `came_by` that the owner has readmitted.
        number: serial number, greater than that of the owner's last order.
    """
    order = propose_exclusion(came_by)
    places = tuple(sorted(order.keys.index(key) for key in set(readmitted)))
    order = msgspec.structs.replace(order, readmitted=places, number=number)
    return msgspec.structs.replace(order, signature=sign_statement(owner, "exclusion", run=run, body=order.body))


def in_force(orders: Iterable[Exclusion]) -> Excluded:
    """Return the keys that valid orders exclude (also each invite of two excluded members) and those that the owner's
    newest order readmits; this order overrides all other orders."""
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
    """Decode an exclusion order of `source`; do not check signatures. Raises: RemoteError: the order is malformed."""
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
            raise ValueError("it lacks their invites")
        if order.readmitted and not order.signature:
            raise ValueError("only the owner may readmit")
        if any(not 0 <= at < len(order.keys) for at in order.readmitted):
            raise ValueError("it readmits a key that it does not name")
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise RemoteError(source, f"sent an invalid exclusion ({error})") from error
    return order


def exclusion_holds(order: Exclusion, *, owner: PeerID, plans: Sequence[SignedPlan], verify: VerifySignature) -> bool:
    """True if the owner, or a majority of the electors of the plan (in `plans`) that the order names, signed it."""
    if order.signature:
        return verify(owner, order.signature, order.body)
    base = next((plan for plan in plans if plan.digest == order.base), None)
    if base is None or len(order.votes) > len(base.plan.electors):
        return False
    voters = {base.plan.electors[at] for at, _ in order.votes if 0 <= at < len(base.plan.electors)}
    if not is_quorum(voters, base.plan, owner):
        return False
    return all(
        0 <= at < len(base.plan.electors) and verify(base.plan.electors[at], signature, order.body)
        for at, signature in order.votes
    )
