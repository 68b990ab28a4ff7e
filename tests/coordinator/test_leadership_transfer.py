import pytest

from shoal.coordinator.leader import PATIENCE_HEARTBEATS, LeadershipTransfer


@pytest.fixture
def succession():
    return LeadershipTransfer(term_s=60.0, heartbeat_s=1.0, now_s=0.0)


def test_the_role_is_due_when_the_term_ends(succession):
    assert not succession.is_due(59.9)
    assert succession.is_due(60.0)
    assert not succession.is_waiting


def test_a_coordinator_that_goes_does_not_wait_for_the_end(succession):
    succession.hasten(10.0)
    succession.hasten(50.0)
    assert succession.is_due(10.0)


def test_an_heir_has_time_and_then_the_next_is_asked(succession):
    assert succession.next(["b", "c"], 60.0) == "b"
    assert succession.is_waiting
    assert not succession.is_due(60.0 + PATIENCE_HEARTBEATS - 0.1)
    assert succession.is_due(60.0 + PATIENCE_HEARTBEATS)
    assert succession.next(["b", "c"], 64.0) == "c"


def test_who_declines_is_not_waited_for(succession):
    succession.next(["b", "c"], 60.0)
    succession.declined("c", 60.1)
    assert not succession.is_due(60.1)
    succession.declined("b", 60.2)
    assert succession.is_due(60.2)


def test_when_nobody_takes_it_the_role_stays_for_a_while(succession):
    succession.next(["b"], 60.0)
    assert succession.next(["b"], 64.0) is None
    assert not succession.is_waiting
    assert not succession.is_due(64.1)
    assert succession.is_due(64.0 + PATIENCE_HEARTBEATS)
    assert succession.next(["b"], 68.0) == "b"


def test_a_new_term_begins_afresh(succession):
    succession.next(["b"], 60.0)
    succession.begin(61.0)
    assert not succession.is_waiting
    assert not succession.is_due(120.9)
    assert succession.is_due(121.0)


def test_an_heir_far_away_has_more_time(succession):
    succession.next(["b", "c"], 60.0)
    succession.accepted("c", 1.0, 60.5)
    assert succession.is_due(60.0 + PATIENCE_HEARTBEATS)
    succession.accepted("b", 0.5, 60.5)
    assert not succession.is_due(60.5 + PATIENCE_HEARTBEATS + 2.9)
    assert succession.is_due(60.5 + PATIENCE_HEARTBEATS + 3.0)
