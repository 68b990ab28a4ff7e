"""The compiled inner loops of the search on the throughput objective: its cost, stage by stage, and local search.

`cost/throughput.py` explains the formula; a test compares the two. A unit is a device, or in the coarse view of a large
swarm a cluster of `weight` alike devices. Only values that a move changes are computed again: the paths of the stages
that gained or lost a member and of their neighbours, then the times of those stages, then the flows between them.

This file is long because numba's cache of a function does not notice a change in another file that it calls. There is
no fastmath, no parallel loop and no transcendental function, random integers are our own, and sums run in the order of
members: the result is the same bit for bit on any machine."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

_njit: Any = njit  # the types of njit lack two of its options
_kernel = _njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)
_inner = _njit(cache=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)
"""Only a `_kernel` is called from Python: a wrapper that unpacks 60 arrays is a third of a function's compile time."""
FLOW_ROUNDS = 6
IMPOSSIBLE = 1e9
"""Costs from here on belong to infeasible placements; a higher cost is further from feasible."""
_LATENCIES = 4.0
_STEP_FLOP = 20.0
_WINDOW_GAIN = 1.5
_GUIDE = 0.03
"""Local search minimises the cost plus this part of the mean stage, the mean member's reduction and the chain: most
moves do not touch the slowest stage."""
_HEAT = 0.08
"""A search at heat 1 begins by accepting placements that are up to this part worse."""


FLOP, WEIGHT, MEMORY, UP, DOWN, FETCH_RATE, CARRIES = range(7)
"""The rows of `SearchProblem.units`: FLOP/s; number of devices; one device's bytes of memory, and of its card's bytes/s
in both directions; the bytes/s of fetching other layers' state; its share of its stage's work, which pauses
meanwhile."""
HOME_FIRST, HOME_LAST = range(2)
"""The rows of `SearchProblem.home`: the range of layers that a unit holds with state in the current plan."""
FLOP_TO, PARAMETERS_TO, HELD_TO, EXPERT_TO, JOB_TO = range(5)
"""The rows of `SearchProblem.layers`, sums over the layers before a bound. `EXPERT_TO` has the parameters of one placed
expert, `JOB_TO` the fixed bytes of the running job."""
MICROBATCHES, JOB_PER_FLOP, LOSS_PER_FLOP, S_MAX, HORIZON_S = range(5)
CUT_BYTES, GRADIENT_BYTES, RESIDENT_BYTES, STATE_BYTES, WORKSPACE_BYTES, TIED_BYTES = range(5, 11)
"""The positions in `SearchProblem.costs`, the demand of one step. A microbatch takes `JOB_PER_FLOP` forwards, at the
last stage `LOSS_PER_FLOP`. `CUT_BYTES` are per activation. The next three are per parameter: its gradient on the wire,
its total in memory, and its state. `WORKSPACE_BYTES` are per stage. `TIED_BYTES` are the gradient of a matrix that the
first and the last stage share; 0: there is none."""
OUT_RATE, IN_RATE, AWAY_OUT, AWAY_IN, PART, REDUCED, TIED, LOAD, SLOPE, OFFSET, TAKEN, CARD = range(12)
"""The rows of `PlacementState.loads`, by unit. `REDUCED`: bytes over its card for each byte of its stage's gradient;
`TIED`: bytes of the matrix that both ends share."""
PATH_UNIT, TIED_S, LATENCY, SECONDS, FREE, COMMIT, JOB, STRAIN, FLOW, HOP = range(10)
"""The rows of `PlacementState.times`, by stage. `PATH_UNIT` is the largest (p_d + p_e) / path rate between two members,
`TIED_S` the seconds of the shared matrix on the worst member's best path, `STRAIN` the mean member's seconds of the
reduction. `FLOW` and `HOP` are between the stage and the next one."""
PATHS, STAGES, PAIRS = range(3)
"""The rows of `PlacementState.dirty`: the values of a stage to compute again."""


class SearchProblem(NamedTuple):
    """The constants of a search. There are N units, L layers and C network cards."""

    units: Any
    """[7, N]"""
    home: Any
    """int64 [2, N]"""
    card: Any
    """int64 [N], the network card of each unit."""
    card_rate: Any
    """[C], bytes/s of the slower direction."""
    shared_cards: bool
    feeds: Any
    """bool [N], True if a unit has the run's text."""
    latency: Any
    rate: Any
    """[N, N], of one path."""
    q: Any
    """[N, N], microbatches/s there and back, over all paths between two units."""
    layers: Any
    """[5, L + 1]"""
    beyond: Any
    """[devices + 1], placed experts that a member of a stage of so many devices holds beyond its slots."""
    costs: Any
    """[11]"""


class PlacementState(NamedTuple):
    """A placement of N units on K stages, and the parts of its cost."""

    stage: Any
    at: Any
    """int64 [N]: the stage of each unit or -1, and its position among the members."""
    members: Any
    """int64 [K, N]; the first `count` are the members of a stage."""
    count: Any
    """int64 [K], the number of members."""
    bounds: Any
    """int64 [K + 1], the layers at which the model is cut."""
    loads: Any
    """[12, N]"""
    times: Any
    """[10, K]"""
    dirty: Any
    """bool [3, K]"""
    card_load: Any
    """[C]"""


@_kernel
def draw(state):
    """Draw a uint64 by SplitMix64 (Steele, Lea, Flood 2014). `state`: uint64 [1], which is advanced."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_inner
def below(state, n):
    """Draw an int64 in [0, n), n < 2^32."""
    return np.int64(((draw(state) >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


@_inner
def unit(state):
    """Draw a float64 in [0, 1)."""
    return np.float64(draw(state) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@_kernel
def exchange_rates(latency, rate, weight, frame_bytes, credit_bytes, q):
    """Fill q [N, N] with `path_rates.both_ways` of all pairs, in frames/s."""
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
    """Compute the rates of stage k's members to both neighbours, and their parts of its reduction. Returns: work."""
    K = len(S.count)
    work = 0
    for neighbour in (k - 1, k + 1):
        rate_row, away_row = (IN_RATE, AWAY_IN) if neighbour < k else (OUT_RATE, AWAY_OUT)
        there = 0 <= neighbour < K
        for a in range(S.count[k]):
            d = S.members[k, a]
            total = near = speed = 0.0
            if there:
                for c in range(S.count[neighbour]):
                    e = S.members[neighbour, c]
                    total += P.q[d, e]
                    if P.shared_cards:
                        speed += P.units[FLOP, e]
                        if P.card[d] == P.card[e]:
                            near += P.units[FLOP, e]
                work += S.count[neighbour]
            S.loads[rate_row, d] = total if there else np.inf
            S.loads[away_row, d] = 0.0 if not there else (1.0 - near / speed if P.shared_cards else 1.0)
            S.loads[TIED, d] = 0.0
    S.times[TIED_S, k] = 0.0
    return work + _scan_mates(P, S, k)


@_inner
def _scan_tied(P, S):
    """Compute what the shared matrix costs the members of both ends. Returns: work."""
    K = len(S.count)
    for k, end in ((0, K - 1), (K - 1, 0)):
        here = there = 0.0
        for a in range(S.count[k]):
            here += P.units[WEIGHT, S.members[k, a]]
        for c in range(S.count[end]):
            there += P.units[WEIGHT, S.members[end, c]]
        S.times[TIED_S, k] = 0.0
        for a in range(S.count[k]):
            d = S.members[k, a]
            S.loads[TIED, d] = P.units[WEIGHT, d] * P.costs[TIED_BYTES] * max(1.0, there / here)
            best = 0.0
            for c in range(S.count[end]):
                e = S.members[end, c]
                best = max(best, P.q[d, e] * P.costs[CUT_BYTES] / (P.units[WEIGHT, d] * P.units[WEIGHT, e]))
            S.times[TIED_S, k] = max(S.times[TIED_S, k], P.costs[TIED_BYTES] / best if best > 0.0 else np.inf)
    return 2 * S.count[0] * S.count[K - 1]


@_inner
def _scan_mates(P, S, k):
    n = S.count[k]
    whole = 0.0
    devices = 0.0
    for a in range(n):
        d = S.members[k, a]
        devices += P.units[WEIGHT, d]
    for a in range(n):
        d = S.members[k, a]
        path = 0.0
        mates = 0.0
        for c in range(n):
            e = S.members[k, c]
            path += P.q[d, e]
            if P.card[e] == P.card[d]:
                mates += 1.0
        rate = min(path * P.costs[CUT_BYTES] if n > 1 else np.inf, P.card_rate[P.card[d]] / mates)
        S.loads[PART, d] = rate
        whole = max(whole, rate)
    total = 0.0
    for a in range(n):
        d = S.members[k, a]
        S.loads[PART, d] = max(S.loads[PART, d], 1e-6 * whole) if 0.0 < whole < np.inf else P.units[WEIGHT, d]
        total += S.loads[PART, d]
    S.times[PATH_UNIT, k] = S.times[LATENCY, k] = 0.0
    for a in range(n):
        d = S.members[k, a]
        S.loads[PART, d] = S.loads[PART, d] / total if n > 1 else 1.0
    for a in range(n):
        d = S.members[k, a]
        S.loads[REDUCED, d] = 2.0 * S.loads[PART, d] * (P.units[WEIGHT, d] - 1.0)
        for c in range(n):
            e = S.members[k, c]
            if e == d:
                continue
            if P.card[e] != P.card[d]:
                S.loads[REDUCED, d] += P.units[WEIGHT, e] * S.loads[PART, d] + P.units[WEIGHT, d] * S.loads[PART, e]
            if c < a:
                pair = P.units[WEIGHT, d] * P.units[WEIGHT, e]
                between = (S.loads[PART, d] / P.units[WEIGHT, d] + S.loads[PART, e] / P.units[WEIGHT, e]) * pair
                rate = P.q[d, e] * P.costs[CUT_BYTES]
                S.times[PATH_UNIT, k] = max(S.times[PATH_UNIT, k], between / rate if rate > 0.0 else np.inf)
                S.times[LATENCY, k] = max(S.times[LATENCY, k], np.float64(P.latency[d, e]), np.float64(P.latency[e, d]))
    return 3 * n * n


@_inner
def _loads(P, S, k, first, last):
    """Compute the bytes that each member of stage k sends over its card in a step, with layers first to last - 1."""
    gradient = P.costs[GRADIENT_BYTES] * (P.layers[PARAMETERS_TO, last] - P.layers[PARAMETERS_TO, first])
    speed = 0.0
    for a in range(S.count[k]):
        speed += P.units[FLOP, S.members[k, a]]
    for a in range(S.count[k]):
        d = S.members[k, a]
        share = P.costs[MICROBATCHES] * P.units[FLOP, d] / speed
        away = S.loads[AWAY_OUT, d] + S.loads[AWAY_IN, d]
        S.loads[LOAD, d] = share * P.costs[CUT_BYTES] * away + S.loads[REDUCED, d] * gradient + S.loads[TIED, d]


@_inner
def _card_part(P, S, d):
    """Return unit d's part of its card, bytes/s."""
    rate = P.card_rate[P.card[d]]
    if not P.shared_cards or S.loads[LOAD, d] <= 0.0:
        return rate
    return rate * (S.loads[LOAD, d] / S.card_load[P.card[d]])


@_inner
def _job(P, first, last):
    """Return the FLOP of a microbatch there and back, as `Workload.job_flop` does."""
    per_flop = P.costs[LOSS_PER_FLOP] if last == P.layers.shape[1] - 1 else P.costs[JOB_PER_FLOP]
    return per_flop * (P.layers[FLOP_TO, last] - P.layers[FLOP_TO, first])


@_inner
def _saturate(P, S, k, first, last):
    """Compute the members' card, slope, offset and taken. Returns: (T_stage, seconds of the reduction)."""
    M = P.costs[MICROBATCHES]
    n = S.count[k]
    job = _job(P, first, last)
    gradient = P.costs[GRADIENT_BYTES] * (P.layers[PARAMETERS_TO, last] - P.layers[PARAMETERS_TO, first])
    reduce_s = S.times[PATH_UNIT, k] * gradient + S.times[TIED_S, k]
    for a in range(n):
        d = S.members[k, a]
        S.loads[CARD, d] = _card_part(P, S, d)
        reduced = S.loads[REDUCED, d] * gradient + S.loads[TIED, d]
        reduce_s = max(reduce_s, reduced / S.loads[CARD, d])
        per_card = P.costs[CUT_BYTES] * (S.loads[AWAY_OUT, d] + S.loads[AWAY_IN, d])
        if per_card > 0.0 and S.loads[CARD, d] < np.inf:
            S.loads[SLOPE, d] = S.loads[CARD, d] / per_card
            S.loads[OFFSET, d] = reduced / per_card
        else:
            S.loads[SLOPE, d] = np.inf
            S.loads[OFFSET, d] = 0.0
    for a in range(n):
        d = S.members[k, a]
        if S.loads[OUT_RATE, d] <= 0.0 or S.loads[IN_RATE, d] <= 0.0:
            return np.inf, np.inf
    seconds = reduce_s
    if not seconds < np.inf:
        return np.inf, np.inf
    for _ in range(2 * n + 2):
        sum_taken = gain = 0.0
        for a in range(n):
            d = S.members[k, a]
            rate = min(P.units[FLOP, d] / job, S.loads[OUT_RATE, d], S.loads[IN_RATE, d])
            taken = rate * seconds
            if S.loads[SLOPE, d] < np.inf and S.loads[SLOPE, d] * seconds - S.loads[OFFSET, d] < taken:
                taken = max(0.0, S.loads[SLOPE, d] * seconds - S.loads[OFFSET, d])
                gain += S.loads[SLOPE, d]
            else:
                gain += rate
            S.loads[TAKEN, d] = taken
            sum_taken += taken
        if M - sum_taken <= 1e-12 * M:
            break
        if gain <= 0.0:
            return np.inf, reduce_s
        seconds += (M - sum_taken) / gain
    return seconds, reduce_s


@_inner
def _time_stage(P, S, k):
    first, last = S.bounds[k], S.bounds[k + 1]
    seconds, _ = _saturate(P, S, k, first, last)
    S.times[SECONDS, k] = seconds
    job = _job(P, first, last)
    gradient = P.costs[GRADIENT_BYTES] * (P.layers[PARAMETERS_TO, last] - P.layers[PARAMETERS_TO, first])
    free = sum_taken = weighted = strain = 0.0
    slowest = np.inf
    for a in range(S.count[k]):
        d = S.members[k, a]
        free += min(P.units[FLOP, d] / job, S.loads[OUT_RATE, d], S.loads[IN_RATE, d], S.loads[SLOPE, d])
        sum_taken += S.loads[TAKEN, d]
        weighted += S.loads[TAKEN, d] * job * P.units[WEIGHT, d] / P.units[FLOP, d]
        slowest = min(slowest, P.units[FLOP, d] / P.units[WEIGHT, d])
        strain += (S.loads[REDUCED, d] * gradient + S.loads[TIED, d]) / S.loads[CARD, d]
    S.times[STRAIN, k] = strain / S.count[k]
    S.times[FREE, k] = free
    S.times[JOB, k] = weighted / sum_taken if sum_taken > 0.0 else np.inf
    parameters = P.layers[PARAMETERS_TO, last] - P.layers[PARAMETERS_TO, first]
    S.times[COMMIT, k] = _LATENCIES * S.times[LATENCY, k] + _STEP_FLOP * parameters / slowest
    return 12 * S.count[k]


# --- between two stages ---


@_inner
def _hop_s(P, d, e):
    """Return the seconds of an activation and its gradient between two units."""
    forth, back = np.float64(P.rate[d, e]), np.float64(P.rate[e, d])
    if P.card[d] != P.card[e]:
        forth = min(forth, P.units[UP, d], P.units[DOWN, e])
        back = min(back, P.units[UP, e], P.units[DOWN, d])
    latency = np.float64(P.latency[d, e]) + np.float64(P.latency[e, d])
    return latency + (P.costs[CUT_BYTES] / forth + P.costs[CUT_BYTES] / back if forth > 0.0 and back > 0.0 else 0.0)


@_inner
def _pair(P, S, k):
    """Compute the flow and the mean hop between stages k and k + 1. Returns: work."""
    n, m = S.count[k], S.count[k + 1]
    supply = np.empty(n)
    demand = np.empty(m)
    sum_supply = sum_demand = 0.0
    for a in range(n):
        supply[a] = S.loads[TAKEN, S.members[k, a]] / S.times[SECONDS, k]
        sum_supply += supply[a]
    for c in range(m):
        demand[c] = S.loads[TAKEN, S.members[k + 1, c]] / S.times[SECONDS, k + 1]
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
        S.times[FLOW, k] = total
        S.times[HOP, k] = hops / total if total > 0.0 else np.inf
        return 4 * n * m
    return 4 * n * m + _fill(P, S, k, supply, demand)


@_inner
def _fill(P, S, k, supply, demand):
    """Compute the flow as `cost.throughput.fill` does, where some paths are too thin. Returns: work."""
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
    S.times[FLOW, k] = total
    S.times[HOP, k] = hops / total if total > 0.0 else np.inf
    return (3 * rounds + 3) * n * m


# --- the whole ---


@_kernel
def evaluate(P, S, work):
    """Compute all dirty values again. Returns: (cost with moving, the guide of local search).
    Args: work: int64 [1], to which the work done is added."""
    K = len(S.count)
    for k in range(K):
        if S.count[k] == 0 or S.bounds[k + 1] <= S.bounds[k]:
            return 1e6 * IMPOSSIBLE, 1e6 * IMPOSSIBLE
    for a in range(S.count[0]):
        if not P.feeds[S.members[0, a]]:
            return 1e6 * IMPOSSIBLE, 1e6 * IMPOSSIBLE
    for k in range(K):
        if S.dirty[PATHS, k]:
            work[0] += _scan_paths(P, S, k)
            S.dirty[STAGES, k] = True
    if P.costs[TIED_BYTES] > 0.0 and K > 1 and (S.dirty[PATHS, 0] or S.dirty[PATHS, K - 1]):
        work[0] += _scan_tied(P, S)
        S.dirty[STAGES, 0] = S.dirty[STAGES, K - 1] = True
    if P.shared_cards:
        S.card_load[:] = 0.0
        for k in range(K):
            _loads(P, S, k, S.bounds[k], S.bounds[k + 1])
            for a in range(S.count[k]):
                d = S.members[k, a]
                S.card_load[P.card[d]] += S.loads[LOAD, d]
            S.dirty[STAGES, k] = True
    for k in range(K):
        if S.dirty[STAGES, k]:
            work[0] += _time_stage(P, S, k)
            if k > 0:
                S.dirty[PAIRS, k - 1] = True
            S.dirty[PAIRS, k] = True
    for k in range(K):
        if not S.times[SECONDS, k] < np.inf:
            return 1e5 * IMPOSSIBLE, 1e5 * IMPOSSIBLE
    for k in range(K - 1):
        if S.dirty[PAIRS, k]:
            work[0] += _pair(P, S, k)
    S.dirty[PATHS, :] = False
    S.dirty[STAGES, :] = False
    S.dirty[PAIRS, :] = False
    return _sum_up(P, S, work)


@_inner
def _sum_up(P, S, work):
    K = len(S.count)
    rate = np.inf
    slowest = 0
    flow_s = mean_s = uneven = 0.0
    for k in range(K):
        if k < K - 1:
            if S.times[FLOW, k] <= 0.0:
                return 1e4 * IMPOSSIBLE, 1e4 * IMPOSSIBLE
            rate = min(rate, S.times[FLOW, k])
            flow_s = max(flow_s, P.costs[MICROBATCHES] / S.times[FLOW, k])
        if S.times[FREE, k] < S.times[FREE, slowest]:
            slowest = k
        flow_s = max(flow_s, S.times[SECONDS, k])
        mean_s += (S.times[SECONDS, k] + S.times[STRAIN, k]) / K
        if S.count[k] > 1:
            uneven = max(uneven, S.times[JOB, k] / 2.0)
    work[0] += 2 * len(S.stage) + 16 * K
    issue_s = P.costs[MICROBATCHES] / min(rate, S.times[FREE, slowest]) - S.times[JOB, slowest]
    step_s, chain_s = _paced(P, S, flow_s, issue_s, uneven, P.costs[S_MAX])
    if P.costs[S_MAX] > 0.0:
        behind_s, behind_chain_s = _paced(P, S, flow_s, issue_s, uneven, 0.0)
        work[0] += 8 * K
        if behind_s < step_s:
            step_s, chain_s = behind_s, behind_chain_s
    memory = _memory(P, S, step_s)
    if memory > 1.0:
        return IMPOSSIBLE * memory, IMPOSSIBLE * memory
    cost = step_s * (1.0 + moving_s(P, S) / P.costs[HORIZON_S])
    return cost, cost + _GUIDE * (mean_s + chain_s)


@_inner
def _paced(P, S, flow_s, issue_s, uneven, ahead):
    """Pace the pipeline with `ahead` steps ahead of the versions. Returns: (T, T_chain)."""
    K = len(S.count)
    trip = tail = 0.0
    for k in range(K - 1, -1, -1):
        trip += S.times[JOB, k] + (S.times[HOP, k] if k < K - 1 else 0.0)
        commit = S.times[COMMIT, k] + _reduce_s(P, S, k, flow_s if ahead > 0.0 else np.inf)
        tail = max(tail, trip + commit)
    chain_s = (issue_s + tail + S.times[LATENCY, 0] + uneven) / (ahead + 1.0)
    if ahead == 0.0:
        return chain_s, chain_s
    larger = max(flow_s, chain_s)
    square = (min(flow_s, chain_s) / larger) ** 2
    return larger * np.sqrt(np.sqrt(1.0 + square * square)), chain_s


@_inner
def _reduce_s(P, S, k, flow_s):
    """Return the seconds of the reduction on the card rate that activations leave: all of it if `flow_s` is inf."""
    first, last = S.bounds[k], S.bounds[k + 1]
    gradient = P.costs[GRADIENT_BYTES] * (P.layers[PARAMETERS_TO, last] - P.layers[PARAMETERS_TO, first])
    seconds = S.times[PATH_UNIT, k] * gradient + S.times[TIED_S, k]
    sum_taken = 0.0
    for a in range(S.count[k]):
        sum_taken += S.loads[TAKEN, S.members[k, a]]
    for a in range(S.count[k]):
        d = S.members[k, a]
        reduced = S.loads[REDUCED, d] * gradient + S.loads[TIED, d]
        if reduced > 0.0:
            card = S.loads[CARD, d]
            if flow_s < np.inf:
                share = S.loads[TAKEN, d] / sum_taken
                away = S.loads[AWAY_OUT, d] + S.loads[AWAY_IN, d]
                busy = P.costs[CUT_BYTES] * away * share * P.costs[MICROBATCHES] / flow_s
                card = max(card - busy, reduced / flow_s)
            seconds = max(seconds, reduced / card)
    return seconds


@_inner
def _resident(P, S, k, first, last):
    """Return the bytes of stage k's state at a member, as `Workload.resident_bytes` does."""
    devices = 0.0
    for a in range(S.count[k]):
        devices += P.units[WEIGHT, S.members[k, a]]
    parameters = P.layers[PARAMETERS_TO, last] - P.layers[PARAMETERS_TO, first]
    parameters += P.beyond[int(devices)] * (P.layers[EXPERT_TO, last] - P.layers[EXPERT_TO, first])
    job = P.layers[JOB_TO, last] - P.layers[JOB_TO, first] + P.costs[WORKSPACE_BYTES]
    return P.costs[RESIDENT_BYTES] * parameters + job


@_inner
def _memory(P, S, step_s):
    most = trip = 0.0
    K = len(S.count)
    for k in range(K - 1, -1, -1):
        trip += S.times[JOB, k] + (S.times[HOP, k] if k < K - 1 else 0.0)
        first, last = S.bounds[k], S.bounds[k + 1]
        resident = _resident(P, S, k, first, last)
        held = P.layers[HELD_TO, last] - P.layers[HELD_TO, first]
        sum_taken = 0.0
        for a in range(S.count[k]):
            sum_taken += S.loads[TAKEN, S.members[k, a]]
        for a in range(S.count[k]):
            d = S.members[k, a]
            made = P.costs[MICROBATCHES] * S.loads[TAKEN, d] / (sum_taken * P.units[WEIGHT, d])
            flying = min(_WINDOW_GAIN * made / step_s * trip + 1.0, max((P.costs[S_MAX] + 1.0) * made, 1.0))
            most = max(most, (resident + flying * held) / P.units[MEMORY, d])
    return most


@_kernel
def moving_s(P, S):
    """Return the seconds of the whole swarm's work that moving here from the current plan costs: what each unit does
    not do while it fetches missing layers. Newcomers did no work before, so they cost nothing."""
    lost_s = 0.0
    if P.costs[HORIZON_S] == np.inf:
        return 0.0
    for d in range(len(S.stage)):
        k = S.stage[d]
        if k < 0 or P.units[CARRIES, d] <= 0.0:
            continue
        first, last = S.bounds[k], S.bounds[k + 1]
        if first >= P.home[HOME_FIRST, d] and last <= P.home[HOME_LAST, d]:
            continue
        has_first, has_last = max(first, P.home[HOME_FIRST, d]), min(last, P.home[HOME_LAST, d])
        missing = P.layers[PARAMETERS_TO, last] - P.layers[PARAMETERS_TO, first]
        if has_last > has_first:
            missing -= P.layers[PARAMETERS_TO, has_last] - P.layers[PARAMETERS_TO, has_first]
        lost_s += P.units[CARRIES, d] * P.costs[STATE_BYTES] * missing / P.units[FETCH_RATE, d]
    return lost_s


# --- where the model is cut ---


@_kernel
def cut(P, S, work):
    """Set the bounds for which the slowest stage of these members is fastest, exactly, by dynamic programming. Stages
    that do not fit in memory with two microbatches held are infeasible. The paths must have been scanned; shared cards
    keep their present loads."""
    K, L = len(S.count), P.layers.shape[1] - 1
    best = np.full((K + 1, L + 1), np.inf)
    since = np.zeros((K + 1, L + 1), np.int64)
    best[0, 0] = 0.0
    for k in range(K):
        memory = np.inf
        for a in range(S.count[k]):
            memory = min(memory, P.units[MEMORY, S.members[k, a]])
        for last in range(k + 1, L - (K - k - 1) + 1):
            # Backwards, the shortest stage first, so that a longer one must be strictly better.
            for first in range(last - 1, k - 1, -1):
                if not best[k, first] < best[k + 1, last]:
                    continue
                needed = _resident(P, S, k, first, last) + 2.0 * (P.layers[HELD_TO, last] - P.layers[HELD_TO, first])
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
                    break  # More layers would only take longer.
    last = L
    for k in range(K - 1, -1, -1):
        S.bounds[k + 1] = last
        last = since[k + 1, last]
    S.bounds[0] = 0
    S.dirty[STAGES, :] = True
    return best[K, L]


# --- moves ---

RELOCATE, EXCHANGE, LAYER, RENAME, CARRY = 0, 1, 2, 3, 4


@_kernel
def build(P, S, stage, bounds):
    """Set S to this placement, all dirty. Members come in ascending order."""
    S.count[:] = 0
    for d in range(len(stage)):
        k = stage[d]
        S.stage[d] = k
        if k >= 0:
            S.at[d] = S.count[k]
            S.members[k, S.count[k]] = d
            S.count[k] += 1
    S.bounds[:] = bounds
    S.dirty[PATHS, :] = True
    S.dirty[STAGES, :] = True
    S.dirty[PAIRS, :] = True
    S.loads[LOAD, :] = 0.0
    S.card_load[:] = 0.0


@_inner
def _touch(S, k):
    for near in range(max(0, k - 1), min(len(S.count), k + 2)):
        S.dirty[PATHS, near] = True


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
    """Make a move. RELOCATE puts unit x into stage y. EXCHANGE swaps the stages of units x and y. LAYER gives a layer
    of stage x to stage y and shifts those between. RENAME swaps the members of stages x and y. CARRY also swaps their
    numbers of layers."""
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
            S.dirty[STAGES, k] = True
    else:
        if kind == CARRY:
            first, last = min(x, y), max(x, y)
            more = (S.bounds[last + 1] - S.bounds[last]) - (S.bounds[first + 1] - S.bounds[first])
            for bound in range(first + 1, last + 1):
                S.bounds[bound] += more
            S.dirty[STAGES, first : last + 1] = True
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
    for row in range(len(A.loads)):
        for d in range(len(A.stage)):
            B.loads[row, d] = A.loads[row, d]
    for row in range(len(A.times)):
        for k in range(len(A.count)):
            B.times[row, k] = A.times[row, k]
    for row in range(len(A.dirty)):
        for k in range(len(A.count)):
            B.dirty[row, k] = A.dirty[row, k]


@_inner
def _slowest(P, S):
    """Return the stage that would gain most from more members or fewer layers."""
    slowest, where = 0.0, 0
    for k in range(len(S.count)):
        seconds = S.times[SECONDS, k]
        for pair in range(max(0, k - 1), min(k + 1, len(S.count) - 1)):
            seconds = max(seconds, P.costs[MICROBATCHES] / S.times[FLOW, pair] if S.times[FLOW, pair] > 0.0 else np.inf)
        if seconds > slowest:
            slowest, where = seconds, k
    return where


@_inner
def _burden(S, k):
    """Return the member of stage k with the slowest reduction."""
    worst, slowest = -1.0, S.members[k, 0]
    for a in range(S.count[k]):
        d = S.members[k, a]
        if S.loads[REDUCED, d] / S.loads[CARD, d] > worst:
            worst, slowest = S.loads[REDUCED, d] / S.loads[CARD, d], d
    return slowest


@_inner
def _propose(P, S, random):
    """Draw a move that leaves stage 0 the text and no stage empty. Returns: (kind, x, y); kind -1: none this time."""
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
    """Search locally from the placement in S until `limit` units are spent. A worse placement is accepted up to a
    threshold that falls to 0 as work is spent, times a draw from [0, 1). Fills best_stage and best_bounds; S is left at
    the end of the search.

    Args: B: a PlacementState for copies. Returns: (the best cost, work)."""
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
