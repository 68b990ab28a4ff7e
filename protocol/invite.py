"""Invites: what one volunteer needs to find a run. Short enough to paste in a chat."""

import base58
import msgspec
from blake3 import blake3

from shoal.protocol.errors import InviteError
from shoal.protocol.identity import PeerID, public_key_of
from shoal.protocol.limits import ADDRESSES_MAX, PROTOCOL_VERSION

PREFIX = "shoal1"
_CHECK_BYTES = 4


class Invite(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`addresses` are multiaddrs with `/p2p/…` of peers that let a newcomer in; `owner` signs the run spec."""

    protocol_version: int
    run: str
    owner: PeerID
    addresses: tuple[str, ...]

    def encode(self) -> str:
        body = msgspec.msgpack.encode(self)
        check = blake3(body).digest(length=_CHECK_BYTES)
        return PREFIX + str(base58.b58encode(body + check), "ascii")


def make_invite(run: str, owner: PeerID, addresses: tuple[str, ...]) -> str:
    return Invite(PROTOCOL_VERSION, run, owner, addresses[:ADDRESSES_MAX]).encode()


def parse_invite(text: str) -> Invite:
    """Read an invite.

    Raises: InviteError: one line that says whether it is no invite, mistyped, or of another version.
    """
    text = text.strip()
    if not text.startswith(PREFIX):
        raise InviteError(f"this is not a shoal invite (they begin with {PREFIX!r}): ask the host for a fresh one")
    try:
        raw = base58.b58decode(text[len(PREFIX) :])
    except ValueError as error:
        raise InviteError("the invite has a character that none contains: copy it again, whole") from error
    body, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if len(raw) <= _CHECK_BYTES or blake3(body).digest(length=_CHECK_BYTES) != check:
        raise InviteError("the invite is damaged or cut short: copy it again, whole")
    try:
        version = msgspec.msgpack.decode(body, type=tuple)[0]
        if version != PROTOCOL_VERSION:
            older, remedy = ("older", "the host") if version < PROTOCOL_VERSION else ("newer", "you")
            raise InviteError(
                f"the invite is of protocol version {version}, {older} than this shoal's {PROTOCOL_VERSION}: "
                f"{remedy} must upgrade"
            )
        invite = msgspec.msgpack.decode(body, type=Invite)
        public_key_of(invite.owner)
    except (msgspec.DecodeError, ValueError, IndexError, TypeError) as error:
        raise InviteError("the invite's content is not that of an invite: ask the host for a fresh one") from error
    if not invite.addresses:
        raise InviteError("the invite names no address: ask the host for a fresh one")
    return invite
