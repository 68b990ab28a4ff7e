"""What the coordinator says of the swarm to people."""

import msgspec

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.swarm_status import STATUS_EXPERTS_MAX, swarm_status
from shoal.coordinator.voting import NOTES_MAX, REASON_CHARS_MAX
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CONTROL_BYTES_MAX
from shoal.protocol.messages import ExpertStatus, SwarmStatus
from shoal.protocol.plan import ExpertGroup, Member
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec

SPEC = RunSpec(swarm=SwarmSpec(stages=2, min_peers=3, heartbeat_s=1.0, term_s=60.0))
PEER_ID_CHARS = 52
FRAME_BYTES = 64 * 1024


def policy() -> ReplanPolicy:
    return ReplanPolicy(ClusterView("run", SPEC), GreedyAllocator())


def test_a_peer_is_shown_with_its_speed_and_its_share_of_its_stage(make_plan, make_heartbeat):
    coordinator = policy()
    live = make_plan([["a", "b"], ["c"]], coordinator="a").plan
    coordinator.obey(live, 0.0)
    for peer in "abcd":
        coordinator.view.hear(peer, make_heartbeat(peer), 1.0)
    status = swarm_status(coordinator.view, live, 2.0, owner=PeerID("a"))
    shown = {peer.peer: peer for peer in status.peers}
    assert [shown[peer].share for peer in "abcd"] == [0.5, 0.5, 1.0, 0.0]
    assert shown["a"].flop_per_s == make_heartbeat("a").advert.flop_per_s > 0


def test_the_newest_plans_are_told_with_their_reasons(make_plan):
    coordinator = policy()
    for sequence in range(1, NOTES_MAX + 4):
        stages = [["a"], ["b"]] if sequence % 2 else [["b"], ["a"]]
        plan = make_plan(stages, coordinator="a", order=(1, sequence), reason=f"{sequence} " + "x" * 500).plan
        coordinator.obey(plan, float(sequence))
    status = swarm_status(coordinator.view, plan, NOTES_MAX + 10.0, owner=PeerID("a"))
    assert [note.sequence for note in status.plans] == list(range(4, NOTES_MAX + 4))
    assert [note.seconds_ago for note in status.plans[-2:]] == [8.0, 7.0]
    assert status.plans[-1].reason.startswith(f"{NOTES_MAX + 3} ")
    assert len(status.plans[-1].reason) == REASON_CHARS_MAX


def test_two_hundred_peers_and_a_full_history_fit_in_a_frame(make_plan, make_heartbeat):
    coordinator = policy()
    peers = [f"{number:0{PEER_ID_CHARS}}" for number in range(200)]
    for sequence in range(1, NOTES_MAX + 1):
        stages = [peers[:90], peers[90:]] if sequence % 2 == NOTES_MAX % 2 else [peers[:89], peers[89:]]
        plan = make_plan(stages, coordinator=peers[0], order=(1, sequence), reason="x" * 500).plan
        coordinator.obey(plan, 0.0)
    for stage, group in enumerate((peers[:90], peers[90:])):
        for peer in group:
            coordinator.view.hear(peer, make_heartbeat(peer, stage=stage, forward_s=0.012345, version=12345), 1.0)
    status = swarm_status(coordinator.view, plan, 2.0, owner=PeerID("a"))
    assert (len(status.peers), len(status.plans)) == (200, NOTES_MAX)
    assert len(msgspec.msgpack.encode(status)) < FRAME_BYTES


def with_experts(num_experts: int) -> ReplanPolicy:
    model = ModelSpec(num_experts=num_experts)
    spec = RunSpec(model=model, swarm=SwarmSpec(stages=2, min_peers=3, heartbeat_s=1.0, term_s=60.0, expert_slots=2))
    return ReplanPolicy(ClusterView("run", spec), GreedyAllocator())


def held_by(stage: int, expert: int, *peers: str) -> ExpertGroup:
    return ExpertGroup(stage, expert, tuple(Member(PeerID(peer), 1.0, 1.0, 1) for peer in peers))


def test_experts_are_shown_with_their_load_and_who_holds_them_already(make_plan, make_heartbeat):
    coordinator = with_experts(2)
    live = make_plan([["a", "b"], ["c"]], coordinator="a").plan
    placed = (held_by(0, 0, "b", "a"), held_by(0, 1, "a"), held_by(1, 0, "c"), held_by(1, 1, "c", "gone"))
    live = msgspec.structs.replace(live, experts=placed)
    coordinator.obey(live, 0.0)
    for counts in ((0, 0), (30, 90)):
        coordinator.view.hear("a", make_heartbeat("a", stage=0, held=((2, 7), (3, 7)), loads=counts), 1.0)
        coordinator.view.hear("b", make_heartbeat("b", stage=0), 1.0)
    coordinator.view.hear("c", make_heartbeat("c", stage=1, era=1, held=((4, 7), (5, 7))), 1.0)
    status = swarm_status(coordinator.view, live, 2.0, owner=PeerID("a"))
    a, b, c = (next(at for at, peer in enumerate(status.peers) if peer.peer == name) for name in "abc")
    assert status.experts == (
        ExpertStatus(stage=0, expert=0, load=0.25, holders=(a,), coming=(b,)),
        ExpertStatus(stage=0, expert=1, load=0.75, holders=(a,)),
        ExpertStatus(stage=1, expert=0, coming=(c,)),
        ExpertStatus(stage=1, expert=1, coming=(c,)),
    ), "c speaks of another era, and nobody knows of one who is gone"


def test_a_thousand_experts_fit_in_a_message(make_plan, make_heartbeat):
    coordinator = with_experts(700)
    peers = [f"{number:0{PEER_ID_CHARS}}" for number in range(200)]
    live = make_plan([peers[:100], peers[100:]], coordinator=peers[0]).plan
    of = [tuple(peers[100 * (n // 700) + (n + k) % 100] for k in range(4)) for n in range(1400)]
    placed = tuple(held_by(*divmod(n, 700), *of[n]) for n in range(1400))
    live = msgspec.structs.replace(live, experts=placed)
    coordinator.obey(live, 0.0)
    for stage in range(2):
        for peer in peers[100 * stage : 100 * (stage + 1)]:
            for beat in range(2):
                loads = tuple(1000 * beat + n for n in range(700))
                coordinator.view.hear(peer, make_heartbeat(peer, stage=stage, version=12345, loads=loads), 1.0)
    status = swarm_status(coordinator.view, live, 2.0, owner=PeerID("a"))
    assert len(status.experts) == STATUS_EXPERTS_MAX
    assert len(msgspec.msgpack.encode(status)) < CONTROL_BYTES_MAX // 2


def test_a_status_of_before_there_was_a_history_is_read(make_plan, make_heartbeat):
    coordinator = policy()
    live = make_plan([["a"], ["b"]], coordinator="a").plan
    coordinator.obey(live, 0.0)
    coordinator.view.hear("a", make_heartbeat("a"), 0.5)
    fields = msgspec.msgpack.decode(
        msgspec.msgpack.encode(swarm_status(coordinator.view, live, 1.0, owner=PeerID("a")))
    )
    del fields["plans"]
    assert "experts" not in fields
    for peer in fields["peers"]:
        del peer["share"], peer["flop_per_s"]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=SwarmStatus)
    assert read.plans == ()
    assert (read.peers[0].share, read.peers[0].flop_per_s) == (0.0, 0.0)
