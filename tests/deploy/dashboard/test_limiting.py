"""What keeps a peer from giving more."""

import msgspec
import pytest

from shoal.deploy.dashboard.limiting import limited_by, slowest_stage
from shoal.deploy.record.report import LimitsNow

PAUSED = LimitsNow(paused=True, why="somebody uses this machine")
CAPPED = LimitsNow(caps=("50% of the device's time", "upload at most 5 Mbit/s"))


@pytest.mark.parametrize(
    ("says", "kind", "text"),
    [
        ({"limits": PAUSED, "busy": 1.0}, "pause", "somebody uses this machine"),
        ({"limits": LimitsNow(paused=True)}, "pause", "paused"),
        ({"stage": None}, "place", "standing by"),
        ({"synced": False, "busy": 0.9}, "state", "stage 0"),
        ({"busy": 0.9}, "device", "90 %"),
        ({"busy": 0.7, "waiting": 3}, "device", "70 %"),
        ({"busy": 0.7, "waiting": 0}, "swarm", "waiting for other peers"),
        ({"sending": 0.9, "limits": CAPPED}, "cap", "5 Mbit/s"),
        ({"busy": 0.5, "waiting": 2, "limits": CAPPED}, "cap", "50% of the device's time"),
        ({"busy": 0.9, "waiting": 2, "limits": CAPPED}, "cap", "50% of the device's time (it computes 90 %)"),
        ({"busy": 0.3, "limits": CAPPED}, "swarm", "waiting for other peers"),
        ({"sending": 0.9}, "upload", "90 %"),
        ({"sending": 0.9, "busy": 0.95}, "device", "95 %"),
        ({"busy": 0.0}, "swarm", "no work now"),
        ({}, "swarm", "stage 1 is the slowest"),
    ],
)
def test_the_first_reason_that_holds_is_said(says, kind, text, make_contribution, make_peer):
    peers = make_peer("a", 0), make_peer("b", 1, forward_s=0.1)
    found = limited_by(make_contribution(**says), peers, num_stages=2)
    assert found.kind == kind
    assert text in found.text


def test_who_is_alone_fetches_from_nobody_and_who_leaves_fetches_nothing(make_contribution, make_peer):
    mine = make_contribution(synced=False)
    alone = make_peer("a", 0)
    alone = msgspec.structs.replace(alone, peer=mine.peer)
    assert limited_by(mine, [alone], num_stages=1).text == "getting the state of stage 0 ready"
    leaving = msgspec.structs.replace(alone, draining=True)
    assert limited_by(mine, [leaving], num_stages=1).text == "leaving: finishing its work"


def test_before_the_first_plan_nobody_is_a_spare(make_contribution):
    assert "waiting for the coordinator's plan" in limited_by(make_contribution(stage=None), (), num_stages=0).text


def test_who_holds_the_slowest_stage_is_not_told_that_it_waits_for_it(make_contribution, make_peer):
    peers = make_peer("a", 0, forward_s=0.1), make_peer("b", 1)
    assert "slowest" not in limited_by(make_contribution(), peers, num_stages=2).text


def test_replicas_add_up_and_the_last_stage_tells_forward_and_backward_in_one(make_peer):
    one = [make_peer("a", 0, forward_s=0.01), make_peer("b", 1, forward_s=0.02)]
    assert slowest_stage(one, num_stages=2) == 0, "three forwards of 10 ms against 20 ms for everything"
    assert slowest_stage([*one, make_peer("c", 0, forward_s=0.01)], num_stages=2) == 1


def test_with_a_stage_of_which_nothing_is_known_none_is_the_slowest(make_peer):
    assert slowest_stage([make_peer("a", 0)], num_stages=2) is None
    assert slowest_stage([make_peer("a", 0), make_peer("b", 1, synced=False)], num_stages=2) is None
    assert slowest_stage([], num_stages=0) is None


def test_who_trains_with_weights_alone_counts_as_one_that_computes(make_peer):
    peers = [make_peer("a", 0), make_peer("b", 1, forward_s=0.1), make_peer("c", 0, synced=False, light=(0, 3))]
    peers = [msgspec.structs.replace(peer, forward_s=0.1) for peer in peers]
    assert slowest_stage(peers, num_stages=2) == 0, "three forwards of 100 ms by two against 100 ms by one"
    assert slowest_stage(peers[1:], num_stages=2) == 0, "it alone"
