"""For how long reduced gradients are kept for a light member that has gone."""

from shoal.peer.group.reductions import AWAY_S, STEPS_MAX, AbsentLight
from shoal.protocol.identity import PeerID

A, B = PeerID("a"), PeerID("b")
NEVER = 2**62


def test_nothing_is_kept_while_nobody_has_gone() -> None:
    absent = AbsentLight()
    assert absent.wanted_from([A, B], [B], version=5, now_s=0.0) == NEVER
    assert absent.wanted_from([A, B], [B], version=6, now_s=1.0) == NEVER
    assert absent.wanted_from([A, B], [A, B], version=7, now_s=2.0) == NEVER, "it is whole now"
    assert absent.wanted_from([A], [A], version=8, now_s=3.0) == NEVER, "who holds the state fetches it again"


def test_what_a_light_member_lacks_that_has_gone_is_kept_for_a_few_steps_and_minutes() -> None:
    absent = AbsentLight()
    absent.wanted_from([A, B], [B], version=5, now_s=0.0)
    assert absent.wanted_from([B], [B], version=6, now_s=10.0) == 4
    assert absent.wanted_from([B], [B], version=7, now_s=20.0) == 4
    assert absent.wanted_from([A, B], [B], version=8, now_s=30.0) == 4, "it is back, and may not have asked yet"
    assert absent.wanted_from([A, B], [B], version=20, now_s=40.0) == 20 - STEPS_MAX
    assert absent.wanted_from([A, B], [B], version=21, now_s=10.0 + AWAY_S) == NEVER


def test_who_has_come_to_the_state_lacks_nothing() -> None:
    absent = AbsentLight()
    absent.wanted_from([A, B], [B], version=5, now_s=0.0)
    assert absent.wanted_from([B], [B], version=6, now_s=10.0) == 4
    assert absent.wanted_from([A, B], [A, B], version=7, now_s=20.0) == NEVER
