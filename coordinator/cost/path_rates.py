"""Computes the rate of a path between two devices as the transport uses it: credits, frames, and shared cards."""

import numpy as np

from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.topology import Floats, Ints, Topology


def path_bytes_per_s(topology: Topology, source: Ints, target: Ints, frame_bytes: float) -> Floats:
    """Return [S, T] bytes/s of frames of `frame_bytes` from each of `source` [S] to each of `target` [T], cards aside;
    0 without a path, and from a device to itself. A stream carries at most STREAM_CREDIT_BYTES of unacknowledged
    frames, or one larger frame, and a frame's credit returns after its own time on the path and a round trip
    (`protocol/frames.py`)."""
    rate = topology.bytes_per_s[np.ix_(source, target)].astype(np.float64)
    there = topology.latency_s[np.ix_(source, target)].astype(np.float64)
    back = topology.latency_s[np.ix_(target, source)].T.astype(np.float64)
    frames = max(1.0, STREAM_CREDIT_BYTES // frame_bytes)
    with np.errstate(divide="ignore"):
        credited = frames * frame_bytes / (frame_bytes / rate + there + back)
    limited = np.minimum(rate, credited)
    limited[source[:, None] == target[None, :]] = 0.0
    return limited


def both_ways(topology: Topology, here: Ints, there: Ints, frame_bytes: float) -> Floats:
    """Return [H, T] bytes/s of the slower direction, because each activation is answered by a gradient of its size."""
    forth = path_bytes_per_s(topology, here, there, frame_bytes)
    return np.minimum(forth, path_bytes_per_s(topology, there, here, frame_bytes).T)


def same_card(topology: Topology, here: Ints, there: Ints) -> "np.ndarray[tuple[int, int], np.dtype[np.bool_]]":
    """Return [H, T], True if both devices share one network card, which their traffic then does not pass."""
    cards: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = topology.card[here][:, None] == topology.card[there][None]
    return cards


def exchange_s(topology: Topology, here: Ints, there: Ints, frame_bytes: float) -> Floats:
    """Return [H, T] seconds for a frame forth and one back on idle paths, cards included; inf without a path."""
    inside = same_card(topology, here, there)

    def one_way(source: Ints, target: Ints, within: "np.ndarray[tuple[int, int], np.dtype[np.bool_]]") -> Floats:
        square = np.ix_(source, target)
        card = np.minimum(topology.up_bytes_per_s[source][:, None], topology.down_bytes_per_s[target][None, :])
        rate = np.where(within, np.inf, card)
        with np.errstate(divide="ignore"):
            seconds: Floats = topology.latency_s[square] + frame_bytes / np.minimum(rate, topology.bytes_per_s[square])
        return seconds

    return one_way(here, there, inside) + one_way(there, here, inside.T).T


def reduction_parts(topology: Topology, members: Ints, frame_bytes: float) -> Floats:
    """Return [n], each member's part of the reduction, in proportion to the rate of its exchange with the others: the
    slower direction of its card, divided among the members behind it, or the sum of its paths if that is slower. A
    member that adds up the part p of S bytes sends and receives S (1 + (n - 2) p), `peer/group/reduce.py`."""
    n = len(members)
    if n < 2:
        return np.ones(n)
    path = both_ways(topology, members, members, frame_bytes).sum(axis=1)
    mates = same_card(topology, members, members).sum(axis=1)
    card = np.minimum(topology.up_bytes_per_s[members], topology.down_bytes_per_s[members]) / mates
    rate = np.minimum(path, card)
    # A plan allows no part of 0.
    rate = np.maximum(rate, 1e-6 * rate.max()) if rate.max() > 0.0 else np.ones(n)
    parts: Floats = rate / rate.sum()
    return parts
