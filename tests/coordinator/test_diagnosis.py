"""What the coordinator says of a run that cannot go on, and of what is on one machine alone."""

import msgspec
import pytest

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.swarm_status import seconds, swarm_status
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import group_keys
from shoal.protocol.messages import Holding, LinkReport
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec

SPEC = RunSpec(model=ModelSpec(num_layers=4), swarm=SwarmSpec(stages=2, min_peers=2, heartbeat_s=1.0, term_s=60.0))
HOST = PeerID("ana")


@pytest.fixture
def swarm(make_plan, make_heartbeat):
    """swarm([["ana"], ["bob"]], bob={"paused_s": 3.0}): the policy that has heard them all at 10 s, and its plan."""

    def make(groups, **says):
        policy = ReplanPolicy(ClusterView("run", SPEC), GreedyAllocator())
        live = make_plan(groups, coordinator="ana", not_started=False).plan
        policy.obey(live, 0.0)
        policy.begin_term(live, 0.0, continuing=False, silent=None)
        for stage, group in enumerate(groups):
            for name in group:
                usual = {"stage": stage, "synced": True, "version": 7} | says.get(name, {})
                if usual.pop("heard", True):
                    policy.view.hear(PeerID(name), make_heartbeat(name, **usual), 10.0)
        return policy, live

    return make


def told(made, now_s=10.0):
    policy, live = made
    return swarm_status(policy.view, live, now_s, owner=HOST)


def test_a_run_that_goes_on_waits_for_nothing(swarm):
    assert told(swarm([["ana"], ["bob"]])).waits_for == ""


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"paused_s": 40.0}, "is paused, for 40 s"),
        ({"paused_s": 40.0, "draining": True}, "is paused, for 40 s"),
        ({"draining": True}, "is leaving"),
        ({"synced": False}, "is downloading its state"),
        ({"synced": False, "light": (2, 6)}, "has 2 of 4 layers of its state"),
        ({"era": 3}, "is downloading its state"),
        ({"heard": False}, "does not answer, for 10 s"),
        ({"paused_s": float("nan")}, "is paused, for 0 s"),
    ],
)
def test_the_only_holder_of_a_stage_is_named_with_what_keeps_it(swarm, says, words):
    assert told(swarm([["ana"], ["bob"]], bob=says)).waits_for == f"stage 1: its only holder, bob, {words}"


def test_how_long_a_peer_has_not_answered_grows(swarm):
    made = swarm([["ana"], ["bob"]])
    made[0].view.hear(HOST, made[0].view.roster.presences[HOST].heartbeat, 22.0)
    assert told(made, 22.0).waits_for == "stage 1: its only holder, bob, does not answer, for 12 s"


def test_since_when_a_peer_is_silent_outlives_the_coordinator(swarm, make_unsigned):
    policy, live = swarm([["ana"], ["bob"]])
    policy.view.hear(HOST, policy.view.roster.presences[HOST].heartbeat, 30.0)
    heir = ReplanPolicy(ClusterView("run", SPEC), GreedyAllocator())
    heir.obey(live, 0.0)
    heir.view.inherit(policy.hand_over(make_unsigned(live), 30.0))
    heir.begin_term(live, 1030.0, continuing=False, silent=None)
    heir.view.hear(HOST, policy.view.roster.presences[HOST].heartbeat, 1031.0)
    status = swarm_status(heir.view, live, 1031.0, owner=HOST)
    assert status.waits_for == "stage 1: its only holder, bob, does not answer, for 21 s"
    assert {peer.name: peer.seen_s_ago for peer in status.peers} == {"ana": 0.0, "bob": 21.0}
    heir.view.hear(PeerID("bob"), policy.view.roster.presences[PeerID("bob")].heartbeat, 1032.0)
    assert swarm_status(heir.view, live, 1032.0, owner=HOST).waits_for == ""


def test_a_coordinator_that_keeps_the_role_goes_on_counting(swarm):
    policy, live = made = swarm([["ana"], ["bob"]])
    policy.begin_term(live, 25.0, continuing=True, silent=None)
    policy.begin_term(live, 30.0, continuing=True, silent=None)
    policy.view.hear(HOST, policy.view.roster.presences[HOST].heartbeat, 31.0)
    assert told(made, 31.0).waits_for == "stage 1: its only holder, bob, does not answer, for 21 s"


def test_how_long_a_pause_is_grows_between_two_heartbeats(swarm):
    status = told(swarm([["ana"], ["bob"]], bob={"paused_s": 40.0}), 11.5)
    assert [peer.paused_s for peer in status.peers] == [None, 41.5]


def test_a_coordinator_that_has_just_begun_blames_nobody(swarm):
    assert told(swarm([["ana"], ["bob"]], bob={"heard": False}), 1.0).waits_for == ""


def test_one_of_two_holders_is_enough(swarm):
    assert told(swarm([["ana", "cleo"], ["bob"]], ana={"paused_s": 40.0})).waits_for == ""


def test_of_several_holders_each_is_named(swarm):
    status = told(swarm([["ana"], ["bob", "cleo"]], bob={"paused_s": 5.0}, cleo={"synced": False}))
    assert status.waits_for == "stage 1: bob is paused, for 5 s and cleo is downloading its state"


def test_who_sends_no_gradients_is_named_with_the_members_that_say_so(swarm):
    bob, eve = PeerID("bob"), PeerID("eve")
    says = {"bob": {"unsound": (eve,)}, "cleo": {"unsound": (eve, bob, PeerID("stranger"))}, "ana": {"unsound": (eve,)}}
    policy, live = made = swarm([["ana"], ["bob", "cleo", "eve"]], **says)
    assert told(made).risks[1:] == (  # the first is of stage 0, which ana holds alone
        "bob sends what is no gradient (NaN, infinity) or restarts without end, says cleo: it counts for nothing (to "
        "put bob out, the host runs `shoal exclude bob`)",
        "eve sends what is no gradient (NaN, infinity) or restarts without end, say ana, bob and cleo: it counts for "
        "nothing (to put eve out, the host runs `shoal exclude eve`)",
    )
    room = {peer.peer: peer.memory_bytes for peer in policy.view.measured(live, 10.0)}
    assert [peer for peer, memory in room.items() if memory == 0] == [eve], "one member's word moves nobody"


def test_the_members_of_one_invite_take_no_place_from_others(swarm):
    ana, bob, cleo, eve, finn = map(PeerID, ("ana", "bob", "cleo", "eve", "finn"))
    invites = {ana: b"", bob: b"theirs", cleo: b"theirs", eve: b"hers", finn: b"his"}
    says = {name: {"unsound": (eve,)} for name in ("bob", "cleo")}
    policy, live = swarm([["ana"], ["bob", "cleo", "eve", "finn"]], **says)
    policy.view.electorate._invite_of = invites.get
    assert all(peer.memory_bytes for peer in policy.view.measured(live, 10.0)), "finn does not say so"


def test_a_stage_without_holders_is_said(swarm):
    assert told(swarm([["ana"], []])).waits_for == "stage 1: no peer holds it"


def test_who_alone_has_what_a_stage_has_learnt_is_named(swarm, make_heartbeat):
    policy, live = made = swarm([["ana", "cleo"], ["bob"]])
    policy.view.ledger.note_version(0, 7)
    assert told(made).risks == ("only bob has the state of stage 1: no other machine has a copy",)
    keys = tuple(sorted(group_keys(SPEC.model, live, 1)))
    own = make_heartbeat("bob", stage=1, synced=True, version=7, holdings=(Holding(era=0, version=5, layers=keys),))
    policy.view.hear(PeerID("bob"), own, 10.0)
    assert told(made).risks, "its own disk is not another machine"
    copies = (("ana", keys[:1]), ("cleo", keys[1:]))
    for name, part in copies:
        held = (Holding(era=0, version=5, layers=part),)
        policy.view.hear(PeerID(name), make_heartbeat(name, stage=0, synced=True, version=7, holdings=held), 10.0)
    assert told(made).risks == ()


def test_two_stages_on_one_machine_each_are_one_sentence(swarm):
    made = swarm([["ana"], ["bob"]])
    made[0].view.ledger.note_version(0, 1)
    assert told(made).risks == ("the states of stages 0 and 1 are on one machine each: no other machine has a copy",)


def test_before_the_first_step_there_is_nothing_to_lose(swarm):
    made = swarm([["ana"], ["bob"]], ana={"version": 0}, bob={"version": 0})
    assert told(made).risks == ()


def test_the_time_left_follows_from_the_rate(swarm):
    policy, _ = made = swarm([["ana"], ["bob"]])
    for step in range(8):
        policy.view.ledger.note_version(0, step + 1)
        policy.view.ledger.note_version(1, step + 1)
        policy.view.ledger.pace.committed(0, step, SPEC.tokens_per_step, 2.0 * step)
    status = told(made, 14.0)
    assert status.tokens_per_s == pytest.approx(SPEC.tokens_per_step / 2.0)
    assert status.left_s == pytest.approx(2.0 * (SPEC.training.steps - 8))
    later = told(made, 24.0)
    assert (later.left_s, later.stands_s) == (None, 10.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(later), type=type(later)) == later


@pytest.mark.parametrize(("span_s", "words"), [(0.4, "0 s"), (119.0, "119 s"), (600.0, "10 min"), (8000.0, "2 h")])
def test_spans_are_read_at_a_glance(span_s, words):
    assert seconds(span_s) == words


def lose(policy, one, other):
    for here, there in ((one, other), (other, one)):
        report = LinkReport(peer=PeerID(there), round_trip_s=0.1, bytes_per_s=0.0, num_failed=2)
        policy.view.links.note(PeerID(here), [report], 10.0)


def test_a_pair_that_cannot_reach_each_other_is_named(swarm, make_advert):
    inside = {name: {"advert": make_advert(name, addresses=("/ip4/192.168.0.7/tcp/1",))} for name in ("ben", "eve")}
    policy, _ = made = swarm([["ana", "bob"], ["ben", "eve"]], **inside)
    lose(policy, "ben", "eve")
    assert told(made, 20.0).risks == ("ben and eve cannot reach each other (both behind routers)",)
    lose(policy, "ana", "bob")
    policy.view.roster.presences["ana"].advert = make_advert("ana", addresses=("/ip4/8.8.8.8/tcp/1", "/ip4/no", "x"))
    assert told(made, 20.0).risks == ("ana and bob; ben and eve cannot reach each other",)
