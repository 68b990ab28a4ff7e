"""Answers commands about admission to a run. Every peer makes invites; the host also revokes and excludes."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.deploy.control.control_socket import ControlServer
from shoal.deploy.control.invite_book import GivenOut, InviteBook
from shoal.deploy.node.node import Node
from shoal.deploy.state.known_peers import whom_to_name
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerID, peer_id_of, public_key_of
from shoal.protocol.invite import Invite, InviteKey, split_address
from shoal.protocol.live.transport import LiveTransport, dialable
from shoal.protocol.membership import invite_name


class HostVerbs:
    """Answers the verbs of `shoal invite`, `exclude` and `readmit` on the control socket.

    Args:
        book: the host's invites; None: this peer is not the run's host, or the run is open to anyone.
        invite: an invite to this run with the key that admitted this peer. Given-out invites are copies of it with
            current addresses.
        seats: how many machines may use a new invite at a time.
    """

    def __init__(
        self, node: Node, transport: LiveTransport, book: InviteBook | None, *, invite: Invite, seats: int
    ) -> None:
        self._coordination, self._members, self._status = node.coordination, node.endpoint.members, node.status
        self._transport, self._book, self._invite, self._seats = transport, book, invite, seats

    def install(self, control: ControlServer) -> None:
        control.on("invite", self._answer)
        control.on("guest", self._guest)
        control.on("invite-new", self._new)
        control.on("invite-list", self._list)
        control.on("invite-revoke", self._revoke)
        control.on("exclude", self._exclude)
        control.on("readmit", self._readmit)

    def apply(self) -> None:
        """Broadcast the newest exclusion order. Callers repeat this, because some peers may have missed it."""
        if self._book is not None and (order := self._book.order) is not None:
            self._coordination.exclude(order)

    async def invite(self, num_peers: int, key: InviteKey | None = None) -> tuple[str, frozenset[PeerID]]:
        """Make an invite that names present members.

        Args: num_peers: the most peers to name, us included; key: the invite's key; None: a key with free seats.
        Returns: the invite, and the peers that it names. Raises: LocalError: this peer's key admits nobody any more.
        """
        addresses = whom_to_name(self._transport.addresses(), await self.others(), num_peers=num_peers)
        named = frozenset(PeerID(split_address(address)[1]) for address in addresses)
        return msgspec.structs.replace(self._invite, addresses=addresses, key=key or self._key()).encode(), named

    def _key(self) -> InviteKey | None:
        """Return the key with which new peers can join now; None: the run is open to anyone."""
        key, present = self._invite.key, self._members.planned or frozenset()
        if self._book is not None:
            return self._book.default(seats=self._seats, taken=lambda key: self._members.seats_taken(key, present))
        if key is not None and 0 < key.delegation.expires_s < time.time():
            raise LocalError(
                "the invite with which this peer joined has expired: `shoal invite` on the host prints one"
            )
        return key

    async def others(self) -> dict[PeerID, tuple[str, ...]]:
        """Return the peers that are connected to us and that others can dial, with their addresses."""
        connected, known = await self._transport.connected(), self._transport.known()
        return {peer: where for peer in connected if peer in known and (where := dialable(known[peer]))}

    async def _answer(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer with an invite, the run, and the number of named peers. Argument `peers`: the most peers to name."""
        invite, named = await self.invite(int(arguments.get("peers", 1)))
        return {"invite": invite, "run": self._invite.run, "peers": len(named)}

    async def _guest(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let a command on this machine ask us, even if its invite has expired. Argument `peer`: its PeerID."""
        self._members.guests.append(PeerID(str(arguments.get("peer", ""))))
        return {}

    async def _new(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        made = self._needed().make(
            lasts_s=float(arguments.get("lasts_s", 0.0)),
            seats=int(arguments.get("seats", 0)),
            may_train=not arguments.get("observe", False),
        )
        text, _ = await self.invite(int(arguments.get("peers", 1)), made.key)
        return {"invite": text, **_described(made)}

    async def _list(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer with all invites, and with the name and the end of the ID of each excluded member or invite."""
        book, names = self._needed(), self._names()
        excluded = sorted(self._coordination.core.excluded.keys)
        out = [f"{names.get(key, '')} ({peer_id_of(key)[-8:]})".strip() for key in excluded]
        return {"invites": [_described(invite) for invite in book.all], "excluded": out}

    def _names(self) -> dict[bytes, str]:
        book = self._needed()
        invites = {invite.key.delegation.key: f"invite {invite.name}" for invite in book.all}
        return {entry.key: entry.name for entry in book.named if entry.name} | invites

    async def _revoke(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        revoked = self._needed().revoke(str(arguments.get("name", "")))
        self.apply()
        return _described(revoked)

    async def _exclude(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted = str(arguments.get("peer", ""))
        members = (await self._status()).peers
        found = [one for one in members if wanted and (one.name == wanted or one.peer.endswith(wanted))]
        if len(found) != 1:
            raise LocalError(f"{len(found) or 'no'} members are called {wanted!r}: see `shoal status`")
        peer, name = found[0].peer, found[0].name
        invite, before = self._members.invite_of(peer), self._coordination.core.excluded.keys
        self._needed().exclude(peer, invite, name=name)
        self.apply()
        is_second = invite in self._coordination.core.excluded.keys - before
        return {"peer": peer, "name": name, "invite": invite_name(invite) if is_second else ""}

    async def _readmit(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Readmit a member or an invite. Argument `who`: a member's name, ID or end of the ID, or an invite's name."""
        wanted, book, names = str(arguments.get("who", "")), self._needed(), self._names()
        excluded = self._coordination.core.excluded
        found = {key for key in excluded.keys if wanted and (_is_called(key, wanted) or names.get(key) == wanted)}
        if len(wanted) > 40:
            found.add(_key_of(wanted))  # a whole ID: its member may be out only because its invite is excluded
        if len(found) != 1:
            raise LocalError(
                f"{len(found) or 'no'} excluded members or invites are called {wanted!r}: see `shoal status`"
            )
        (key,) = found
        book.readmit(key, excluded.came_by.get(key, b""))
        self.apply()
        return {"name": wanted}

    def _needed(self) -> InviteBook:
        if self._book is None:
            raise LocalError(
                "this peer is not the run's host, or the run is open to anyone: the host gives out and revokes invites"
            )
        return self._book


def _is_called(key: bytes, wanted: str) -> bool:
    return peer_id_of(key).endswith(wanted) or invite_name(key).startswith(wanted.lower())


def _key_of(peer: str) -> bytes:
    try:
        return public_key_of(PeerID(peer))
    except ValueError as error:
        raise LocalError(f"{peer!r} is not a peer's ID") from error


def _described(invite: GivenOut) -> dict[str, Any]:
    terms = invite.key.delegation
    return {
        "name": invite.name,
        "made_s": invite.made_s,
        "expires_s": terms.expires_s,
        "seats": terms.seats,
        "observe": not terms.may_train,
        "revoked": invite.revoked,
    }
