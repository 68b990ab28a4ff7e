"""A will must fit into a message, whatever there is to say; what becomes of it is in `test_core.py`."""

import msgspec
import pytest

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.cluster_view import LEAST_NEEDED, ClusterView, fitting
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.roster import TOLD_MAX
from shoal.protocol.limits import CONTROL_BYTES_MAX, ENVELOPE_BYTES_MAX
from shoal.protocol.messages import (
    Absence,
    ArrivalStatistics,
    FailureRecord,
    PlanNote,
    TransferLeadership,
    UnreachablePair,
)
from shoal.protocol.spec import RunSpec, SwarmSpec

NAMES = [f"{number:052}" for number in range(512)]
GROUPS = [["a", "d"], ["b", "e"], ["c", "f"]]


@pytest.fixture
def make_large(make_advert):
    """An advert with as many addresses as there may be, and long ones."""
    return lambda name: make_advert(name, addresses=("x" * 200,) * 8)


def size(transfer):
    return len(msgspec.msgpack.encode(transfer)) + ENVELOPE_BYTES_MAX


@pytest.mark.parametrize(
    ("plan_bytes", "left_out"), [(55_000, 0), (120_000, 1), (200_000, 4), (230_000, 5), (300_000, 7)]
)
def test_what_is_needed_least_is_left_out_first(make_large, plan_bytes, left_out):
    transfer = TransferLeadership(
        plan=bytes(plan_bytes),
        roster=tuple((name, make_large(name)) for name in NAMES[:TOLD_MAX]),
        version=57,
        plans=tuple(PlanNote(1, sequence, 1.0, NAMES[0], "why " * 40) for sequence in range(16)),
        absent=(Absence(NAMES[0], make_large(NAMES[0]), 9.0),),
        loads=((1.0,) * 1024,) * 4,
        records=tuple(FailureRecord(name, 1.0, 1.0) for name in NAMES),
        arrivals=(ArrivalStatistics(NAMES[0], 1.0, 1.0, 9.0),),
        unreachable=(UnreachablePair(NAMES[0], NAMES[1], 9.0),),
    )
    less = fitting(transfer)
    assert size(less) <= CONTROL_BYTES_MAX or plan_bytes > CONTROL_BYTES_MAX
    assert [name for name in LEAST_NEEDED if getattr(less, name) == ()] == list(LEAST_NEEDED[:left_out])
    assert msgspec.structs.replace(less, **{name: getattr(transfer, name) for name in LEAST_NEEDED}) == transfer


def test_with_a_plan_for_a_thousand_there_is_a_will(make_plan, make_large, make_heartbeat):
    spec = RunSpec(swarm=SwarmSpec(stages=3, min_peers=6))
    policy = ReplanPolicy(ClusterView("run", spec), GreedyAllocator())
    live = msgspec.structs.replace(make_plan(GROUPS, coordinator="a"), envelope=bytes(200 * 1024))
    policy.obey(live.plan, 0.0)
    for name in NAMES[: 2 * TOLD_MAX]:
        policy.view.hear(name, make_heartbeat(name, advert=make_large(name), version=57), 0.0)
    transfer = policy.hand_over(live, 0.0)
    assert size(transfer) <= CONTROL_BYTES_MAX
    assert (transfer.plan, transfer.version, transfer.roster) == (live.link, 57, ())
    assert len(transfer.plans) == 1


def test_how_irregular_heartbeats_are_is_handed_over(make_plan, make_heartbeat):
    spec = RunSpec(swarm=SwarmSpec(stages=3, min_peers=6))
    live = make_plan(GROUPS, coordinator="a")
    last, heir = ClusterView("run", spec), ClusterView("run", spec)
    for view in (last, heir):
        view.obey(live.plan, 0.0)
    last.begin_term(live.plan, 0.0, continuing=False, silent=None)
    now_s = 0.0
    for number in range(40):
        now_s += 1.0 if number % 2 else 7.0
        last.hear("b", make_heartbeat("b"), now_s)
    patience_s = last.roster.arrivals("b").patience_s
    heir.inherit(last.hand_over(live, now_s))
    heir.begin_term(live.plan, now_s, continuing=False, silent=None)
    assert heir.roster.arrivals("b").patience_s == patience_s > heir.roster.arrivals("c").patience_s
    heir.begin_term(live.plan, now_s, continuing=False, silent=None)  # whoever was in between has died
    assert heir.roster.arrivals("b").patience_s == patience_s
