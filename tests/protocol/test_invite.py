"""Invites: short, complete, and nothing that is damaged gets through."""

import contextlib

import base58
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.errors import InviteError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import (
    PREFIX,
    Invite,
    InviteKey,
    is_global,
    is_open,
    make_invite,
    parse_invite,
    split_address,
    worth_telling,
)
from shoal.protocol.limits import ADDRESSES_MAX, PROTOCOL_VERSION

HOST = Identity(bytes(32))
PEERS = [Identity(bytes([number]) * 32).peer_id for number in range(4)]
OWNER, RUN = PEERS[0], "0123456789abcdef"
KEY = InviteKey.make(HOST, run=RUN, expires_s=1_800_000_000, seats=8)


def at(where: str, peer: int = 0) -> str:
    return f"{where}/p2p/{PEERS[peer]}"


def sealed(body: bytes) -> str:
    """Any content with the right check."""
    return PREFIX + str(base58.b58encode(body + blake3(body).digest(length=4)), "ascii")


def test_the_hosts_invite_fits_a_chat() -> None:
    three = [at("/ip4/84.12.33.7/tcp/40123", peer) for peer in range(3)]
    assert len(make_invite(RUN, OWNER, three[:1], KEY)) <= 222
    assert len(make_invite(RUN, OWNER, three, KEY)) <= 331
    assert len(make_invite(RUN, OWNER, three[:1])) <= 80, "to an open run"


@given(expires_s=st.integers(0, 2**32 - 1), seats=st.integers(0, 2**16 - 1), may_train=st.booleans())
def test_an_invites_key_comes_back_with_its_terms(expires_s: int, seats: int, may_train: bool) -> None:
    key = InviteKey.make(HOST, run=RUN, expires_s=expires_s, seats=seats, may_train=may_train)
    invite = parse_invite(make_invite(RUN, OWNER, [at("/ip4/84.12.33.7/tcp/40123")], key))
    assert invite.key == key
    assert (key.delegation.expires_s, key.delegation.seats, key.delegation.may_train) == (expires_s, seats, may_train)


def test_terms_that_no_invite_holds_are_said() -> None:
    for terms in ({"expires_s": 2**32}, {"seats": 2**16}, {"seats": -1}):
        with pytest.raises(ValueError, match="at most 65535 seats"):
            InviteKey.make(HOST, run=RUN, **terms)


def test_nobody_changes_the_terms_of_an_invite() -> None:
    """Whoever has one could give itself more seats, a later end, or leave to train."""
    raw = base58.b58decode(make_invite(RUN, OWNER, [at("/ip4/84.12.33.7/tcp/40123")], KEY).removeprefix(PREFIX))[:-4]
    start = 1 + 8 + 32 + 1 + 32
    for offset in range(4 + 2 + 1):
        changed = bytearray(raw)
        changed[start + offset] ^= 1
        with pytest.raises(InviteError, match="invalid content"):
            parse_invite(sealed(bytes(changed)))


ADDRESSES = [
    "/ip4/84.12.33.7/tcp/40123",
    "/ip4/0.0.0.0/tcp/0",
    "/ip6/2001:db8::1/tcp/65535",
    "/ip6/2001:0db8::1/tcp/1",  # not the form that would come back: kept as text
    "/dns4/train.example.org/tcp/4001",
    "/ip4/84.12.33.7/udp/4001/quic",
    f"/ip4/84.12.33.7/tcp/4001/p2p/{PEERS[3]}/p2p-circuit",
    "/ip4/84.12.33.7/tcp/99999",
]


@pytest.mark.parametrize("where", ADDRESSES)
@pytest.mark.parametrize("peer", [0, 1])
def test_an_address_comes_back_as_it_was(where: str, peer: int) -> None:
    invite = Invite(PROTOCOL_VERSION, RUN, OWNER, (at(where, peer),))
    assert parse_invite(invite.encode()) == invite


@given(peers=st.lists(st.integers(0, 3), min_size=1, max_size=ADDRESSES_MAX), data=st.data())
def test_any_addresses_come_back_a_peer_at_a_time(peers: list[int], data: st.DataObject) -> None:
    wheres = data.draw(st.lists(st.sampled_from(ADDRESSES), min_size=len(peers), max_size=len(peers)))
    addresses = [at(where, peer) for where, peer in zip(wheres, peers, strict=True)]
    found = parse_invite(make_invite(RUN, OWNER, addresses)).addresses
    assert sorted(found) == sorted(addresses)
    order = [split_address(address)[1] for address in found]
    assert list(dict.fromkeys(order)) == list(dict.fromkeys(PEERS[peer] for peer in peers))


def test_only_so_many_addresses_are_told() -> None:
    addresses = [at(f"/ip4/84.12.33.7/tcp/{port}") for port in range(1, 20)]
    assert parse_invite(make_invite(RUN, OWNER, addresses)).addresses == tuple(addresses[:ADDRESSES_MAX])
    with pytest.raises(ValueError, match="more than an invite can hold"):
        Invite(PROTOCOL_VERSION, RUN, OWNER, tuple(addresses)).encode()


INVITE = make_invite(RUN, OWNER, [at("/ip4/84.12.33.7/tcp/40123")])


@pytest.mark.parametrize(
    "text",
    [
        f"  {INVITE}\n",
        f"`{INVITE}`",
        f"shoal join {INVITE}",
        f"<{INVITE}>.",
        f"Come along: {INVITE}!",
        f"{INVITE[:30]}\n{INVITE[30:60]}\r\n  {INVITE[60:]}",
    ],
)
def test_what_a_chat_puts_around_it_does_no_harm(text: str) -> None:
    assert parse_invite(text) == parse_invite(INVITE)


@pytest.mark.parametrize("position", range(len(PREFIX), len(INVITE)))
def test_a_changed_letter_is_noticed(position: int) -> None:
    other = "2" if INVITE[position] != "2" else "3"
    with pytest.raises(InviteError, match="damaged or cut short"):
        parse_invite(INVITE[:position] + other + INVITE[position + 1 :])


@pytest.mark.parametrize("text", ["", "hello", PREFIX[:-1], INVITE[len(PREFIX) :]])
def test_what_is_no_invite_is_said(text: str) -> None:
    with pytest.raises(InviteError, match="not a shoal invite"):
        parse_invite(text)


def test_a_letter_that_base58_has_not_is_said() -> None:
    with pytest.raises(InviteError, match="a character that none contains"):
        parse_invite(INVITE[:20] + "0" + INVITE[21:])


@pytest.mark.parametrize("text", [PREFIX, PREFIX + "z" * 100_000])
def test_nothing_and_too_much_are_damaged(text: str) -> None:
    with pytest.raises(InviteError, match="damaged or cut short"):
        parse_invite(text)


HEAD = bytes([PROTOCOL_VERSION]) + bytes(8 + 32) + b"\0"


@pytest.mark.parametrize(
    "body",
    [
        bytes([PROTOCOL_VERSION]),
        HEAD[:-1],
        HEAD + bytes([129]),  # an address is missing
        HEAD + bytes([129, 4, 1, 2, 3]),
        HEAD + bytes([129, 9, 1, 2, 3, 4, 0, 1]),  # of no known kind
        HEAD + bytes([129, 0, 200]) + b"/short",
        HEAD + bytes([129, 0, 5]) + b"words",
        HEAD + bytes([129, 0, 3]) + b"/\xff\xff",
        HEAD + bytes([129, 0, 3]) + b"/\x1bc",  # it would reset the terminal that shows it
        HEAD + bytes([1]) + bytes(31),
        HEAD + bytes([128 + 9]) + bytes([4, 1, 2, 3, 4, 0, 1]) * 9,
    ],
)
def test_content_that_is_none_is_said(body: bytes) -> None:
    with pytest.raises(InviteError, match="the invite has invalid content"):
        parse_invite(sealed(body))


@given(body=st.binary(min_size=1, max_size=200))
def test_any_content_is_an_invite_or_an_invite_error(body: bytes) -> None:
    with contextlib.suppress(InviteError):
        assert parse_invite(sealed(body)).addresses


def test_an_invite_without_an_address_is_said() -> None:
    with pytest.raises(InviteError, match="names no address"):
        parse_invite(sealed(HEAD))


def test_other_versions_are_said_before_anything_else() -> None:
    with pytest.raises(InviteError, match=r"protocol version 99, newer than this shoal's .*: you must upgrade"):
        parse_invite(sealed(bytes([99]) + b"whatever"))
    with pytest.raises(InviteError, match="the host must upgrade"):
        parse_invite(sealed(bytes([0])))


def test_the_way_over_a_relay_ends_at_the_peer() -> None:
    relay, peer = PEERS[1], PEERS[2]
    over = f"/ip4/1.2.3.4/tcp/5/p2p/{relay}/p2p-circuit"
    assert split_address(f"{over}/p2p/{peer}") == (over, peer)
    assert split_address(over) == (over, "")
    assert split_address("/ip4/1.2.3.4/tcp/5") == ("/ip4/1.2.3.4/tcp/5", "")


@pytest.mark.parametrize(
    ("known", "told"),
    [
        (["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/1", "/ip4/84.12.33.7/tcp/1"], [2, 1]),
        (["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"], [0, 1]),
        (["/ip6/fe80::1/tcp/1", "/ip4/10.0.0.1/tcp/1"], [1]),
        (["/ip4/10.0.0.1/tcp/1", "/dns4/train.example.org/tcp/1"], [1, 0]),
        ([], []),
    ],
)
def test_the_far_reaching_addresses_are_told_first(known: list[str], told: list[int]) -> None:
    addresses = [at(where) for where in known]
    assert worth_telling(addresses) == tuple(addresses[index] for index in told)


@pytest.mark.parametrize(
    ("place", "is_so"),
    [
        ("/ip4/20.0.1.10/tcp/4001", True),
        ("/ip4/20.0.1.10/tcp/4001/p2p/12D3KooW", True),
        ("/ip6/2a01:4f8::1/tcp/4001", True),
        ("/dns4/example.org/tcp/4001", True),
        ("/ip4/192.168.1.2/tcp/4001", False),
        ("/ip4/100.64.1.2/tcp/4001", False),
        ("/ip4/127.0.0.1/tcp/4001", False),
        ("/ip6/fe80::1/tcp/4001", False),
        ("/ip4/20.0.1.10/tcp/4001/p2p/12D3KooW/p2p-circuit", False),
        ("nonsense", False),
    ],
)
def test_what_can_be_dialled_from_anywhere(place, is_so):
    assert is_global(place) is is_so


@pytest.mark.parametrize(
    ("places", "is_so"),
    [
        (["/ip4/84.12.33.7/tcp/4001"], True),
        (["/ip4/127.0.0.1/tcp/4001", "/ip6/fe80::1/tcp/4001", "/ip4/84.12.33.7/tcp/4001"], True),
        (["/dns4/example.org/tcp/4001"], True),
        (["/ip4/192.168.1.7/tcp/4001"], False),
        (["/ip4/192.168.1.7/tcp/4001", "/ip4/84.12.33.7/tcp/41257"], False),  # the router's, as others have seen it
        (["/ip4/84.12.33.7/tcp/1/p2p/x/p2p-circuit"], False),
        ([], False),
    ],
)
def test_whoever_tells_a_private_address_too_may_be_behind_a_router(places, is_so):
    assert is_open(places) is is_so
