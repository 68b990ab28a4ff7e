"""A snapshot as the topology that objectives and searches work on: measured where it was, estimated where not.

| unknown                  | estimate                                                                                |
|--------------------------|-----------------------------------------------------------------------------------------|
| latency i -> j           | what the triangle allows: between the largest |ia - aj| and the least ia + aj over all  |
|                          | a that both were measured towards, near the upper end where some a is near i or j       |
| rate i -> j              | the least of i's best rate out, j's best rate in, and what links between peers near i   |
|                          | and near j carry where their own ends could do more: a line between two towns; less     |
|                          | where most links of i, or towards j, are slower than these say, or most links towards i |
|                          | where few of its own are known                                                          |
| a peer without figures   | what it claims; else the swarm's median; else `DEFAULT_LATENCY_S`, `DEFAULT_BYTES_PER_S`|
| rate of a network card   | what has gone out over several links at once, or its best link with another machine; as |
|                          | much comes in, or what its best link brings                                             |
| rate of a link that was  | the estimate if that is more: the far end may have been busy                            |
| probed less than 3 times |                                                                                         |
| rate inside a machine   | the usual one inside machines                                                           |
| who shares a card        | peers that name one machine and are near each other                                     |
| unreachable pairs        | there is no path, rate 0                                                                |

Memory is a claim: nobody else can measure it.
"""

import numpy as np

from shoal.coordinator.allocate.interface import MeasuredPeer, Snapshot
from shoal.coordinator.measured import CLAIM_MIN
from shoal.protocol.topology import Floats, Ints, Topology, make_topology

DEFAULT_LATENCY_S = 0.05
DEFAULT_BYTES_PER_S = 1.25e9
"""10 Gbit/s where nothing is known of any link, so that compute and memory decide. (With 100 Mbit/s large stages had
better not be replicated: two peers of 32 equal ones got 20 of 24 layers.)"""
SAME_MACHINE_S = 0.001
"""Two peers that name one machine are believed if their latency is less."""
CARD_MAX = 16.0
"""A card is believed to carry so many times what its best link carries."""
NEAR_S = 0.004
"""Links say something of another link whose ends are nearer than about this."""
LIMITED = 0.75
"""Something lies between two places if so large a part of the links between them carries less than its ends could. The
rest are links that were busy when they were probed."""
_POWER = 4.0
"""The exponent of the mean over such links: the faster ones count, since a probe errs low."""
SLOW_LINKS_MIN = 4
"""Where so many links of a peer are slower than those beside them, its others are believed to be slow too."""
CENSORED = 0.7
"""A link that carries so much of what its ends could do says nothing of what lies between them."""


def topology_of(snapshot: Snapshot) -> Topology:
    """The topology of a snapshot; devices are in the order of `snapshot.peers`. Raises: LocalError."""
    peers, network = snapshot.peers, snapshot.network
    assert network is not None
    n = len(peers)
    card = _cards(peers, network.latency_s)
    beside = (card[:, None] == card[None, :]) & np.isnan(network.latency_s)
    latency = _latencies(np.where(beside, SAME_MACHINE_S / 10.0, network.latency_s))
    inside = card[:, None] == card[None, :]
    known = np.where(inside, np.nan, network.bytes_per_s)
    claims = np.array([peer.upload_bytes_per_s for peer in peers])
    claims[claims < CLAIM_MIN] = np.nan
    best = _of_card(_best(known), card)
    together = _of_card(np.array([peer.card_bytes_per_s for peer in peers]), card)
    up = np.fmax(_or(best, _of_card(claims, card)), np.fmin(together, CARD_MAX * best))
    down = np.maximum(_or(_of_card(_best(known.T), card), np.full(n, np.nan)), up)
    ends = np.minimum(up[:, None], down[None, :])
    between = np.minimum(ends, _between(known, up, down, latency))
    slower_out, slower_in = _slower(known / between), _slower((known / between).T)
    slower_out = np.where((~np.isnan(known)).sum(axis=1) < SLOW_LINKS_MIN, slower_in, slower_out)
    between *= np.fmin(slower_out[:, None], slower_in[None, :])
    within = network.bytes_per_s[inside & ~np.isnan(network.bytes_per_s)]
    loopback = float(np.median(within)) if len(within) else 0.0
    estimate = np.where(inside, np.maximum(ends, loopback), np.minimum(ends, between))
    rate = np.where(network.is_certain, network.bytes_per_s, np.fmax(network.bytes_per_s, estimate))
    np.fill_diagonal(rate, 0.0)
    np.fill_diagonal(latency, 0.0)
    number = {peer.peer: index for index, peer in enumerate(peers)}
    for one, other in snapshot.unreachable:
        if one in number and other in number:
            i, j = number[one], number[other]
            rate[i, j] = rate[j, i] = 0.0
    return make_topology(
        latency,
        rate,
        flop_per_s=[peer.flop_per_s for peer in peers],
        memory_bytes=[max(1.0, float(peer.memory_bytes)) for peer in peers],
        up_bytes_per_s=up if n > 1 else np.inf,
        down_bytes_per_s=down if n > 1 else np.inf,
        card=card,
        names=tuple(peer.peer for peer in peers),
        may_feed=[float(peer.has_data) for peer in peers],
    )


def _latencies(measured: Floats) -> Floats:
    """[N, N] seconds, without gaps and symmetric."""
    n = len(measured)
    known = measured.copy()
    np.fill_diagonal(known, 0.0)
    lower, upper = np.zeros((n, n)), np.full((n, n), np.inf)
    for a in range(n):
        row = known[a]
        lower = np.fmax(lower, np.fabs(row[:, None] - row[None, :]))
        upper = np.fmin(upper, row[:, None] + row[None, :])
    # With a peer right beside i the two bounds meet. Without one the truth is more often near the upper.
    bounded = np.isfinite(upper)
    estimate = np.where(bounded, 0.25 * lower + 0.75 * np.where(bounded, upper, 0.0), np.nan)
    near = _or(_medians(measured), np.full(n, DEFAULT_LATENCY_S))
    estimate = np.where(np.isnan(estimate), np.maximum(near[:, None], near[None, :]), estimate)
    return np.where(np.isnan(known), estimate, known)


def _cards(peers: tuple[MeasuredPeer, ...], latency: Floats) -> Ints:
    """[N], the same number for peers behind one network card."""
    first: dict[str, int] = {}
    card = np.arange(len(peers))
    for index, peer in enumerate(peers):
        if not peer.machine:
            continue
        other = first.setdefault(peer.machine, index)
        if not latency[index, other] >= SAME_MACHINE_S:  # they may not have been measured towards each other
            card[index] = other
    return card


def _between(known: Floats, up: Floats, down: Floats, latency: Floats) -> Floats:
    """[N, N] bytes/s of what lies between i's surroundings and j's, as far as measured links say; inf: nothing in the
    way."""
    ends = np.minimum(up[:, None], down[None, :])
    seen = ~np.isnan(known)
    if not seen.any():
        return np.full_like(ends, np.inf)
    limits = seen & (np.where(seen, known, np.inf) < CENSORED * ends)
    if not limits.any():
        return np.full_like(ends, np.inf)
    near = np.exp(-latency / NEAR_S)
    near[near < 0.01] = 0.0
    weight = near @ seen.astype(np.float64) @ near.T
    limited = near @ limits.astype(np.float64) @ near.T
    scale = float(known[limits].max())
    powers = near @ np.where(limits, (np.where(limits, known, 0.0) / scale) ** _POWER, 0.0) @ near.T
    with np.errstate(divide="ignore", invalid="ignore"):
        usual = scale * (powers / limited) ** (1.0 / _POWER)
        return np.where((limited > LIMITED * weight) & (weight > 0.0), usual, np.inf)


def _slower(ratio: Floats) -> Floats:
    """[N], in [0, 1]: how much slower the links from each peer are than their surroundings let one think, in the
    median, where that is true of most that are known. A card that carries much over all of them makes none quicker.

    Args: ratio: [N, N], known over estimated; NaN where nothing is known.
    """
    seen, slow = (~np.isnan(ratio)).sum(axis=1), (ratio < CENSORED).sum(axis=1)
    is_slow = (slow >= SLOW_LINKS_MIN) & (slow > LIMITED * seen)
    slower = np.ones(len(ratio))
    if is_slow.any():
        slower[is_slow] = np.nanmedian(ratio[is_slow], axis=1)
    return slower


def _of_card(rates: Floats, card: Ints) -> Floats:
    """[N], the best that is known of anybody behind the same card; NaN where nothing is."""
    best = np.full(len(rates), np.nan)
    np.fmax.at(best, card, rates)
    return best[card]


def _best(matrix: Floats) -> Floats:
    """[N], the largest of what is known of each row; NaN where nothing is."""
    best = np.full(len(matrix), np.nan)
    known = ~np.isnan(matrix).all(axis=1)
    if known.any():
        best[known] = np.nanmax(matrix[known], axis=1)
    return best


def _medians(matrix: Floats) -> Floats:
    """[N], the median of what is known of each row; NaN where nothing is."""
    medians = np.full(len(matrix), np.nan)
    known = ~np.isnan(matrix).all(axis=1)
    if known.any():
        medians[known] = np.nanmedian(matrix[known], axis=1)
    return medians


def _or(values: Floats, claims: Floats) -> Floats:
    """Fill gaps: `values`, then `claims`, then the median of what is known, then `DEFAULT_BYTES_PER_S`."""
    known = values[~np.isnan(values)]
    values = np.where(np.isnan(values), claims, values)
    return np.where(np.isnan(values), float(np.median(known)) if len(known) else DEFAULT_BYTES_PER_S, values)
