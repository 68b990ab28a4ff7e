"""The compiled inner loops of the search on the throughput objective: its cost, stage by stage, and local search.

The formula is that of `cost/throughput.py`, where it is explained; a test holds the two against each other. Here a
unit is a device, or in the coarse view of a large swarm a cluster of `weight` alike devices that are taken together.
Only what a move touches is computed again: the paths of the stages that gained or lost a member and of their
neighbours, then the times of those stages, then the flows between them.

This file is long because numba's cache of a function does not notice a change in another file that it calls.
No fastmath, no parallel loops, no transcendental functions, integer randomness of our own, sums in the order of
members: the same result bit for bit on any machine.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

_njit: Any = njit  # whose types leave two of its options out
_kernel = _njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)
_inner = _njit(cache=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)
"""Python calls only a `_kernel`. A wrapper that takes 60 arrays out of a tuple is a third of what a function costs to
compile: with a wrapper for each function the first search on a machine took 42 s of CPU, without them it takes 27."""
FLOW_ROUNDS = 6
IMPOSSIBLE = 1e9
"""Costs from here on are of placements that cannot be; more is further from one that can."""
_LATENCIES = 4.0
_STEP_FLOP = 20.0
_WINDOW_GAIN = 1.5
_GUIDE = 0.03
"""Of the mean stage, the mean member's reduction and the chain in what local search looks at: most moves do not touch
what is slowest, and yet are for the better or the worse."""
_HEAT = 0.08
"""At heat 1 the search begins by accepting what is up to so much worse."""


class Problem(NamedTuple):
    """What never changes. N units, L layers, S stages of the current plan, C cards."""

    flop: Any
    weight: Any
    memory: Any
    """[N], of one device."""
    card: Any
    card_rate: Any
    """[C], the slower direction."""
    up: Any
    down: Any
    """[N], of one device's card."""
    feeds: Any
    latency: Any
    rate: Any
    """[N, N], of one path."""
    q: Any
    """[N, N], microbatches/s forth and back, of all paths between two units."""
    flop_to: Any
    parameters_to: Any
    held_to: Any
    """[L + 1], of the layers before."""
    home: Any
    """[N], stage in the current plan, -1: none."""
    home_first: Any
    home_last: Any
    """[N], layers it has the state of."""
    fetch_rate: Any
    """[N], bytes/s at which it gets the state of others."""
    carries: Any
    """[N], its share of its stage's work now: what stands still while it fetches."""
    microbatches: float
    job_per_flop: float
    loss_per_flop: float
    """Of the last stage."""
    cut_bytes: float
    gradient_bytes: float
    resident_bytes: float
    state_bytes: float
    """The last three: of a parameter."""
    s_max: float
    price: Any
    """[2, 2], `Price`: (at one, half powers) where all of the open step is seen, and where none is."""
    horizon_s: float
    shared_cards: bool
    has_cards: bool


class State(NamedTuple):
    """A placement and all that its cost is made of."""

    stage: Any
    at: Any
    """[N], stage or -1, and the place among its members."""
    members: Any
    count: Any
    bounds: Any
    out_rate: Any
    in_rate: Any
    away_out: Any
    away_in: Any
    part: Any
    reduced: Any
    """[N], bytes over its card for each byte of the stage's gradient."""
    load: Any
    slope: Any
    offset: Any
    taken: Any
    card: Any
    """[N]"""
    path_unit: Any
    """[K], largest (p_d + p_e) / path rate between two mates."""
    latency: Any
    seconds: Any
    free: Any
    commit: Any
    tail: Any
    job: Any
    strain: Any
    """[K]; tail: from a microbatch's arrival to its step's commit, as last summed up; strain: the mean member's seconds
    of the reduction, where `commit` has the largest."""
    flow: Any
    hop: Any
    """[K], towards the next."""
    paths_dirty: Any
    dirty: Any
    pair_dirty: Any
    """[K]"""
    card_load: Any
    """[C]"""


@_kernel
def draw(state):
    """uint64: SplitMix64 (Steele, Lea, Flood 2014). state: uint64 [1]."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_inner
def below(state, n):
    """int64 in [0, n), n < 2^32."""
    return np.int64(((draw(state) >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


@_inner
def unit(state):
    """float64 in [0, 1)."""
    return np.float64(draw(state) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@_kernel
def exchange_rates(latency, rate, weight, frame_bytes, credit_bytes, q):
    """Fill q [N, N]: `path_rates.both_ways` in frames/s, for all pairs."""
    frames = max(1.0, np.floor(credit_bytes / frame_bytes))
    n = len(weight)
    for i in range(n):
        q[i, i] = 0.0
        for j in range(i):
            slower = np.float64(min(rate[i, j], rate[j, i]))
            both = 0.0
            if slower > 0.0:
                trip = np.float64(latency[i, j]) + np.float64(latency[j, i])
                both = min(slower / frame_bytes, frames / (frame_bytes / slower + trip))
            q[i, j] = q[j, i] = both * weight[i] * weight[j]


# --- one stage ---


@_inner
def _scan_paths(P, S, k):
    """Rates of the members of stage k to both neighbours, and how they share its reduction. Returns: work."""
    K = len(S.count)
    work = 0
    for neighbour in (k - 1, k + 1):
        rates, away = (S.in_rate, S.away_in) if neighbour < k else (S.out_rate, S.away_out)
        there = 0 <= neighbour < K
        for a in range(S.count[k]):
            d = S.members[k, a]
            total = near = speed = 0.0
            if there:
                for c in range(S.count[neighbour]):
                    e = S.members[neighbour, c]
                    total += P.q[d, e]
                    if P.shared_cards:
                        speed += P.flop[e]
                        if P.card[d] == P.card[e]:
                            near += P.flop[e]
                work += S.count[neighbour]
            rates[d] = total if there else np.inf
            away[d] = 0.0 if not there else (1.0 - near / speed if P.shared_cards else 1.0)
    return work + _scan_mates(P, S, k)


@_inner
def _scan_mates(P, S, k):
    n = S.count[k]
    whole = 0.0
    devices = 0.0
    for a in range(n):
        d = S.members[k, a]
        devices += P.weight[d]
    for a in range(n):
        d = S.members[k, a]
        path = 0.0
        mates = 0.0
        for c in range(n):
            e = S.members[k, c]
            path += P.q[d, e]
            if P.card[e] == P.card[d]:
                mates += 1.0
        rate = min(path * P.cut_bytes if n > 1 else np.inf, P.card_rate[P.card[d]] / mates)
        S.part[d] = rate
        whole = max(whole, rate)
    total = 0.0
    for a in range(n):
        d = S.members[k, a]
        S.part[d] = max(S.part[d], 1e-6 * whole) if 0.0 < whole < np.inf else P.weight[d]
        total += S.part[d]
    S.path_unit[k] = S.latency[k] = 0.0
    for a in range(n):
        d = S.members[k, a]
        S.part[d] = S.part[d] / total if n > 1 else 1.0
    for a in range(n):
        d = S.members[k, a]
        S.reduced[d] = 2.0 * S.part[d] * (P.weight[d] - 1.0)
        for c in range(n):
            e = S.members[k, c]
            if e == d:
                continue
            if P.card[e] != P.card[d]:
                S.reduced[d] += P.weight[e] * S.part[d] + P.weight[d] * S.part[e]
            if c < a:
                pair = P.weight[d] * P.weight[e]
                between = (S.part[d] / P.weight[d] + S.part[e] / P.weight[e]) * pair
                rate = P.q[d, e] * P.cut_bytes
                S.path_unit[k] = max(S.path_unit[k], between / rate if rate > 0.0 else np.inf)
                S.latency[k] = max(S.latency[k], np.float64(P.latency[d, e]), np.float64(P.latency[e, d]))
    return 3 * n * n


@_inner
def _loads(P, S, k, first, last):
    """What each member of stage k sends over its card in a step, if its layers were these."""
    gradient = P.gradient_bytes * (P.parameters_to[last] - P.parameters_to[first])
    speed = 0.0
    for a in range(S.count[k]):
        speed += P.flop[S.members[k, a]]
    for a in range(S.count[k]):
        d = S.members[k, a]
        share = P.microbatches * P.flop[d] / speed
        S.load[d] = share * P.cut_bytes * (S.away_out[d] + S.away_in[d]) + S.reduced[d] * gradient


@_inner
def _card_part(P, S, d):
    """bytes/s of its card that are d's."""
    rate = P.card_rate[P.card[d]]
    if not P.shared_cards or S.load[d] <= 0.0:
        return rate
    return rate * (S.load[d] / S.card_load[P.card[d]])


@_inner
def _job(P, first, last):
    """FLOP of a microbatch there and back, `Workload.job_flop`."""
    per_flop = P.loss_per_flop if last == P.flop_to.size - 1 else P.job_per_flop
    return per_flop * (P.flop_to[last] - P.flop_to[first])


@_inner
def _saturate(P, S, k, first, last):
    """T_stage of stage k with these layers; fills card, slope, offset and taken of its members. Returns: (seconds,
    seconds of the reduction alone)."""
    M = P.microbatches
    n = S.count[k]
    job = _job(P, first, last)
    gradient = P.gradient_bytes * (P.parameters_to[last] - P.parameters_to[first])
    reduce_s = S.path_unit[k] * gradient
    for a in range(n):
        d = S.members[k, a]
        S.card[d] = _card_part(P, S, d)
        reduce_s = max(reduce_s, S.reduced[d] * gradient / S.card[d])
        per_card = P.cut_bytes * (S.away_out[d] + S.away_in[d])
        if per_card > 0.0 and S.card[d] < np.inf:
            S.slope[d] = S.card[d] / per_card
            S.offset[d] = S.reduced[d] * gradient / per_card
        else:
            S.slope[d] = np.inf
            S.offset[d] = 0.0
    seconds = reduce_s
    if not seconds < np.inf:
        return np.inf, np.inf
    for _ in range(2 * n + 2):
        sum_taken = gain = 0.0
        for a in range(n):
            d = S.members[k, a]
            rate = min(P.flop[d] / job, S.out_rate[d], S.in_rate[d])
            taken = rate * seconds
            if S.slope[d] < np.inf and S.slope[d] * seconds - S.offset[d] < taken:
                taken = max(0.0, S.slope[d] * seconds - S.offset[d])
                gain += S.slope[d]
            else:
                gain += rate
            S.taken[d] = taken
            sum_taken += taken
        if M - sum_taken <= 1e-12 * M:
            break
        if gain <= 0.0:
            return np.inf, reduce_s
        seconds += (M - sum_taken) / gain
    return seconds, reduce_s


@_inner
def _time_stage(P, S, k):
    """Seconds, free rate, commit and mean job of stage k. Returns: work."""
    first, last = S.bounds[k], S.bounds[k + 1]
    seconds, _ = _saturate(P, S, k, first, last)
    S.seconds[k] = seconds
    job = _job(P, first, last)
    gradient = P.gradient_bytes * (P.parameters_to[last] - P.parameters_to[first])
    free = sum_taken = weighted = strain = 0.0
    slowest = np.inf
    for a in range(S.count[k]):
        d = S.members[k, a]
        free += min(P.flop[d] / job, S.out_rate[d], S.in_rate[d], S.slope[d])
        sum_taken += S.taken[d]
        weighted += S.taken[d] * job * P.weight[d] / P.flop[d]
        slowest = min(slowest, P.flop[d] / P.weight[d])
        strain += S.reduced[d] * gradient / S.card[d]
    S.strain[k] = strain / S.count[k]
    S.free[k] = free
    S.job[k] = weighted / sum_taken if sum_taken > 0.0 else np.inf
    parameters = P.parameters_to[last] - P.parameters_to[first]
    S.commit[k] = _LATENCIES * S.latency[k] + _STEP_FLOP * parameters / slowest
    return 12 * S.count[k]


# --- between two stages ---


@_inner
def _hop_s(P, d, e):
    """Seconds of an activation and its gradient between two devices."""
    forth, back = np.float64(P.rate[d, e]), np.float64(P.rate[e, d])
    if P.has_cards and P.card[d] != P.card[e]:
        forth = min(forth, P.up[d], P.down[e])
        back = min(back, P.up[e], P.down[d])
    latency = np.float64(P.latency[d, e]) + np.float64(P.latency[e, d])
    return latency + (P.cut_bytes / forth + P.cut_bytes / back if forth > 0.0 and back > 0.0 else 0.0)


@_inner
def _pair(P, S, k):
    """Flow and mean hop between stages k and k + 1. Returns: work."""
    n, m = S.count[k], S.count[k + 1]
    supply = np.empty(n)
    demand = np.empty(m)
    sum_supply = sum_demand = 0.0
    for a in range(n):
        supply[a] = S.taken[S.members[k, a]] / S.seconds[k]
        sum_supply += supply[a]
    for c in range(m):
        demand[c] = S.taken[S.members[k + 1, c]] / S.seconds[k + 1]
        sum_demand += demand[c]
    largest = max(sum_supply, sum_demand)
    total = hops = 0.0
    fits = True
    for a in range(n):
        d = S.members[k, a]
        for c in range(m):
            flow = supply[a] * demand[c] / largest
            if flow > P.q[d, S.members[k + 1, c]]:
                fits = False
                break
            if flow > 0.0:
                total += flow
                hops += flow * _hop_s(P, d, S.members[k + 1, c])
        if not fits:
            break
    if fits:
        S.flow[k] = total
        S.hop[k] = hops / total if total > 0.0 else np.inf
        return 4 * n * m
    return 4 * n * m + _fill(P, S, k, supply, demand)


@_inner
def _fill(P, S, k, supply, demand):
    """`cost/flow.py`. Returns: work."""
    n, m = len(supply), len(demand)
    flow = np.zeros((n, m))
    left, room = supply.copy(), demand.copy()
    rounds = 0
    for _ in range(FLOW_ROUNDS):
        offered, wanted = left.sum(), room.sum()
        if offered <= 0.0 or wanted <= 0.0:
            break
        rounds += 1
        more = 0.0
        largest = max(offered, wanted)
        for a in range(n):
            d = S.members[k, a]
            for c in range(m):
                step = min(left[a] * room[c] / largest, P.q[d, S.members[k + 1, c]] - flow[a, c])
                flow[a, c] += step
                more += step
        for a in range(n):
            left[a] = max(0.0, supply[a] - flow[a].sum())
        for c in range(m):
            given = 0.0
            for a in range(n):
                given += flow[a, c]
            room[c] = max(0.0, demand[c] - given)
        if more <= 1e-9 * supply.sum():
            break
    total = hops = 0.0
    for a in range(n):
        for c in range(m):
            if flow[a, c] > 0.0:
                total += flow[a, c]
                hops += flow[a, c] * _hop_s(P, S.members[k, a], S.members[k + 1, c])
    S.flow[k] = total
    S.hop[k] = hops / total if total > 0.0 else np.inf
    return (3 * rounds + 3) * n * m


# --- the whole ---


@_kernel
def evaluate(P, S, work):
    """(cost with moving, what local search looks at) of the placement, everything dirty computed again.

    work: int64 [1], what it took is added.
    """
    K = len(S.count)
    for k in range(K):
        if S.count[k] == 0:
            return 1e6 * IMPOSSIBLE, 1e6 * IMPOSSIBLE
    for k in range(K):
        if S.paths_dirty[k]:
            work[0] += _scan_paths(P, S, k)
            S.dirty[k] = True
    if P.shared_cards:
        S.card_load[:] = 0.0
        for k in range(K):
            _loads(P, S, k, S.bounds[k], S.bounds[k + 1])
            for a in range(S.count[k]):
                d = S.members[k, a]
                S.card_load[P.card[d]] += S.load[d]
            S.dirty[k] = True
    for k in range(K):
        if S.dirty[k]:
            work[0] += _time_stage(P, S, k)
            if k > 0:
                S.pair_dirty[k - 1] = True
            S.pair_dirty[k] = True
    for k in range(K):
        if not S.seconds[k] < np.inf:
            return 1e5 * IMPOSSIBLE, 1e5 * IMPOSSIBLE
    for k in range(K - 1):
        if S.pair_dirty[k]:
            work[0] += _pair(P, S, k)
    S.paths_dirty[:] = False
    S.dirty[:] = False
    S.pair_dirty[:] = False
    return _sum_up(P, S, work)


@_inner
def _sum_up(P, S, work):
    K = len(S.count)
    rate = np.inf
    slowest = 0
    flow_s = mean_s = uneven = 0.0
    for k in range(K):
        if k < K - 1:
            if S.flow[k] <= 0.0:
                return 1e4 * IMPOSSIBLE, 1e4 * IMPOSSIBLE
            rate = min(rate, S.flow[k])
            flow_s = max(flow_s, P.microbatches / S.flow[k])
        if S.free[k] < S.free[slowest]:
            slowest = k
        flow_s = max(flow_s, S.seconds[k])
        mean_s += (S.seconds[k] + S.strain[k]) / K
        if S.count[k] > 1:
            uneven = max(uneven, S.job[k] / 2.0)
    work[0] += 2 * len(S.stage) + 16 * K
    issue_s = P.microbatches / min(rate, S.free[slowest]) - S.job[slowest]
    step_s, seconds, chain_s = _paced(P, S, flow_s, issue_s, uneven, P.s_max)
    if P.s_max > 0.0:
        behind_s, behind, behind_chain_s = _paced(P, S, flow_s, issue_s, uneven, 0.0)
        work[0] += 8 * K
        if behind < seconds:
            step_s, seconds, chain_s = behind_s, behind, behind_chain_s
    memory = _memory(P, S, step_s)
    if memory > 1.0:
        return IMPOSSIBLE * memory, IMPOSSIBLE * memory
    cost = seconds * (1.0 + moving_s(P, S) / P.horizon_s)
    return cost, cost + _GUIDE * (mean_s + chain_s)


@_inner
def _paced(P, S, flow_s, issue_s, uneven, ahead):
    """(T, times what staleness costs, T_chain) with so many steps ahead of the versions."""
    K = len(S.count)
    trip = tail = commit = stale = 0.0
    for k in range(K - 1, -1, -1):
        trip += S.job[k] + (S.hop[k] if k < K - 1 else 0.0)
        commit_k = S.commit[k] + _reduce_s(P, S, k, flow_s if ahead > 0.0 else np.inf)
        commit = max(commit, commit_k)
        S.tail[k] = trip + commit_k
        tail = max(tail, S.tail[k])
    chain_s = (issue_s + tail + S.latency[0] + uneven) / (ahead + 1.0)
    if ahead == 0.0:
        return chain_s, chain_s, chain_s
    larger = max(flow_s, chain_s)
    square = (min(flow_s, chain_s) / larger) ** 2
    step_s = larger * np.sqrt(np.sqrt(1.0 + square * square))
    for k in range(K):
        stale += min(ahead, S.tail[k] / step_s) / K
    seen = 1.0 - min(1.0, trip / step_s) * trip / (trip + commit)
    more = seen * _further(P.price[0], stale) + (1.0 - seen) * _further(P.price[1], stale)
    return step_s, step_s * (1.0 + more), chain_s


@_inner
def _further(price, stale):
    """`Price.more_steps` less 1."""
    power = np.sqrt(stale) if int(price[1]) % 2 == 1 else 1.0
    for _ in range(int(price[1]) // 2):
        power *= stale
    return price[0] * power


@_inner
def _reduce_s(P, S, k, flow_s):
    """The reduction on what activations leave of the cards, all of them if `flow_s` is inf."""
    gradient = P.gradient_bytes * (P.parameters_to[S.bounds[k + 1]] - P.parameters_to[S.bounds[k]])
    seconds = S.path_unit[k] * gradient
    sum_taken = 0.0
    for a in range(S.count[k]):
        sum_taken += S.taken[S.members[k, a]]
    for a in range(S.count[k]):
        d = S.members[k, a]
        reduced = S.reduced[d] * gradient
        if reduced > 0.0:
            card = S.card[d]
            if flow_s < np.inf:
                share = S.taken[d] / sum_taken
                busy = P.cut_bytes * (S.away_out[d] + S.away_in[d]) * share * P.microbatches / flow_s
                card = max(card - busy, reduced / flow_s)
            seconds = max(seconds, reduced / card)
    return seconds


@_inner
def _memory(P, S, step_s):
    """Largest needed / present."""
    most = trip = 0.0
    K = len(S.count)
    for k in range(K - 1, -1, -1):
        trip += S.job[k] + (S.hop[k] if k < K - 1 else 0.0)
        first, last = S.bounds[k], S.bounds[k + 1]
        resident = P.resident_bytes * (P.parameters_to[last] - P.parameters_to[first])
        held = P.held_to[last] - P.held_to[first]
        sum_taken = 0.0
        for a in range(S.count[k]):
            sum_taken += S.taken[S.members[k, a]]
        for a in range(S.count[k]):
            d = S.members[k, a]
            made = P.microbatches * S.taken[d] / (sum_taken * P.weight[d])
            flying = min(_WINDOW_GAIN * made / step_s * trip + 1.0, max((P.s_max + 1.0) * made, 1.0))
            most = max(most, (resident + flying * held) / P.memory[d])
    return most


@_kernel
def moving_s(P, S):
    """Seconds of the whole swarm's work that getting here from the current plan costs: what each device does not do
    while it fetches the layers that it has not. Newcomers did nothing before, so they cost nothing."""
    lost_s = 0.0
    if P.horizon_s == np.inf:
        return 0.0
    for d in range(len(S.stage)):
        k = S.stage[d]
        if k < 0 or P.carries[d] <= 0.0:
            continue
        first, last = S.bounds[k], S.bounds[k + 1]
        if first >= P.home_first[d] and last <= P.home_last[d]:
            continue
        has_first, has_last = max(first, P.home_first[d]), min(last, P.home_last[d])
        missing = P.parameters_to[last] - P.parameters_to[first]
        if has_last > has_first:
            missing -= P.parameters_to[has_last] - P.parameters_to[has_first]
        lost_s += P.carries[d] * P.state_bytes * missing / P.fetch_rate[d]
    return lost_s


# --- where the model is cut ---


@_kernel
def cut(P, S, work):
    """Set the bounds for which the slowest stage of these members is fastest, exactly: dynamic programming over all
    cuts, each stage's time being that of `_saturate` with its own members. What does not fit in memory with two
    microbatches held counts as impossible. Needs the paths scanned; on shared cards it takes the loads as they are."""
    K, L = len(S.count), len(P.flop_to) - 1
    best = np.full((K + 1, L + 1), np.inf)
    since = np.zeros((K + 1, L + 1), np.int64)
    best[0, 0] = 0.0
    for k in range(K):
        memory = np.inf
        for a in range(S.count[k]):
            memory = min(memory, P.memory[S.members[k, a]])
        for last in range(k + 1, L - (K - k - 1) + 1):
            # Backwards: the shortest stage first, so that a longer one must be better, not as good.
            for first in range(last - 1, k - 1, -1):
                if not best[k, first] < best[k + 1, last]:
                    continue
                needed = P.resident_bytes * (P.parameters_to[last] - P.parameters_to[first])
                needed += 2.0 * (P.held_to[last] - P.held_to[first])
                if needed > memory:
                    seconds = IMPOSSIBLE * needed / memory
                else:
                    seconds, _ = _saturate(P, S, k, first, last)
                    work[0] += 8 * S.count[k]
                joined = max(best[k, first], seconds)
                if joined < best[k + 1, last]:
                    best[k + 1, last] = joined
                    since[k + 1, last] = first
                elif seconds > best[k + 1, last]:
                    break  # Still more layers only take longer.
    last = L
    for k in range(K - 1, -1, -1):
        S.bounds[k + 1] = last
        last = since[k + 1, last]
    S.bounds[0] = 0
    S.dirty[:] = True
    return best[K, L]


# --- moves ---

RELOCATE, EXCHANGE, LAYER, RENAME, CARRY = 0, 1, 2, 3, 4


@_kernel
def build(P, S, stage, bounds):
    """Make S this placement, everything dirty. Members come in ascending order."""
    S.count[:] = 0
    for d in range(len(stage)):
        k = stage[d]
        S.stage[d] = k
        if k >= 0:
            S.at[d] = S.count[k]
            S.members[k, S.count[k]] = d
            S.count[k] += 1
    S.bounds[:] = bounds
    S.paths_dirty[:] = True
    S.dirty[:] = True
    S.pair_dirty[:] = True
    S.load[:] = 0.0
    S.card_load[:] = 0.0


@_inner
def _touch(S, k):
    for near in range(max(0, k - 1), min(len(S.count), k + 2)):
        S.paths_dirty[near] = True


@_inner
def _relocate(S, d, k):
    old = S.stage[d]
    if old >= 0:
        last = S.members[old, S.count[old] - 1]
        S.members[old, S.at[d]] = last
        S.at[last] = S.at[d]
        S.count[old] -= 1
        _touch(S, old)
    S.stage[d] = k
    if k >= 0:
        S.at[d] = S.count[k]
        S.members[k, S.count[k]] = d
        S.count[k] += 1
        _touch(S, k)


@_inner
def _apply(S, kind, x, y):
    """RELOCATE device x to stage y; EXCHANGE the stages of devices x and y; a LAYER from stage x to stage y, those
    between shift; RENAME: stages x and y exchange their members; CARRY: and their numbers of layers."""
    if kind == RELOCATE:
        _relocate(S, x, y)
    elif kind == EXCHANGE:
        k, other = S.stage[x], S.stage[y]
        _relocate(S, x, other)
        _relocate(S, y, k)
    elif kind == LAYER:
        step = -1 if x < y else 1
        for bound in range(min(x, y) + 1, max(x, y) + 1):
            S.bounds[bound] += step
        for k in range(min(x, y), max(x, y) + 1):
            S.dirty[k] = True
    else:
        if kind == CARRY:
            first, last = min(x, y), max(x, y)
            more = (S.bounds[last + 1] - S.bounds[last]) - (S.bounds[first + 1] - S.bounds[first])
            for bound in range(first + 1, last + 1):
                S.bounds[bound] += more
            S.dirty[first : last + 1] = True
        for a in range(max(S.count[x], S.count[y])):
            mine = S.members[x, a]
            S.members[x, a] = S.members[y, a]
            S.members[y, a] = mine
        S.count[x], S.count[y] = S.count[y], S.count[x]
        for k in (x, y):
            _touch(S, k)
            for a in range(S.count[k]):
                S.stage[S.members[k, a]] = k


@_inner
def _copy(A, B):
    """What `evaluate` computes, and what of it is still to be computed, of A into B."""
    for d in range(len(A.stage)):
        B.out_rate[d], B.in_rate[d] = A.out_rate[d], A.in_rate[d]
        B.away_out[d], B.away_in[d] = A.away_out[d], A.away_in[d]
        B.part[d], B.reduced[d] = A.part[d], A.reduced[d]
        B.load[d], B.slope[d], B.offset[d] = A.load[d], A.slope[d], A.offset[d]
        B.taken[d], B.card[d] = A.taken[d], A.card[d]
    for k in range(len(A.count)):
        B.path_unit[k], B.latency[k], B.seconds[k] = A.path_unit[k], A.latency[k], A.seconds[k]
        B.free[k], B.commit[k], B.job[k], B.strain[k] = A.free[k], A.commit[k], A.job[k], A.strain[k]
        B.flow[k], B.hop[k] = A.flow[k], A.hop[k]
        B.paths_dirty[k], B.dirty[k], B.pair_dirty[k] = A.paths_dirty[k], A.dirty[k], A.pair_dirty[k]


@_inner
def _slowest(P, S):
    """The stage that would gain most from more members or fewer layers."""
    slowest, where = 0.0, 0
    for k in range(len(S.count)):
        seconds = S.seconds[k]
        for pair in range(max(0, k - 1), min(k + 1, len(S.count) - 1)):
            seconds = max(seconds, P.microbatches / S.flow[pair] if S.flow[pair] > 0.0 else np.inf)
        if seconds > slowest:
            slowest, where = seconds, k
    return where


@_inner
def _burden(S, k):
    """The member of stage k that is slowest in its reduction."""
    worst, who = -1.0, S.members[k, 0]
    for a in range(S.count[k]):
        d = S.members[k, a]
        if S.reduced[d] / S.card[d] > worst:
            worst, who = S.reduced[d] / S.card[d], d
    return who


@_inner
def _propose(P, S, random):
    """(kind, x, y) of a move that leaves a stage 0 with text and no stage empty; kind -1: none this time."""
    N, K = len(S.stage), len(S.count)
    slow = _slowest(P, S) if draw(random) & np.uint64(1) else below(random, K)
    dice = below(random, 100)
    if dice < 10:
        d = _burden(S, slow)
        return (RELOCATE, d, -1) if S.count[slow] > 1 else (-1, 0, 0)
    if dice < 45:
        d, k = below(random, N), -1 if below(random, 8) == 0 else slow
        if S.stage[d] == k or (S.stage[d] >= 0 and S.count[S.stage[d]] == 1) or (k == 0 and not P.feeds[d]):
            return -1, 0, 0
        return RELOCATE, d, k
    if dice < 80:
        d, e = S.members[slow, below(random, S.count[slow])], below(random, N)
        if S.stage[e] == slow or (S.stage[e] == 0 and not P.feeds[d]) or (slow == 0 and not P.feeds[e]):
            return -1, 0, 0
        return EXCHANGE, d, e
    k = below(random, K)
    if k == slow:
        return -1, 0, 0
    if dice < 94:
        return (LAYER, slow, k) if S.bounds[slow + 1] - S.bounds[slow] > 1 else (-1, 0, 0)
    if k == 0 or slow == 0:
        other = max(k, slow)
        for a in range(S.count[other]):
            if not P.feeds[S.members[other, a]]:
                return -1, 0, 0
    return (RENAME if dice < 97 else CARRY), slow, k


@_kernel
def improve(P, S, B, seed, limit, heat, best_stage, best_bounds):
    """Local search from the placement in S until `limit` units are spent. B: a State to keep copies in.

    A worse placement is accepted up to a threshold that falls to 0 with what is spent, times a draw from [0, 1).
    Fills best_stage and best_bounds. Returns: (the best cost, work). S is left where the search has ended.
    """
    random = np.full(1, np.uint64(seed), np.uint64)
    work = np.zeros(1, np.int64)
    cost, guide = evaluate(P, S, work)
    _copy(S, B)
    best, best_guide = cost, guide
    best_stage[:] = S.stage
    best_bounds[:] = S.bounds
    while work[0] < limit:
        work[0] += 64
        kind, x, y = _propose(P, S, random)
        if kind < 0:
            continue
        old = S.stage[x] if kind == RELOCATE else 0
        _apply(S, kind, x, y)
        work[0] += len(S.stage) // 2
        new_cost, new_guide = evaluate(P, S, work)
        cool = 1.0 - work[0] / limit
        if new_guide <= guide * (1.0 + _HEAT * heat * cool * cool * unit(random)):
            cost, guide = new_cost, new_guide
            _copy(S, B)
            if cost < best or (cost == best and guide < best_guide):
                best, best_guide = cost, guide
                best_stage[:] = S.stage
                best_bounds[:] = S.bounds
        else:
            if kind == RELOCATE:
                _apply(S, kind, x, old)
            elif kind == LAYER:
                _apply(S, kind, y, x)
            else:
                _apply(S, kind, x, y)
            _copy(B, S)
    return best, work[0]
