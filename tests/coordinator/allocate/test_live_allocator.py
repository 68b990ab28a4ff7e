"""What the live coordinator's search may move, and what it must gain; its repairs are in `test_greedy.py` too."""

import math
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.allocate.at_once import plan_at_once
from shoal.coordinator.allocate.interface import SPEED_MAX, MeasuredPeer, NoLayout, SwarmSnapshot
from shoal.coordinator.allocate.live_allocator import EvolutionaryAllocator
from shoal.coordinator.allocate.measured import RATE_MAX, MeasuredNetwork
from shoal.coordinator.allocate.measured_topology import predict_step_time, topology_of
from shoal.coordinator.cost.memory import FrozenBase
from shoal.coordinator.cost.workload import Workload, layer_costs
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Member, Plan, PlanShape, Stage, plan_flaw
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec, TrainingSpec

SPEC = RunSpec(
    model=ModelSpec(num_layers=6, dim=256, ffn_dim=704),
    training=TrainingSpec(microbatches_per_step=24),
    swarm=SwarmSpec(stages=3, min_peers=6),
)
ALLOCATOR = EvolutionaryAllocator()
CITIES = {"left": "abcd", "middle": "efgh", "right": "ijkl"}
SPLIT = [["a", "b", "e", "i"], ["c", "f", "g", "j"], ["d", "h", "k", "l"]]
"""Every stage is in all three cities, so everything that is exchanged goes through slow paths."""


def plan_of(groups, spares=()):
    stages = tuple(
        Stage(
            first_layer=2 * index,
            last_layer=2 * index + 2,
            members=tuple(Member(peer=PeerID(peer), share=1.0, bandwidth=1.0) for peer in group),
        )
        for index, group in enumerate(groups)
    )
    return Plan(
        run="run", term=1, sequence=1, previous="", coordinator=PeerID("a"), stages=stages, spares=tuple(spares)
    )


def snapshot_of(names="abcdefghijkl", *, previous=None, says=None, noise=0.0, seed=0):
    """Three cities: 100 MB/s and 2 ms inside, 0.5 MB/s and 40 ms between. Who is in `previous` holds its stage."""
    rng = np.random.default_rng(seed)
    city = [next(city for city, members in CITIES.items() if name in members) for name in names]
    near = np.array([[a == b for b in city] for a in city])

    def noisy(values):
        return values * rng.uniform(1.0 - noise, 1.0 + noise, values.shape)

    speeds = noisy(np.full(len(names), 2e10))
    peers = tuple(
        replace(
            MeasuredPeer(
                peer=PeerID(name),
                flop_per_s=float(speeds[index]),
                upload_bytes_per_s=1e7,
                memory_bytes=1 << 34,
                has_data=True,
                speed_variance=0.0,
                synced_stage=previous.stage_of(PeerID(name)) if previous else None,
            ),
            **(says or {}).get(name, {}),
        )
        for index, name in enumerate(names)
    )
    return SwarmSnapshot(
        peers=peers,
        layer_costs=layer_costs(SPEC.model),
        num_stages=3,
        workload=Workload.of(SPEC),
        network=MeasuredNetwork(
            latency_s=noisy(np.where(near, 0.002, 0.04)),
            bytes_per_s=noisy(np.where(near, 1e8, 5e5)),
            is_certain=np.full(near.shape, fill_value=True),
            rate_variance=np.zeros(near.shape),
        ),
    )


def groups(layout):
    return [set(stage.peers) for stage in layout.stages]


def search(previous, seed=3, **says):
    return ALLOCATOR.search(snapshot_of(previous=previous, **says), previous, seed=seed)


def first():
    layout, _ = ALLOCATOR.search(snapshot_of(), None, seed=1)
    return layout


def test_a_first_layout_at_once_has_as_many_stages_as_its_rule_finds_best():
    snapshot = replace(snapshot_of(), num_stages=None)
    placement, _ = plan_at_once(topology_of(snapshot), snapshot.workload)
    layout = ALLOCATOR.allocate(snapshot, None, seed=0)
    assert [stage.layers for stage in layout.stages] == list(pairwise(placement.bounds))
    assert plan_flaw(as_plan(layout), PlanShape(num_layers=6)) is None
    alone = ALLOCATOR.allocate(replace(snapshot_of("a"), num_stages=None), None, seed=0)
    assert (groups(alone), alone.stages[0].layers) == ([{"a"}], (0, 6))


def test_a_first_layout_keeps_what_is_exchanged_inside_cities():
    layout = first()
    assert sorted("".join(sorted(group)) for group in groups(layout)) == sorted(CITIES.values())
    assert plan_flaw(as_plan(layout), PlanShape(num_layers=6)) is None
    assert layout.spares == ()
    assert layout == first(), "the same snapshot and seed: the same layout"


@pytest.mark.parametrize(("gigabytes", "divides"), [(0.01, False), (5.0, True)])
def test_where_a_base_has_to_travel_a_first_layout_asks_for_less_of_it(gigabytes, divides):
    """Each of four peers alone with the whole model is quickest; but 5 GB for each take an hour at 4 MB/s."""
    snapshot, layers = replace(snapshot_of("abcd"), num_stages=None), SPEC.model.num_layers
    workload = snapshot.workload
    base = FrozenBase(layer_bytes=(gigabytes * 1e9 / layers,) * layers, parameters=1e6, travels=True)
    memory = replace(workload.memory, base=base)
    network = replace(snapshot.network, bytes_per_s=np.full((4, 4), 4e6))
    snapshot = replace(snapshot, workload=replace(workload, memory=memory), network=network)
    stays = replace(snapshot, workload=replace(workload, memory=replace(memory, base=replace(base, travels=False))))
    layout, _ = ALLOCATOR.search(snapshot, None, seed=1)
    assert len(ALLOCATOR.search(stays, None, seed=1)[0].stages) == 1
    assert (len(layout.stages) > 1) == divides


OFTEN = {"failure_probability": 0.5}
"""Said of each peer, it makes a lone holder cost a quarter of all work, where going back takes five minutes."""


@pytest.mark.parametrize("says", [{"a": {"flop_per_s": 2e12}}, {"a": {"flop_per_s": 2e12}, "b": {"has_data": False}}])
def test_a_first_layout_leaves_nobody_alone_where_peers_fail_often(says):
    """A machine that was idle when it looked seems many times faster than the others on it."""
    often = {peer: OFTEN | says.get(peer, {}) for peer in "abcdef"}
    snapshot = replace(snapshot_of("abcdef", says=often), going_back_s=3000.0)
    layout, _ = ALLOCATOR.search(snapshot, None, seed=1)
    assert [len(stage.members) for stage in layout.stages] == [2, 2, 2]
    if "b" in says:
        assert "b" not in layout.stages[0].peers
    steady, _ = ALLOCATOR.search(snapshot_of("abcdef", says=says), None, seed=1)
    assert min(len(stage.members) for stage in steady.stages) == 1, "who never fails may be alone"


def as_plan(layout):
    return replace_stages(plan_of(SPLIT), layout)


def replace_stages(plan, layout):
    return Plan(
        run=plan.run,
        term=1,
        sequence=2,
        previous="",
        coordinator=plan.coordinator,
        stages=layout.stages,
        spares=layout.spares,
    )


def test_a_search_moves_whom_it_pays_to_move_and_leaves_half_of_each_stage():
    previous = plan_of(SPLIT)
    layout, reason = search(previous)
    assert layout is not None
    assert layout.reason == reason
    assert "% more" in reason
    assert [(s.first_layer, s.last_layer) for s in layout.stages] == [(0, 2), (2, 4), (4, 6)]
    for before, after in zip(previous.stages, layout.stages, strict=True):
        stay = [peer for peer in before.peers if peer in after.peers]
        assert len(stay) >= 2
        assert list(after.peers[: len(stay)]) == stay, "who stays keeps its rank before those who come"
    assert plan_flaw(replace_stages(previous, layout), PlanShape(num_layers=6)) is None
    assert layout == search(previous)[0]


def test_nobody_moves_for_less_than_what_is_seen():
    """Figures that say less of the live layout than it makes are wrong, and no reason to move."""
    previous = plan_of(SPLIT)
    layout, _ = search(previous)
    promised = predict_step_time(snapshot_of(previous=previous), layout.stages).tokens_per_s
    slower, faster = (
        replace(snapshot_of(previous=previous), seen_tokens_per_s=part * promised) for part in (0.5, 1.01)
    )
    moved, _ = ALLOCATOR.search(slower, previous, seed=3)
    assert moved is not None
    assert moved.stages == layout.stages
    stays, _ = ALLOCATOR.search(faster, previous, seed=3)
    assert groups(stays) == [set(group) for group in SPLIT], "at most the shares change"


def test_searches_end_where_nothing_is_worth_a_move():
    previous, moves = plan_of(SPLIT), 0
    while (layout := search(previous, seed=moves)[0]) is not None:
        previous, moves = replace_stages(previous, layout), moves + 1
        assert moves < 6
    assert moves >= 1
    assert search(previous, seed=99)[0] is None


def test_noise_of_ten_percent_moves_nobody():
    previous = as_plan(first())
    assert all(search(previous, noise=0.1, seed=seed)[0] is None for seed in range(6))


def test_nobody_moves_while_somebody_drains():
    assert search(plan_of(SPLIT), says={"l": {"draining": True}}) == (None, "a peer is leaving")


def test_who_does_not_hold_its_state_yet_stays_where_it_is():
    previous = plan_of(SPLIT)
    layout, _ = search(previous, says={"a": {"synced_stage": None}, "l": {"synced_stage": 0}})
    assert layout is not None
    assert "a" in layout.stages[0].peers
    assert "l" in layout.stages[2].peers


def test_a_stage_without_state_is_waited_for():
    layout, reason = search(plan_of(SPLIT), says={peer: {"synced_stage": None} for peer in SPLIT[1]})
    assert layout is None
    assert "stage 1" in reason


def test_who_has_not_the_text_is_never_moved_to_the_first_stage():
    previous = plan_of(SPLIT)
    says = {peer: {"has_data": False} for peer in "cdfghjkl"}
    layout, _ = search(previous, says=says)
    first_stage = {"a", "b", "e", "i"}
    assert layout is None or groups(layout)[0] <= first_stage


def test_a_peer_that_was_put_aside_stays_there_until_somebody_is_lost():
    previous = plan_of([["a", "b"], ["e", "f"], ["i", "j"]], spares=["c", "k"])
    names = "abcefijk"
    quiet = ALLOCATOR.allocate(snapshot_of(names, previous=previous), previous, seed=2)
    assert quiet.spares == ("c", "k")
    assert groups(quiet) == [{"a", "b"}, {"e", "f"}, {"i", "j"}]
    names = "abcefik"
    repaired = ALLOCATOR.allocate(snapshot_of(names, previous=previous), previous, seed=2)
    assert groups(repaired) == [{"a", "b"}, {"e", "f"}, {"i", "k"}], "of two spares the one that is near"
    assert repaired.spares == ("c",)


def test_spares_come_back_when_without_them_there_is_no_layout():
    previous = plan_of([["a", "b"], ["e"], ["i"]], spares=["c", "k", "l"])
    layout = ALLOCATOR.allocate(snapshot_of("ckl", previous=previous), previous, seed=2)
    assert sorted(len(group) for group in groups(layout)) == [1, 1, 1]


def test_a_newcomer_is_a_spare_until_a_search_has_a_place_for_it():
    previous = plan_of([["a", "b"], ["e", "f"], ["i", "j"]])
    names = "abcefij"
    layout = ALLOCATOR.allocate(snapshot_of(names, previous=previous), previous, seed=2)
    assert (groups(layout), layout.spares) == ([{"a", "b"}, {"e", "f"}, {"i", "j"}], ("c",))
    previous = replace_stages(previous, layout)
    says = {"i": {"flop_per_s": 1e13}, "j": {"flop_per_s": 1e13}} | {p: {"flop_per_s": 2e9} for p in "abc"}
    found, _ = ALLOCATOR.search(snapshot_of(names, previous=previous, says=says), previous, seed=2)
    assert found is not None
    assert any({"a", "b", "c"} <= group for group in groups(found)), "with those of its city"


def test_newcomers_are_spares_until_a_search_finds_places_for_them():
    previous = plan_of([["a", "b"], ["e"], ["i", "j"]])
    snapshot = snapshot_of("abcefijk", previous=previous)
    layout = ALLOCATOR.allocate(snapshot, previous, seed=2)
    assert (groups(layout), layout.spares) == ([{"a", "b"}, {"e"}, {"i", "j"}], ("c", "f", "k"))
    layout, _ = ALLOCATOR.search(snapshot, previous, seed=2)
    assert (groups(layout), layout.spares) == ([{"a", "b", "c"}, {"e", "f"}, {"i", "j", "k"}], ())


def test_only_a_peer_that_comes_back_joins_a_sole_holder_at_once():
    """For instance after a pause: it had the state of this stage."""
    previous = plan_of([["a", "b"], ["e"], ["i", "j"]])
    snapshot = snapshot_of("abcefijk", previous=previous, says={"f": {"homes": (1,)}})
    layout = ALLOCATOR.allocate(snapshot, previous, seed=2)
    assert (groups(layout), layout.spares) == ([{"a", "b"}, {"e", "f"}, {"i", "j"}], ("c", "k"))


def beside_a_lone_holder(*, newcomer, going_back_s):
    """Return the stage of "b", which fails often, after a search in which "d" is new."""
    previous = plan_of([["a"], ["b"], ["c"]])
    says = {"a": {"flop_per_s": 2e9}, "b": OFTEN, "c": {"flop_per_s": 2e9}, "d": {"flop_per_s": newcomer}}
    snapshot = replace(snapshot_of("abcd", previous=previous, says=says), going_back_s=going_back_s)
    if newcomer > 2e9:
        snapshot.network.bytes_per_s[3, :3] = snapshot.network.bytes_per_s[:3, 3] = 1e5
    layout, _ = ALLOCATOR.search(snapshot, previous, seed=2)
    return next(group for group in groups(layout) if "b" in group)


@pytest.mark.parametrize(("newcomer", "second"), [(2e10, "d"), (2e9, "a")], ids=["it has a slow line", "it is slow"])
def test_who_fails_often_gets_a_second_holder_if_going_back_costs_more_than_what_that_one_slows_down(newcomer, second):
    assert beside_a_lone_holder(newcomer=newcomer, going_back_s=0.0) == {"b"}
    assert beside_a_lone_holder(newcomer=newcomer, going_back_s=1e6) == {"b", second}


def test_shares_are_those_that_the_objective_assumes():
    previous = plan_of([["a", "b"], ["e", "f"], ["i", "j"]])
    says = {"b": {"flop_per_s": 2e9}}
    layout = ALLOCATOR.allocate(snapshot_of("abefij", previous=previous, says=says), previous, seed=2)
    shares = {member.peer: member.share for member in layout.stages[0].members}
    assert shares["a"] + shares["b"] == pytest.approx(1.0)
    assert shares["a"] > 2 * shares["b"]


def test_the_shares_of_a_layout_that_stays_follow_what_is_measured():
    previous = plan_of([["a", "b", "c"], ["e", "f", "g"], ["i", "j", "k"]])
    names = "abcefgijk"
    says = {"c": {"flop_per_s": 5e9}}
    changed = ALLOCATOR.allocate(snapshot_of(names, previous=previous), previous, seed=2)
    previous = replace_stages(previous, changed)
    layout, reason = ALLOCATOR.search(snapshot_of(names, previous=previous, says=says), previous, seed=2)
    assert reason == "search: shares follow what is measured now"
    assert groups(layout) == groups(changed)
    shares = [{member.peer: member.share for member in made.stages[0].members} for made in (changed, layout)]
    assert shares[1]["c"] < 0.5 * shares[0]["c"]
    faster = replace(snapshot_of(names, previous=previous, says=says), seen_tokens_per_s=1e12)
    assert ALLOCATOR.search(faster, previous, seed=2) == (layout, reason), (
        "what was seen before it became slow is no bar"
    )
    again = replace_stages(previous, layout)
    assert ALLOCATOR.search(snapshot_of(names, previous=again, says=says), again, seed=2)[0] is None


def test_with_one_stage_a_member_without_the_text_stays_aside():
    first_plan = one_stage("a", spares="b")
    snapshot = replace(snapshot_of("ab", previous=first_plan, says={"b": {"has_data": False}}), num_stages=1)
    assert ALLOCATOR.search(snapshot, first_plan, seed=1)[0] is None


def one_stage(names, spares=""):
    members = tuple(Member(peer=PeerID(name), share=1.0, bandwidth=1.0) for name in names)
    stage = Stage(first_layer=0, last_layer=6, members=members)
    return Plan(
        run="run",
        term=1,
        sequence=1,
        previous="",
        coordinator=PeerID(names[0]),
        stages=(stage,),
        spares=tuple(map(PeerID, spares)),
    )


FIGURES = st.fixed_dictionaries(
    {
        "has_data": st.booleans(),
        "memory_bytes": st.sampled_from([0, 1 << 26, 1 << 34]),
        "flop_per_s": st.sampled_from([1.0, 2e10, SPEED_MAX]),
        "synced_stage": st.sampled_from([None, 0, 1]),
    }
)
LINKS = st.sampled_from([1.0, 1e7, RATE_MAX, math.nan])
"""Measured rates are clipped, and a pair without a path is in `unreachable`."""
PREVIOUS = st.sampled_from(
    [None, one_stage("a", "bcd"), one_stage("abcd"), plan_of("abc", "d"), plan_of(["ad", "b", "c"])]
)


@settings(max_examples=40, deadline=None)
@given(
    says=st.fixed_dictionaries(dict.fromkeys("abcd", FIGURES)),
    rates=st.lists(LINKS, min_size=16, max_size=16),
    unreachable=st.sets(st.sampled_from([("a", "b"), ("a", "c"), ("c", "d")])),
    previous=PREVIOUS,
    num_stages=st.sampled_from([None, 1, 2, 3]),
    seen_tokens_per_s=st.sampled_from([0.0, 1e-9, 1e12]),
    forecast_error=st.sampled_from([0.0, 0.2, 100.0]),
)
def test_no_figures_however_absurd_break_a_search_or_a_repair(says, rates, unreachable, previous, num_stages, **seen):
    snapshot = replace(
        snapshot_of("abcd", says=says),
        num_stages=num_stages,
        network=MeasuredNetwork(
            latency_s=np.full((4, 4), 0.01),
            bytes_per_s=np.array(rates).reshape(4, 4),
            is_certain=np.isfinite(np.array(rates).reshape(4, 4)),
        ),
        unreachable=frozenset((PeerID(one), PeerID(other)) for one, other in unreachable),
        **seen,
    )
    layout, reason = ALLOCATOR.search(snapshot, previous, seed=1)
    assert reason
    with suppress(NoLayout):
        layout = layout or ALLOCATOR.allocate(snapshot, previous, seed=1)
    if layout is not None:
        assert plan_flaw(replace_stages(plan_of("abc"), layout), PlanShape(num_layers=6)) is None
