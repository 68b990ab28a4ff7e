"""The compiled local search on the throughput objective, and the exact cut of the model. `cost/pipeline.py` defines the
objective, its input P and the placement S under evaluation."""

import numpy as np

from shoal.coordinator.cost.compiled import below, build, draw, evaluate, inner, kernel, resident_bytes, saturate, unit
from shoal.coordinator.cost.pipeline import (
    CARD,
    FLOW,
    HELD_TO,
    HOP,
    IMPOSSIBLE,
    MEMORY,
    MICROBATCHES,
    PATHS,
    SECONDS,
    STAGES,
    TAKEN,
    TEXT,
    UNIT,
)

_HEAT = 0.08
"""A search at heat 1 at first accepts a placement that is worse by up to this fraction."""


# --- where the model is cut ---


@inner
def _cut(P, S, work):
    """Divide the layers among the stages of the placement S anew (`S.bounds`), exactly, by dynamic programming, so that
    the slowest stage is as fast as possible. A stage must fit into memory with two microbatches held. `scan_paths` must
    have brought the paths in S up to date; loads of shared network cards are taken from S as they are."""
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
                needed = resident_bytes(P, S, k, first, last) + 2.0 * (
                    P.layers[HELD_TO, last] - P.layers[HELD_TO, first]
                )
                if needed > memory:
                    seconds = IMPOSSIBLE * needed / memory
                else:
                    seconds = saturate(P, S, k, first, last)
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


@kernel
def price(P, S, stage, bounds, is_cut, work):
    """Price the stages with `bounds` or, if `is_cut`, with the best bounds for these stages (`_cut`). The priced bounds
    are then in S.bounds. Args: stage: int64 [N], the stage of each unit. work: int64 [1], to which the units of work
    used are added.
    Returns: the cost, the cost of moving state included."""
    build(P, S, stage, bounds)
    cost, _ = evaluate(P, S, work)
    if is_cut and S.count.all():
        _cut(P, S, work)
        build(P, S, stage, S.bounds)
        cost, _ = evaluate(P, S, work)
    return cost


# --- starts ---


@kernel
def row(q, at, jitter):
    """Return int64 [N], all units in one row: after unit `at`, each next unit is the nearest to the one before it that
    is not in the row yet. Args: q: [N, N], `P.q` of one activation size: near means a high rate. jitter: float64 [N],
    random in [0, 1): unit e counts as nearer by 10 % of `jitter[e]`."""
    N = len(q)
    found = np.empty(N, np.int64)
    is_left = np.ones(N, np.bool_)
    for position in range(N):
        found[position] = at
        is_left[at] = False
        best, nearest = -1, -1.0
        for e in range(N):
            near = q[at, e] * (1.0 + 0.1 * jitter[e])
            if is_left[e] and near > nearest:
                best, nearest = e, near
        at = best
    return found


# --- moves ---

RELOCATE, EXCHANGE, LAYER, RENAME, CARRY = 0, 1, 2, 3, 4


@inner
def _touch(S, k):
    for near in range(max(0, k - 1), min(len(S.count), k + 2)):
        S.dirty[PATHS, near] = True


@inner
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


@inner
def _apply(S, kind, x, y):
    """Make a move. RELOCATE puts unit x into stage y. EXCHANGE swaps the stages of units x and y. LAYER takes a layer
    from stage x and adds one to stage y; stages between shift by one layer. RENAME swaps the members of stages x and y.
    CARRY swaps the members of stages x and y and also the two stages' numbers of layers."""
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


@inner
def _copy(A, B):
    """Copy from state A to state B the values that an evaluation recomputes only where a move changed something."""
    for row in range(TAKEN + 1):
        for d in range(len(A.stage)):
            B.loads[row, d] = A.loads[row, d]
    for row in range(HOP + 1):
        for k in range(len(A.count)):
            B.times[row, k] = A.times[row, k]
    for row in range(len(A.dirty)):
        for k in range(len(A.count)):
            B.dirty[row, k] = A.dirty[row, k]


@inner
def _slowest(P, S):
    """Return the stage with the longest time, alone or with a neighbour: more members or fewer layers help it most."""
    slowest, where = 0.0, 0
    for k in range(len(S.count)):
        seconds = S.times[SECONDS, k]
        for pair in range(max(0, k - 1), min(k + 1, len(S.count) - 1)):
            seconds = max(seconds, P.costs[MICROBATCHES] / S.times[FLOW, pair] if S.times[FLOW, pair] > 0.0 else np.inf)
        if seconds > slowest:
            slowest, where = seconds, k
    return where


@inner
def _burden(S, k):
    """Return the member of stage k for which the reduction takes longest."""
    worst, slowest = -1.0, S.members[k, 0]
    for a in range(S.count[k]):
        d = S.members[k, a]
        if S.loads[UNIT, d] / S.loads[CARD, d] > worst:
            worst, slowest = S.loads[UNIT, d] / S.loads[CARD, d], d
    return slowest


@inner
def _must_stay(S, home, stayers, d):
    """True if unit d is still in its stage of the current plan (`home`), and that stage has no more of its holders left
    than it must keep (`stayers`)."""
    k = S.stage[d]
    if k < 0 or home[d] != k:
        return False
    staying = 0
    for a in range(S.count[k]):
        if home[S.members[k, a]] == k:
            staying += 1
    return staying <= stayers[k]


@inner
def _propose(P, S, home, stayers, random):
    """Draw a random move after which all members of stage 0 have the text, no stage is empty, and each stage keeps
    enough holders. Returns: (kind, x, y) as for `_apply`; kind -1: the move drawn is not allowed."""
    N, K = len(S.stage), len(S.count)
    slow = _slowest(P, S) if draw(random) & np.uint64(1) else below(random, K)
    dice = below(random, 100)
    if dice < 10:
        d = _burden(S, slow)
        return (RELOCATE, d, -1) if S.count[slow] > 1 and not _must_stay(S, home, stayers, d) else (-1, 0, 0)
    if dice < 45:
        d, k = below(random, N), -1 if below(random, 8) == 0 else slow
        if S.stage[d] == k or (S.stage[d] >= 0 and S.count[S.stage[d]] == 1) or (k == 0 and P.holds[TEXT, d] == 0):
            return -1, 0, 0
        return (RELOCATE, d, k) if not _must_stay(S, home, stayers, d) else (-1, 0, 0)
    if dice < 80:
        d, e = S.members[slow, below(random, S.count[slow])], below(random, N)
        if S.stage[e] == slow or (S.stage[e] == 0 and P.holds[TEXT, d] == 0) or (slow == 0 and P.holds[TEXT, e] == 0):
            return -1, 0, 0
        if _must_stay(S, home, stayers, d) or _must_stay(S, home, stayers, e):
            return -1, 0, 0
        return EXCHANGE, d, e
    k = below(random, K)
    if k == slow:
        return -1, 0, 0
    if dice < 94:
        return (LAYER, slow, k) if S.bounds[slow + 1] - S.bounds[slow] > 1 else (-1, 0, 0)
    if stayers[k] > 0 or stayers[slow] > 0:
        return -1, 0, 0
    if k == 0 or slow == 0:
        other = max(k, slow)
        for a in range(S.count[other]):
            if P.holds[TEXT, S.members[other, a]] == 0:
                return -1, 0, 0
    return (RENAME if dice < 97 else CARRY), slow, k


@kernel
def improve(P, S, B, home, stayers, seed, limit, heat, best_stage, best_bounds):
    """Search locally until `limit` units of work are spent. The search begins with the placement in best_stage and
    best_bounds, and overwrites it with the best one found. It accepts a worse placement if it is worse by less than a
    random part of a threshold, which falls to 0 as work is spent.

    Args:
        S, B: the state of the search, and a second one for undoing a move.
        home: int64 [N], the stage of each unit in the current plan.
        stayers: int64 [K], the number of holders in the current plan that each stage must keep.
    Returns: (the best cost, the units of work used)."""
    random = np.full(1, np.uint64(seed), np.uint64)
    build(P, S, best_stage, best_bounds)
    work = np.zeros(1, np.int64)
    cost, guide = evaluate(P, S, work)
    _copy(S, B)
    best, best_guide = cost, guide
    while work[0] < limit:
        work[0] += 64
        kind, x, y = _propose(P, S, home, stayers, random)
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
