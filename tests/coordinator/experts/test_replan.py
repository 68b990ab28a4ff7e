"""Re-placement as the coordinator asks for it: after failures, as loads move, and not for noise."""

import random
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.experts.placement import busiest_replica_load_ratio, replica_counts
from shoal.coordinator.experts.replan import BUSIER, replan

LOADS = [9.0, 5.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0]


def swarm(num_peers: int) -> dict[str, float]:
    return {f"p{i}": 0.05 for i in range(num_peers)}


def holders(placement: Mapping[str, Sequence[int]], expert: int) -> int:
    return sum(expert in experts for experts in placement.values())


def num_fetches(before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]]) -> int:
    return sum(len(set(experts) - set(before.get(peer, ()))) for peer, experts in after.items())


def held(placement: Mapping[str, Sequence[int]]) -> set[int]:
    return {expert for experts in placement.values() for expert in experts}


def check(placement: Mapping[str, Sequence[int]], nodes: Mapping[str, float], *, slots: int = 4) -> None:
    """All slots are full and the promise is kept."""
    assert {peer: len(experts) for peer, experts in placement.items()} == dict.fromkeys(nodes, slots)
    assert held(placement) == set(range(len(LOADS)))
    for expert in held(placement):
        assert holders(placement, expert) >= 2


def test_the_first_plan_places_everything() -> None:
    nodes = swarm(6)
    check(replan({}, LOADS, nodes, slots=4, min_replicas=2), nodes)


def test_asked_again_it_finds_nothing_to_do() -> None:
    nodes = swarm(6)
    first = replan({}, LOADS, nodes, slots=4, min_replicas=2)
    assert replan(first, LOADS, nodes, slots=4, min_replicas=2) == first


def test_after_a_failure_little_is_fetched_and_the_promise_is_back() -> None:
    nodes = swarm(6)
    first = replan({}, LOADS, nodes, slots=4, min_replicas=2)
    for dead in nodes:
        left = {peer: node for peer, node in nodes.items() if peer != dead}
        placement = replan(first, LOADS, left, slots=4, min_replicas=2)
        check(placement, left)
        # 4 slots were lost; experts that were on two nodes need a holder again, and little beyond them moves.
        assert num_fetches(first, placement) <= 8


def test_a_newcomer_is_filled_and_nobody_else_moves() -> None:
    nodes = swarm(6)
    first = replan({}, LOADS, nodes, slots=4, min_replicas=2)
    more = nodes | {"new": 0.05}
    placement = replan(first, LOADS, more, slots=4, min_replicas=2)
    check(placement, more)
    assert {peer: placement[peer] for peer in nodes} == first


def test_more_slots_keep_what_was_held() -> None:
    nodes = swarm(6)
    first = replan({}, LOADS, nodes, slots=4, min_replicas=2)
    placement = replan(first, LOADS, nodes, slots=5, min_replicas=2)
    check(placement, nodes, slots=5)
    assert num_fetches(first, placement) <= 6


def test_noise_moves_nobody_and_a_shift_does() -> None:
    rng = random.Random(1)
    nodes = swarm(10)
    placement = first = replan({}, LOADS, nodes, slots=6, min_replicas=2)
    for _ in range(30):
        loads = [load * rng.uniform(0.92, 1.08) for load in LOADS]
        placement = replan(placement, loads, nodes, slots=6, min_replicas=2)
        assert placement == first
    shifted = LOADS[::-1]
    placement = replan(first, shifted, nodes, slots=6, min_replicas=2)
    assert num_fetches(first, placement)
    best = busiest_replica_load_ratio(shifted, replica_counts(shifted, num_slots=60, min_replicas=2))
    slots = [expert for experts in placement.values() for expert in experts]
    ratio = busiest_replica_load_ratio(shifted, [slots.count(expert) for expert in range(len(shifted))])
    assert ratio <= best * BUSIER


def test_a_node_that_has_become_unreliable_loses_what_is_rare() -> None:
    loads = [20.0] * 4 + [1.0] * 4
    nodes = dict.fromkeys(swarm(8), 0.01)
    first = replan({}, loads, nodes, slots=4, min_replicas=2)
    rare = next(peer for peer, experts in first.items() if 7 in experts)
    changed = nodes | {rare: 0.6}
    placement = replan(first, loads, changed, slots=4, min_replicas=2)
    assert placement != first
    assert replan(placement, loads, changed, slots=4, min_replicas=2) == placement


def test_the_order_of_mappings_does_not_matter() -> None:
    nodes = swarm(6)
    first = replan({}, LOADS, nodes, slots=4, min_replicas=2)
    backwards = dict(reversed(nodes.items()))
    assert replan({}, LOADS, backwards, slots=4, min_replicas=2) == first


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_every_history_of_changes_keeps_the_promise_and_comes_to_rest(seed: int) -> None:
    rng = random.Random(seed)
    loads = [rng.uniform(0.0, 4.0) for _ in LOADS]
    nodes = swarm(rng.randint(2, 7))
    current: Mapping[str, tuple[int, ...]] = {}
    for turn in range(5):
        event = rng.randrange(4)
        if event == 0 and len(nodes) > 2:
            del nodes[rng.choice(sorted(nodes))]
        elif event == 1 and len(nodes) < 9:
            nodes[f"n{turn}"] = rng.choice([0.01, 0.2])
        elif event == 2:
            nodes[rng.choice(sorted(nodes))] = rng.choice([0.01, 0.2])
        else:
            loads = [load * rng.uniform(0.3, 3.0) for load in loads]
        slots = max(3, -(-2 * len(loads) // len(nodes)))
        placement = replan(current, loads, nodes, slots=slots, min_replicas=2)
        check(placement, nodes, slots=slots)
        assert replan(placement, loads, nodes, slots=slots, min_replicas=2) == placement
        current = placement
