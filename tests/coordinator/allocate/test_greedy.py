from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Layout, MeasuredPeer, NoLayout, SwarmSnapshot
from shoal.coordinator.allocate.live_allocator import EvolutionaryAllocator
from shoal.coordinator.allocate.measured import MeasuredNetwork
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.plan import Member, Plan, PlanShape, Stage, plan_flaw
from shoal.protocol.spec import RunSpec

ALLOCATOR = GreedyAllocator()
COSTS = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def measured(peer, speed=1.0, **says):
    usual = {"upload_bytes_per_s": 1e6, "memory_bytes": 1 << 30, "has_data": True}
    return MeasuredPeer(peer=peer, flop_per_s=speed, **(usual | says))


def snapshot(peers, num_stages=3):
    return SwarmSnapshot(
        peers=tuple(sorted(peers, key=lambda peer: peer.peer)), layer_costs=COSTS, num_stages=num_stages
    )


def with_network(snapshot):
    """Two cities by their names, and two peers of three have measured each other."""
    names = [ord(peer.peer[0]) for peer in snapshot.peers]
    near = np.array([[a % 2 == b % 2 for b in names] for a in names])
    unknown = np.array([[(a + b) % 3 == 0 for b in names] for a in names])
    return replace(
        snapshot,
        workload=Workload.of(RunSpec()),
        network=MeasuredNetwork(
            latency_s=np.where(unknown, np.nan, np.where(near, 0.005, 0.05)),
            bytes_per_s=np.where(unknown, np.nan, np.where(near, 1e8, 1e6)),
            is_certain=~unknown,
        ),
    )


def as_plan(layout, sequence=1):
    return Plan(
        run="run",
        term=1,
        sequence=sequence,
        previous="",
        coordinator="a",
        stages=layout.stages,
        spares=layout.spares,
    )


def groups(layout):
    return [list(stage.peers) for stage in layout.stages]


@st.composite
def swarms(draw, min_peers=1, names="abcdefghijklmno"):
    chosen = draw(st.lists(st.sampled_from(names), unique=True, min_size=min_peers, max_size=len(names)))
    return [
        measured(
            name,
            draw(st.floats(1.0, 1e13)),
            upload_bytes_per_s=draw(st.floats(1.0, 1e9)),
            has_data=draw(st.booleans()),
            draining=draw(st.sampled_from([False, False, False, True])),
            synced_stage=draw(st.sampled_from([None, 0, 1, 2])),
        )
        for name in chosen
    ]


def check(layout, peers, *, by_speed=True):
    """What every layout promises. Args: by_speed: shares follow speeds alone."""
    plan = as_plan(layout)
    assert plan_flaw(plan, PlanShape(num_layers=len(COSTS))) is None
    by_id = {peer.peer: peer for peer in peers}
    assert set(plan.members) <= set(by_id)
    stayers = {peer.peer for peer in peers if not peer.draining}
    assert stayers <= set(plan.members)
    assert all(by_id[peer].has_data for peer in plan.stages[0].peers)
    for stage in plan.stages:
        assert sum(member.share for member in stage.members) == pytest.approx(1.0)
        assert sum(member.bandwidth for member in stage.members) == pytest.approx(1.0)
        if not by_speed:
            continue
        fastest = max(stage.members, key=lambda member: by_id[member.peer].flop_per_s)
        assert fastest.share == max(member.share for member in stage.members)


def allocate(peers, previous=None, seed=0, *, live=False):
    """Args: live: by the live coordinator's allocator, which repairs with the same rules and knows the network."""
    allocator, shot = (EvolutionaryAllocator(), with_network(snapshot(peers))) if live else (ALLOCATOR, snapshot(peers))
    try:
        return allocator.allocate(shot, previous, seed=seed)
    except NoLayout:
        return None


def orphans_of(previous, by_id):
    """Stages of `previous` that nobody who stays and may serve them holds any more."""
    return sum(
        not any(p in by_id and not by_id[p].draining and (index or by_id[p].has_data) for p in stage.peers)
        for index, stage in enumerate(previous.stages)
    )


@pytest.mark.parametrize("live", [False, True])
@given(peers=swarms(), seed=st.integers(0, 9))
def test_a_first_layout_holds_what_it_promises(live, peers, seed):
    layout = allocate(peers, seed=seed, live=live)
    stayers = [peer for peer in peers if not peer.draining]
    possible = len(stayers) >= 3 and any(peer.has_data for peer in stayers)
    assert (layout is not None) is possible
    if layout is not None:
        check(layout, stayers, by_speed=not live)
        assert layout == allocate(list(reversed(peers)), seed=seed, live=live)


@pytest.mark.parametrize("live", [False, True])
@given(before=swarms(), after=swarms(), seed=st.integers(0, 9))
def test_a_later_layout_holds_what_it_promises_and_moves_few(live, before, after, seed):
    first = allocate([peer for peer in before if not peer.draining])
    assume(first is not None)
    previous = as_plan(first)
    layout = allocate(after, previous, seed=seed, live=live)
    assert layout == allocate(after, previous, seed=seed, live=live)
    if layout is None:
        return
    check(layout, after, by_speed=not live)
    assert [(s.first_layer, s.last_layer) for s in layout.stages] == [
        (s.first_layer, s.last_layer) for s in previous.stages
    ]
    by_id = {peer.peer: peer for peer in after}
    for index, stage in enumerate(previous.stages):
        stayers = [p for p in stage.peers if p in by_id and not by_id[p].draining and (index or by_id[p].has_data)]
        kept = [p for p in layout.stages[index].peers if p in stayers]
        assert kept == [p for p in stayers if p in kept], "ranks keep their order"
        # one moves away for each stage that nobody lasting is left to hold, and nobody without such a need
        assert len(stayers) - len(kept) <= orphans_of(previous, by_id)
    for index, stage in enumerate(previous.stages):
        had = [p for p in stage.peers if p in by_id and (index or by_id[p].has_data)]
        if any(by_id[p].synced_stage == index for p in had) and not orphans_of(previous, by_id):
            assert any(by_id[p].synced_stage == index for p in layout.stages[index].peers), "state is never let go"


def test_equal_peers_are_spread_evenly():
    layout = allocate([measured(name) for name in "abcdef"])
    assert sorted(len(group) for group in groups(layout)) == [2, 2, 2]


def test_speed_is_balanced_not_numbers():
    layout = allocate([measured("a", 4.0), measured("b", 4.0), *(measured(name) for name in "cdef")])
    speeds = sorted(sum(4.0 if peer in "ab" else 1.0 for peer in group) for group in groups(layout))
    assert speeds == [4.0, 4.0, 4.0]


def test_shares_follow_speed_and_bandwidth_follows_upload():
    peers = [measured("a", 3.0, upload_bytes_per_s=1e6), measured("b", 1.0, upload_bytes_per_s=4e6)]
    layout = ALLOCATOR.allocate(SwarmSnapshot(peers=tuple(peers), layer_costs=COSTS, num_stages=1), None, seed=0)
    (stage,) = layout.stages
    assert [member.share for member in stage.members] == [0.75, 0.25]
    assert [member.bandwidth for member in stage.members] == [0.2, 0.8]


def test_a_newcomer_goes_to_the_poorest_stage():
    previous = as_plan(allocate([measured(name) for name in "abcdef"]))
    lost = previous.stages[1].peers[1]
    layout = allocate([*(measured(name) for name in "abcdef" if name != lost), measured("new")], previous)
    assert groups(layout)[1] == [previous.stages[1].peers[0], "new"]


def test_a_stage_without_holders_gets_one_that_does_not_lead_the_richest():
    previous = as_plan(allocate([measured(name) for name in "abcdef"]))
    dead = set(previous.stages[2].peers)
    rich = previous.stages[0].peers
    peers = [measured(name, 5.0 if name in rich else 1.0) for name in "abcdef" if name not in dead]
    layout = allocate(peers, previous)
    assert groups(layout) == [[rich[0]], list(previous.stages[1].peers), [rich[1]]]
    assert "moved to stage 2" in layout.reason


def test_who_cannot_read_the_text_never_serves_stage_0():
    layout = allocate([measured("a", 0.1), *(measured(name, 9.0, has_data=False) for name in "bcdef")])
    assert groups(layout)[0] == ["a"]


def test_a_peer_that_nothing_fits_is_a_spare():
    peers = (measured("a"), measured("b", has_data=False))
    layout = ALLOCATOR.allocate(SwarmSnapshot(peers=peers, layer_costs=COSTS, num_stages=1), None, seed=0)
    assert groups(layout) == [["a"]]
    assert layout.spares == ("b",)


WHOLE_RUN = Workload.of(RunSpec())
WORKLOAD = replace(WHOLE_RUN, memory=replace(WHOLE_RUN.memory, layer_job_bytes=(), workspace_bytes=0.0))
"""Only what layers take in proportion."""
WHOLE_BYTES = WORKLOAD.resident_bytes(0, 6, members=1)


def free(*peers):
    """A snapshot whose number of stages nobody has said."""
    return replace(snapshot(peers, num_stages=None), workload=WORKLOAD)


@pytest.mark.parametrize(("share", "num_stages"), [(1.0, 1), (0.6, 2), (0.4, 3)])
def test_where_the_number_of_stages_is_free_they_are_the_fewest_that_fit(share, num_stages):
    peers = [measured(name, memory_bytes=share * WHOLE_BYTES) for name in "abcdef"]
    layout = ALLOCATOR.allocate(free(*peers), None, seed=0)
    assert len(layout.stages) == num_stages
    assert len([peer for group in groups(layout) for peer in group]) == 6
    alone = ALLOCATOR.allocate(free(measured("a", memory_bytes=WHOLE_BYTES)), None, seed=0)
    assert (groups(alone), alone.reason) == ([["a"]], "first plan: 1 peer on 1 stage")


def test_nobody_gets_a_stage_that_its_memory_does_not_hold():
    large, small = measured("a", memory_bytes=WHOLE_BYTES), measured("b", 99.0, memory_bytes=0.9 * WHOLE_BYTES)
    first = ALLOCATOR.allocate(free(large), None, seed=0)
    layout = ALLOCATOR.allocate(free(large, small), as_plan(first), seed=0)
    assert (groups(layout), layout.spares) == ([["a"]], ("b",))
    with pytest.raises(NoLayout, match=r"stage \d takes 0\.0 GB of memory, and no peer has more than 0\.0 GB"):
        ALLOCATOR.allocate(free(*(measured(name, memory_bytes=WHOLE_BYTES / 9) for name in "ab")), None, seed=0)


def test_who_claims_less_than_its_stage_takes_leaves_it_once_somebody_else_has_its_state():
    peers = [measured(name, memory_bytes=WHOLE_BYTES, synced_stage=0) for name in "ab"]
    previous = as_plan(ALLOCATOR.allocate(free(*peers), None, seed=0))
    short = replace(peers[0], memory_bytes=0.5 * WHOLE_BYTES)
    layout = ALLOCATOR.allocate(free(short, peers[1]), previous, seed=0)
    assert (groups(layout), layout.spares) == ([["b"]], ("a",))
    fetching = replace(peers[1], synced_stage=None)
    layout = ALLOCATOR.allocate(free(short, fetching), previous, seed=0)
    assert sorted(groups(layout)[0]) == ["a", "b"], "nobody else has the state yet"


def test_a_draining_peer_stays_until_another_has_the_state():
    previous = as_plan(allocate([measured(name) for name in "abc"]))
    leaver = previous.stages[1].peers[0]
    rest = [measured(name, synced_stage=previous.stage_of(name)) for name in "abc" if name != leaver]
    going = measured(leaver, draining=True, synced_stage=1)
    assert groups(allocate([*rest, going], previous))[1] == [leaver]
    helped = allocate([*rest, going, measured("d")], previous)
    assert groups(helped)[1] == [leaver, "d"]
    synced = allocate([*rest, going, measured("d", synced_stage=1)], as_plan(helped))
    assert groups(synced)[1] == ["d"]


def test_too_few_peers_is_a_sentence():
    with pytest.raises(NoLayout, match="2 peers cannot hold 3 stages"):
        ALLOCATOR.allocate(snapshot([measured("a"), measured("b")]), None, seed=0)
    with pytest.raises(NoLayout, match="no peer has the run's text to hold stage 0"):
        ALLOCATOR.allocate(snapshot([measured(name, has_data=False) for name in "abc"]), None, seed=0)


def test_ties_are_broken_by_the_seed():
    peers = [measured(name) for name in "abcdefgh"]
    assert len({str(groups(allocate(peers, seed=seed))) for seed in range(20)}) > 1


def test_a_peer_that_returns_goes_home_if_that_is_about_as_poor():
    previous = as_plan(allocate([measured(name) for name in "abcdef"]))
    back = previous.stages[2].peers[1]
    away = as_plan(allocate([measured(name) for name in "abcdef" if name != back], previous))
    rest = [measured(name) for name in "abcdef" if name != back]
    assert groups(allocate([*rest, measured(back, homes=(2,))], away))[2][-1] == back
    richer = [measured(name, 9.0 if name in away.stages[2].peers else 1.0) for name in "abcdef" if name != back]
    assert back not in groups(allocate([*richer, measured(back, homes=(2,))], away))[2], "not where nobody needs it"


def test_a_dead_stage_is_refilled_from_spares_before_anybody_moves():
    previous = as_plan(allocate([measured(name) for name in "abcdef"]))
    dead = set(previous.stages[1].peers)
    rest = [measured(name) for name in "abcdef" if name not in dead]
    layout = allocate([*rest, measured("spare")], previous)
    assert groups(layout) == [list(previous.stages[0].peers), ["spare"], list(previous.stages[2].peers)]


def test_who_has_the_snapshot_is_moved_before_others():
    previous = as_plan(allocate([measured(name) for name in "abcdefghi"]))
    dead = set(previous.stages[1].peers)
    keeper = previous.stages[2].peers[1]
    rest = [measured(name, homes=(1,) if name == keeper else ()) for name in "abcdefghi" if name not in dead]
    assert groups(allocate(rest, previous))[1] == [keeper]


def test_the_only_reader_of_the_text_goes_where_it_is_needed():
    stages = tuple(
        Stage(2 * index, 2 * index + 2, tuple(Member(peer, 1.0, 1.0) for peer in group))
        for index, group in enumerate(["x", "yz", "r"])
    )
    previous = as_plan(Layout(stages=stages, spares=(), reason=""))
    left = [measured("r"), measured("y", has_data=False), measured("z", has_data=False)]
    assert groups(allocate(left, previous)) == [["r"], ["y"], ["z"]]


@given(swarms(min_peers=6), st.randoms(use_true_random=False), st.integers(0, 9))
def test_half_of_a_swarm_is_enough_if_it_can_hold_the_model_at_all(before, dice, seed):
    before = [replace(peer, draining=False) for peer in before]
    first = allocate(before)
    assume(first is not None)
    left = dice.sample(before, len(before) // 2)
    possible = len(left) >= 3 and any(peer.has_data for peer in left)
    layout = allocate(left, as_plan(first), seed=seed)
    assert (layout is not None) is possible
    if layout is not None:
        check(layout, left)
