"""Random settings of up to 12 nodes, alike and not: nothing that was promised is lost, neither rule is ever better,
and re-planning comes to rest. A line for each that is not so, with how to make it again; then exit code 1.

    python tests/soak/experts.py --settings 10000   # seven minutes of a core; `make soak-experts`
    python tests/soak/experts.py --only 1234        # that one again
"""

import argparse
import itertools
import random
import sys
from collections.abc import Mapping

from shoal.coordinator.experts.placement import (
    FAILURE_PROBABILITY_ASSUMED,
    attainable_min_replicas,
    mro,
    place,
    replica_counts,
    spread,
)
from shoal.coordinator.experts.recovery import holder_masks, loss_probability
from shoal.coordinator.experts.replan import replan

NODES_MAX = 12


def draw_loads(rng: random.Random, count: int) -> list[float]:
    kind = rng.randrange(4)
    if kind == 0:
        return [1.0] * count
    if kind == 1:
        return [1.0 / rank for rank in range(1, count + 1)]
    return [rng.lognormvariate(0.0, 1.5) if kind == 2 else rng.random() for _ in range(count)]


def one_placement(rng: random.Random) -> str:
    """Returns: what is wrong, or nothing."""
    size = rng.randint(1, NODES_MAX)
    alike = rng.random() < 0.6
    slots = [rng.randint(1, 8)] * size if alike else [rng.randint(0, 8) for _ in range(size)]
    num_experts = rng.randint(1, 24)
    if not (most := attainable_min_replicas(slots, num_experts)):
        return ""
    min_replicas = rng.randint(1, min(4, most))
    replicas = replica_counts(draw_loads(rng, num_experts), num_slots=sum(slots), min_replicas=min_replicas)
    chance = None if rng.random() < 0.7 else [10 ** rng.uniform(-3.0, 0.0) for _ in slots]
    placement = place(replicas, slots, failure_probability=chance, min_replicas=min_replicas)
    setting = f"{slots=} {replicas=} {min_replicas=} {chance=} {placement=}"
    if [len(experts) for experts in placement] != slots:
        return f"slots are not full: {setting}"
    if tuple(map(list(itertools.chain(*placement)).count, range(num_experts))) != replicas:
        return f"replicas are missing: {setting}"
    if min(mask.bit_count() for mask in holder_masks(placement, num_experts)) < min_replicas:
        return f"the promise is broken: {setting}"
    for rule in (mro, spread):
        theirs = holder_masks(rule(replicas, slots), num_experts)
        if min(mask.bit_count() for mask in theirs) >= min_replicas:
            chances = chance or [FAILURE_PROBABILITY_ASSUMED] * size
            ours = holder_masks(placement, num_experts)
            a, b = (loss_probability(masks, chances).probability for masks in (ours, theirs))
            if a > b * (1.0 + 1e-9):
                return f"{rule.__name__} is better, {b} to {a}: {setting}"
    return ""


def one_history(rng: random.Random) -> str:
    """A swarm through ten changes."""
    loads = draw_loads(rng, rng.randint(1, 16))
    nodes = {f"p{i}": FAILURE_PROBABILITY_ASSUMED for i in range(rng.randint(2, 10))}
    slots_wanted = rng.randint(1, 6)
    current: Mapping[str, tuple[int, ...]] = {}
    for turn in range(10):
        event = rng.randrange(5)
        if event == 0 and len(nodes) > 1:
            del nodes[rng.choice(sorted(nodes))]
        elif event == 1 and len(nodes) < NODES_MAX:
            nodes[f"n{turn}"] = 10 ** rng.uniform(-3.0, 0.0)
        elif event == 2:
            nodes[rng.choice(sorted(nodes))] = 10 ** rng.uniform(-3.0, 0.0)
        elif event == 3:
            slots_wanted = rng.randint(1, 6)
        else:
            loads = [load * rng.lognormvariate(0.0, 0.5) for load in loads]
        min_replicas = min(2, len(nodes))
        slots = max(slots_wanted, -(-len(loads) * min_replicas // len(nodes)))
        placement = replan(current, loads, nodes, slots=slots, min_replicas=min_replicas)
        setting = f"{loads=} {nodes=} {slots=} {current=} {placement=}"
        if any(len(experts) != slots for experts in placement.values()):
            return f"slots are not full: {setting}"
        if min(map(int.bit_count, holder_masks(list(placement.values()), len(loads)))) < min_replicas:
            return f"the promise is broken: {setting}"
        again = replan(placement, loads, nodes, slots=slots, min_replicas=min_replicas)
        if again != placement:
            return f"no rest, {again}: {setting}"
        current = placement
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=10_000)
    parser.add_argument("--only", type=int)
    asked = parser.parse_args()
    seeds = range(asked.settings) if asked.only is None else [asked.only]
    failed = 0
    for seed in seeds:
        rng = random.Random(seed)
        # A history is twenty placements and more.
        if wrong := one_history(rng) if seed % 20 == 0 else one_placement(rng):
            failed += 1
            sys.stdout.write(f"--only {seed}: {wrong}\n")
        if seed % 500 == 499:
            sys.stdout.write(f"{seed + 1} settings so far\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(seeds)} settings, {failed} wrong\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
