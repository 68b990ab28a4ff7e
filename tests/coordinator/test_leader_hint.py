import pytest

from shoal.coordinator.chain_sync import (
    DOUBT_HEARTBEATS,
    DOUBTED_MAX,
    GONE_ON_HEARTBEATS,
    HINT_HEARTBEATS,
    LeaderHint,
)
from shoal.protocol.messages import HeartbeatReply, PlanHead


@pytest.fixture
def chain(make_chain):
    return make_chain()


@pytest.fixture
def hint(chain):
    return LeaderHint(me="b", owner="owner", chain=chain, heartbeat_s=1.0, now_s=0.0)


@pytest.fixture
def plan(chain, make_plan):
    chain.live = make_plan([["owner"], ["b"], ["c"]], coordinator="owner")


def head(coordinator, term, sequence):
    return PlanHead(term=term, sequence=sequence, digest="", coordinator=coordinator, addresses=())


def reply(coordinator, *, leads, term=1):
    return HeartbeatReply(coordinator=coordinator, term=term, is_coordinator=leads)


def test_before_any_plan_everyone_reports_to_the_owner(hint):
    assert hint.coordinator == "owner"


def test_a_newcomer_reports_to_whom_the_directory_names(hint):
    assert hint.found(head("c", 7, 9), 0.0)
    assert hint.coordinator == "c"
    assert hint.run_exists(0.0)


def test_an_older_head_is_no_news(hint, plan):
    assert not hint.found(head("c", 1, 1), 0.0)
    assert hint.found(head("c", 2, 2), 0.0)
    assert not hint.found(head("b", 2, 1), 0.0)
    assert hint.coordinator == "c"


def test_who_is_not_the_coordinator_names_who_is(hint, plan):
    hint.replied("owner", reply("c", leads=False, term=2), 1.0)
    assert hint.coordinator == "c"


@pytest.mark.parametrize("leads", [True, False])
def test_a_coordinator_that_has_long_named_a_later_plan_is_no_sign_of_ours(hint, plan, leads):
    """It may lead that plan, or have handed the role over."""
    later = reply("owner" if leads else "c", leads=leads, term=2)
    hint.replied("owner", later, 1.0)
    for second in range(2, 1 + int(GONE_ON_HEARTBEATS)):
        hint.replied("c", reply("c", leads=True), float(second))
        hint.replied("owner", later, float(second))
        assert not hint.has_gone_on(float(second))
    assert hint.has_gone_on(1.0 + GONE_ON_HEARTBEATS)
    hint.replied("owner", reply("owner", leads=True), 6.0)
    assert not hint.has_gone_on(6.0)


def test_the_plan_that_follows_ends_the_doubt_of_ours(hint, plan, chain, make_plan):
    hint.replied("owner", reply("c", leads=False, term=2), 1.0)
    chain.live = make_plan([["owner"], ["b"], ["c"]], coordinator="c", order=(2, 2))
    hint.obeyed()
    assert not hint.has_gone_on(100.0)


def test_a_plan_ends_the_hint(hint, plan, chain, make_plan):
    hint.found(head("c", 2, 2), 0.0)
    chain.live = make_plan([["owner"], ["b"], ["c"]], coordinator="c", order=(2, 2))
    hint.obeyed()
    assert hint.coordinator == "c"
    hint.found(None, 6.0)
    assert not hint.run_exists(6.0)


def test_who_does_not_show_its_plan_in_time_is_doubted_for_a_while(hint, plan):
    late_s = HINT_HEARTBEATS
    hint.found(head("liar", 99, 99), 0.0)
    hint.found(head("liar", 99, 100), late_s - 0.1)
    assert hint.coordinator == "liar"
    hint.weigh(late_s)
    assert hint.coordinator == "owner", "and another plan has not given it more time"
    assert not hint.found(head("liar", 99, 101), late_s)
    assert hint.found(head("c", 2, 2), late_s), "others are believed"
    hint.weigh(2 * late_s)
    again_s = late_s + DOUBT_HEARTBEATS
    hint.weigh(again_s)
    assert hint.found(head("liar", 99, 102), again_s), "it may have been out of reach"


def test_two_who_outdo_each_other_gain_no_time(hint, plan):
    hint.found(head("liar", 9, 9), 0.0)
    assert hint.found(head("other", 10, 10), 3.0)
    assert not hint.found(head("liar", 11, 11), 6.0)
    hint.weigh(3.0 + HINT_HEARTBEATS)
    assert hint.coordinator == "owner"


def test_who_shows_its_plan_is_not_doubted_any_more(hint, plan, chain, make_plan):
    hint.found(head("c", 2, 2), 0.0)
    hint.weigh(HINT_HEARTBEATS)
    assert "c" in hint.doubted
    chain.live = make_plan([["owner"], ["b"], ["c"]], coordinator="c", order=(2, 2))
    hint.obeyed()
    assert hint.found(head("c", 3, 3), 9.0)


def test_liars_without_number_take_no_room_without_end(hint, plan):
    for number in range(2 * DOUBTED_MAX):
        hint.found(head(f"liar {number}", 9 + number, 9), 0.0)
    assert len(hint.doubted) == DOUBTED_MAX


def test_the_run_exists_until_the_directory_has_forgotten_it(hint):
    hint.found(head("c", 7, 9), 0.0)
    hint.weigh(HINT_HEARTBEATS)
    assert hint.coordinator == "owner"
    hint.found(head("c", 7, 9), HINT_HEARTBEATS)
    assert hint.run_exists(HINT_HEARTBEATS), "though who has its plan does not answer"
    hint.found(None, 120.0)
    assert not hint.run_exists(120.0)


def test_a_sleep_of_ours_gives_it_more_time(hint, plan):
    hint.found(head("c", 2, 2), 0.0)
    hint.excuse(60.0)
    hint.weigh(60.0)
    assert hint.coordinator == "c"
