"""Who is a member: provable offline by the owner's key alone, and by nothing less."""

import msgspec
import pytest

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import InviteKey
from shoal.protocol.limits import CERTIFICATE_BYTES_MAX
from shoal.protocol.membership import (
    RENEWED_FOR_S,
    AccessLevel,
    Certificate,
    Excluded,
    Members,
    certify,
    delegate,
    renew,
)

OWNER, ANA, BEN, MALLORY = (Identity(bytes([number]) * 32) for number in range(1, 5))
RUN = "0123456789abcdef"


def key_of(**terms: object) -> InviteKey:
    return InviteKey.make(OWNER, run=RUN, **terms)  # type: ignore[arg-type]


def certificate(key: InviteKey, member: Identity, *, run: str = RUN) -> bytes:
    return certify(Identity(key.seed), key.delegation, member.peer_id, run=run)


def members(**options: object) -> Members:
    return Members(RUN, OWNER.peer_id, **options)  # type: ignore[arg-type]


def test_a_certificate_lets_in_whom_it_names() -> None:
    run = members()
    assert run.access_level(ANA.peer_id) is AccessLevel.STRANGER
    run.show(ANA.peer_id, certificate(key_of(), ANA))
    assert run.access_level(ANA.peer_id) is AccessLevel.MEMBER
    assert run.access_level(OWNER.peer_id) is AccessLevel.MEMBER, "the owner shows nothing"
    assert run.access_level(BEN.peer_id) is AccessLevel.STRANGER


def test_a_certificate_is_short() -> None:
    assert len(certificate(key_of(expires_s=2**32 - 1, seats=2**16 - 1), ANA)) <= 181 <= CERTIFICATE_BYTES_MAX


def test_what_proves_nothing_is_the_senders_fault() -> None:
    key, run = key_of(), members()
    own = InviteKey.make(MALLORY, run=RUN)
    good = msgspec.msgpack.decode(certificate(key, MALLORY), type=Certificate)
    more_rights = msgspec.structs.replace(good.delegation, seats=100)
    forged = [
        (b"rubbish", "an invalid certificate"),
        (b"\xc1" * 1000, "an invalid certificate"),
        (certificate(own, MALLORY), "owner did not sign"),
        (certificate(key, ANA), "another member's"),
        (certificate(key, MALLORY, run="f" * 16), "another member's"),
        (certify(MALLORY, key.delegation, MALLORY.peer_id, run=RUN), "another member's"),
        (msgspec.msgpack.encode(msgspec.structs.replace(good, delegation=more_rights)), "owner did not sign"),
        (
            certify(MALLORY, delegate(OWNER, MALLORY.public_key, run="f" * 16), MALLORY.peer_id, run=RUN),
            "owner did not sign",
        ),
    ]
    for shown, why in forged:
        with pytest.raises(RemoteError, match=why):
            run.show(MALLORY.peer_id, shown)
        assert run.access_level(MALLORY.peer_id) is AccessLevel.STRANGER


def test_whoever_only_looks_on_may_come_to_train_later() -> None:
    run, looks, trains = members(), key_of(may_train=False), key_of()
    run.show(ANA.peer_id, certificate(looks, ANA))
    assert run.access_level(ANA.peer_id) is AccessLevel.OBSERVER
    run.show(ANA.peer_id, certificate(trains, ANA))
    assert run.access_level(ANA.peer_id) is AccessLevel.MEMBER
    run.show(ANA.peer_id, certificate(looks, ANA))
    assert run.access_level(ANA.peer_id) is AccessLevel.MEMBER


def test_a_certificate_ends_with_its_invite_and_throws_nobody_out_that_is_in() -> None:
    now_s = [1000.0]
    run, looks, trains = (
        members(wall_s=lambda: now_s[0]),
        key_of(expires_s=2000, may_train=False),
        key_of(expires_s=2000),
    )
    for peer, key in ((ANA, trains), (BEN, trains), (MALLORY, looks)):
        run.show(peer.peer_id, certificate(key, peer))
    run.planned = {ANA.peer_id}
    assert run.why_not_enter(BEN.peer_id, ()) == ""
    now_s[0] = 2001.0
    levels = [run.access_level(peer.peer_id) for peer in (ANA, BEN, MALLORY)]
    assert levels == [AccessLevel.MEMBER, AccessLevel.STRANGER, AccessLevel.STRANGER]
    assert "has expired: ask the host for a fresh one" in run.why_stranger(BEN.peer_id)
    run.show(BEN.peer_id, certificate(key_of(expires_s=3000, may_train=False), BEN))
    assert run.access_level(BEN.peer_id) is AccessLevel.OBSERVER, "the one that has not ended counts"
    run.planned = {BEN.peer_id}
    assert run.access_level(ANA.peer_id) is AccessLevel.STRANGER
    newcomer = members(wall_s=lambda: now_s[0])
    newcomer.show(ANA.peer_id, certificate(trains, ANA))
    assert newcomer.access_level(ANA.peer_id) is AccessLevel.MEMBER, "a peer without a plan cannot tell who is in"
    assert "has expired" in newcomer.why_not_enter(ANA.peer_id, ())


def test_the_owner_renews_a_certificate_and_nobody_else_does() -> None:
    now_s = [1000.0]
    run, key = members(wall_s=lambda: now_s[0]), key_of(expires_s=2000)
    first = certificate(key, ANA)
    run.show(ANA.peer_id, first)
    run.planned = {ANA.peer_id}
    renewed = run.renew(OWNER, ANA.peer_id)
    assert len(renewed) <= 186 <= CERTIFICATE_BYTES_MAX
    ana = members(certificate=first, wall_s=lambda: now_s[0])
    assert ana.should_renew
    ana.take_renewed(renewed, ANA.peer_id)
    assert (ana.certificate, ana.should_renew) == (renewed, False)

    run.planned, now_s[0] = set(), 2001.0
    assert run.access_level(ANA.peer_id) is AccessLevel.STRANGER
    run.show(ANA.peer_id, renewed)
    run.show(ANA.peer_id, first)
    assert run.access_level(ANA.peer_id) is AccessLevel.MEMBER, "an old one takes nothing away"
    assert run.invite_of(ANA.peer_id) == key.delegation.key
    now_s[0] += RENEWED_FOR_S
    assert run.access_level(ANA.peer_id) is AccessLevel.STRANGER

    terms = {"run": RUN, "ends_s": 2**32}
    longer = msgspec.structs.replace(msgspec.msgpack.decode(renewed, type=Certificate), renewed_to_s=2**32)
    for forged in (
        renew(MALLORY, key.delegation, MALLORY.peer_id, **terms),  # type: ignore[arg-type]
        renew(Identity(key.seed), key.delegation, MALLORY.peer_id, **terms),  # type: ignore[arg-type]
        renewed,
        msgspec.msgpack.encode(longer),
    ):
        with pytest.raises(RemoteError, match="another member's"):
            run.show(MALLORY.peer_id, forged)
    with pytest.raises(RemoteError, match="another invite"):
        members(certificate=certificate(key_of(), ANA)).take_renewed(renewed, ANA.peer_id)


def test_an_invite_has_so_many_seats_at_a_time() -> None:
    run, key, other = members(), key_of(seats=2), key_of()
    for peer in (ANA, BEN, MALLORY):
        run.show(peer.peer_id, certificate(other if peer is BEN else key, peer))
    assert run.why_not_enter(MALLORY.peer_id, [ANA.peer_id, BEN.peer_id]) == "", "Ben came by another"
    late = Identity(bytes([9]) * 32)
    run.show(late.peer_id, certificate(key, late))
    assert "all 2 seats" in run.why_not_enter(late.peer_id, [ANA.peer_id, BEN.peer_id, MALLORY.peer_id])
    assert run.why_not_enter(ANA.peer_id, [ANA.peer_id, MALLORY.peer_id]) == "", "who has a seat keeps it"


def test_the_seat_of_an_excluded_member_stays_taken() -> None:
    run, key = members(), key_of(seats=2)
    for peer in (ANA, BEN, MALLORY):
        run.show(peer.peer_id, certificate(key, peer))
    run.exclude(Excluded({ANA.public_key}, came_by={ANA.public_key: key.delegation.key}))
    assert run.why_not_enter(BEN.peer_id, []) == ""
    assert "all 2 seats" in run.why_not_enter(BEN.peer_id, [MALLORY.peer_id]), "a fresh key of Ana's takes another"
    assert run.why_not_enter(BEN.peer_id, [ANA.peer_id]) == "", "and nobody counts twice"


def test_a_command_of_this_machine_may_ask_its_peer_whatever_its_invite() -> None:
    run = members()
    run.guests.append(ANA.peer_id)
    assert run.access_level(ANA.peer_id) is AccessLevel.MEMBER
    run.exclude(Excluded({ANA.public_key}))
    assert run.access_level(ANA.peer_id) is AccessLevel.STRANGER


def test_a_member_or_a_whole_invite_is_excluded() -> None:
    run, key, other, called = members(), key_of(), key_of(), []
    run.on_exclusion.append(lambda: called.append(run.excluded.keys))
    run.show(ANA.peer_id, certificate(key, ANA))
    run.show(BEN.peer_id, certificate(other, BEN))
    run.exclude(Excluded({ANA.public_key}))
    assert run.access_level(ANA.peer_id) is AccessLevel.STRANGER
    for _ in range(2):
        run.exclude(Excluded({ANA.public_key, other.delegation.key}))
    assert run.access_level(BEN.peer_id) is AccessLevel.STRANGER
    run.show(MALLORY.peer_id, certificate(other, MALLORY))
    assert run.access_level(MALLORY.peer_id) is AccessLevel.STRANGER
    run.exclude(Excluded({OWNER.public_key}))
    assert run.access_level(OWNER.peer_id) is AccessLevel.MEMBER, "nobody can take a run from its owner"
    assert run.access_level(ANA.peer_id) is AccessLevel.MEMBER, "what is excluded no more is in again"
    assert len(called) == 3


def test_a_member_of_a_revoked_invite_is_out_by_whatever_invite_it_comes_then() -> None:
    run, revoked, anothers = members(), key_of(), key_of()
    run.show(ANA.peer_id, certificate(revoked, ANA))
    assert run.invite_of(ANA.peer_id) == revoked.delegation.key
    run.show(ANA.peer_id, certificate(anothers, ANA))
    assert run.invite_of(ANA.peer_id) == anothers.delegation.key
    run.exclude(Excluded({revoked.delegation.key}))
    run.show(ANA.peer_id, certificate(anothers, ANA))
    assert run.access_level(ANA.peer_id) is AccessLevel.STRANGER
    run.exclude(Excluded({revoked.delegation.key}, readmitted={ANA.public_key}))
    assert run.access_level(ANA.peer_id) is AccessLevel.MEMBER, "the owner lets in this one of them"
    assert run.invite_of(OWNER.peer_id) == run.invite_of(BEN.peer_id) == b""


def test_whoever_has_an_invite_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.protocol.membership.PEERS_MAX", 8)
    run, key = members(), key_of()
    for number in range(30):
        peer = Identity(number.to_bytes(32, "big"))
        run.show(peer.peer_id, certificate(key, peer))
    assert len(run._shown) == 8
