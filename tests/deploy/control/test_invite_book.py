"""What a host gives out stays given out over its restarts, and what it has revoked stays revoked."""

from pathlib import Path

import pytest

from shoal.deploy.control.invite_book import DEFAULT_LASTS_S, FILE_NAME, InviteBook
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity, public_key_of
from shoal.protocol.live.disk import LiveDisk

OWNER, ANA = Identity(bytes(32)), Identity(bytes([1]) * 32)
RUN = "0123456789abcdef"


def book(folder: Path, *, now_s: float = 1_800_000_000.0) -> InviteBook:
    return InviteBook(OWNER, RUN, LiveDisk(folder), wall_s=lambda: now_s)


def test_the_default_invite_is_the_same_every_day_until_it_expires(tmp_path: Path) -> None:
    first = book(tmp_path).default()
    assert book(tmp_path).default() == first
    late = 1_800_000_000.0 + DEFAULT_LASTS_S + 1
    assert book(tmp_path, now_s=late).default() != first
    assert len(book(tmp_path).all) == 2


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
    again.exclude(ANA.peer_id)
    assert book(tmp_path).order.keys == tuple(sorted((key.delegation.key, public_key_of(ANA.peer_id))))  # type: ignore[union-attr]


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
