"""Computes the seconds that a step of the asynchronous pipeline on unequal GPUs takes, in loops over tables.

    T = (T_flow^4 + T_chain(s_max)^4)^(1/4),  or T_chain(0) if that is less: then no microbatch runs ahead of its step

A *card* is a network card here, and the *reduction* is the all-reduce of a stage's gradient.

**T_flow** is the time of the busiest resource for one step's work when everything overlaps: M microbatches through
every stage and every pair of neighbouring stages, and the reduction of every stage, on the same cards. In T seconds
member d of a stage can take

    n_d(T) = min(T / job_d,  T out_d,  T in_d,  (T card_d - R_d) / (b away_d))          [microbatches]

    job_d    (1 + backward_per_forward) F / flop_per_s, with F the stage's forward FLOP: forward and backward run on
             one device (1F1B). The last stage does both in one job (`Workload.loss_per_forward`)              [s]
    out_d    the sum of d's paths to the next stage; in_d: of those to the previous stage [microbatches/s]. A gradient
             of the same size answers each activation, so a path counts by its slower direction and stream credit (`q`)
    card_d   the slower direction of d's card; a shared card is split in proportion to load              [bytes/s]
    R_d      what the reduction of a gradient of S bytes sends over d's card: S times the sum of (p_d + p_e) over the
             members e on other cards. Member d adds up the part p_d of the gradient, in proportion to the rate of its
             exchange with the others (`peer/group/reduce.py`). In a tied model the first and the last stage add the
             gradient of the shared matrix, both ways (`peer/group/tied.py`)                               [bytes]
    b away_d what a microbatch sends over d's card: b bytes for each neighbouring stage (activation out, gradient back).
             away_d is the number of neighbouring stages (2; at the ends 1), less the share of traffic within one card.
             If a plan has several formats, b differs by pair of stages and S by stage (`WireBytes`)       [bytes]

T_stage is the T at which the n_d add to M. T_pair is M / flow, where flow is the rate between two neighbouring stages
if each member sends and takes at capacity (`fill`). For the reduction, a path between two members needs
S (p_d + p_e) / rate, and a card needs R_d / card_d.

**T_chain** is the longest dependency chain. A microbatch of step t begins when version t - s_max is available. So
s_max + 1 steps together take at least the sum of three times, for the worst stage k: issuing M microbatches to an
otherwise idle pipeline, the round trip of the last one from stage k to the end and back, and the commit of stage k
(reduction, four latencies of its vote, the optimizer's step). With s_max = 0 that is the synchronous flush, with fill,
drain and reduction exposed. Otherwise the reduction gets the part of each card that the next step's activations leave.

    T_chain(s_max) = (M / rate - job_slowest + max_k (round trip_k + commit_k) + claim + job / 2) / (s_max + 1)

    rate         the rate of the slowest stage or pair while no stage reduces                   [microbatches/s]
    job_slowest  one job of the slowest stage: the last microbatch's own job is in its round trip            [s]
    claim        one latency of stage 0: its leader grants microbatches to its members                       [s]
    job / 2      the longest job of a stage with several members, halved: M does not divide evenly           [s]
    commit_k     max over d of R_d / (card_d - b away_d share_d M / T_flow), or the time of the slowest path  [s]

T combines T_flow and T_chain by a norm: a pipeline that waits for the reduction is late for the next chain, so where
both times are nearly equal, T is longer than either. The exponent is fitted to simulations (MEASURED.md).

**Memory.** A member of stage k holds `Workload.resident_bytes` and, for each microbatch in flight, the inputs of its
backward. The microbatches in flight are 1.5 (the window's gain, `peer/replica/flow.py`) x the member's rate x the round
trip of stage k, and one more, but never more than the member's share of s_max + 1 steps.

**One source.** Python runs these functions as they are to price a single layout of a small swarm. A search runs them
compiled (`compiled.py`), with the same result bit for bit on any machine: there is no transcendental function, and sums
run in the order of members. P is a `PipelineInput`, and S a `PipelineState`. Only values that a move changes are
computed again: the paths of the stages that gained or lost a member and of their neighbours, then the times of those
stages, then the flows between them. A unit is a device or, in the coarse view of a large swarm, a cluster of `WEIGHT`
similar devices.

Source: ours; checked against shoal's real peers in virtual time (MEASURED.md).
"""

from typing import Any, NamedTuple

import numpy as np

FLOW_ROUNDS = 6
"""The rounds of `fill`. The flow found is 94 % of the maximum in the median, 73 % at least (compared with linear
programming in 200 random cases of up to 8 x 8 members in which half of the paths are too slow)."""
COMMIT_LATENCIES = 4.0
"""Messages in a row in a commit: Progress to the leader, RoundStart, a part of the gradient, its sum."""
STEP_FLOP_PER_PARAMETER = 20.0
"""The FLOP of an optimizer's step for each parameter, as in `step_flop` of `peer/pipeline/stage.py`."""
WINDOW_GAIN = 1.5
"""Microbatches in flight divided by what an empty pipeline holds; equal to `Window.gain` of `peer/replica/flow.py`."""
IMPOSSIBLE = 1e9
"""Infeasible placements cost at least this; a higher cost is further from feasible."""
_GUIDE = 0.03
"""Local search minimises the cost plus this fraction of (mean time of a stage + mean reduction time of a member +
chain). Most moves leave the slowest stage unchanged, and so the cost; the added terms tell such moves apart."""

FLOP, WEIGHT, MEMORY, UP, DOWN, FETCH_RATE, CARRIES = range(7)
"""The rows of the table `P.units` (a unit is a device or a cluster of devices). `FLOP`: FLOP/s; `WEIGHT`: number of
devices; `MEMORY`: bytes of one device; `UP`, `DOWN`: bytes/s of the network card for one device; `FETCH_RATE`: bytes/s
for fetching state; `CARRIES`: the unit's share of its stage's work in the current plan, which pauses during a fetch."""
HOME_FIRST, HOME_LAST, TEXT = range(3)
"""The rows of the table `P.holds`. `HOME_FIRST`, `HOME_LAST`: the layers for which a unit holds state in the current
plan; `TEXT`: 1 if it has the run's text, else 0."""
FLOP_TO, PARAMETERS_TO, HELD_TO, EXPERT_TO, JOB_TO = range(5)
"""The rows of the table `P.layers`: sums over the layers before a bound, of FLOP, parameters, bytes held for a
microbatch, parameters of one placed expert, and fixed bytes (`StageMemory.layer_fixed_bytes`)."""
MICROBATCHES, JOB_PER_FLOP, LOSS_PER_FLOP, S_MAX, HORIZON_S = range(5)
TIED_PARAMETERS, RESIDENT_BYTES, STATE_BYTES, WORKSPACE_BYTES = range(5, 9)
"""The positions in `P.costs`, the demand of one step. A microbatch takes the time of `JOB_PER_FLOP` forwards; at the
last stage, of `LOSS_PER_FLOP`. `TIED_PARAMETERS`: parameters of a matrix that the first and the last stage share; 0:
there is none. A parameter takes `RESIDENT_BYTES` of memory, and `STATE_BYTES` on the wire when its layer moves.
`WORKSPACE_BYTES` are bytes of memory for each stage."""
PATH_RATE, AWAY, PART, UNIT, TIED, LOAD, CARD, REDUCED, SLOPE, OFFSET, TAKEN, NEEDED = range(12)
"""The rows of `S.loads`, for each unit. `PATH_RATE`: microbatches/s on its slower side (in_d or out_d); `AWAY`: away_d;
`PART`: p_d, its part of the reduction; `UNIT`: bytes over its network card for each byte of the stage's gradient;
`TIED`: bytes for the matrix that both ends share; `LOAD`: bytes over its card in a step; `CARD`: bytes/s of its card;
`REDUCED`: R_d, bytes over its card in a reduction; `SLOPE`, `OFFSET`: its card lets it take t `SLOPE` - `OFFSET`
microbatches in t seconds; `TAKEN`: microbatches that it takes, of M; `NEEDED`: bytes of memory of a device."""
PATH_UNIT, TIED_S, LATENCY, SECONDS, REDUCE, BY_PATH, FREE, COMMIT, JOB, STRAIN = range(10)
FLOW, HOP, TRIP, BESIDE, ALONE, CROWDED = range(10, 16)
"""The rows of `S.times`, by stage; seconds unless said otherwise. `PATH_UNIT`: the largest (p_d + p_e) / path rate of
two members (s/byte); `TIED_S`: the shared matrix on the worst member's best path; `LATENCY`: the longest latency of two
members; `SECONDS`: T_stage; `REDUCE`: the reduction on otherwise idle cards and paths; `BY_PATH`: the reduction if only
paths limit; `FREE`: microbatches/s while no stage reduces; `COMMIT`: a commit without its reduction; `JOB`: mean time
of a microbatch; `STRAIN`: mean reduction time of a member; `FLOW` (microbatches/s) and `HOP`: to the next stage;
`TRIP`: the round trip from the stage to the end; `BESIDE`: a commit beside the next step's activations; `ALONE`: a
commit without them; `CROWDED`: the share that activations take of the card that limits `BESIDE`."""
STEP_S, FLOW_S, CHAIN_S, ISSUE_S, UNEVEN_S, AHEAD = range(6)
"""The positions in `S.step`. `STEP_S`: T; `FLOW_S`: T_flow; `CHAIN_S`: T_chain; `ISSUE_S`: seconds to issue M
microbatches, less the last one's job; `UNEVEN_S`: job / 2; `AHEAD`: the steps ahead with the shortest T, s_max or 0."""
PATHS, STAGES, PAIRS = range(3)
"""The rows of `S.dirty`: True if a stage's paths, its times, or its flow to the next stage must be computed again."""


class PipelineInput(NamedTuple):
    """The tables that are the same for all placements: N units (devices or clusters of devices), L layers, C network
    cards, F activation sizes."""

    units: Any
    """float64 [7, N]; the rows are `FLOP` to `CARRIES`, one column for each unit."""
    holds: Any
    """int64 [3, N]; the rows are `HOME_FIRST`, `HOME_LAST` and `TEXT`."""
    card: Any
    """int64 [N], the network card of each unit."""
    card_rate: Any
    """float64 [C], bytes/s of the slower direction of each card."""
    shared_cards: bool
    latency: Any
    """float64 [N, N], one-way latency in seconds from the row's unit to the column's."""
    rate: Any
    """float64 [N, N], bytes/s of one path from a device of the row's unit to one of the column's."""
    cut_bytes: Any
    """float64 [F], bytes of a microbatch's activation on the wire; `Workload.cut_bytes` is first."""
    q: Any
    """[F, N, N], activations a second of each size over all paths between two units; a gradient answers each."""
    layers: Any
    """float64 [5, L + 1]; the rows are `FLOP_TO` to `JOB_TO`."""
    beyond: Any
    """float64 [devices + 1]: entry n is how many experts each member of a stage of n devices holds beyond its slots."""
    costs: Any
    """float64 [9]; the positions are `MICROBATCHES` to `WORKSPACE_BYTES`."""


class PipelineState(NamedTuple):
    """A placement of N units on K stages, and the values from which its cost is computed."""

    stage: Any
    at: Any
    """`stage`, int64 [N]: the stage of each unit, -1: none. `at`, int64 [N]: the unit's position among the members."""
    members: Any
    """int64 [K, N]; row k begins with the `count[k]` members of stage k, and the rest of it is unused."""
    count: Any
    """int64 [K], the number of members (units) of each stage."""
    bounds: Any
    """int64 [K + 1], the first layer of each stage, and at last L."""
    cut_size: Any
    """int64 [K], the index in `P.cut_bytes` of the activations from each stage to the next; the last is unused."""
    sum_bytes: Any
    """float64 [K], the bytes on the wire, one way, for each parameter's gradient in each stage's reduction."""
    loads: Any
    """float64 [12, N]; the rows are `PATH_RATE` to `NEEDED`."""
    times: Any
    """float64 [16, K]; the rows are `PATH_UNIT` to `CROWDED`."""
    step: Any
    """float64 [6]; the positions are `STEP_S` to `AHEAD`."""
    dirty: Any
    """bool [3, K]; the rows are `PATHS`, `STAGES` and `PAIRS`: True if a stage's values must be computed again."""
    card_load: Any
    """float64 [C], bytes over each network card in a step."""


ENTRIES = ("build", "evaluate")
"""The functions that Python code calls. Only these get numba's wrapper: it takes a third of their compile time."""


def build(P, S, stage, bounds):
    """Put a placement into S, and mark all its values as not computed (dirty). Args: stage: int64 [N], the stage of
    each unit (a device or a cluster); -1: none. bounds: int64 [K + 1]; stage k begins with layer bounds[k]."""
    S.count[:] = 0
    for d in range(len(stage)):
        k = stage[d]
        S.stage[d] = k
        if k >= 0:
            S.at[d] = S.count[k]
            S.members[k, S.count[k]] = d
            S.count[k] += 1
    S.bounds[:] = bounds
    S.dirty[:, :] = True
    S.loads[LOAD, :] = 0.0
    S.card_load[:] = 0.0


# --- one stage ---


def scan_paths(P, S, k):
    """Compute the rates of stage k's members to their neighbours, and their parts of its reduction. Returns: units of
    search budget used."""
    K = len(S.count)
    work = 0
    for a in range(S.count[k]):
        d = S.members[k, a]
        S.loads[PATH_RATE, d] = np.inf
        S.loads[AWAY, d] = S.loads[TIED, d] = 0.0
    S.times[TIED_S, k] = 0.0
    for neighbour in (k - 1, k + 1):
        if not 0 <= neighbour < K:
            continue
        size = S.cut_size[min(k, neighbour)]
        edge = P.cut_bytes[size] / P.cut_bytes[0]
        for a in range(S.count[k]):
            d = S.members[k, a]
            total = near = speed = 0.0
            for c in range(S.count[neighbour]):
                e = S.members[neighbour, c]
                total += P.q[size, d, e]
                if P.shared_cards:
                    speed += P.units[FLOP, e]
                    if P.card[d] == P.card[e]:
                        near += P.units[FLOP, e]
            S.loads[PATH_RATE, d] = min(S.loads[PATH_RATE, d], total)
            S.loads[AWAY, d] += edge * (1.0 - near / speed if P.shared_cards else 1.0)
        work += S.count[k] * S.count[neighbour]
    return work + _scan_mates(P, S, k)


def _scan_mates(P, S, k):
    """Compute each member's part of stage k's reduction, and the bytes that it sends for each byte of the gradient.
    Returns: the units of search budget used."""
    n = S.count[k]
    whole = 0.0
    for a in range(n):
        d = S.members[k, a]
        path = 0.0
        mates = 0.0
        for c in range(n):
            e = S.members[k, c]
            path += P.q[0, d, e]
            if P.card[e] == P.card[d]:
                mates += 1.0
        rate = min(path * P.cut_bytes[0] if n > 1 else np.inf, P.card_rate[P.card[d]] / mates)
        S.loads[PART, d] = rate
        whole = max(whole, rate)
    total = 0.0
    for a in range(n):
        d = S.members[k, a]
        # A part is never 0: plans do not allow that.
        S.loads[PART, d] = max(S.loads[PART, d], 1e-6 * whole) if 0.0 < whole < np.inf else P.units[WEIGHT, d]
        total += S.loads[PART, d]
    S.times[PATH_UNIT, k] = S.times[LATENCY, k] = 0.0
    for a in range(n):
        d = S.members[k, a]
        S.loads[PART, d] = S.loads[PART, d] / total if n > 1 else 1.0
    for a in range(n):
        d = S.members[k, a]
        S.loads[UNIT, d] = 2.0 * S.loads[PART, d] * (P.units[WEIGHT, d] - 1.0)
        for c in range(n):
            e = S.members[k, c]
            if e == d:
                continue
            if P.card[e] != P.card[d]:
                S.loads[UNIT, d] += P.units[WEIGHT, e] * S.loads[PART, d] + P.units[WEIGHT, d] * S.loads[PART, e]
            if c < a:
                pair = P.units[WEIGHT, d] * P.units[WEIGHT, e]
                between = (S.loads[PART, d] / P.units[WEIGHT, d] + S.loads[PART, e] / P.units[WEIGHT, e]) * pair
                rate = P.q[0, d, e] * P.cut_bytes[0]
                S.times[PATH_UNIT, k] = max(S.times[PATH_UNIT, k], between / rate if rate > 0.0 else np.inf)
                S.times[LATENCY, k] = max(S.times[LATENCY, k], np.float64(P.latency[d, e]), np.float64(P.latency[e, d]))
    return 3 * n * n


def _scan_tied(P, S):
    """Compute the traffic for a tied model's shared matrix at the members of the first and the last stage.
    Returns: the units of search budget used."""
    K = len(S.count)
    # Each end sends the matrix in the format of its own reduction; the larger format makes the slower direction.
    tied_bytes = max(S.sum_bytes[0], S.sum_bytes[K - 1]) * P.costs[TIED_PARAMETERS]
    for k, end in ((0, K - 1), (K - 1, 0)):
        here = there = 0.0
        for a in range(S.count[k]):
            here += P.units[WEIGHT, S.members[k, a]]
        for c in range(S.count[end]):
            there += P.units[WEIGHT, S.members[end, c]]
        S.times[TIED_S, k] = 0.0
        for a in range(S.count[k]):
            d = S.members[k, a]
            S.loads[TIED, d] = P.units[WEIGHT, d] * tied_bytes * max(1.0, there / here)
            best = 0.0
            for c in range(S.count[end]):
                e = S.members[end, c]
                best = max(best, P.q[0, d, e] * P.cut_bytes[0] / (P.units[WEIGHT, d] * P.units[WEIGHT, e]))
            S.times[TIED_S, k] = max(S.times[TIED_S, k], tied_bytes / best if best > 0.0 else np.inf)
    return 2 * S.count[0] * S.count[K - 1]


def _gradient_bytes(P, S, k, first, last):
    return S.sum_bytes[k] * (P.layers[PARAMETERS_TO, last] - P.layers[PARAMETERS_TO, first])


def _load_cards(P, S):
    """Compute the bytes over each network card in a step, one way."""
    S.card_load[:] = 0.0
    for k in range(len(S.count)):
        gradient = _gradient_bytes(P, S, k, S.bounds[k], S.bounds[k + 1])
        speed = 0.0
        for a in range(S.count[k]):
            speed += P.units[FLOP, S.members[k, a]]
        for a in range(S.count[k]):
            d = S.members[k, a]
            share = P.costs[MICROBATCHES] * P.units[FLOP, d] / speed
            sent = share * P.cut_bytes[0] * S.loads[AWAY, d]
            S.loads[LOAD, d] = sent + S.loads[UNIT, d] * gradient + S.loads[TIED, d]
            S.card_load[P.card[d]] += S.loads[LOAD, d]
        S.dirty[STAGES, k] = True


def _job(P, first, last):
    """Return the FLOP of a microbatch's forward and backward, as `Workload.job_flop` does."""
    per_flop = P.costs[LOSS_PER_FLOP] if last == P.layers.shape[1] - 1 else P.costs[JOB_PER_FLOP]
    return per_flop * (P.layers[FLOP_TO, last] - P.layers[FLOP_TO, first])


def saturate(P, S, k, first, last):
    """Compute the reduction of stage k with layers first to last - 1, and the microbatches that its members take. It is
    exact: Newton's method from the left on a concave, piecewise linear sum. Returns: T_stage."""
    M = P.costs[MICROBATCHES]
    n = S.count[k]
    job = _job(P, first, last)
    gradient = _gradient_bytes(P, S, k, first, last)
    S.times[BY_PATH, k] = seconds = S.times[PATH_UNIT, k] * gradient + S.times[TIED_S, k]
    is_reached = True
    for a in range(n):
        d = S.members[k, a]
        card = P.card_rate[P.card[d]]
        if P.shared_cards and S.loads[LOAD, d] > 0.0:
            card *= S.loads[LOAD, d] / S.card_load[P.card[d]]
        reduced = S.loads[UNIT, d] * gradient + S.loads[TIED, d]
        S.loads[CARD, d], S.loads[REDUCED, d] = card, reduced
        seconds = max(seconds, reduced / card)
        per_card = P.cut_bytes[0] * S.loads[AWAY, d]
        is_limited = per_card > 0.0 and card < np.inf
        S.loads[SLOPE, d] = card / per_card if is_limited else np.inf
        S.loads[OFFSET, d] = reduced / per_card if is_limited else 0.0
        is_reached = is_reached and S.loads[PATH_RATE, d] > 0.0
    S.times[REDUCE, k] = seconds
    if not is_reached or not seconds < np.inf:
        return np.inf
    for _ in range(2 * n + 2):
        sum_taken = gain = 0.0
        for a in range(n):
            d = S.members[k, a]
            rate = min(P.units[FLOP, d] / job, S.loads[PATH_RATE, d])
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
            return np.inf
        seconds += (M - sum_taken) / gain
    return seconds


def _time_stage(P, S, k):
    """Compute the times of stage k that do not depend on other stages. Returns: units of search budget used."""
    first, last = S.bounds[k], S.bounds[k + 1]
    S.times[SECONDS, k] = saturate(P, S, k, first, last)
    job = _job(P, first, last)
    free = sum_taken = weighted = strain = 0.0
    slowest = np.inf
    for a in range(S.count[k]):
        d = S.members[k, a]
        free += min(P.units[FLOP, d] / job, S.loads[PATH_RATE, d], S.loads[SLOPE, d])
        sum_taken += S.loads[TAKEN, d]
        weighted += S.loads[TAKEN, d] * job * P.units[WEIGHT, d] / P.units[FLOP, d]
        slowest = min(slowest, P.units[FLOP, d] / P.units[WEIGHT, d])
        strain += S.loads[REDUCED, d] / S.loads[CARD, d]
    S.times[STRAIN, k] = strain / S.count[k]
    S.times[FREE, k] = free
    S.times[JOB, k] = weighted / sum_taken if sum_taken > 0.0 else np.inf
    parameters = P.layers[PARAMETERS_TO, last] - P.layers[PARAMETERS_TO, first]
    S.times[COMMIT, k] = COMMIT_LATENCIES * S.times[LATENCY, k] + STEP_FLOP_PER_PARAMETER * parameters / slowest
    return 12 * S.count[k]


# --- between two stages ---


def _hop_s(P, cut_bytes, d, e):
    """Return the seconds of an activation and its gradient between two units, on idle paths and cards."""
    forth, back = np.float64(P.rate[d, e]), np.float64(P.rate[e, d])
    if P.card[d] != P.card[e]:
        forth = min(forth, P.units[UP, d], P.units[DOWN, e])
        back = min(back, P.units[UP, e], P.units[DOWN, d])
    latency = np.float64(P.latency[d, e]) + np.float64(P.latency[e, d])
    return latency + (cut_bytes / forth + cut_bytes / back if forth > 0.0 and back > 0.0 else 0.0)


def _pair(P, S, k):
    """Compute the flow (microbatches/s) and the mean seconds of a hop between stages k and k + 1.
    Returns: the units of search budget used."""
    n, m = S.count[k], S.count[k + 1]
    size = S.cut_size[k]
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
            if flow > P.q[size, d, S.members[k + 1, c]]:
                fits = False
                break
            if flow > 0.0:
                total += flow
                hops += flow * _hop_s(P, P.cut_bytes[size], d, S.members[k + 1, c])
        if not fits:
            break
    work = 4 * n * m
    if not fits:
        path = np.empty((n, m))
        for a in range(n):
            for c in range(m):
                path[a, c] = P.q[size, S.members[k, a], S.members[k + 1, c]]
        flows, rounds = fill(supply, demand, path)
        work += (3 * rounds + 3) * n * m
        total = hops = 0.0
        for a in range(n):
            for c in range(m):
                if flows[a, c] > 0.0:
                    total += flows[a, c]
                    hops += flows[a, c] * _hop_s(P, P.cut_bytes[size], S.members[k, a], S.members[k + 1, c])
    S.times[FLOW, k] = total
    S.times[HOP, k] = hops / total if total > 0.0 else np.inf
    return work


def fill(supply, demand, path):
    """Compute a flow from senders to receivers. It starts in proportion to the demands. In up to `FLOW_ROUNDS` rounds,
    what a path cannot carry is offered to other receivers. The result is at most the maximum flow, and equal if no path
    limits.
    Args: supply: [n], for each sender. demand: [m], for each receiver. path: [n, m], capacities; all in one unit.
    Returns: (flow [n, m], rounds)."""
    n, m = len(supply), len(demand)
    flow = np.zeros((n, m))
    left, room = supply.copy(), demand.copy()
    rounds = 0
    for _ in range(FLOW_ROUNDS):
        offered = wanted = sum_supply = 0.0
        for a in range(n):
            offered += left[a]
            sum_supply += supply[a]
        for c in range(m):
            wanted += room[c]
        if offered <= 0.0 or wanted <= 0.0:
            break
        rounds += 1
        more = 0.0
        largest = max(offered, wanted)
        for a in range(n):
            for c in range(m):
                step = min(left[a] * room[c] / largest, path[a, c] - flow[a, c])
                flow[a, c] += step
                more += step
        for a in range(n):
            sent = 0.0
            for c in range(m):
                sent += flow[a, c]
            left[a] = max(0.0, supply[a] - sent)
        for c in range(m):
            given = 0.0
            for a in range(n):
                given += flow[a, c]
            room[c] = max(0.0, demand[c] - given)
        if more <= 1e-9 * sum_supply:
            break
    return flow, rounds


# --- the whole ---


def evaluate(P, S, work):
    """Compute all dirty values. Returns: (cost, with the cost of moving state; the figure that local search minimises).
    Args: work: int64 [1], to which the units of search budget used are added."""
    K = len(S.count)
    for k in range(K):
        if S.count[k] == 0 or S.bounds[k + 1] <= S.bounds[k]:
            return 1e6 * IMPOSSIBLE, 1e6 * IMPOSSIBLE
    for k in range(K):
        if S.dirty[PATHS, k]:
            work[0] += scan_paths(P, S, k)
            S.dirty[STAGES, k] = True
    if P.costs[TIED_PARAMETERS] > 0.0 and K > 1 and (S.dirty[PATHS, 0] or S.dirty[PATHS, K - 1]):
        work[0] += _scan_tied(P, S)
        S.dirty[STAGES, 0] = S.dirty[STAGES, K - 1] = True
    if P.shared_cards:
        _load_cards(P, S)
    for k in range(K):
        if S.dirty[STAGES, k]:
            work[0] += _time_stage(P, S, k)
            if k > 0:
                S.dirty[PAIRS, k - 1] = True
            S.dirty[PAIRS, k] = True
    for a in range(S.count[0]):
        if P.holds[TEXT, S.members[0, a]] == 0:
            return 1e6 * IMPOSSIBLE, 1e6 * IMPOSSIBLE
    for k in range(K):
        if not S.times[SECONDS, k] < np.inf:
            return 1e5 * IMPOSSIBLE, 1e5 * IMPOSSIBLE
    for k in range(K - 1):
        if S.dirty[PAIRS, k]:
            work[0] += _pair(P, S, k)
    S.dirty[:, :] = False
    return _sum_up(P, S, work)


def _sum_up(P, S, work):
    K = len(S.count)
    rate = np.inf
    slowest = 0
    flow_s = mean_s = uneven_s = 0.0
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
            uneven_s = max(uneven_s, S.times[JOB, k] / 2.0)
    work[0] += 2 * len(S.stage) + 16 * K
    S.step[FLOW_S], S.step[UNEVEN_S] = flow_s, uneven_s
    S.step[ISSUE_S] = P.costs[MICROBATCHES] / min(rate, S.times[FREE, slowest]) - S.times[JOB, slowest]
    trip = tail = 0.0
    for k in range(K - 1, -1, -1):
        trip += S.times[JOB, k] + (S.times[HOP, k] if k < K - 1 else 0.0)
        S.times[TRIP, k] = trip
        S.times[ALONE, k] = S.times[COMMIT, k] + S.times[REDUCE, k]
        tail = max(tail, trip + S.times[ALONE, k])
    ahead = 0.0
    step_s = longest_s = chain_s(S, tail, 0.0)
    if P.costs[S_MAX] > 0.0:
        tail = 0.0
        for k in range(K - 1, -1, -1):
            _commit_beside(P, S, k, flow_s)
            tail = max(tail, S.times[TRIP, k] + S.times[BESIDE, k])
        ahead_chain_s = chain_s(S, tail, P.costs[S_MAX])
        ahead_s = joined(flow_s, ahead_chain_s)
        work[0] += 8 * K
        if not step_s < ahead_s:
            ahead, step_s, longest_s = P.costs[S_MAX], ahead_s, ahead_chain_s
    S.step[STEP_S], S.step[CHAIN_S], S.step[AHEAD] = step_s, longest_s, ahead
    memory = _memory(P, S, step_s)
    if memory > 1.0:
        return IMPOSSIBLE * memory, IMPOSSIBLE * memory
    cost = step_s * (1.0 + _moving_s(P, S) / P.costs[HORIZON_S])
    return cost, cost + _GUIDE * (mean_s + longest_s)


def chain_s(S: Any, tail_s: Any, ahead: float) -> Any:
    """Return T_chain in seconds a step. Args: tail_s: last round trip and commit, in seconds. ahead: steps ahead."""
    return (S.step[ISSUE_S] + tail_s + S.times[LATENCY, 0] + S.step[UNEVEN_S]) / (ahead + 1.0)


def joined(a: float, b: float) -> Any:
    """Return the 4-norm of a and b by square roots, which give the same bits on every machine; powers do not."""
    larger = max(a, b)
    square = (min(a, b) / larger) ** 2
    return larger * np.sqrt(np.sqrt(1.0 + square * square))


def _sum_taken(S, k):
    taken = 0.0
    for a in range(S.count[k]):
        taken += S.loads[TAKEN, S.members[k, a]]
    return taken


def _commit_beside(P, S, k, flow_s):
    """Compute `BESIDE`: seconds of stage k's commit if its reduction gets only the bandwidth that activations leave."""
    seconds, sum_taken = S.times[BY_PATH, k], _sum_taken(S, k)
    crowded = 0.0
    for a in range(S.count[k]):
        d = S.members[k, a]
        if S.loads[REDUCED, d] > 0.0:
            share = S.loads[TAKEN, d] / sum_taken
            busy = P.cut_bytes[0] * S.loads[AWAY, d] * share * P.costs[MICROBATCHES] / flow_s
            # At least the rate that T_flow assumes is left, so that rounding cannot leave nothing.
            by_card_s = S.loads[REDUCED, d] / max(S.loads[CARD, d] - busy, S.loads[REDUCED, d] / flow_s)
            # If several cards are equally slow (up to rounding), the most crowded one counts.
            if by_card_s > (1.0 + 1e-9) * seconds:
                crowded = 0.0
            if by_card_s > (1.0 - 1e-9) * seconds:
                crowded = max(crowded, min(1.0, busy / S.loads[CARD, d]))
            seconds = max(seconds, by_card_s)
    S.times[BESIDE, k] = S.times[COMMIT, k] + seconds
    S.times[CROWDED, k] = crowded


def resident_bytes(P, S, k, first, last):
    """Return the bytes that a member of stage k needs without its microbatches, as `Workload.resident_bytes` does."""
    devices = 0.0
    for a in range(S.count[k]):
        devices += P.units[WEIGHT, S.members[k, a]]
    parameters = P.layers[PARAMETERS_TO, last] - P.layers[PARAMETERS_TO, first]
    parameters += P.beyond[int(devices)] * (P.layers[EXPERT_TO, last] - P.layers[EXPERT_TO, first])
    job = P.layers[JOB_TO, last] - P.layers[JOB_TO, first] + P.costs[WORKSPACE_BYTES]
    return P.costs[RESIDENT_BYTES] * parameters + job


def _memory(P, S, step_s):
    """Compute the memory that each member needs. Returns: the largest ratio of needed to present memory."""
    most = 0.0
    for k in range(len(S.count)):
        first, last = S.bounds[k], S.bounds[k + 1]
        resident = resident_bytes(P, S, k, first, last)
        held = P.layers[HELD_TO, last] - P.layers[HELD_TO, first]
        sum_taken = _sum_taken(S, k)
        for a in range(S.count[k]):
            d = S.members[k, a]
            made = P.costs[MICROBATCHES] * S.loads[TAKEN, d] / (sum_taken * P.units[WEIGHT, d])
            flying = min(WINDOW_GAIN * made / step_s * S.times[TRIP, k] + 1.0, max((P.costs[S_MAX] + 1.0) * made, 1.0))
            S.loads[NEEDED, d] = resident + flying * held
            most = max(most, S.loads[NEEDED, d] / P.units[MEMORY, d])
    return most


def _moving_s(P, S):
    """Return the cost of moving from the current plan to this placement, in seconds of the whole swarm's work: the work
    that units do not do while they fetch missing layers. Newcomers did no work before, so they cost nothing."""
    lost_s = 0.0
    if P.costs[HORIZON_S] == np.inf:
        return 0.0
    for d in range(len(S.stage)):
        k = S.stage[d]
        if k < 0 or P.units[CARRIES, d] <= 0.0:
            continue
        first, last = S.bounds[k], S.bounds[k + 1]
        if first >= P.holds[HOME_FIRST, d] and last <= P.holds[HOME_LAST, d]:
            continue
        has_first, has_last = max(first, P.holds[HOME_FIRST, d]), min(last, P.holds[HOME_LAST, d])
        missing = P.layers[PARAMETERS_TO, last] - P.layers[PARAMETERS_TO, first]
        if has_last > has_first:
            missing -= P.layers[PARAMETERS_TO, has_last] - P.layers[PARAMETERS_TO, has_first]
        lost_s += P.units[CARRIES, d] * P.costs[STATE_BYTES] * missing / P.units[FETCH_RATE, d]
    return lost_s
