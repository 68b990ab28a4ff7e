"""What a coordinator makes of what it hears; whole swarms of it are in `test_rollback.py`."""

import msgspec
import pytest

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.cost.workload import Workload
from shoal.coordinator.replan_policy import NOTHING_TO_READ, TOLD_HEARTBEATS, ReplanPolicy, _divided
from shoal.coordinator.swarm_status import swarm_status
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.messages import CommitReport, Holding, Reset, TransferLeadership
from shoal.protocol.plan import Mandate
from shoal.protocol.spec import RunSpec, SwarmSpec

SPEC = RunSpec(swarm=SwarmSpec(stages=3, min_peers=6, heartbeat_s=1.0, term_s=60.0))
GROUPS = [["a", "d"], ["b", "e"], ["c", "f"]]
STAGE_OF = {peer: stage for stage, group in enumerate(GROUPS) for peer in group}


@pytest.fixture
def make_live(make_plan):
    return lambda **says: make_plan(GROUPS, coordinator="a", **says)


@pytest.fixture
def policy():
    return ReplanPolicy(ClusterView("run", SPEC), GreedyAllocator())


@pytest.fixture
def hear(policy, make_heartbeat):
    def everybody(peers="abcdef", *, now_s=0.0, **says):
        usual = {"version": 57, "synced": True}
        flaws = []
        for peer in peers:
            heartbeat = make_heartbeat(peer, **({"stage": STAGE_OF.get(peer)} | usual | says))
            flaws += policy.view.hear(peer, heartbeat, now_s)
        return flaws

    return everybody


def kept(version, *stages, era=0):
    layers = tuple(key for stage in stages for key in stage_layer_keys(SPEC.model, 2 * stage, 2 * stage + 2))
    return (Holding(era=era, version=version, layers=layers),)


def begin(policy, live, now_s=0.0):
    policy.obey(live.plan, now_s)
    policy.begin_term(live.plan, now_s, continuing=False, silent=None)


def begin_with_two_left(policy, live, *, died_s):
    """Of six peers a and c are left: the others were heard for the last time at `died_s`, and are known to be dead."""
    begin(policy, live, died_s)
    for peer in "bdef":
        policy.view.roster.lose(peer, dead=True)


def test_nothing_is_said_while_everybody_has_what_he_should(policy, make_live, hear):
    live = make_live(not_started=False)
    begin(policy, live)
    hear()
    assert policy.next_plan(live.plan, 2.0, sequence=2) == (None, "")


def test_a_fresh_plan_gives_way_once_a_step_is_committed(policy, make_live, hear):
    live = make_live()
    begin(policy, live)
    hear(version=0)
    assert policy.next_plan(live.plan, 0.5, sequence=2) == (None, "")
    assert policy.view.is_fresh(live.plan, None, leads=True)
    hear("a", version=1, now_s=1.0)
    draft, reason = policy.next_plan(live.plan, 1.0, sequence=2)
    assert draft.beginning is None
    assert [stage.peers for stage in draft.stages] == [tuple(group) for group in GROUPS]
    assert reason == "training is under way"
    assert not policy.view.is_fresh(live.plan, None, leads=True)


def test_who_takes_over_and_knows_nothing_does_not_call_a_plan_fresh(policy, make_live, make_heartbeat):
    live = make_live()
    policy.obey(live.plan, 0.0)
    assert not policy.view.is_fresh(live.plan, None, leads=False)
    assert not policy.view.is_fresh(live.plan, make_heartbeat("b", stage=None, synced=False), leads=False)
    assert policy.view.is_fresh(live.plan, make_heartbeat("b", stage=1, synced=True), leads=False)
    assert not policy.view.is_fresh(live.plan, make_heartbeat("b", stage=1, synced=True, version=3), leads=False)
    policy.view.inherit(TransferLeadership(plan=b"", roster=(), version=0))
    assert policy.view.is_fresh(live.plan, None, leads=False)
    policy.view.inherit(TransferLeadership(plan=b"", roster=(), version=9))
    assert not policy.view.is_fresh(live.plan, None, leads=False)


def test_a_lost_stage_begins_an_era_from_the_newest_whole_snapshot(policy, make_live, hear):
    live = make_live(not_started=False)
    begin(policy, live)
    hear()
    assert policy.next_plan(live.plan, 0.0, sequence=2) == (None, "")
    hear("acdf", now_s=1.0, holdings=kept(50, 0, 1) + kept(40, 0, 1, 2))
    hear("be", now_s=1.0, synced=False, holdings=kept(50, 2) + kept(55, 2))
    assert policy.next_plan(live.plan, 1.0, sequence=2) == (None, "")
    draft, reason = policy.next_plan(live.plan, 3.1, sequence=2)
    assert (draft.beginning.era, draft.beginning.version, draft.beginning.from_era) == (1, 50, 0)
    assert reason == draft.reason == "stage 1 has no holder left: back to version 50"


def test_a_run_that_was_saved_does_not_begin_anew_where_nothing_of_it_can_be_read(make_live, make_heartbeat):
    """The coordinator's own snapshots are damaged, and nobody else that is here has a whole one."""
    policy = ReplanPolicy(ClusterView("run", SPEC), GreedyAllocator(), has_lost_all=lambda: True)
    for peer in "abcdef":
        policy.view.hear(peer, make_heartbeat(peer), 0.0)
    assert policy.first_plan(1.0) == (None, NOTHING_TO_READ)
    live = make_live(not_started=False)
    begin(policy, live)
    for now_s in (1.0, 500.0):
        for peer in "abcdef":
            policy.view.hear(peer, make_heartbeat(peer, stage=STAGE_OF[peer], version=1), now_s)
        layout, _ = policy.next_plan(live.plan, now_s, sequence=2)
        assert layout is None or layout.beginning is None
    policy.view.hear("f", make_heartbeat("f", version=1, holdings=kept(50, 0, 1, 2)), 501.0)
    layout, _ = policy.next_plan(live.plan, 501.0, sequence=2)
    assert layout.beginning.version == 50


def test_what_is_said_of_another_era_is_no_holding_of_this_one(policy, make_live, hear):
    live = make_live(order=(1, 9), era=2, restore_version=50, restore_era=1, not_started=False)
    begin(policy, live)
    hear("acdf", now_s=2.0, era=2, holdings=kept(50, 0, 1, 2, era=1))
    hear("be", now_s=2.0, era=1, version=99)
    assert policy.view.version_max == 57
    assert policy.next_plan(live.plan, 2.9, sequence=10) == (None, "")
    draft, _ = policy.next_plan(live.plan, 3.1, sequence=10)
    assert (draft.beginning.era, draft.beginning.version, draft.beginning.from_era) == (3, 50, 1)


def test_who_is_behind_a_whole_snapshot_of_its_era_has_begun_it_again(policy, make_live, hear):
    live = make_live()
    begin(policy, live)
    hear(version=2, now_s=2.0, holdings=kept(50, 0, 1, 2))
    draft, _ = policy.next_plan(live.plan, 3.1, sequence=2)
    assert (draft.beginning.era, draft.beginning.version) == (1, 50)


@pytest.mark.parametrize("said", [69, 66])
def test_a_mate_that_has_yet_to_commit_what_is_on_disks_holds_the_state(policy, make_live, hear, said):
    """Either its heartbeat is older than the snapshot, or whoever died after its own commit owes it the sums."""
    live = make_live(not_started=False)
    begin(policy, live)
    hear("be", version=said)
    policy.next_plan(live.plan, 0.0, sequence=2)
    hear("acdf", version=70, now_s=0.5, holdings=kept(70, 0, 1, 2))
    hear("e", version=70, now_s=0.5)
    policy.next_plan(live.plan, 0.5, sequence=2)
    policy.view.roster.lose("e", dead=True)
    draft, reason = policy.next_plan(live.plan, 0.6, sequence=2)
    assert draft.beginning is None, reason
    assert {peer for stage in draft.stages for peer in stage.peers} == set("abcdf")
    for now_s in (3.0, 6.0):
        hear("acdf", version=70, now_s=now_s, holdings=kept(70, 0, 1, 2))
        hear("b", version=69, now_s=now_s)
        draft, reason = policy.next_plan(live.plan, now_s, sequence=2)
        assert draft.beginning is None, "it goes on from there, however long its commit takes"


def test_what_is_safe_is_on_two_disks_of_members_that_are_alive(policy, make_live, hear):
    live = make_live(not_started=False)
    begin(policy, live)
    for peer, copy in zip("abcdef", (0, 1, 2, 1, 2, 0), strict=True):
        hear(peer, holdings=kept(50, copy))
    assert policy.view.safe(live.plan, 0.0) == (0, 50)
    assert policy.view.safe(make_live().plan, 0.0) == (0, 0), "a plan that has just gone back may read older ones"
    for peer, copy in zip("abcdeg", (0, 1, 2, 1, 2, 0), strict=True):
        hear(peer, holdings=kept(50, copy) + kept(60, copy), now_s=2.0)
    assert policy.view.safe(live.plan, 2.0) == (0, 50), "g is no member"
    hear("f", holdings=kept(60, 0), now_s=3.0)
    assert policy.view.safe(live.plan, 3.0) == (0, 60)
    hear("bcde", holdings=kept(60, 1, 2), now_s=60.0)
    hear("a", holdings=kept(60, 0), now_s=60.0)
    assert policy.view.safe(live.plan, 60.0) == (0, 0), "f has not been heard for a minute"


def test_too_few_peers_is_said_and_waited_for(policy, make_live, hear):
    live = make_live(not_started=False)
    begin_with_two_left(policy, live, died_s=30.0)
    hear("ac", now_s=30.0, holdings=kept(50, 0, 1, 2))
    draft, reason = policy.next_plan(live.plan, 30.0, sequence=2)
    assert draft is None
    assert "2 peers cannot hold 3 stages" in reason
    hear("acg", now_s=31.0, holdings=kept(50, 0, 1, 2))
    draft, reason = policy.next_plan(live.plan, 31.0, sequence=2)
    assert draft.beginning.version == 50
    assert "back to version 50" in reason


@pytest.fixture(params=[2, 6])
def two_left(make_live, make_heartbeat, request):
    """(who has copies of which stages, now) -> what comes next, where a and c are left of a run that begins with
    `min_peers` peers, two or all six."""
    few = msgspec.structs.replace(SPEC, swarm=msgspec.structs.replace(SPEC.swarm, min_peers=request.param))
    policy, live = ReplanPolicy(ClusterView("run", few), GreedyAllocator()), make_live(not_started=False)
    begin_with_two_left(policy, live, died_s=30.0)

    def next_plan(copies, now_s):
        for peer, stages in copies.items():
            beat = make_heartbeat(peer, stage=STAGE_OF[peer], version=57, synced=True, holdings=kept(50, *stages))
            policy.view.hear(peer, beat, now_s)
        return policy.next_plan(live.plan, now_s, sequence=2)

    return next_plan


def test_a_run_with_fewer_peers_than_stages_goes_back_with_fewer_stages(two_left):
    copies = {"a": (0, 1), "c": (1, 2)}
    assert two_left(copies, 30.0) == (None, "no new plan: 2 peers cannot hold 3 stages"), "a disk may not be known yet"
    draft, reason = two_left(copies, 30.0 + TOLD_HEARTBEATS)
    assert (draft.beginning.version, draft.beginning.from_era) == (50, 0)
    assert [stage.layers for stage in draft.stages] == [(0, 6)], "one stage holds both, as it fits"
    assert reason == "stage 1 has no holder left: back to version 50, 2 peers on 1 stage"


def test_it_does_so_at_once_where_the_last_holder_was_heard_long_before(two_left):
    """As where a home was asked again for some seconds before its refusals counted."""
    draft, reason = two_left({"a": (0, 1), "c": (1, 2)}, 30.0 + TOLD_HEARTBEATS)
    assert reason == "stage 1 has no holder left: back to version 50, 2 peers on 1 stage"
    assert draft.beginning.version == 50


def test_a_run_that_goes_back_with_fewer_stages_waits_for_a_disk_first(two_left):
    copies = {"a": (0,), "c": (2,)}
    two_left(copies, 30.0)
    draft, reason = two_left(copies, 30.0 + TOLD_HEARTBEATS)
    assert draft is None
    assert "waiting for a peer that has layers.2 to layers.3 of step 50 on its disk" in reason


def test_an_era_that_has_not_begun_is_divided_anew_if_too_few_peers_are_left(policy, make_live, hear):
    live = make_live()
    begin_with_two_left(policy, live, died_s=30.0)
    for later_s in (0.0, TOLD_HEARTBEATS - 0.5):
        hear("ac", now_s=30.0 + later_s, version=0)
        assert policy.next_plan(live.plan, 30.0 + later_s, sequence=2)[0] is None, "more peers may come back"
    hear("ac", now_s=30.0 + TOLD_HEARTBEATS, version=0)
    draft, reason = policy.next_plan(live.plan, 30.0 + TOLD_HEARTBEATS, sequence=2)
    assert (draft.beginning.version, draft.beginning.loses) == (0, False)
    assert [stage.layers for stage in draft.stages] == [(0, 6)]
    assert reason == "the stages have too few peers: goes on from the seed, 2 peers on 1 stage"


def test_its_next_division_begins_at_the_same_version(policy, make_live, hear):
    live = make_live(era=1, restore_version=50)
    begin_with_two_left(policy, live, died_s=30.0)
    for later_s in (0.0, TOLD_HEARTBEATS):
        hear("a", now_s=30.0 + later_s, version=0, era=1, holdings=kept(50, 0, 1))
        hear("c", now_s=30.0 + later_s, version=0, era=1, holdings=kept(50, 2) + kept(40, 0, 1, 2))
        draft, _ = policy.next_plan(live.plan, 30.0 + later_s, sequence=2)
    assert (draft.beginning.version, draft.beginning.from_era) == (50, 0)


def test_reports_that_cannot_be_name_their_reporter(policy, make_live, hear):
    policy.obey(make_live().plan, 0.0)
    report = CommitReport(
        stage=1,
        step=3,
        members=2,
        microbatches=SPEC.training.microbatches_per_step - 1,
        duplicates=0,
        given_up=0,
        tokens=1,
        staleness_steps_mean=0.0,
        loss=None,
        digest="",
    )
    (complaint,) = hear("b", commits=(report,), version=0)
    assert complaint.startswith("b reports step 3 of stage 1")
    assert policy.view.ledger.version_max == 0


def test_a_peer_that_returns_goes_back_to_its_stage(policy, make_live, make_plan, hear):
    live = make_live(not_started=False)
    begin(policy, live)
    smaller = make_plan([["a", "d"], ["b"], ["c"]], coordinator="a", order=(1, 2), base=live, not_started=False)
    policy.obey(smaller.plan, 0.0)
    policy.begin_term(smaller.plan, 0.0, continuing=False, silent=None)
    hear("abcd")
    hear("f", synced=False, stage=None)
    draft, _ = policy.next_plan(smaller.plan, 1.0, sequence=3)
    assert draft.stages[2].peers == ("c", "f"), "stage 1 is as poor, and f was at stage 2"


def test_a_reset_is_for_those_in_reach(policy, make_live, make_advert):
    live = make_live(not_started=False)
    policy.obey(live.plan, 0.0)
    roster = tuple((peer, make_advert(peer)) for peer in "abcd")
    reset = Reset(mandate=b"m", live=live.link, version=60, roster=roster)
    leave = Mandate(override_epoch=1, term=1001, coordinator="a", previous=live.digest)
    draft, _ = policy.reset_plan(live, reset, leave, 0.0, sequence=2)
    assert draft.beginning is None
    assert {peer for stage in draft.stages for peer in stage.peers} == set("abcd")
    assert draft.reason.startswith("reset by the owner")
    assert not policy.view.is_fresh(live.plan, None, leads=False)
    few = msgspec.structs.replace(reset, roster=roster[:2])
    draft, reason = policy.reset_plan(live, few, leave, 0.0, sequence=2)
    assert draft is None
    assert "2 peers cannot hold 3 stages" in reason
    back = msgspec.structs.replace(leave, era=1, restore_version=50, restore_era=0)
    draft, _ = policy.reset_plan(live, few, back, 0.0, sequence=2)
    assert [stage.layers for stage in draft.stages] == [(0, 6)], "an era that begins anew may have other stages"
    assert draft.reason == "reset by the owner: back to version 50 of era 0, 2 peers on 1 stage"


# --- the first plan of a run whose number of stages is free ---


def test_a_host_begins_alone_where_the_model_fits(make_advert, make_heartbeat):
    policy = ReplanPolicy(ClusterView("run", RunSpec()), GreedyAllocator())
    assert policy.first_plan(0.0) == (None, "waiting for peers: 0 of 1 are here")
    policy.view.hear("a", make_heartbeat("a"), 0.0)
    layout, reason = policy.first_plan(0.0)
    assert [(stage.layers, stage.peers) for stage in layout.stages] == [((0, RunSpec().model.num_layers), ("a",))]
    assert reason == "first plan: 1 peer on 1 stage"


def test_a_host_whose_memory_is_too_small_waits_and_says_for_how_much(make_advert, make_heartbeat):
    needed = Workload.of(RunSpec()).resident_bytes(0, RunSpec().model.num_layers, members=1)
    policy = ReplanPolicy(ClusterView("run", RunSpec()), GreedyAllocator())
    small = {name: make_advert(name, memory_bytes=int(0.7 * needed)) for name in "ab"}
    policy.view.hear("a", make_heartbeat("a", advert=small["a"]), 0.0)
    layout, reason = policy.first_plan(0.0)
    assert layout is None
    assert reason.startswith("waiting for peers with 0.1 GB of memory in all: the model takes 0.1 GB while it trains")
    policy.view.hear("b", make_heartbeat("b", advert=small["b"]), 0.0)
    assert [stage.peers for stage in policy.first_plan(0.0)[0].stages] in ([("a",), ("b",)], [("b",), ("a",)])


def test_who_reads_that_half_are_gone_is_told_who_can_help(make_plan, make_heartbeat):
    """Only the run's owner can recover it, and everybody reads this sentence."""
    policy = ReplanPolicy(ClusterView("run", SPEC), GreedyAllocator())
    live = make_plan([["a", "b"]], coordinator="a", not_started=False)
    policy.obey(live.plan, 0.0)
    policy.begin_term(live.plan, 0.0, continuing=False, silent=None)
    policy.view.hear("a", make_heartbeat("a", stage=0, version=5, synced=True), 0.0)
    policy.view.roster.lose("b", dead=True)
    said = swarm_status(policy.view, live.plan, 1.0, owner="c").waits_for
    assert said == "half of the votes: 1 of 2 do not answer (the host can run `shoal recover`)"


def test_stages_whose_number_stays_have_moved_boundaries(make_live):
    plan = msgspec.structs.replace(make_live().plan, next_layout=make_live().plan.stages)
    assert _divided(plan, 29) == "the boundaries of the stages moved at step 29: layers 0-2, 2-4, 4-6"
