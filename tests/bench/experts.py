"""What the planning of experts is worth: every figure in coordinator/experts/MEASURED.md, by hand.

    python tests/bench/experts.py            # all of them, one after another
    python tests/bench/experts.py recovery   # the known cases, beside MRO and spread
    python tests/bench/experts.py settings 1000 12   # so many random settings of up to so many nodes
    python tests/bench/experts.py unequal    # 24 swarms of unequal nodes against MRO in random orders
    python tests/bench/experts.py busiest    # the busiest replica, ours and equation 1
    python tests/bench/experts.py planning   # CPU time at 64 and 1,000 nodes
    python tests/bench/experts.py migration  # fetched replicas after two failures, 400 draws
    python tests/bench/experts.py hysteresis # re-placements under noise, fetches when the load moves

Seeds are fixed, so that only times differ between machines.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from shoal.coordinator.experts.placement import (
    FAILURE_PROBABILITY_ASSUMED,
    attainable_min_replicas,
    busiest_replica_load_ratio,
    mro,
    place,
    replica_counts,
    spread,
)
from shoal.coordinator.experts.recovery import ExpertPlacement, holder_masks, loss_probability, recovery_by_failures
from shoal.coordinator.experts.replan import fewest_fetches, num_fetches, replan

LOADS: dict[str, Callable[[int, random.Random], list[float]]] = {
    "flat": lambda count, rng: [1.0] * count,
    "zipf": lambda count, rng: [1.0 / rank for rank in range(1, count + 1)],
    "uniform": lambda count, rng: [rng.random() for _ in range(count)],
    "hot": lambda count, rng: [float(count)] + [1.0] * (count - 1),
}


def recovery(placement: ExpertPlacement, num_experts: int) -> tuple[float, ...]:
    by_failures = recovery_by_failures(placement, num_experts)
    assert by_failures is not None
    return by_failures


def loss(placement: ExpertPlacement, num_experts: int, chances: Sequence[float]) -> float:
    return loss_probability(holder_masks(placement, num_experts), chances).probability


def show_recovery() -> None:
    cases = [
        ("N=3 c=2 r=(2,2,2)", (2, 2, 2), [2] * 3),
        ("N=10 c=6 flat, 8 experts", replica_counts([1.0] * 8, num_slots=60, min_replicas=2), [6] * 10),
        (
            "N=10 c=6 Zipf(1), 16 experts",
            replica_counts([1 / k for k in range(1, 17)], num_slots=60, min_replicas=2),
            [6] * 10,
        ),
    ]
    for title, replicas, slots in cases:
        print(title)
        for name, placement in (
            ("MRO", mro(replicas, slots)),
            ("spread", spread(replicas, slots)),
            ("ours", place(replicas, slots, min_replicas=2)),
        ):
            print(f"  {name:7}", " ".join(f"{chance:.3f}" for chance in recovery(placement, len(replicas))[1:-1]))


def setting(rng: random.Random, nodes_max: int) -> tuple[list[int], tuple[int, ...], int]:
    """Equal slots, any counts of experts, any kind of load."""
    while True:
        slots = [rng.randint(1, 8)] * rng.randint(2, nodes_max)
        num_experts = rng.randint(1, 24)
        most = attainable_min_replicas(slots, num_experts)
        if most:
            break
    min_replicas = rng.randint(1, min(4, most))
    loads = LOADS[rng.choice(sorted(LOADS))](num_experts, rng)
    return slots, replica_counts(loads, num_slots=sum(slots), min_replicas=min_replicas), min_replicas


def show_settings(number: int, nodes_max: int, seed: int) -> None:
    """Counts, and every setting in which ours loses an expert more often than a rule or breaks its promise."""
    rng = random.Random(seed)
    behind = broken = better = less_at_some_k = with_twins = 0
    seconds = []
    for _ in range(number):
        slots, replicas, min_replicas = setting(rng, nodes_max)
        begun_s = time.process_time()
        placement = place(replicas, slots, min_replicas=min_replicas)
        seconds.append(time.process_time() - begun_s)
        rules = [rule(replicas, slots) for rule in (mro, spread)]
        chances = [FAILURE_PROBABILITY_ASSUMED] * len(slots)
        ours, *theirs = (recovery(each, len(replicas)) for each in (placement, *rules))
        losses = [loss(each, len(replicas), chances) for each in (placement, *rules)]
        copies = sum(mask.bit_count() for mask in holder_masks(placement, len(replicas)))
        with_twins += copies < most_copies(replicas, slots)
        broken += any(chance < 1.0 for chance in ours[:min_replicas])
        better += losses[0] * (1.0 + 1e-9) < min(losses[1:])
        less_at_some_k += any(a < max(at_k) for a, *at_k in zip(ours, *theirs, strict=True))
        keep = [p for p, by in zip(losses[1:], theirs, strict=True) if min(by[:min_replicas]) == 1.0]
        if keep and losses[0] > min(keep) * (1.0 + 1e-9):
            behind += 1
            print("behind", slots, replicas, min_replicas, losses)
    print(
        f"{number} settings (seed {seed}): ours behind either rule in {behind}, ahead of both in {better}; "
        f"below one of them at some k in {less_at_some_k}; promise broken in {broken}; twins beyond need in "
        f"{with_twins}; CPU ms a plan: median {1e3 * statistics.median(seconds):.1f}, largest {1e3 * max(seconds):.0f}"
    )


def most_copies(replicas: Sequence[int], slots: Sequence[int]) -> int:
    """The most different (expert, node) pairs that counts and slots allow, by Gale and Ryser."""
    degrees = sorted((min(count, len(slots)) for count in replicas), reverse=True)
    return min(sum(degrees[k:]) + sum(min(count, k) for count in slots) for k in range(len(degrees) + 1))


def show_unequal() -> None:
    rng = random.Random(0)
    ratios, to_best = [], []
    print(" N slots    experts load      MRO mean  best of 100    ours  mean/ours  best/   ms")
    for case in range(24):
        size = rng.randint(5, 12)
        slots = [rng.randint(2, 8) for _ in range(size)]
        chance = [10 ** rng.uniform(-2.5, -0.5) for _ in range(size)]
        num_experts = rng.randint(4, sum(slots) // 3)
        kind = sorted(LOADS)[case % len(LOADS)]
        min_replicas = min(2, attainable_min_replicas(slots, num_experts))
        replicas = replica_counts(LOADS[kind](num_experts, rng), num_slots=sum(slots), min_replicas=min_replicas)
        orders = [rng.sample(range(size), size) for _ in range(100)]
        theirs = [loss(mro(replicas, slots, order=order), num_experts, chance) for order in orders]
        begun_s = time.process_time()
        placement = place(replicas, slots, failure_probability=chance, min_replicas=min_replicas)
        took_s = time.process_time() - begun_s
        ours = loss(placement, num_experts, chance)
        ratios.append(statistics.fmean(theirs) / ours)
        to_best.append(min(theirs) / ours)
        print(
            f"{size:2} {min(slots)}-{max(slots)} ({sum(slots):2}) {num_experts:7} {kind:8}"
            f" {statistics.fmean(theirs):9.2e} {min(theirs):9.2e} {ours:9.2e}"
            f" {ratios[-1]:10.1f} {to_best[-1]:8.2f} {1e3 * took_s:5.0f}"
        )
    print(
        f"median {statistics.median(ratios):.1f} (smallest {min(ratios):.1f}), against the best of 100 orders "
        f"{statistics.median(to_best):.2f} ({min(to_best):.2f})"
    )


def show_busiest() -> None:
    rng = random.Random(0)
    print("nodes slots experts load      ours  equation 1  equation 1 / ours (mean, largest)")
    for size, each, num_experts in ((10, 6, 8), (10, 6, 16), (64, 6, 64)):
        for kind in ("zipf", "uniform", "lognormal", "dirichlet"):
            ours, theirs = [], []
            for _ in range(400):
                loads = draw_loads(kind, num_experts, rng)
                ours.append(busiest(replica_counts, loads, size * each))
                theirs.append(busiest(paper_replica_counts, loads, size * each))
            quotients = [b / a for a, b in zip(ours, theirs, strict=True)]
            print(
                f"{size:5} {each:5} {num_experts:7} {kind:9} {statistics.fmean(ours):.3f}"
                f"  {statistics.fmean(theirs):.3f}       {statistics.fmean(quotients):.3f}  {max(quotients):.2f}"
            )


def paper_replica_counts(loads: Sequence[float], *, num_slots: int, min_replicas: int) -> tuple[int, ...]:
    """Lazarus's rule (arXiv 2407.04656, equation 1): in ascending order of load, each expert's share of what is left,
    rounded down, and at least the minimum."""
    replicas = [0] * len(loads)
    left, rest = num_slots, math.fsum(loads)
    ascending = sorted(range(len(loads)), key=lambda expert: (loads[expert], expert))
    for position, expert in enumerate(ascending):
        # An even share where nothing is loaded; the small push undoes rounding in sums such as 0.1 + 0.2.
        share = loads[expert] / rest if rest > 0.0 else 1.0 / (len(loads) - position)
        is_last = position == len(loads) - 1
        replicas[expert] = left if is_last else max(math.floor(share * left + 1e-9), min_replicas)
        left -= replicas[expert]
        rest = math.fsum(loads[other] for other in ascending[position + 1 :])
    return tuple(replicas)


def draw_loads(kind: str, count: int, rng: random.Random) -> list[float]:
    if kind == "lognormal":
        return [rng.lognormvariate(0.0, 1.0) for _ in range(count)]
    if kind == "dirichlet":
        return [rng.gammavariate(0.5, 1.0) for _ in range(count)]
    if kind == "zipf":
        power = rng.uniform(0.5, 1.5)
        return [rank**-power for rank in range(1, count + 1)]
    return [rng.random() for _ in range(count)]


def busiest(rule: Callable[..., tuple[int, ...]], loads: Sequence[float], num_slots: int) -> float:
    return busiest_replica_load_ratio(loads, rule(loads, num_slots=num_slots, min_replicas=2))


def show_planning() -> None:
    print("nodes slots experts load    nodes are  CPU ms (counts and placement; smallest and largest of 5)")
    for size, each, num_experts in ((64, 6, 64), (1_000, 6, 256), (1_000, 8, 256)):
        for kind in ("zipf", "uniform", "flat"):
            for alike in (True, False):
                rng = random.Random(1)
                loads = LOADS[kind](num_experts, rng)
                chance = None if alike else [rng.uniform(0.01, 0.3) for _ in range(size)]
                seconds = []
                for _ in range(5):
                    begun_s = time.process_time()
                    replicas = replica_counts(loads, num_slots=size * each, min_replicas=2)
                    place(replicas, [each] * size, failure_probability=chance, min_replicas=2)
                    seconds.append(time.process_time() - begun_s)
                print(
                    f"{size:5} {each:5} {num_experts:7} {kind:7} {'alike' if alike else 'unequal':9} "
                    f"{1e3 * min(seconds):7.1f} {1e3 * max(seconds):7.1f}"
                )


def greedy_parts(current: Sequence[Collection[int]], target: ExpertPlacement) -> ExpertPlacement:
    """Node after node takes the part of which it has most."""
    left, taken = list(target), []
    for held in current:
        best = max(left, key=lambda part: len(set(part) & set(held)))
        left.remove(best)
        taken.append(best)
    return tuple(taken)


def show_migration() -> None:
    """400 draws: 10 nodes x 6 slots, two of them fail, loads as they were or moved a little."""
    for num_experts, drift in ((8, 0.0), (16, 0.0), (16, 0.3)):
        rng = random.Random(0)
        fetched: dict[str, list[int]] = {"greedy": [], "parts and names": [], "replan": []}
        least = []
        for _ in range(400):
            loads = [rng.lognormvariate(0.0, 1.0) for _ in range(num_experts)]
            before = place(replica_counts(loads, num_slots=60, min_replicas=2), [6] * 10, min_replicas=2, patience=15)
            dead = set(rng.sample(range(10), 2))
            left = [part for node, part in enumerate(before) if node not in dead]
            loads = [load * rng.lognormvariate(0.0, drift) if drift else load for load in loads]
            replicas = replica_counts(loads, num_slots=48, min_replicas=2)
            target = place(replicas, [6] * 8, min_replicas=2, patience=15)
            fetched["greedy"].append(num_fetches(left, greedy_parts(left, target)))
            fetched["parts and names"].append(num_fetches(left, fewest_fetches(left, target, kinds=[0] * 8)))
            names = {f"p{node}": part for node, part in enumerate(left)}
            chosen = replan(names, loads, dict.fromkeys(names, 0.05), slots=6, min_replicas=2)
            fetched["replan"].append(fetches_between(names, chosen))
            least.append(sum(max(0, 2 - sum(expert in part for part in left)) for expert in range(num_experts)))
        print(f"{num_experts} experts, drift {drift}: fetches, mean (largest) of 400")
        for name, counts in fetched.items():
            share = statistics.fmean(counts) / statistics.fmean(fetched["greedy"])
            print(f"  {name:16} {statistics.fmean(counts):5.2f} ({max(counts)})  {share:.2f} of greedy's")
        never_more = all(a <= b for a, b in zip(fetched["parts and names"], fetched["greedy"], strict=True))
        print(
            f"  for two holders  {statistics.fmean(least):5.2f} are needed; names never more than greedy: {never_more}"
        )


def fetches_between(before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]]) -> int:
    """How many copies peers have to fetch to get from one placement to the other."""
    return sum(len(set(experts) - set(before.get(peer, ()))) for peer, experts in after.items())


def show_hysteresis() -> None:
    peers = {f"p{node}": 0.05 for node in range(10)}
    for noise in (0.05, 0.1, 0.2):
        rng = random.Random(0)
        base = [rng.lognormvariate(0.0, 1.0) for _ in range(16)]
        plan = replan({}, base, peers, slots=6, min_replicas=2)
        moves = fetches = 0
        for _ in range(100):
            loads = [load * rng.lognormvariate(0.0, noise) for load in base]
            before, plan = plan, replan(plan, loads, peers, slots=6, min_replicas=2)
            moves += plan != before
            fetches += fetches_between(before, plan)
        print(f"noise {noise:4}: {moves} of 100 looks move anything, {fetches} fetches")
    rng = random.Random(1)
    loads = [rng.lognormvariate(0.0, 1.0) for _ in range(16)]
    plan, worst, fetches, moves = replan({}, loads, peers, slots=6, min_replicas=2), 0.0, 0, 0
    for _ in range(100):
        loads = [load * rng.lognormvariate(0.0, 0.1) for load in loads]
        before, plan = plan, replan(plan, loads, peers, slots=6, min_replicas=2)
        slots = [expert for experts in plan.values() for expert in experts]
        ratio = busiest_replica_load_ratio(loads, [slots.count(expert) for expert in range(len(loads))])
        worst = max(worst, ratio / busiest(replica_counts, loads, 60))
        moves += plan != before
        fetches += fetches_between(before, plan)
    print(
        f"random walk, 0.1 a look: {moves} of 100 move, {fetches} fetches, busiest at most {worst:.2f} times the best"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shows = ["recovery", "settings", "unequal", "busiest", "planning", "migration", "hysteresis"]
    parser.add_argument("what", choices=[*shows, "all"], nargs="?", default="all")
    parser.add_argument("number", nargs="?", type=int, default=1_000)
    parser.add_argument("nodes_max", nargs="?", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for what in shows if asked.what == "all" else [asked.what]:
        if asked.what == "all":
            print(f"-- {what}")
        if what == "settings":
            show_settings(asked.number, asked.nodes_max, asked.seed)
        else:
            globals()[f"show_{what}"]()


if __name__ == "__main__":
    main()
