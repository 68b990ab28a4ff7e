"""Compiled steps of the DT-FM paper's genetic algorithm (`algorithm.py`). They follow the rules of the product's
`dtfm_kernels.py`."""

import numpy as np
from numba import njit


@njit(cache=True)
def cyclic_pass(labels, hop, num_stages):
    """At most K rounds of closed chains of moves between stages, so sizes stay; each device moves at most once.

    From each stage the device with the nearest mate would leave, for the stage it is farthest from in the mean; the
    gain is that mean hop less the hop to the nearest mate. A chain begins in the stage of the largest gain and goes on
    in the stage it moved to, until it is back, or a stage has nobody left who has not moved. Then it is cut where
    closing it early gains most (nowhere, if nothing gains). Rounds end when every stage has received somebody.

    Args: labels: int64 [N], changed in place. hop: float64 [N, N].
    """
    N, K = len(labels), num_stages
    if K < 2:
        return
    towards = np.zeros((N, K))
    sizes = np.zeros(K, np.int64)
    for d in range(N):
        sizes[labels[d]] += 1
        for e in range(N):
            towards[d, labels[e]] += hop[d, e]
    locked, received = np.zeros(N, np.bool_), np.zeros(K, np.bool_)
    leaver, target, gain = np.empty(K, np.int64), np.empty(K, np.int64), np.empty(K)
    moved, origin = np.empty(N + 1, np.int64), np.empty(N + 1, np.int64)
    for _ in range(K):
        _candidates(labels, hop, towards, sizes, locked, leaver, target, gain)
        start = int(np.argmax(gain))
        if leaver[start] < 0:
            return
        here, count, cut, total, best = start, 0, 0, 0.0, 0.0
        while leaver[here] >= 0:
            device, goal = leaver[here], target[here]
            if count:
                closing = total + towards[device, start] / max(1, sizes[start]) - _nearest(labels, hop, device)
                if closing > best:
                    best, cut = closing, count
            total += gain[here]
            moved[count], origin[count] = device, here
            count += 1
            locked[device] = True
            received[goal] = True
            _move(labels, hop, towards, sizes, device, goal)
            here = goal
            if here == start:
                break
            _candidates(labels, hop, towards, sizes, locked, leaver, target, gain)
        for index in range(count - 1, cut, -1):
            _move(labels, hop, towards, sizes, moved[index], origin[index])
        _move(labels, hop, towards, sizes, moved[cut], start)
        if received.all():
            return


@njit(cache=True)
def _nearest(labels, hop, device):
    """Smallest hop to a mate; 0 without one."""
    nearest = np.inf
    for e in range(len(labels)):
        if labels[e] == labels[device] and e != device:
            nearest = min(nearest, hop[device, e])
    return 0.0 if nearest == np.inf else nearest


@njit(cache=True)
def _candidates(labels, hop, towards, sizes, locked, leaver, target, gain):
    """Who would leave each stage (-1: nobody is free), for where, and what that gains; all filled, [K]."""
    nearest = np.full(len(sizes), np.inf)
    leaver[:] = -1
    target[:] = -1
    gain[:] = -np.inf
    for d in range(len(labels)):
        if not locked[d]:
            mate = _nearest(labels, hop, d)
            if leaver[labels[d]] < 0 or mate < nearest[labels[d]]:
                leaver[labels[d]], nearest[labels[d]] = d, mate
    for k in range(len(sizes)):
        if leaver[k] >= 0:
            for goal in range(len(sizes)):
                value = towards[leaver[k], goal] / max(1, sizes[goal]) - nearest[k]
                if goal != k and value > gain[k]:
                    target[k], gain[k] = goal, value


@njit(cache=True)
def _move(labels, hop, towards, sizes, device, goal):
    for d in range(len(labels)):
        towards[d, labels[device]] -= hop[d, device]
        towards[d, goal] += hop[d, device]
    sizes[labels[device]] -= 1
    sizes[goal] += 1
    labels[device] = goal


@njit(cache=True)
def fill(labels, room):
    """Move devices, lowest index first, from stages above their size to the first below, in place."""
    sizes = np.zeros(len(room), np.int64)
    for k in labels:
        sizes[k] += 1
    for d in range(len(labels)):
        if sizes[labels[d]] > room[labels[d]]:
            sizes[labels[d]] -= 1
            k = 0
            while sizes[k] >= room[k]:
                k += 1
            labels[d] = k
            sizes[k] += 1
