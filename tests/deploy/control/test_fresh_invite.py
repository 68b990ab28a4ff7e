import pytest

from shoal.deploy.control.fresh_invite import APART_S, PEERS_NAMED, SETTLES_S, FreshInvite
from shoal.protocol.identity import PeerID

ME, A, B, C, D = (PeerID(name) for name in ("me", "a", "b", "c", "d"))


@pytest.fixture
def invite():
    return FreshInvite(ME)


def test_whoever_is_alone_has_told_all(invite):
    assert not invite.is_due([], 0.0)
    assert not invite.is_due([], 1000.0)


def test_once_three_can_be_named_they_are(invite):
    assert PEERS_NAMED == 3
    assert invite.is_due([A, B], 0.0)
    invite.told([ME, A, B], 0.0)
    assert not invite.is_due([A, B, C], 1000.0)


def test_a_single_other_is_named_once_no_more_have_come_for_a_while(invite):
    assert not invite.is_due([A], 0.0)
    assert not invite.is_due([A], SETTLES_S - 1.0)
    assert invite.is_due([A], SETTLES_S)
    invite.told([ME, A], SETTLES_S)
    assert not invite.is_due([A], 1000.0)
    assert invite.is_due([A, B], 1000.0)


def test_there_is_another_when_those_that_it_names_have_gone(invite):
    invite.told([ME, A, B], 0.0)
    assert not invite.is_due([A], 1000.0)
    assert invite.is_due([A, C], 1000.0)
    assert invite.is_due([C, D], 1000.0)


def test_invites_are_told_a_minute_apart(invite):
    invite.told([ME, A, B], 0.0)
    assert not invite.is_due([C, D], APART_S - 1.0)
    assert invite.is_due([C, D], APART_S)
