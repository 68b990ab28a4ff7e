"""The roles, piece by piece; whole terms are in `test_core.py`, whole swarms in `test_rollback.py`."""

import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.coordination_events import Answered, Ask, Unanswered
from shoal.coordinator.era import MISSING_HEARTBEATS, PATIENCE_HEARTBEATS
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.role import PATIENCE_HEARTBEATS as HEIR_HEARTBEATS
from shoal.coordinator.role import SEARCH_HEARTBEATS, CoordinationRole, Tenure, rank, standing
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.messages import Done, Holding, Ping, TransferLeadership
from shoal.protocol.spec import RunSpec, SwarmSpec

TERM_S = 20.0
SPEC = RunSpec(swarm=SwarmSpec(stages=3, min_peers=6, heartbeat_s=1.0, term_s=TERM_S))
GROUPS = [["a", "d"], ["b", "e"], ["c", "f"]]
STAGE_OF = {peer: stage for stage, group in enumerate(GROUPS) for peer in group}
PART = (Holding(era=0, version=50, layers=stage_layer_keys(SPEC.model, 0, 2)),)


@pytest.fixture
def policy():
    return ReplanPolicy(ClusterView("run", SPEC), GreedyAllocator())


@pytest.fixture
def chain(make_chain):
    return make_chain()


@pytest.fixture
def proposed():
    """(time, layout) of each proposal."""
    return []


@pytest.fixture
def leader(policy, chain, proposed):
    return CoordinationRole(
        run="run",
        me="a",
        owner="a",
        swarm=SPEC.swarm,
        chain=chain,
        policy=policy,
        proposer=SimpleNamespace(
            is_busy=False,
            next_sequence=lambda base: base.plan.sequence + 1,
            propose=lambda base, layout, now_s: proposed.append((now_s, layout)) or [],
            campaign=lambda base, now_s, permit: [],
        ),
        sign_transfer=lambda body: b"yes",
        verify_transfer=lambda peer, permit, body: permit == b"yes",
        rng=random.Random(0),
        now_s=0.0,
    )


@pytest.fixture
def live(policy, chain, make_plan):
    chain.live = make_plan(GROUPS, coordinator="a", not_started=False)
    policy.obey(chain.live.plan, 0.0)
    return chain.live


def asked(commands, kind):
    return [command.peer for command in commands if isinstance(command, Ask) and isinstance(command.message, kind)]


@pytest.mark.parametrize("eligible", [True, False])
def test_who_waits_for_disks_keeps_the_role_if_it_may(
    leader, policy, live, proposed, make_heartbeat, make_advert, eligible
):
    """Stage 1 has lost its state, and of the only snapshot just a part is here. The wait is longer than a term."""
    leader.begin_term(live.plan, 0.0, continuing=False, silent=None)
    if not eligible:
        leader.own = make_heartbeat("a", advert=make_advert("a", willing_to_coordinate=False))
    handed_over_s = []
    for tick in range(2 * int(PATIENCE_HEARTBEATS + MISSING_HEARTBEATS + 1)):
        now_s = tick / 2
        for peer, stage in STAGE_OF.items():
            says = {"stage": stage, "synced": stage != 1, "version": 57, "holdings": PART}
            policy.view.hear(peer, make_heartbeat(peer, **says), now_s)
        handed_over_s += [now_s for _ in asked(leader.work(live, now_s, done=False), TransferLeadership)]
    begun_again_s = [now_s for now_s, layout in proposed if layout.beginning is not None]
    if eligible:
        assert handed_over_s == []
        assert begun_again_s[0] == PATIENCE_HEARTBEATS + MISSING_HEARTBEATS
    else:
        assert handed_over_s[0] == TERM_S


@pytest.mark.parametrize(
    ("silent", "answers", "expected_s"),
    [
        ((), False, TERM_S),
        (("f",), False, TERM_S + 1.25 + SEARCH_HEARTBEATS),
        (("f",), True, TERM_S),
        (("b", "c", "d", "e", "f"), False, math.inf),
    ],
    ids=["nobody is silent", "dropped first", "it lives", "no majority"],
)
def test_who_doubts_somebody_finds_out_before_the_role_moves(
    leader, policy, chain, live, proposed, make_plan, make_heartbeat, silent, answers, expected_s
):
    """They fall silent two heartbeats before the term ends: an heir would give them three from then on."""
    leader.begin_term(live.plan, 0.0, continuing=False, silent=None)
    handed_over_s, dropped_s = math.inf, math.inf
    for tick in range(int(TERM_S + 10) * 4):
        now_s = tick / 4
        for peer, stage in STAGE_OF.items():
            if now_s % 1.0 == 0.0 and (peer not in silent or now_s <= TERM_S - 2.0):
                policy.view.hear(peer, make_heartbeat(peer, stage=stage, synced=True, version=57), now_s)
                leader.hear(peer, make_heartbeat(peer), live.plan, now_s)
        commands = leader.work(live, now_s, done=False)
        for peer in asked(commands, Ping) if answers else []:
            leader.answered(Answered(peer=peer, asked=Ping(), reply=Ping()), now_s)
        if asked(commands, TransferLeadership):
            handed_over_s = min(handed_over_s, now_s)
        if proposed:
            dropped_s = min(dropped_s, proposed.pop()[0])
            live = make_plan([["a", "d"], ["b", "e"], ["c"]], coordinator="a", order=(1, 2), not_started=False)
            chain.live = live
            policy.obey(live.plan, now_s)
    assert handed_over_s == expected_s
    assert (dropped_s < handed_over_s < math.inf) == (silent == ("f",) and not answers)


def test_whom_a_mate_calls_silent_is_looked_for_at_the_next_tick(leader, policy, live, make_heartbeat):
    leader.begin_term(live.plan, 0.0, continuing=False, silent=None)
    for peer in STAGE_OF:
        policy.view.hear(peer, make_heartbeat(peer), 0.0)
    assert asked(leader.work(live, 0.1, done=False), Ping) == []
    leader.hear("b", make_heartbeat("b", silent=("f",)), live.plan, 0.2)
    assert asked(leader.work(live, 0.25, done=False), Ping) == ["f"]


def test_a_dead_coordinator_that_no_plan_names_is_not_looked_for(leader, live):
    leader.begin_term(live.plan, 0.0, continuing=False, silent="z")
    assert "z" not in asked(leader.work(live, 0.1, done=False), Ping)
    assert leader.answered(Answered(peer="z", asked=Ping(), reply=Ping()), 0.2) == []
    leader.begin_term(live.plan, 0.0, continuing=False, silent="f")
    assert asked(leader.work(live, 0.1, done=False), Ping) == ["f"]


# --- the transfer of the role ---


@pytest.fixture
def tenure():
    return Tenure(begun_s=0.0, due_s=60.0, publish_at_s=0.0, members=frozenset())


def next_heir(tenure, order, now_s):
    return tenure.next_heir(order, now_s + HEIR_HEARTBEATS)


def test_a_coordinator_that_goes_does_not_wait_for_the_end(tenure):
    tenure.hasten(10.0)
    tenure.hasten(50.0)
    assert tenure.due_s == 10.0
    next_heir(tenure, ["b"], 10.0)
    tenure.hasten(10.0)
    assert tenure.due_s == 10.0 + HEIR_HEARTBEATS, "an heir that has been asked has its time"


def test_an_heir_has_time_and_then_the_next_is_asked(tenure):
    assert next_heir(tenure, ["b", "c"], 60.0) == "b"
    assert tenure.due_s > 60.0 + HEIR_HEARTBEATS - 0.1
    assert tenure.due_s <= 60.0 + HEIR_HEARTBEATS
    assert next_heir(tenure, ["b", "c"], 64.0) == "c"


def test_when_nobody_takes_it_the_role_stays_for_a_while(tenure):
    next_heir(tenure, ["b"], 60.0)
    assert next_heir(tenure, ["b"], 64.0) is None
    assert tenure.due_s > 64.1
    assert tenure.due_s <= 64.0 + HEIR_HEARTBEATS
    assert next_heir(tenure, ["b"], 68.0) == "b"


@pytest.fixture
def asks_an_heir(leader, policy, live, make_heartbeat):
    """asks_an_heir(now_s): (the heir, the question), or None; all members are heard."""
    leader.begin_term(live.plan, 0.0, continuing=False, silent=None)

    def look(now_s):
        for peer in STAGE_OF:
            policy.view.hear(peer, make_heartbeat(peer), now_s)
        asks = [c for c in leader.work(live, now_s, done=False) if isinstance(c, Ask)]
        return next(((ask.peer, ask.message) for ask in asks if isinstance(ask.message, TransferLeadership)), None)

    return look


def test_who_declines_is_not_waited_for(leader, asks_an_heir):
    heir, transfer = asks_an_heir(TERM_S)
    other = next(peer for peer in STAGE_OF if peer not in (heir, "a"))
    leader.unanswered(Unanswered(peer=other, asked=transfer, reason="no"), TERM_S + 0.1)
    assert not asks_an_heir(TERM_S + 0.1)
    leader.unanswered(Unanswered(peer=heir, asked=transfer, reason="no"), TERM_S + 0.2)
    assert asks_an_heir(TERM_S + 0.2)


@pytest.mark.parametrize("is_heir", [True, False])
def test_an_heir_far_away_has_more_time(leader, asks_an_heir, is_heir):
    heir, transfer = asks_an_heir(TERM_S)
    peer = heir if is_heir else next(peer for peer in STAGE_OF if peer not in (heir, "a"))
    leader.answered(Answered(peer=peer, asked=transfer, reply=Done(), took_s=0.5), TERM_S + 0.5)
    due_s = TERM_S + 0.5 + HEIR_HEARTBEATS + 3.0 if is_heir else TERM_S + HEIR_HEARTBEATS
    for tenth in range(1, 10 * int(due_s - TERM_S)):
        assert not asks_an_heir(TERM_S + tenth / 10)
    assert not asks_an_heir(due_s - 0.05)
    assert asks_an_heir(due_s)


# --- the rank ---

CANDIDATES = [f"peer-{number}" for number in range(10)]


@given(st.permutations(CANDIDATES), st.integers(1, 1000))
def test_everyone_computes_the_same_order(shuffled, term):
    assert rank("run", term, shuffled) == rank("run", term, CANDIDATES)
    assert sorted(rank("run", term, shuffled)) == sorted(CANDIDATES)


def test_the_first_differs_from_term_to_term_and_run_to_run():
    assert rank("run", 1, CANDIDATES) != rank("run", 2, CANDIDATES)
    assert rank("run", 1, CANDIDATES) != rank("another", 1, CANDIDATES)


def test_every_peer_has_its_turn_about_as_often():
    firsts = Counter(rank("run", term, CANDIDATES)[0] for term in range(2000))
    # 200 each on average; five standard deviations (13.4) on either side
    assert all(133 < firsts[peer] < 267 for peer in CANDIDATES)


def test_who_stays_keeps_the_order_when_others_leave():
    order = rank("run", 7, CANDIDATES)
    assert rank("run", 7, CANDIDATES[:5]) == tuple(peer for peer in order if peer in CANDIDATES[:5])


def plan_of(make_plan, *, coordinator):
    return make_plan([CANDIDATES], coordinator=coordinator, order=(3, 9)).plan


def test_the_standby_is_the_first_that_is_not_the_coordinator(make_plan):
    order = rank("run", 3, CANDIDATES)
    assert standing("run", plan_of(make_plan, coordinator=order[0]), order[1]) == 0
    assert standing("run", plan_of(make_plan, coordinator=order[4]), order[0]) == 0
    assert standing("run", plan_of(make_plan, coordinator=order[0]), order[9]) == 8


def test_coordinator_and_strangers_stand_nowhere(make_plan):
    plan = plan_of(make_plan, coordinator=CANDIDATES[0])
    assert standing("run", plan, CANDIDATES[0]) is None
    assert standing("run", plan, "stranger") is None
