"""Assignments of devices to stages, and the operators of the evolutionary search. Pure; randomness is passed in.

An assignment is int64 [N]: the stage of each device, or `LEFT_OUT`. Two assignments are the same individual, with equal
`key`, if they differ only in the names of their stages or by an exchange of interchangeable devices. `align` renames
one assignment to agree as much as possible with another, so that the child of two good parents is not noise (Falkenauer
1992 on grouping problems: inherit groups, not genes).
"""

import random

import numpy as np
import numpy.typing as npt

Assignment = npt.NDArray[np.int64]

LEFT_OUT = -1
"""The device holds nothing, on purpose."""
HOMELESS = -2
"""The device lost its stage in a crossover or mutation; `Evaluator.repair` finds another."""


def key(assignment: Assignment, classes: Assignment, num_stages: int) -> bytes:
    """Return a name that is equal for assignments that differ only in the names of stages and of interchangeable
    devices.

    Args: classes: int64 [N], devices with equal numbers are interchangeable.
    """
    placed = assignment >= 0
    stages = sorted(np.sort(classes[placed & (assignment == stage)]).tobytes() for stage in range(num_stages))
    return b"/".join([*stages, np.sort(classes[~placed]).tobytes()])


def align(first: Assignment, second: Assignment, classes: Assignment, num_stages: int) -> Assignment:
    """Rename the stages of `second`, and exchange interchangeable devices, so that it agrees with `first` on most
    devices.

    Stages are paired by largest overlap first. This does not always give the largest total overlap, but it keeps the
    most similar stages together, as a crossover needs, and it takes N + K^2 log K.
    """
    num_classes = int(classes.max()) + 1
    counts = [_counts(parent, classes, num_stages, num_classes) for parent in (first, second)]
    overlap = np.array([np.minimum(row, counts[1]).sum(axis=1) for row in counts[0]])
    names = np.full(num_stages, -1, dtype=np.int64)
    taken = np.zeros(num_stages, dtype=np.bool_)
    for pair in np.argsort(-overlap, axis=None, kind="stable"):
        mine, theirs = divmod(int(pair), num_stages)
        if not taken[mine] and names[theirs] < 0:
            names[theirs] = mine
            taken[mine] = True
    renamed = np.where(second >= 0, names[np.maximum(second, 0)], second)
    return _exchange(first, renamed, classes)


def _counts(assignment: Assignment, classes: Assignment, num_stages: int, num_classes: int) -> Assignment:
    placed = assignment >= 0
    flat = assignment[placed] * num_classes + classes[placed]
    counts: Assignment = np.bincount(flat, minlength=num_stages * num_classes).reshape(num_stages, num_classes)
    return counts


def _exchange(first: Assignment, second: Assignment, classes: Assignment) -> Assignment:
    """Exchange devices inside each class of `second`, so that most are where `first` has them."""
    result = second.copy()
    order = np.argsort(classes, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(classes[order])) + 1):
        if len(members) == 1:
            continue
        places: dict[int, int] = {}
        for place in second[members]:
            places[int(place)] = places.get(int(place), 0) + 1
        rest = []
        for device in members:
            wish = int(first[device])
            if places.get(wish, 0) > 0:
                places[wish] -= 1
                result[device] = wish
            else:
                rest.append(device)
        left = [place for place in sorted(places) for _ in range(places[place])]
        result[rest] = left
    return result


def crossover(first: Assignment, second: Assignment, num_stages: int, rng: random.Random) -> Assignment:
    """Take some stages of `first` whole, and the others from `second`, which must be aligned to it.

    A device is `HOMELESS` if `first` has it in a stage that comes from `second`, and `second` has it in one that comes
    from `first`.
    """
    kept = np.zeros(num_stages, dtype=np.bool_)
    kept[rng.sample(range(num_stages), rng.randint(1, max(1, num_stages - 1)))] = True
    from_first = (first >= 0) & kept[np.maximum(first, 0)]
    clash = (second >= 0) & kept[np.maximum(second, 0)]
    child: Assignment = np.where(from_first, first, np.where(clash, HOMELESS, second))
    return child


def mutate(assignment: Assignment, num_stages: int, rng: random.Random) -> Assignment:
    """Exchange or move one to a few devices, or dissolve a stage and seed it anew. Devices may become `HOMELESS`."""
    child = assignment.copy()
    devices = len(child)
    kind = rng.randrange(3)
    if kind == 0:
        for _ in range(rng.randint(1, max(1, devices // 8))):
            a, b = rng.randrange(devices), rng.randrange(devices)
            child[a], child[b] = child[b], child[a]
    elif kind == 1:
        for _ in range(rng.randint(1, max(1, devices // 16))):
            child[rng.randrange(devices)] = rng.randrange(num_stages)
    else:
        dissolved = rng.sample(range(num_stages), min(num_stages, rng.randint(1, 2)))
        child[np.isin(child, dissolved)] = HOMELESS
        seeds = rng.sample(range(devices), min(devices, len(dissolved)))
        child[seeds] = dissolved[: len(seeds)]
    return child
