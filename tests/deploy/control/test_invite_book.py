"""What a host gives out stays given out over its restarts, and what it has revoked stays revoked."""

import json
from pathlib import Path

import pytest

from shoal.deploy.control.invite_book import FILE_NAME, InviteBook
from shoal.protocol.errors import LocalError
from shoal.protocol.exclusion import in_force
from shoal.protocol.identity import Identity, public_key_of
from shoal.protocol.live.disk import LiveDisk

OWNER, ANA = Identity(bytes(32)), Identity(bytes([1]) * 32)
RUN = "0123456789abcdef"
NOW_S, DAY_S = 1_800_000_000.0, 24 * 3600.0


def book(folder: Path, *, now_s: float = NOW_S) -> InviteBook:
    return InviteBook(OWNER, RUN, LiveDisk(folder), wall_s=lambda: now_s)


def test_the_default_invite_has_five_seats_and_a_week_and_is_the_same_while_it_is_good(tmp_path: Path) -> None:
    first = book(tmp_path).default()
    assert (first.delegation.seats, first.delegation.expires_s) == (5, int(NOW_S + 7 * DAY_S))
    assert book(tmp_path, now_s=NOW_S + 5 * DAY_S).default() == first
    assert book(tmp_path, now_s=NOW_S + 6.5 * DAY_S).default() != first, "half a day is too short to be handed on"
    assert len(book(tmp_path).all) == 2


def test_when_all_seats_of_an_invite_are_taken_another_one_is_handed_out(tmp_path: Path) -> None:
    given = book(tmp_path)
    first = given.default()
    taken = {first.delegation.key: 4}
    assert given.default(taken=lambda key: taken.get(key, 0)) == first
    taken[first.delegation.key] = 5
    second = given.default(taken=lambda key: taken.get(key, 0))
    assert second != first
    assert given.default(taken=lambda key: taken.get(key, 0)) == second
    taken[first.delegation.key] = 4
    assert given.default(taken=lambda key: taken.get(key, 0)) == first, "a seat is free again"
    assert given.default(seats=8).delegation.seats == 8, "a run that begins with eight"


def test_a_book_of_before_there_were_seats_is_read(tmp_path: Path) -> None:
    old = book(tmp_path).make(lasts_s=90 * DAY_S)
    path = tmp_path / RUN / FILE_NAME
    lines = json.loads(path.read_text())
    for invite in lines["invites"]:
        del invite["is_default"]
    path.write_text(json.dumps(lines))
    again = book(tmp_path)
    assert again.all == (old,)
    assert again.default() != old.key, "any number of machines is not what `shoal invite` gives out any more"


def test_a_revoked_invite_is_no_default_and_is_ordered_out(tmp_path: Path) -> None:
    given = book(tmp_path)
    key = given.default()
    assert given.order is None
    given.make(seats=3)
    assert given.default() == key, "one with few seats is for somebody"
    given.revoke(key.delegation.name[:3])
    again = book(tmp_path)
    assert again.order is not None
    assert again.order.keys == (key.delegation.key,)
    assert again.default() != key
    again.exclude(ANA.peer_id, key.delegation.key)
    assert book(tmp_path).order.keys == tuple(sorted((key.delegation.key, public_key_of(ANA.peer_id))))  # type: ignore[union-attr]


def test_what_the_owner_has_readmitted_is_in_the_next_order(tmp_path: Path) -> None:
    given = book(tmp_path)
    key = given.default().delegation.key
    given.revoke(given.all[0].name)
    given.exclude(ANA.peer_id)
    first = given.order
    assert first is not None
    given.readmit(key)
    given.readmit(ANA.public_key)
    again = book(tmp_path).order
    assert again is not None
    assert (again.keys, again.number > first.number) == (first.keys, True), "an order names all that ever were excluded"
    assert in_force([again]).keys == set()
    assert not book(tmp_path).all[0].revoked
    given.revoke(given.all[0].name)
    assert in_force([given.order]).keys == {key}  # type: ignore[list-item]


def test_members_that_an_earlier_version_has_excluded_stay_out(tmp_path: Path) -> None:
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / FILE_NAME).write_text(json.dumps({"invites": [], "excluded": [ANA.peer_id]}))
    old = book(tmp_path)
    assert in_force([old.order]).keys == {ANA.public_key}  # type: ignore[list-item]
    old.default()
    assert in_force([book(tmp_path).order]).keys == {ANA.public_key}  # type: ignore[list-item]


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    given = book(tmp_path)
    with pytest.raises(LocalError, match="no invites of this run begin with 'ff'"):
        given.revoke("ff")
    with pytest.raises(LocalError, match="owner cannot be excluded"):
        given.exclude(OWNER.peer_id)
    with pytest.raises(LocalError, match="at most 65535 seats"):
        given.make(seats=1 << 16)
    (tmp_path / RUN).mkdir(exist_ok=True)
    (tmp_path / RUN / FILE_NAME).write_bytes(b"{")
    with pytest.raises(LocalError, match="cannot be read"):
        book(tmp_path)
