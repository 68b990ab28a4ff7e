from shoal.peer.replica.members import MembershipView
from shoal.peer.replica.views import standstill
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import RoundMember, RoundStart
from shoal.protocol.plan import Member

ME, MATE = PeerID("me"), PeerID("mate")


def members(*, mate_ready: bool = True) -> MembershipView:
    found = MembershipView(me=ME, ready=True)
    found.set_planned([Member(ME, 1.0, 1.0), Member(MATE, 1.0, 1.0)], (), now_s=0.0)
    found.announced(MATE, ready=mate_ready, is_open=True)
    return found


def test_a_round_that_does_not_end() -> None:
    start = RoundStart(
        stage=0,
        step=3,
        attempt=1,
        members=tuple(RoundMember(peer=peer, bandwidth=1.0, indices=b"") for peer in (ME, MATE)),
        duplicates=0,
        given_up=0,
        loss_sum=0.0,
        staleness_sum=0,
    )
    assert standstill(members(), start, []) == "the round of me, mate"


def test_microbatches_that_have_not_come() -> None:
    found = members()
    found.names(MATE, ME, count=1)
    assert standstill(found, None, [1, 4]) == "microbatches [1, 4]; we lead"


def test_a_mate_that_has_not_said_who_leads() -> None:
    assert standstill(members(), None, []) == "a round; we lead, but these have not confirmed it: mate"


def test_somebody_else_leads() -> None:
    found = MembershipView(me=ME, ready=True)
    found.set_planned([Member(MATE, 1.0, 1.0), Member(ME, 1.0, 1.0)], (), now_s=0.0)
    found.announced(MATE, ready=True, is_open=True)
    assert standstill(found, None, [2]) == "microbatches [2], from the leader, mate"


def test_nobody_is_ready() -> None:
    assert standstill(MembershipView(me=ME), None, []) == "a round, and a leader"
