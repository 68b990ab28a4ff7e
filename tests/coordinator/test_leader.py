"""The coordinator's part, piece by piece; whole terms are in `test_core.py`, whole swarms in `test_rollback.py`."""

import math

import pytest

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.plan_layout import Layout
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.coordination_events import Answered, Ask
from shoal.coordinator.era import MISSING_HEARTBEATS, PATIENCE_HEARTBEATS
from shoal.coordinator.leader import SEARCH_HEARTBEATS, Leader
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.messages import Holding, Ping, TransferLeadership
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
def leader(policy):
    return Leader(me="a", owner="a", swarm=SPEC.swarm, policy=policy, sign_transfer=lambda body: b"yes", now_s=0.0)


@pytest.fixture
def live(policy, make_plan):
    live = make_plan(GROUPS, coordinator="a", not_started=False)
    policy.obey(live.plan, 0.0)
    return live


def work(leader, live, now_s, *, eligible=True):
    return leader.work(live, now_s, eligible=eligible, busy=False, outranked=False, sequence=live.plan.sequence + 1)


def asked(commands, kind):
    return [command.peer for command in commands if isinstance(command, Ask) and isinstance(command.message, kind)]


@pytest.mark.parametrize("eligible", [True, False])
def test_who_waits_for_disks_keeps_the_role_if_it_may(leader, policy, live, make_heartbeat, eligible):
    """Stage 1 has lost its state, and of the only snapshot just a part is here. The wait is longer than a term."""
    leader.begin(live.plan, 0.0, continuing=False, silent=None)
    handed_over_s, begun_again_s = [], []
    for tick in range(2 * int(PATIENCE_HEARTBEATS + MISSING_HEARTBEATS + 1)):
        now_s = tick / 2
        for peer, stage in STAGE_OF.items():
            says = {"stage": stage, "synced": stage != 1, "version": 57, "holdings": PART}
            policy.view.hear(peer, make_heartbeat(peer, **says), now_s)
        commands, want = work(leader, live, now_s, eligible=eligible)
        handed_over_s += [now_s for _ in asked(commands, TransferLeadership)]
        if isinstance(want, Layout) and want.beginning is not None:
            begun_again_s.append(now_s)
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
    leader, policy, live, make_plan, make_heartbeat, silent, answers, expected_s
):
    """They fall silent two heartbeats before the term ends: an heir would give them three from then on."""
    leader.begin(live.plan, 0.0, continuing=False, silent=None)
    handed_over_s, dropped_s = math.inf, math.inf
    for tick in range(int(TERM_S + 10) * 4):
        now_s = tick / 4
        for peer, stage in STAGE_OF.items():
            if now_s % 1.0 == 0.0 and (peer not in silent or now_s <= TERM_S - 2.0):
                policy.view.hear(peer, make_heartbeat(peer, stage=stage, synced=True, version=57), now_s)
                leader.heard(peer, make_heartbeat(peer), live.plan, now_s)
        commands, want = work(leader, live, now_s)
        for peer in asked(commands, Ping) if answers else []:
            leader.answered(Answered(peer=peer, asked=Ping(), reply=Ping()), now_s)
        if asked(commands, TransferLeadership):
            handed_over_s = min(handed_over_s, now_s)
        if isinstance(want, Layout):
            dropped_s = min(dropped_s, now_s)
            live = make_plan([["a", "d"], ["b", "e"], ["c"]], coordinator="a", order=(1, 2), not_started=False)
            policy.obey(live.plan, now_s)
    assert handed_over_s == expected_s
    assert (dropped_s < handed_over_s < math.inf) == (silent == ("f",) and not answers)


def test_whom_a_mate_calls_silent_is_looked_for_at_the_next_tick(leader, policy, live, make_heartbeat):
    leader.begin(live.plan, 0.0, continuing=False, silent=None)
    for peer in STAGE_OF:
        policy.view.hear(peer, make_heartbeat(peer), 0.0)
    assert asked(work(leader, live, 0.1)[0], Ping) == []
    leader.heard("b", make_heartbeat("b", silent=("f",)), live.plan, 0.2)
    assert asked(work(leader, live, 0.25)[0], Ping) == ["f"]


def test_a_dead_coordinator_that_no_plan_names_is_not_looked_for(leader, live):
    leader.begin(live.plan, 0.0, continuing=False, silent="z")
    assert "z" not in asked(work(leader, live, 0.1)[0], Ping)
    assert leader.answered(Answered(peer="z", asked=Ping(), reply=Ping()), 0.2) == []
    leader.begin(live.plan, 0.0, continuing=False, silent="f")
    assert asked(work(leader, live, 0.1)[0], Ping) == ["f"]
