"""The compiled inner loop of the search on the DT-FM objective: annealing over explicit pipelines.

A layout is the int64 [K, R] of `matching.py`, so a change is priced by the few sums it touches (0.4 us at 64 devices;
an exact evaluation takes 30 us), and exact matching and order are computed at the ends only. There are four kinds of
change:

- Two places exchange their devices.
- Two columns exchange a stretch of several stages. Without it a search freezes: where devices come in boxes, moving one
  device of a box makes two boundaries slow, while moving its whole stretch makes none slow.
- Two columns exchange all stages below a boundary: the same groups, matched in another way.
- A stretch of stages is reversed: the same groups in another order.

The two maxima of the objective are replaced by root mean squares, which also react to changes below the maximum; it
turns into the true one as the temperature falls. No kernel uses powers or logarithms, which differ between machines.
The rules of `matching.py` hold, too."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

_PROBES = 128
"""The number of first trials that only measure the size of changes, to scale the temperature."""


class LayoutState(NamedTuple):
    """A layout and its running sums."""

    x: Any
    """int64 [K, R]"""
    sums: Any
    """[K, R], the all-reduce seconds (dp) of each place."""
    row_worst: Any
    row_square: Any
    """[K] each: the largest of a stage's `sums`, and the sum of their squares."""
    edge_worst: Any
    edge_mean: Any
    """[K - 1] each: the longest hop of a boundary, and the root mean square of all its hops."""


class LinkTables(NamedTuple):
    """The fixed costs between devices."""

    share: Any
    """[2, N, N], seconds of all-reduce between two members of a small (0) or a full (1) stage; symmetric."""
    hop: Any
    """[N, N], seconds from one device to one of the next stage; symmetric."""
    classes: Any
    """int64 [N]; devices with equal numbers are interchangeable."""


@njit(cache=True)
def draw(lots):
    """Draw a uint64 by SplitMix64 (Steele, Lea, Flood 2014). `lots`: uint64 [1], the state, which is advanced."""
    lots[0] += np.uint64(0x9E3779B97F4A7C15)
    z = lots[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(cache=True)
def below(lots, n):
    """Draw an int64 in [0, n), n < 2^32."""
    return np.int64(((draw(lots) >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


# --- what things cost ---


@njit(cache=True)
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


@njit(cache=True)
def _full(x, k):
    """Return the index into `LinkTables.share` for the stage: 1 if it has no hole, else 0."""
    for c in range(x.shape[1]):
        if x[k, c] < 0:
            return 0
    return 1


@njit(cache=True)
def _row(x, k, share, sums):
    """Write the dp of each place of a stage into sums[k]; a hole has 0."""
    R, full = x.shape[1], _full(x, k)
    for c in range(R):
        total = 0.0
        if x[k, c] >= 0:
            for m in range(R):
                if m != c and x[k, m] >= 0:
                    total += share[full, x[k, c], x[k, m]]
        sums[k, c] = total


@njit(cache=True)
def _replaced(x, k, c, leaves, comes, share, old, sums):
    """Update as `_row` when device `comes` replaces `leaves` at column c, from the `old` sums. Neither is a hole."""
    total, full = 0.0, _full(x, k)
    for m in range(x.shape[1]):
        e = x[k, m]
        if m != c and e >= 0:
            gain = share[full, comes, e]
            sums[k, m] = old[k, m] - share[full, leaves, e] + gain
            total += gain
        else:
            sums[k, m] = 0.0
    sums[k, c] = total


@njit(cache=True)
def _spread(sums, k):
    worst, square = 0.0, 0.0
    for c in range(sums.shape[1]):
        worst = max(worst, sums[k, c])
        square += sums[k, c] * sums[k, c]
    return worst, square


@njit(cache=True)
def _refresh(s, links):
    for k in range(len(s.x)):
        _row(s.x, k, links.share, s.sums)
        s.row_worst[k], s.row_square[k] = _spread(s.sums, k)
        if k:
            s.edge_worst[k - 1], s.edge_mean[k - 1] = _boundary(s.x, k - 1, k, links.hop)


@njit(cache=True)
def _energy(s, devices, smooth):
    dp, square, pp, mean = 0.0, 0.0, 0.0, 0.0
    for k in range(len(s.row_worst)):
        dp = max(dp, s.row_worst[k])
        square += s.row_square[k]
    for k in range(len(s.edge_worst)):
        pp += s.edge_worst[k]
        mean += s.edge_mean[k]
    return (1.0 - smooth) * (dp + 2.0 * pp) + smooth * (np.sqrt(square / devices) + 2.0 * mean)


# --- changes: each returns (energy after it, work), and undoes itself where that is above `bound` ---


@njit(cache=True)
def _exchange(s, links, trial, kept, k, j, c, m, length, smooth, bound):
    """Exchange stages k.. of column c with stages j.. of column m, `length` of them. They do not overlap unless k == j.
    Args: trial: float64 [K, R], scratch. kept: float64 [4, K], scratch."""
    x, (K, R) = s.x, s.x.shape
    differ = False
    for i in range(length):
        d, e = x[k + i, c], x[j + i, m]
        if d < 0 or e < 0:
            differ = differ or d != e
            if k != j and d != e and not _full(x, j + i if d < 0 else k + i):
                return bound + 1.0, 20 + length + R  # A stage has at most one hole.
        else:
            differ = differ or links.classes[d] != links.classes[e]
    if not differ:
        return bound + 1.0, 20 + length
    work = 20 + (length * 4 + 2) * R + 6 * K
    _keep(s, kept)
    for i in range(length):
        d, e = x[k + i, c], x[j + i, m]
        x[k + i, c], x[j + i, m] = e, d
        if k == j:
            continue
        if d >= 0 and e >= 0:
            _replaced(x, k + i, c, d, e, links.share, s.sums, trial)
            _replaced(x, j + i, m, e, d, links.share, s.sums, trial)
        else:
            _row(x, k + i, links.share, trial)
            _row(x, j + i, links.share, trial)
            work += 2 * R * R
        s.row_worst[k + i], s.row_square[k + i] = _spread(trial, k + i)
        s.row_worst[j + i], s.row_square[j + i] = _spread(trial, j + i)
    for start in (k, j):
        for edge in range(max(start - 1, 0), min(start + length, K - 1)):
            s.edge_worst[edge], s.edge_mean[edge] = _boundary(x, edge, edge + 1, links.hop)
    new = _energy(s, len(links.classes), smooth)
    if new > bound:
        for i in range(length):
            x[k + i, c], x[j + i, m] = x[j + i, m], x[k + i, c]
        _give_back(s, kept)
    elif k == j:
        s.sums[k, c], s.sums[k, m] = s.sums[k, m], s.sums[k, c]
    else:
        for i in range(length):
            for place in range(R):
                s.sums[k + i, place] = trial[k + i, place]
                s.sums[j + i, place] = trial[j + i, place]
    return new, work


@njit(cache=True)
def _keep(s, kept):
    """Save all totals by loops: numba's slice assignments cost more than copying so few numbers."""
    for k in range(len(s.row_worst)):
        kept[0, k], kept[1, k] = s.row_worst[k], s.row_square[k]
    for k in range(len(s.edge_worst)):
        kept[2, k], kept[3, k] = s.edge_worst[k], s.edge_mean[k]


@njit(cache=True)
def _give_back(s, kept):
    for k in range(len(s.row_worst)):
        s.row_worst[k], s.row_square[k] = kept[0, k], kept[1, k]
    for k in range(len(s.edge_worst)):
        s.edge_worst[k], s.edge_mean[k] = kept[2, k], kept[3, k]


@njit(cache=True)
def _cross(s, links, k, c, m, smooth, bound):
    x, K = s.x, len(s.x)
    worst, mean = s.edge_worst[k], s.edge_mean[k]
    x[k + 1, c], x[k + 1, m] = x[k + 1, m], x[k + 1, c]
    s.edge_worst[k], s.edge_mean[k] = _boundary(x, k, k + 1, links.hop)
    new = _energy(s, len(links.classes), smooth)
    if new > bound:
        x[k + 1, c], x[k + 1, m] = x[k + 1, m], x[k + 1, c]
        s.edge_worst[k], s.edge_mean[k] = worst, mean
    else:
        s.sums[k + 1, c], s.sums[k + 1, m] = s.sums[k + 1, m], s.sums[k + 1, c]
        for i in range(k + 2, K):
            x[i, c], x[i, m] = x[i, m], x[i, c]
            s.sums[i, c], s.sums[i, m] = s.sums[i, m], s.sums[i, c]
    return new, 20 + x.shape[1] + 4 * K


@njit(cache=True)
def _turn(s, links, i, j, smooth, bound):
    x, (K, R) = s.x, s.x.shape
    before, after = max(i - 1, 0), min(j, K - 2)
    kept = (s.edge_worst[before], s.edge_mean[before], s.edge_worst[after], s.edge_mean[after])
    if i > 0:
        s.edge_worst[before], s.edge_mean[before] = _boundary(x, i - 1, j, links.hop)
    if j < K - 1:
        s.edge_worst[after], s.edge_mean[after] = _boundary(x, i, j + 1, links.hop)
    new = _energy(s, len(links.classes), smooth)
    if new > bound:
        s.edge_worst[before], s.edge_mean[before], s.edge_worst[after], s.edge_mean[after] = kept
    else:
        x[i : j + 1] = x[i : j + 1][::-1].copy()
        s.sums[i : j + 1] = s.sums[i : j + 1][::-1].copy()
        s.row_worst[i : j + 1] = s.row_worst[i : j + 1][::-1].copy()
        s.row_square[i : j + 1] = s.row_square[i : j + 1][::-1].copy()
        s.edge_worst[i:j] = s.edge_worst[i:j][::-1].copy()
        s.edge_mean[i:j] = s.edge_mean[i:j][::-1].copy()
    return new, 20 + 2 * R + 4 * K


@njit(cache=True)
def anneal(x, links, seed, work, heat, smooth):
    """Anneal x in place; the temperature falls to 0.

    Args:
        x: a layout of at least two stages.
        heat: the first temperature, in mean changes of a trial; 0 accepts no loss.
        smooth: the first share of the smooth objective, in [0, 1].
    Returns: the work done; about 300 million units take a second.
    """
    K, R = x.shape
    s = LayoutState(x, np.zeros((K, R)), np.zeros(K), np.zeros(K), np.zeros(K - 1), np.zeros(K - 1))
    trial, kept = np.zeros((K, R)), np.zeros((4, K))
    lots = np.array([seed], np.uint64)
    spent, trials, probed, mean, heat_now, smooth_now, now = 0, 0, 0, 0.0, 0.0, smooth, 0.0
    while spent < work:
        if trials % 64 == 0:
            if trials % 4096 == 0:  # rounding errors must not accumulate
                _refresh(s, links)
                spent += K * R * R
            rest = max(0.0, 1.0 - spent / work)
            heat_now = mean * heat * rest * rest * rest
            smooth_now = max(smooth * rest, 0.01)  # what remains at the end breaks ties
            now = _energy(s, len(links.classes), smooth_now)
        trials += 1
        probing = heat > 0.0 and probed < _PROBES
        u = np.float64(below(lots, 1 << 20)) / (1 << 20)
        # 3 u^2 has mean 1: the threshold is drawn without the logarithm that Metropolis needs.
        bound = -1.0 if probing else now + heat_now * 3.0 * u * u
        kind, new, cost = below(lots, 64), np.inf, 20
        if kind < 52:
            length = 1 if kind < 32 else 1 + below(lots, max(1, K // 2))
            k, j = below(lots, K + 1 - length), below(lots, K + 1 - length)
            c, m = below(lots, R), below(lots, R)
            if abs(k - j) >= length or (k == j and length == 1 and c != m):
                new, cost = _exchange(s, links, trial, kept, k, j, c, m, length, smooth_now, bound)
        elif kind < 60:
            k, c, m = below(lots, K - 1), below(lots, R), below(lots, R)
            if c != m:
                new, cost = _cross(s, links, k, c, m, smooth_now, bound)
        else:
            i, j = below(lots, K), below(lots, K)
            i, j = min(i, j), max(i, j)
            if i < j and j - i < K - 1:
                new, cost = _turn(s, links, i, j, smooth_now, bound)
        spent += cost
        if probing and new > 0.0 and new < np.inf:
            probed += 1
            mean += abs(new - now) / _PROBES
        elif new <= bound:
            now = new
    return spent
