"""Whole swarms that place experts by who has failed how often: what coordinators learn and hand on."""

import msgspec
import pytest

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.experts import groups
from shoal.coordinator.experts.failure_records import FailureRecords
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import FailureRecord, TransferLeadership
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec

GROUPS = [["a", "d"], ["b", "e"], ["c", "f"]]
TERM_S = 30.0


def records_of(peer) -> FailureRecords:
    return peer.coordination.core.view.experts.records


def failures(records, *peers) -> list[float]:
    told = {record.peer: record.failures for record in records.tell(())}
    return [told.get(peer, 0.0) for peer in peers]


@pytest.mark.sim
def test_the_next_coordinator_knows_who_has_died_and_who_said_good_bye(run_swarm, monkeypatch):
    asked = []
    usual = groups.replan

    def replan(current, loads, chances, **says):
        asked.append(chances)
        return usual(current, loads, chances, **says)

    monkeypatch.setattr(groups, "replan", replan)

    async def scenario(swarm):
        for number in range(9):
            await swarm.add(f"p{number}")
        await swarm.until(lambda: all(peer.order == (1, 1) for peer in swarm.alive()), within_s=10.0)
        first = swarm.coordinator
        flaky, polite, steady = (swarm.peers[name].peer_id for name in ("p3", "p4", "p5"))

        def planned(peer):
            return first.plan.has(peer)

        for _ in range(3):
            swarm.world.crash(swarm.peers["p3"].port)
            await swarm.until(lambda: not planned(flaky), within_s=10.0)
            await swarm.add("p3")
            await swarm.until(lambda: planned(flaky), within_s=10.0)
        swarm.peers["p4"].draining = True
        await swarm.until(lambda: not planned(polite), within_s=20.0)
        await swarm.peers["p4"].port.spawn(swarm.peers["p4"].coordination.close(leave=True))
        assert swarm.coordinator is first
        assert failures(records_of(first), flaky, polite, steady) == [3.0, 0.0, 0.0]
        del swarm.peers["p4"]
        await swarm.until(lambda: swarm.agreed() and swarm.coordinator is not first, within_s=9 * TERM_S)
        heir = swarm.coordinator
        assert failures(records_of(heir), flaky, polite, steady) == [3.0, 0.0, 0.0]
        asked.clear()
        await swarm.add("comer")
        await swarm.until(lambda: heir.plan.has(swarm.peers["comer"].peer_id), within_s=10.0)
        chances = {peer: chance for stage in asked for peer, chance in stage.items()}  # of the stage that changed
        known = dict(zip(chances, records_of(heir).probabilities(list(chances)), strict=True))
        assert chances == pytest.approx(known, rel=0.01)
        of_flaky, of_steady = records_of(heir).probabilities([flaky, steady])
        assert of_flaky > 3.0 * of_steady
        assert swarm.peers["comer"].peer_id in chances

    run_swarm(scenario, min_peers=9, expert_slots=3, term_s=TERM_S)


@pytest.mark.sim
def test_a_dead_coordinator_is_a_failure_that_its_heir_has_seen(run_swarm):
    async def scenario(swarm):
        await swarm.begin(9)
        dead = swarm.coordinator
        swarm.world.crash(dead.port)
        await swarm.until(lambda: all(not peer.plan.has(dead.peer_id) for peer in swarm.alive()), within_s=10.0)
        others = [peer.peer_id for peer in swarm.alive()]
        assert failures(records_of(swarm.coordinator), dead.peer_id, *others) == [1.0] + [0.0] * 8

    run_swarm(scenario, min_peers=9, expert_slots=3)


@pytest.fixture
def policy():
    swarm = SwarmSpec(stages=3, min_peers=6, heartbeat_s=1.0, term_s=60.0, expert_slots=2)
    spec = RunSpec(model=ModelSpec(num_experts=4), swarm=swarm)
    return ReplanPolicy(ClusterView("run", spec), GreedyAllocator())


@pytest.mark.parametrize(("leads", "counted"), [(True, 1.0), (False, 0.0)])
def test_only_who_coordinates_knows_why_somebody_is_gone(policy, make_plan, make_heartbeat, leads, counted):
    live = make_plan(GROUPS, coordinator="a")
    policy.obey(live.plan, 0.0)
    policy.begin_term(live.plan, 0.0, continuing=False, silent=None)
    for now_s in (0.0, 1.0):
        for peer in "abcdef":
            policy.view.hear(peer, make_heartbeat(peer), now_s)
    policy.view.roster.lose("f")
    policy.view.roster.leave("e")
    smaller = make_plan([["a", "d"], ["b"], ["c"]], coordinator="a", order=(1, 2), base=live)
    policy.obey(smaller.plan, 1.0, leads=leads)
    assert failures(policy.view.experts.records, "e", "f") == [0.0, counted]
    told = policy.hand_over(smaller, 1.0).records
    assert [record.peer for record in told[:4]] == ["a", "d", "b", "c"]
    assert {record.seen_s for record in told} == {1.0}


def test_a_liar_hands_over_what_harms_nobody(policy, make_plan):
    lies = [FailureRecord(PeerID(f"x{number}"), 1e300, float("nan")) for number in range(2000)]
    transfer = TransferLeadership(plan=b"", roster=(), records=(FailureRecord(PeerID("a"), 1e300, 1e300), *lies))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(transfer), type=TransferLeadership)
    policy.view.inherit(again)
    assert [record.peer for record in policy.view.experts.records.tell(())] == ["a"]
    stages = make_plan(GROUPS, coordinator="a").plan.stages
    assert len(policy.view.experts.place(stages, None, sequence=1)) == 12


def test_a_hand_over_without_records_is_one(policy):
    """From a coordinator whose model has no experts, or of the release before."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(TransferLeadership(plan=b"", roster=())))
    del plain["records"]
    transfer = msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=TransferLeadership)
    policy.view.inherit(transfer)
    assert policy.view.experts.records == FailureRecords()


def test_loads_of_an_old_term_do_not_come_back(policy, make_plan, make_heartbeat):
    live = make_plan(GROUPS, coordinator="a").plan
    policy.obey(live, 0.0)
    policy.begin_term(live, 0.0, continuing=False, silent=None)
    for count in (0, 100):
        policy.view.hear("a", make_heartbeat("a", stage=0, loads=(count,) * 4), 0.0)
    policy.view.stand_by()
    policy.view.inherit(TransferLeadership(plan=b"", roster=(), loads=((1.0,) * 4,)))
    policy.begin_term(live, 600.0, continuing=False, silent=None)
    policy.view.hear("a", make_heartbeat("a", stage=0, loads=(100_000, 200, 200, 200)), 600.0)
    assert policy.view.experts.load_shares(0) == pytest.approx([0.25] * 4)
