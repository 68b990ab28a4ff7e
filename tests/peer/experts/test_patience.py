"""How long a holder of experts is waited for."""

import math

from shoal.peer.experts.patience import APART, LIMIT_S_MIN, LIMIT_TIMES, Patience
from shoal.protocol.identity import PeerID

A, B, X = (PeerID(name) for name in "abx")


def answered(patience: Patience, holder: PeerID, seconds: float, *, step: int = 1, at_s: float = 100.0) -> None:
    patience.answered(holder, step, sent_s=at_s - seconds, now_s=at_s)


def test_the_limit_is_a_multiple_of_what_others_took() -> None:
    patience = Patience()
    assert patience.limit_s(X) == math.inf
    answered(patience, X, 50.0)
    assert patience.limit_s(X) == math.inf, "its own answers say nothing of others"
    answered(patience, A, 0.01)
    assert patience.limit_s(X) == LIMIT_S_MIN
    answered(patience, B, 2.0)
    answered(patience, A, 0.02)
    assert patience.limit_s(X) == LIMIT_TIMES * 2.0
    assert patience.limit_s(A) == LIMIT_TIMES * 50.0


def test_nobody_is_given_up_while_others_have_not_answered_for_that_step() -> None:
    """They may all wait for a version."""
    patience = Patience()
    answered(patience, A, 0.1, step=4, at_s=100.0)
    assert not patience.is_over(X, 5, sent_s=90.0, now_s=200.0), "a's answer was for the step before"
    assert not patience.is_over(X, 4, sent_s=101.0, now_s=200.0), "a's answer came before x was asked"
    assert patience.is_over(X, 4, sent_s=99.9, now_s=200.0)
    assert not patience.is_over(X, 4, sent_s=99.9, now_s=100.2), "x still has time"
    assert not patience.is_over(A, 4, sent_s=99.9, now_s=200.0), "nobody else has answered"


def test_who_is_given_up_is_shunned_for_longer_each_time_until_it_answers() -> None:
    patience = Patience()
    patience.gave_up(X, after_s=2.0, now_s=10.0)
    patience.gave_up(X, after_s=2.5, now_s=10.1)
    assert patience.shunned(10.0 + APART * 2.0 - 0.1) == {X}
    again_s = 10.0 + APART * 2.0
    assert patience.shunned(again_s) == frozenset()
    patience.gave_up(X, after_s=1.0, now_s=again_s)
    assert patience.shunned(again_s + 2 * APART * 2.0 - 0.1) == {X}
    answered(patience, X, 3.0, at_s=again_s + 1.0)
    assert patience.shunned(again_s + 1.0) == frozenset()
