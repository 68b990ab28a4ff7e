"""Exact compiled matching of two stages and ordering of all stages, for the DT-FM objective.

A layout is int64 [K, R] of devices: row = stage in pipeline order, column = one pipeline; -1 is the hole of a stage
that is one smaller than the largest. Where two neighbouring stages have holes in different columns, the two devices
opposite the holes send to each other; a device opposite the only hole shares the nearest partner.

There is no fastmath and no parallel loop, and sums have a fixed order, so the result is the same bit for bit on any
machine. A kernel here calls only kernels of this file: numba's cache does not notice a change in another."""

import numpy as np
from numba import njit

ORDER_EXACT_MAX = 13
"""The limit for solving the order of stages exactly. At 13, half of Held and Karp's table takes 0.3 ms."""


@njit(cache=True)
def match(hop, rows, num_rows, columns, num_columns, partner):
    """Find a bottleneck matching of all rows, num_rows <= num_columns, in O(rows * columns^2).

    Rows join one after the other, each along the augmenting path whose longest edge is shortest. This is optimal: if
    the rows so far can be matched within a bound, so can the next, by an alternating path within the same bound.

    Args: partner: int64, filled: for each index into `columns` an index into `rows`, or -1. Returns: the longest edge.
    """
    slack = np.empty(num_columns)
    way = np.empty(num_columns, np.int64)
    done = np.empty(num_columns, np.bool_)
    back = np.empty(num_rows, np.int64)
    partner[:num_columns] = -1
    bound = 0.0
    for first in range(num_rows):
        slack[:] = np.inf
        done[:] = False
        row = first
        while True:
            best, free, reach = -1, False, np.inf
            for j in range(num_columns):
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


@njit(cache=True)
def members(row, out):
    """Copy the devices of a stage without holes. Returns: their number."""
    count = 0
    for device in row:
        if device >= 0:
            out[count] = device
            count += 1
    return count


@njit(cache=True)
def handover(hop, a, num_a, b, num_b, partner):
    """Match two stages: each member of the larger has a partner. Returns: (longest hop, True if a is the rows)."""
    flip = num_a > num_b
    rows, num_rows, columns, num_columns = (b, num_b, a, num_a) if flip else (a, num_a, b, num_b)
    bound = match(hop, rows, num_rows, columns, num_columns, partner)
    for j in range(num_columns):
        if partner[j] < 0:
            nearest = np.inf
            for i in range(num_rows):
                nearest = min(nearest, hop[rows[i], columns[j]])
            bound = max(bound, nearest)
    return bound, not flip


@njit(cache=True)
def open_path(cost, order):
    """Find the shortest path through all K nodes with free ends; above `ORDER_EXACT_MAX` nodes by 2-opt.

    Held and Karp (1962), met in the middle: only sets of up to half the nodes are expanded, then joined with the rest.

    Args: cost: float64 [K, K], symmetric. order: int64 [K], filled; a start for the 2-opt. Returns: its length."""
    K = len(cost)
    if K > ORDER_EXACT_MAX:
        return _two_opt(cost, order)
    half, everyone = (K + 1) // 2, (1 << K) - 1
    best = np.full((1 << K, K), np.inf)
    for k in range(K):
        best[1 << k, k] = 0.0
    shortest, first, last, tail = 0.0 if K == 1 else np.inf, 0, 0, 0
    for mask in range(1, everyone):
        if _count(mask) < half:
            for end in range(K):
                if mask >> end & 1:
                    for node in range(K):
                        if not mask >> node & 1:
                            longer = best[mask, end] + cost[end, node]
                            if longer < best[mask | 1 << node, node]:
                                best[mask | 1 << node, node] = longer
    for mask in range(1, everyone):
        for end in range(K if _count(mask) == half else 0):
            if best[mask, end] < shortest:
                for node in range(K):
                    total = best[mask, end] + cost[end, node] + best[everyone ^ mask, node]
                    if total < shortest:
                        shortest, first, last, tail = total, mask, end, node
    order[0] = 0
    if K > 1:
        size = _unwind(cost, best, first, last, order)
        order[:size] = order[:size][::-1].copy()
        _unwind(cost, best, everyone ^ first, tail, order[size:])
    return shortest


@njit(cache=True)
def _count(mask):
    size = 0
    while mask:
        size += mask & 1
        mask >>= 1
    return size


@njit(cache=True)
def _unwind(cost, best, mask, last, order):
    """Write the path behind best[mask, last] into `order`, backwards. Returns: its number of nodes."""
    position = 0
    while True:
        order[position] = last
        position += 1
        mask ^= 1 << last
        if not mask:
            return position
        node, shortest = -1, np.inf
        for k in range(len(cost)):
            if mask >> k & 1 and best[mask, k] + cost[k, last] < shortest:
                node, shortest = k, best[mask, k] + cost[k, last]
        last = node


@njit(cache=True)
def _two_opt(cost, order):
    K = len(cost)
    better = True
    while better:
        better = False
        for i in range(K - 1):
            for j in range(i + 1, K):
                before, after = 0.0, 0.0
                if i > 0:
                    before += cost[order[i - 1], order[i]]
                    after += cost[order[i - 1], order[j]]
                if j < K - 1:
                    before += cost[order[j], order[j + 1]]
                    after += cost[order[i], order[j + 1]]
                if after < before - 1e-12 * before:
                    order[i : j + 1] = order[i : j + 1][::-1].copy()
                    better = True
    total = 0.0
    for i in range(K - 1):
        total += cost[order[i], order[i + 1]]
    return total


@njit(cache=True)
def price(x, share, hop, groups, sizes, order):
    """Price a layout's groups exactly, independently of their order and columns.

    Args:
        share: float64 [2, N, N], seconds of all-reduce between two members of a small (0) or a full (1) stage.
        hop: float64 [N, N], symmetric.
        groups: int64 [K, R], filled: the members of each stage of x, ascending.
        sizes: int64 [K], filled.
        order: int64 [K], filled: the best order.
    Returns: (dp, pp).
    """
    K, R = x.shape
    partner = np.empty(R, np.int64)
    dp = 0.0
    for k in range(K):
        sizes[k] = members(np.sort(x[k]), groups[k])
        dp = max(dp, slowest_member(groups[k], sizes[k], share[1 if sizes[k] == R else 0]))
    cost = np.zeros((K, K))
    for k in range(K):
        order[k] = k
        for j in range(k):
            cost[k, j], _ = handover(hop, groups[k], sizes[k], groups[j], sizes[j], partner)
            cost[j, k] = cost[k, j]
    pp = open_path(cost, order)
    if groups[order[0], 0] > groups[order[-1], 0]:
        order[:] = order[::-1].copy()
    return dp, pp


@njit(cache=True)
def settle(x, share, hop):
    """Put stages in the best order and devices in the best columns, in place. Args: as of `price`. Returns: (dp, pp,
    work)."""
    K, R = x.shape
    groups = np.empty((K, R), np.int64)
    sizes = np.empty(K, np.int64)
    order = np.empty(K, np.int64)
    partner = np.empty(R, np.int64)
    dp, pp = price(x, share, hop, groups, sizes, order)
    x[0, :] = -1
    x[0, : sizes[order[0]]] = groups[order[0], : sizes[order[0]]]
    for k in range(1, K):
        above, under = order[k - 1], order[k]
        args = (groups[above], sizes[above], groups[under], sizes[under], partner)
        _, above_is_rows = handover(hop, *args)
        x[k, :] = -1
        _columns(x, k, *args, above_is_rows)
    return dp, pp, K * K * R * R * 2 + (K * K << min(K, ORDER_EXACT_MAX)) // 4


@njit(cache=True)
def _columns(x, k, above, num_above, under, num_under, partner, above_is_rows):
    """Write stage k of x so that partners share a column; a device without a partner gets the free column."""
    R = x.shape[1]
    column = np.empty(num_above, np.int64)
    for c in range(R):
        for i in range(num_above):
            if x[k - 1, c] == above[i]:
                column[i] = c
    if above_is_rows:
        left = -1
        for j in range(num_under):
            if partner[j] >= 0:
                x[k, column[partner[j]]] = under[j]
            else:
                left = j
        for c in range(R):
            if left >= 0 and x[k, c] < 0:
                x[k, c] = under[left]
                left = -1
    else:
        for i in range(num_above):
            if partner[i] >= 0:
                x[k, column[i]] = under[partner[i]]


@njit(cache=True)
def slowest_member(group, size, share):
    """Return the dp of one stage: the largest sum over the other members."""
    worst = 0.0
    for i in range(size):
        total = 0.0
        for j in range(size):
            if j != i:
                total += share[group[i], group[j]]
        worst = max(worst, total)
    return worst
