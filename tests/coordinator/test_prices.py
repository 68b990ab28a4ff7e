"""What the coordinator reckons that a change, and a stage with one holder, may cost: from what it has seen."""

import pytest

from shoal.coordinator.cluster_view import HORIZON_S_MAX, RETURN_HEARTBEATS, ClusterView
from shoal.coordinator.era import CheckpointCatalog, disks_of
from shoal.coordinator.experts.failure_records import HORIZON_S, PRIOR_S
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.messages import Holding
from shoal.protocol.spec import RunSpec, SwarmSpec

SPEC = RunSpec(swarm=SwarmSpec(heartbeat_s=1.0, snapshot_interval_s=300.0, snapshot_interval_steps=0))
WAY_BACK_S = RETURN_HEARTBEATS * 1.0
NOTHING = CheckpointCatalog.of(())


@pytest.fixture
def view(make_heartbeat):
    view = ClusterView("run", SPEC)
    for peer in "ab":
        view.hear(peer, make_heartbeat(peer), 0.0)
    return view


def snapshot_at(view, now_s, catalog=NOTHING):
    return view.snapshot(view.roster.measured(0.0), None, catalog, now_s, knows_network=False)


def test_a_layout_is_expected_to_last_as_long_as_nobody_has_come_or_gone(view, make_plan):
    two = make_plan([["a"], ["b"]], coordinator="a").plan
    view.obey(two, 1000.0)
    assert snapshot_at(view, 1100.0).horizon_s == HORIZON_S, "at least"
    view.obey(make_plan([["b"], ["a"]], coordinator="a").plan, 2000.0)
    assert snapshot_at(view, 3000.0).horizon_s == 2000.0, "the same members in other places"
    view.obey(make_plan([["a"], ["b", "c"]], coordinator="a").plan, 3000.0)
    assert snapshot_at(view, 3700.0).horizon_s == 700.0
    assert snapshot_at(view, 1e6).horizon_s == HORIZON_S_MAX


def test_a_layout_is_expected_to_last_no_longer_than_those_before_it(view, make_plan):
    one, two = make_plan([["a", "b"]], coordinator="a").plan, make_plan([["a"], ["b"]], coordinator="a").plan
    horizons = []
    for number in range(7):
        view.obey((one, two)[number % 2], 1000.0 + 30.0 * number)
        horizons.append(snapshot_at(view, 1000.0 + 30.0 * number).horizon_s)
    assert horizons[0] == HORIZON_S, "there was none"
    assert horizons == sorted(horizons, reverse=True)
    assert horizons[6] == (HORIZON_S + 180.0) / 7
    view.obey(one, 1200.0)
    assert snapshot_at(view, 1200.0).horizon_s == (HORIZON_S + 200.0) / 7, "the same division under another plan"
    assert snapshot_at(view, 1000.0 + 12 * 3600.0).horizon_s == pytest.approx(12 * 3600.0 / 7, rel=0.02)


def test_going_back_costs_half_an_interval_of_snapshots_or_everything_if_there_are_none(
    view, make_plan, make_heartbeat
):
    view.obey(make_plan([["a"], ["b"]], coordinator="a").plan, 0.0)
    assert snapshot_at(view, 100.0).going_back_s == 150.0 + WAY_BACK_S, "the first snapshot is on its way"
    assert snapshot_at(view, 700.0).going_back_s == 700.0 + WAY_BACK_S, "nobody keeps any"
    whole = Holding(era=0, version=9, layers=tuple(stage_layer_keys(SPEC.model, 0, SPEC.model.num_layers)))
    view.hear("a", make_heartbeat("a", holdings=(whole,)), 1.0)
    assert snapshot_at(view, 700.0, disks_of(view.roster, 1.0, among=None)).going_back_s == 150.0 + WAY_BACK_S


def test_who_is_not_known_fails_as_often_as_the_others_of_the_swarm(view):
    before = snapshot_at(view, 0.0).peers[0].failure_probability
    assert before == pytest.approx(600.0 / PRIOR_S, rel=0.05)
    for number in range(20):
        view.experts.records.lost(f"gone{number}")
    after = snapshot_at(view, 0.0).peers[0].failure_probability
    assert after > 10.0 * before
