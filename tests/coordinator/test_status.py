"""What the coordinator says of the swarm to people."""

import msgspec

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.governor import STATUS_PLANS_MAX, STATUS_REASON_CHARS_MAX, Governor
from shoal.protocol.messages import SwarmStatus
from shoal.protocol.spec import RunSpec, SwarmSpec

SPEC = RunSpec(swarm=SwarmSpec(stages=2, min_peers=3, heartbeat_s=1.0, term_s=60.0))
PEER_ID_CHARS = 52
FRAME_BYTES = 64 * 1024


def governor() -> Governor:
    return Governor(run="run", spec=SPEC, allocator=GreedyAllocator())


def test_a_peer_is_shown_with_its_speed_and_its_share_of_its_stage(make_plan, make_heartbeat):
    coordinator = governor()
    live = make_plan([["a", "b"], ["c"]], coordinator="a").plan
    coordinator.obey(live, 0.0)
    for peer in "abcd":
        coordinator.hear(peer, make_heartbeat(peer), 1.0)
    status = coordinator.status(live, 2.0)
    shown = {peer.peer: peer for peer in status.peers}
    assert [shown[peer].share for peer in "abcd"] == [0.5, 0.5, 1.0, 0.0]
    assert shown["a"].flop_per_s == make_heartbeat("a").advert.flop_per_s > 0


def test_the_newest_plans_are_told_with_their_reasons(make_plan):
    coordinator = governor()
    for sequence in range(1, STATUS_PLANS_MAX + 4):
        plan = make_plan([["a"], ["b"]], coordinator="a", order=(1, sequence), reason=f"{sequence} " + "x" * 500).plan
        coordinator.obey(plan, float(sequence))
    status = coordinator.status(plan, STATUS_PLANS_MAX + 10.0)
    assert [note.sequence for note in status.plans] == list(range(4, STATUS_PLANS_MAX + 4))
    assert [note.seconds_ago for note in status.plans[-2:]] == [8.0, 7.0]
    assert status.plans[-1].reason.startswith(f"{STATUS_PLANS_MAX + 3} ")
    assert len(status.plans[-1].reason) == STATUS_REASON_CHARS_MAX


def test_two_hundred_peers_and_a_full_history_fit_in_a_frame(make_plan, make_heartbeat):
    coordinator = governor()
    peers = [f"{number:0{PEER_ID_CHARS}}" for number in range(200)]
    for sequence in range(1, STATUS_PLANS_MAX + 1):
        plan = make_plan([peers[:90], peers[90:]], coordinator=peers[0], order=(1, sequence), reason="x" * 500).plan
        coordinator.obey(plan, 0.0)
    for stage, group in enumerate((peers[:90], peers[90:])):
        for peer in group:
            coordinator.hear(peer, make_heartbeat(peer, stage=stage, forward_s=0.012345, version=12345), 1.0)
    status = coordinator.status(plan, 2.0)
    assert len(status.peers) == 200
    assert len(msgspec.msgpack.encode(status)) < FRAME_BYTES


def test_a_status_of_before_there_was_a_history_is_read(make_plan, make_heartbeat):
    coordinator = governor()
    live = make_plan([["a"], ["b"]], coordinator="a").plan
    coordinator.obey(live, 0.0)
    coordinator.hear("a", make_heartbeat("a"), 0.5)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(coordinator.status(live, 1.0)))
    del fields["plans"]
    for peer in fields["peers"]:
        del peer["share"], peer["flop_per_s"]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=SwarmStatus)
    assert read.plans == ()
    assert (read.peers[0].share, read.peers[0].flop_per_s) == (0.0, 0.0)
