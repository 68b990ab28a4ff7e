"""Keeps the invites of a run in the host's folder: `RUN/invites.json`, which is as secret as the host's key.

A revoked invite stays in the file, because its exclusion must go into every later plan.
"""

import time
from collections.abc import Callable
from pathlib import PurePosixPath

import msgspec

from shoal.deploy.base.disk_error import or_say
from shoal.protocol.durable import replace_file
from shoal.protocol.errors import LocalError
from shoal.protocol.exclusion import Exclusion, order_exclusion
from shoal.protocol.identity import Identity, PeerID, public_key_of
from shoal.protocol.invite import InviteKey
from shoal.protocol.limits import EXCLUDED_KEYS_MAX
from shoal.protocol.ports import Disk

FILE_NAME = "invites.json"
INVITES_MAX = EXCLUDED_KEYS_MAX // 2
"""The most invites of one run, revoked ones included. An exclusion order has room for all these and as many members."""
DEFAULT_LASTS_S = 7 * 24 * 3600
"""How long newcomers can join with the invite that `shoal host` prints; members stay in after that time."""
DEFAULT_SEATS = 5
"""How many machines may be in the run at a time with the invite that `shoal host` prints."""
_USEFUL_S = 24 * 3600
"""`InviteBook.default` returns no invite that expires within this many seconds."""


class GivenOut(msgspec.Struct, frozen=True, kw_only=True):
    """One invite of the run. Each time that it is printed, the addresses in it are chosen anew."""

    key: InviteKey
    made_s: float
    """When the invite was made, in seconds since 1970."""
    revoked: bool = False
    is_default: bool = False
    """True if `shoal invite` hands out this invite as long as the invite has a free seat."""

    @property
    def name(self) -> str:
        return self.key.delegation.name


class NamedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A member that the owner has excluded, or a key (a member's or an invite's) that the owner has readmitted."""

    key: bytes
    name: str = ""
    """The name that the member had when it was excluded."""
    invite: bytes = b""
    """The key of the member's invite, or the invite's own key; empty: unknown."""
    readmitted: bool = False


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    invites: tuple[GivenOut, ...] = ()
    excluded: tuple[PeerID, ...] = ()
    """Members excluded by an earlier version of shoal."""
    named: tuple[NamedKey, ...] = ()
    number: int = 0


class InviteBook:
    """Makes, revokes and finds invites, and keeps the exclusion order.

    Args: owner: the run's owner, with the private key; disk: the host's folder; wall_s: returns seconds since 1970.
    """

    def __init__(self, owner: Identity, run: str, disk: Disk, *, wall_s: Callable[[], float] = time.time) -> None:
        self._owner, self._run, self._disk, self._wall_s = owner, run, disk, wall_s
        self._path = PurePosixPath(run, FILE_NAME)
        self._file = self._read()

    @property
    def all(self) -> tuple[GivenOut, ...]:
        """All invites, in the order of creation."""
        return self._file.invites

    @property
    def order(self) -> Exclusion | None:
        """The owner's signed list of excluded members, revoked invites and readmitted keys; None: there are none."""
        revoked = {invite.key.delegation.key for invite in self.all if invite.revoked}
        came_by = {key: key for key in revoked} | {named.key: named.invite for named in self._file.named}
        readmitted = [named.key for named in self._file.named if named.readmitted]
        if not came_by:
            return None
        return order_exclusion(self._owner, came_by, run=self._run, readmitted=readmitted, number=self._file.number)

    def find(self, name: str) -> GivenOut:
        """Find an invite by its name or the beginning of it. Raises: LocalError: no invite or several match."""
        found = [invite for invite in self.all if name and invite.name.startswith(name.lower())]
        if len(found) != 1:
            raise LocalError(f"{len(found) or 'no'} invites of this run begin with {name!r}: see `shoal invite list`")
        return found[0]

    def default(self, *, seats: int = DEFAULT_SEATS, taken: Callable[[bytes], int] = lambda key: 0) -> InviteKey:
        """Return the key of the invite that `shoal host` and `shoal invite` print: one with free seats, or a new one.

        Args: seats: the least number of machines that the invite may admit in all; taken: invite's key -> number of
        machines that are in the run with this invite now.
        """
        until_s = self._wall_s() + _USEFUL_S
        for invite in self.all:
            terms = invite.key.delegation
            is_good = invite.is_default and not invite.revoked and terms.expires_s > until_s
            if is_good and terms.seats >= seats and taken(terms.key) < terms.seats:
                return invite.key
        return self.make(lasts_s=DEFAULT_LASTS_S, seats=seats, is_default=True).key

    def make(
        self, *, lasts_s: float = 0.0, seats: int = 0, may_train: bool = True, is_default: bool = False
    ) -> GivenOut:
        """Make an invite. Args: lasts_s: seconds for which newcomers can join with the invite; 0: for ever.

        Raises: LocalError: `lasts_s` or `seats` is out of bounds; there are too many invites; the disk is full.
        """
        if len(self.all) >= INVITES_MAX:
            raise LocalError(f"this run has given out {INVITES_MAX} invites already")
        expires_s = int(self._wall_s() + lasts_s) if lasts_s else 0
        try:
            key = InviteKey.make(self._owner, run=self._run, expires_s=expires_s, seats=seats, may_train=may_train)
        except ValueError as error:
            raise LocalError(str(error)) from error
        made = GivenOut(key=key, made_s=self._wall_s(), is_default=is_default)
        self._write(msgspec.structs.replace(self._file, invites=(*self.all, made)))
        return made

    def revoke(self, name: str) -> GivenOut:
        """Mark an invite as revoked; the caller excludes its key.

        Raises: LocalError: no invite or several have a name that begins with `name`; the disk is full.
        """
        return self._mark(self.find(name), revoked=True)

    @property
    def named(self) -> tuple[NamedKey, ...]:
        return self._file.named

    def exclude(self, peer: PeerID, invite: bytes = b"", *, name: str = "") -> None:
        """Exclude `peer`, which joined with the invite that has the key `invite`.

        Raises: LocalError: `peer` is the owner; too many members are excluded; the disk is full.
        """
        if peer == self._owner.peer_id:
            raise LocalError("the run's owner cannot be excluded from it")
        self._name(NamedKey(key=public_key_of(peer), name=name, invite=invite))

    def readmit(self, key: bytes, invite: bytes = b"") -> None:
        """Undo the exclusion of a member or the revocation of an invite.

        Args: key: the key of the member or invite; invite: the key of the member's invite; empty: unknown.
        Raises: LocalError: too many members are excluded or readmitted; the disk is full.
        """
        self._name(NamedKey(key=key, invite=invite, readmitted=True))
        for given in self.all:
            if given.key.delegation.key == key and given.revoked:
                self._mark(given, revoked=False)

    def _mark(self, invite: GivenOut, *, revoked: bool) -> GivenOut:
        marked = msgspec.structs.replace(invite, revoked=revoked)
        invites = tuple(marked if other.name == invite.name else other for other in self.all)
        key = invite.key.delegation.key
        named = tuple(entry for entry in self._file.named if not (revoked and entry.key == key))
        self._order(invites=invites, named=named)
        return marked

    def _name(self, named: NamedKey) -> None:
        others = tuple(entry for entry in self._file.named if entry.key != named.key)
        if len(others) >= INVITES_MAX:
            raise LocalError(f"this run has excluded {INVITES_MAX} members already: revoke their invites")
        if (*others, named) != self._file.named:
            self._order(named=(*others, named))

    def _order(self, **changed: object) -> None:
        number = max(self._file.number + 1, int(self._wall_s()))  # higher than in a file that was lost
        self._write(msgspec.structs.replace(self._file, number=number, **changed))

    def _read(self) -> _File:
        try:
            file = msgspec.json.decode(self._disk.read(self._path), type=_File)
            named = (*file.named, *(NamedKey(key=public_key_of(peer)) for peer in file.excluded))
            return msgspec.structs.replace(file, named=named, excluded=())
        except FileNotFoundError:
            return _File()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            # Without the file, a second default invite would be made and revocations forgotten.
            raise LocalError(
                f"{self._disk.where(self._path)} cannot be read ({error}): put it back from a copy, or remove it to "
                "give out new invites"
            ) from error

    def _write(self, file: _File) -> None:
        with or_say(f"cannot write {self._disk.where(self._path)}"):
            replace_file(self._disk, self._path, msgspec.json.format(msgspec.json.encode(file)))
        self._file = file
