"""Exclusion: the owner, or a majority, puts a member's key or a whole invite's out of the run for good. Pure.

An order proves itself, so anybody may hand it on, and plans carry the orders of their run. The owner's orders name all
that it has ever excluded: the newest one is enough. A majority's is of the electors of one plan, for one set of keys.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import EXCLUDED_KEYS_MAX, EXCLUSION_BYTES_MAX
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

    @property
    def body(self) -> bytes:
        """The bytes that are signed."""
        return exclusion_body(self.keys, self.base)

    def encode(self) -> bytes:
        return _ENCODER.encode(self)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Exclusion)


def exclusion_body(keys: Iterable[bytes], base: str = "") -> bytes:
    return _ENCODER.encode((base, tuple(sorted(keys))))


def order_exclusion(owner: Identity, keys: Iterable[bytes], *, run: str) -> Exclusion:
    """Sign an order as the run's owner. `keys` are all that are to be excluded, those that already are among them."""
    ordered = tuple(sorted(set(keys)))
    return Exclusion(ordered, sign_statement(owner, "exclusion", run=run, body=exclusion_body(ordered)))


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
