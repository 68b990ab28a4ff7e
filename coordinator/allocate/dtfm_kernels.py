"""Kernels of the DT-FM search: exact matching of two stages, exact order of the stages, annealing of pipelines.

A layout is int64 [K, R] of devices: a row is a stage, in pipeline order, and a column is one pipeline. -1 marks the
hole in a stage that has one device less than the largest. If two neighbouring stages have holes in different columns,
the two devices opposite the holes send to each other. If only one has a hole, the device opposite the hole shares the
nearest partner.

Annealing prices a change by the rows and boundaries that it touches (0.5 us at 64 devices; an exact evaluation takes
30 us). Exact matching and order are computed only at the beginning and the end. There are two kinds of change:

- Two columns exchange a run of consecutive stages, at the same position or not. A run of one stage exchanges two
  devices. A run up to the last stage joins the same stages in another way. Without long runs a search gets stuck: if
  several devices share a machine, moving one of them makes two boundaries slow, but moving their run makes none slow.
- A run of stages is reversed: the same stages in another order.

The two maxima of the objective are replaced by root mean squares, which also react to changes below the maximum. As the
temperature falls, the true maxima replace them.

There is no fastmath, no parallel loop, no power and no logarithm, and sums have a fixed order, so the result is the
same bit for bit on any machine. A kernel calls only kernels of this file and of `cost/compiled.py`: numba's cache does
not notice a change in another file."""

import numpy as np

from shoal.coordinator.cost.compiled import below, inner, kernel

ORDER_EXACT_MAX = 13
"""The most stages K whose best order is found exactly: Held and Karp's table has K 2^K entries, 106,496 for 13."""
_PROBES = 128
"""Annealing first tries this many changes and undoes each: their mean effect on the cost sets the first temperature."""
_ROW_WORST, _ROW_SQUARE, _EDGE_WORST, _EDGE_MEAN = range(4)
"""The rows of `totals`, float64 [4, K]. For each stage: the longest all-reduce time of a member (dp, seconds), and the
sum of squares of these times. For the boundary to the next stage: the longest hop, and the root mean square."""


# --- exact matching and order ---


@inner
def match(hop, rows, columns, partner):
    """Match each row with a column of its own so that the longest hop is shortest, in O(rows * columns^2). There must
    be at least as many columns as rows.

    Rows join one after the other, each along the augmenting path with the least longest edge. This is optimal: if all
    rows can be matched within a bound, each next row has an alternating path within that bound.

    Args: hop: seconds between devices. partner: int64, set to the index of each column's matching row; -1: none.
    Returns: the longest hop."""
    slack = np.empty(len(columns))
    way = np.empty(len(columns), np.int64)
    done = np.empty(len(columns), np.bool_)
    back = np.empty(len(rows), np.int64)
    partner[:] = -1
    bound = 0.0
    for first in range(len(rows)):
        slack[:] = np.inf
        done[:] = False
        row = first
        while True:
            best, free, reach = -1, False, np.inf
            for j in range(len(columns)):
                if done[j]:
                    continue
                edge = hop[rows[row], columns[j]]
                if edge < slack[j]:
                    slack[j] = edge
                    way[j] = row
                value = max(slack[j], bound)
                if best < 0 or value < reach or (value == reach and not free and partner[j] < 0):
                    best, free, reach = j, partner[j] < 0, value
            bound = reach
            done[best] = True
            if free:
                break
            row = partner[best]
        while True:
            row = way[best]
            partner[best] = row
            if row == first:
                break
            best, back[row] = back[row], best
        back[row] = best
    return bound


@kernel
def handover(hop, above, under):
    """Match two stages. Returns: (longest hop, partners). `partners` has for each member of the larger stage the index
    of its partner in the smaller stage; -1: it is left over, and sends to the nearest member of the smaller stage."""
    if len(above) <= len(under):
        rows, columns = above, under
    else:
        rows, columns = under, above
    partner = np.empty(len(columns), np.int64)
    bound = match(hop, rows, columns, partner)
    for j in range(len(columns)):
        if partner[j] < 0:
            nearest = np.inf
            for device in rows:
                nearest = min(nearest, hop[device, columns[j]])
            bound = max(bound, nearest)
    return bound, partner


@kernel
def open_path(cost, order):
    """Find the shortest path through all K nodes, from any node to any other (Held and Karp 1962). More than
    `ORDER_EXACT_MAX` nodes keep their given order.

    Args: cost: float64 [K, K], symmetric. order: int64 [K], is filled with the path. Returns: its length."""
    K = len(cost)
    shortest = 0.0
    if K > ORDER_EXACT_MAX:
        for k in range(K):
            order[k] = k
            shortest += cost[k - 1, k] if k else 0.0
        return shortest
    best = np.full((1 << K, K), np.inf)
    before = np.zeros((1 << K, K), np.int8)
    for k in range(K):
        best[1 << k, k] = 0.0
    for mask in range(1, 1 << K):
        for end in range(K):
            if best[mask, end] < np.inf:
                for node in range(K):
                    longer = best[mask, end] + cost[end, node]
                    if not mask >> node & 1 and longer < best[mask | 1 << node, node]:
                        best[mask | 1 << node, node] = longer
                        before[mask | 1 << node, node] = end
    mask = (1 << K) - 1
    last = np.argmin(best[mask])
    shortest = best[mask, last]
    for position in range(K - 1, -1, -1):
        order[position] = last
        mask, last = mask ^ (1 << last), before[mask, last]
    return shortest


@kernel
def settle(x, share, hop):
    """Put the stages of layout `x` into the order in which the longest hops between neighbours have the least sum, and
    match the members of neighbours so that their longest hop is shortest. Changes `x`.

    Args:
        share: float64 [2, N, N], seconds of all-reduce between two members of a small (0) or a full (1) stage.
        hop: float64 [N, N], symmetric, seconds.
    Returns: (dp, pp, units of work used); `dtfm_search.py` defines dp and pp."""
    K, R = x.shape
    groups = np.empty((K, R), np.int64)
    sizes = np.empty(K, np.int64)
    order = np.empty(K, np.int64)
    cost = np.zeros((K, K))
    dp = 0.0
    for k in range(K):
        row = np.sort(x[k])
        row = row[row >= 0]
        sizes[k] = len(row)
        groups[k, : len(row)] = row
        dp = max(dp, _all_reduce(row, share[1 if len(row) == R else 0])[0])
        for j in range(k):
            cost[k, j], _ = handover(hop, row, groups[j, : sizes[j]])
            cost[j, k] = cost[k, j]
    pp = open_path(cost, order)
    if groups[order[0], 0] > groups[order[-1], 0]:
        order[:] = order[::-1].copy()
    x[:] = -1
    x[0, : sizes[order[0]]] = groups[order[0], : sizes[order[0]]]
    for k in range(1, K):
        above, under = groups[order[k - 1], : sizes[order[k - 1]]], groups[order[k], : sizes[order[k]]]
        _, partner = handover(hop, above, under)
        _columns(x, k, above, under, partner)
    work = K * K * R * R + ((K * K << K) // 4 if K <= ORDER_EXACT_MAX else 0)
    return dp, pp, work


@inner
def _columns(x, k, above, under, partner):
    """Write stage k (`under`) into layout x so that each device shares a column with its partner in stage k - 1
    (`above`). A device without a partner gets the free column."""
    R = x.shape[1]
    column = np.empty(len(above), np.int64)
    for i in range(len(above)):
        for c in range(R):
            if x[k - 1, c] == above[i]:
                column[i] = c
    alone = -1
    for j in range(len(partner)):
        if len(above) > len(under):
            if partner[j] >= 0:
                x[k, column[j]] = under[partner[j]]
        elif partner[j] >= 0:
            x[k, column[partner[j]]] = under[j]
        else:
            alone = under[j]
    for c in range(R):
        if alone >= 0 and x[k, c] < 0:
            x[k, c] = alone
            break


# --- the totals of a layout ---


@inner
def _all_reduce(row, share):
    """Return (the longest, the sum of squares) of the all-reduce times of a stage's members, in seconds."""
    worst, square = 0.0, 0.0
    for d in row:
        total = 0.0
        if d >= 0:
            for e in row:
                if e >= 0:
                    total += share[d, e]
        worst = max(worst, total)
        square += total * total
    return worst, square


@inner
def _boundary(x, above, under, hop):
    """Price the boundary between two stages. Returns: (its longest hop, the root mean square of all its hops)."""
    R = x.shape[1]
    worst, square, up, down = 0.0, 0.0, -1, -1
    for c in range(R):
        u, v = x[above, c], x[under, c]
        if u >= 0 and v >= 0:
            h = hop[u, v]
            worst = max(worst, h)
            square += h * h
        elif u >= 0:
            up = u
        elif v >= 0:
            down = v
    if up >= 0 or down >= 0:
        h = np.inf
        if up >= 0 and down >= 0:
            h = hop[up, down]
        else:
            alone, row = (up, under) if up >= 0 else (down, above)
            for c in range(R):
                if x[row, c] >= 0:
                    h = min(h, hop[alone, x[row, c]])
        worst = max(worst, h)
        square += h * h
    return worst, np.sqrt(square / R)


@kernel
def total_rows(x, share, totals, first, last):
    """Compute the two rows of `totals` about stages, for the stages `first` to `last` - 1."""
    for k in range(first, last):
        totals[_ROW_WORST, k], totals[_ROW_SQUARE, k] = _all_reduce(x[k], share[1 if x[k].min() >= 0 else 0])


@kernel
def total_edges(x, hop, totals, first, last):
    """Compute the two rows of `totals` about boundaries, for all boundaries of the stages `first` to `last` - 1."""
    for k in range(max(first - 1, 0), min(last, len(x) - 1)):
        totals[_EDGE_WORST, k], totals[_EDGE_MEAN, k] = _boundary(x, k, k + 1, hop)


@kernel
def energy(totals, num_devices, smooth):
    """Return a layout's objective (s). Args: smooth: 0: with true maxima; 1: with root mean squares in their place;
    between 0 and 1: the weighted mean of the two."""
    K = totals.shape[1]
    dp, square, pp, mean = 0.0, 0.0, 0.0, 0.0
    for k in range(K):
        dp = max(dp, totals[_ROW_WORST, k])
        square += totals[_ROW_SQUARE, k]
    for k in range(K - 1):
        pp += totals[_EDGE_WORST, k]
        mean += totals[_EDGE_MEAN, k]
    return (1.0 - smooth) * (dp + 2.0 * pp) + smooth * (np.sqrt(square / num_devices) + 2.0 * mean)


# --- changes ---


@kernel
def exchange(x, k, j, c, m, length):
    """Exchange `length` devices of column c of layout x, from stage k on, with as many of column m, from stage j on. A
    second call with the same arguments undoes the exchange."""
    for i in range(length):
        x[k + i, c], x[j + i, m] = x[j + i, m], x[k + i, c]


@kernel
def turn(x, first, last):
    """Reverse the order of the stages of layout x from `first` to `last` - 1. A second call restores the order."""
    for i in range((last - first) // 2):
        for c in range(x.shape[1]):
            x[first + i, c], x[last - 1 - i, c] = x[last - 1 - i, c], x[first + i, c]


@inner
def _is_possible(x, k, j, c, m, length):
    """True if `exchange` with these arguments changes x, and leaves each stage at most one empty column (hole)."""
    differs = False
    for i in range(length):
        d, e = x[k + i, c], x[j + i, m]
        differs = differs or d != e
        if k != j and d != e and (d < 0 or e < 0) and x[j + i if d < 0 else k + i].min() < 0:
            return False
    return differs


@kernel
def anneal(x, share, hop, seed, work, heat, smooth):
    """Anneal x in place; the temperature falls to 0.

    Args:
        x: a layout of at least two stages.
        share: float64 [2, N, N], seconds of all-reduce between two members of a small (0) or a full (1) stage.
        hop: float64 [N, N], symmetric, seconds.
        heat: the first temperature / the mean effect of a random change on the objective; 0 accepts nothing worse.
        smooth: the weight at the beginning, in [0, 1], of the objective with root mean squares in place of maxima.
    Returns: the units of work used; about 150 million take a second."""
    K, R = x.shape
    totals, kept = np.zeros((4, K)), np.zeros((4, K))
    lots = np.array([seed], np.uint64)
    spent, trials, probed, mean, heat_now, smooth_now, now = 0, 0, 0, 0.0, 0.0, smooth, 0.0
    total_rows(x, share, totals, 0, K)
    total_edges(x, hop, totals, 0, K)
    while spent < work:
        if trials % 64 == 0:
            rest = max(0.0, 1.0 - spent / work)
            heat_now = mean * heat * rest * rest * rest
            smooth_now = max(smooth * rest, 0.01)  # the last 1 % breaks ties
            now = energy(totals, len(hop), smooth_now)
        trials += 1
        spent += 10
        kind = below(lots, 64)
        is_turn, is_same = kind >= 60, 52 <= kind < 60
        length = 1 + below(lots, max(1, K // 2)) if 32 <= kind < 52 else 1
        starts = K + 1 - length
        k, j, c, m = below(lots, starts), below(lots, starts), below(lots, R), below(lots, R)
        if is_turn:
            k, j = min(k, j), max(k, j) + 1
            if j - k < 2 or j - k == K:
                continue
        elif is_same:
            j, length = k, K - k
        if not is_turn:
            overlap = (k == j and c == m) or (k != j and abs(k - j) < length)
            if overlap or not _is_possible(x, k, j, c, m, length):
                continue
        for row in range(4):
            for stage in range(K):
                kept[row, stage] = totals[row, stage]
        if is_turn:
            turn(x, k, j)
            total_rows(x, share, totals, k, j)
            total_edges(x, hop, totals, k, j)
            spent += (j - k) * R * R // 4
        else:
            exchange(x, k, j, c, m, length)
            if k != j:
                total_rows(x, share, totals, k, k + length)
                total_rows(x, share, totals, j, j + length)
                total_edges(x, hop, totals, j, j + length)
                spent += length * R * R // 2
            total_edges(x, hop, totals, k, k + length)
            spent += (length + 1) * R
        spent += 2 * K
        new = energy(totals, len(hop), smooth_now)
        u = np.float64(below(lots, 1 << 20)) / (1 << 20)
        # The random threshold 3 u^2 has mean 1, like that of Metropolis, and needs no logarithm.
        probing = heat > 0.0 and probed < _PROBES
        if probing and abs(new - now) > 1e-9 * now:
            probed += 1
            mean += abs(new - now) / _PROBES
        if not probing and new <= now + heat_now * 3.0 * u * u:
            now = new
            continue
        if is_turn:
            turn(x, k, j)
        else:
            exchange(x, k, j, c, m, length)
        for row in range(4):
            for stage in range(K):
                totals[row, stage] = kept[row, stage]
    return spent
