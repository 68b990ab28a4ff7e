"""Makes the topology of a snapshot from measured values and, where those are missing, estimates. Also predicts the
speed of a plan's stages on it, and chooses their tensor formats.

| unknown                   | estimate                                                                               |
|---------------------------|----------------------------------------------------------------------------------------|
| latency i -> j            | by the triangle inequality: between the largest |ia - aj|, over all peers a with both  |
|                           | latencies measured, and the shortest path over any peers; nearer to the latter         |
| rate i -> j               | the least of i's best rate out, j's best rate in, and the rate of a bottleneck between |
|                           | their places (shown by links from peers near i to peers near j that are slower than    |
|                           | their ends); lower if most links from i, or most links to j, are slower than this;     |
|                           | if few links from i are known, the links to i count in their place                     |
| a peer without figures    | its claim; else the swarm's median; else `DEFAULT_LATENCY_S`, `DEFAULT_BYTES_PER_S`    |
| rate of a network card    | out: the rate over several links at once, or the best link to another machine; in: the |
|                           | same rate, or the best link from another machine if that is faster                     |
| rate of an uncertain link | the estimate if it is higher than the probes: the far end may have been busy           |
| rate inside a machine     | the median rate inside machines                                                        |
| peers on one network card | those that claim the same machine and are near each other                              |
| rate between peers that   | 0                                                                                      |
| cannot reach each other   |                                                                                        |

Memory is always the peer's claim: no other peer can measure it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from shoal.coordinator.allocate.interface import MeasuredPeer, SwarmSnapshot
from shoal.coordinator.allocate.measured import CLAIM_MIN, WIDE
from shoal.coordinator.cost.format_choice import formats_of
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import FormatBytes, WireBytes
from shoal.protocol.plan import Foreseen, Stage
from shoal.protocol.topology import Floats, Ints, Topology, make_topology
from shoal.protocol.wire_format import Formats

DEFAULT_LATENCY_S = 0.05
DEFAULT_BYTES_PER_S = 1.25e9
"""The rate (10 Gbit/s) where no link is known: so high that compute and memory decide."""
SAME_MACHINE_S = 0.001
"""Two peers that claim the same machine are believed, unless a latency of at least this was measured between them."""
CARD_MAX = 16.0
"""A network card is believed to carry at most this multiple of the rate of its best link."""
NEAR_S = 0.004
"""A link counts in another's estimate with weight e^(-x / `NEAR_S`); x: latency between senders + between receivers."""
LIMITED = 0.75
"""A bottleneck, or a slow peer, is assumed if over this part of the known links concerned is slow (`CENSORED`)."""
_POWER = 4.0
"""The exponent of the power mean over the links of a bottleneck: faster links weigh more, since probes err low."""
SLOW_LINKS_MIN = 4
"""A peer may be believed to be slow on its unmeasured links only if at least this many of its links are slow."""
CENSORED = 0.7
"""A link is clearly slower than its ends if its rate is below this fraction of the rate that its ends would allow."""


@lru_cache(maxsize=1)
def topology_of(snapshot: SwarmSnapshot) -> Topology:
    """Return the snapshot's topology, devices in the order of `snapshot.peers`. Raises: LocalError: it is invalid."""
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
    best = _of_card(_of_rows(np.nanmax, known), card)
    together = _of_card(np.array([peer.card_bytes_per_s for peer in peers]), card)
    up = np.fmax(_or(best, _of_card(claims, card)), np.fmin(together, CARD_MAX * best))
    down = np.maximum(_or(_of_card(_of_rows(np.nanmax, known.T), card), np.full(n, np.nan)), up)
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


def rate_variance_of(snapshot: SwarmSnapshot, topology: Topology) -> Floats:
    """Return float [N, N], the variance of log(`Topology.bytes_per_s`) of each link; row = sender. It is `WIDE` where
    the rate is an estimate. Args: topology: the topology of `snapshot`."""
    network = snapshot.network
    assert network is not None
    is_measured = (topology.bytes_per_s == network.bytes_per_s) & ~np.isnan(network.rate_variance)
    return np.where(is_measured, network.rate_variance, WIDE)


def _latencies(measured: Floats) -> Floats:
    """Return the latencies [N, N] in seconds, with estimates in place of NaN."""
    n = len(measured)
    known = measured.copy()
    np.fill_diagonal(known, 0.0)
    lower, upper = np.zeros((n, n)), np.where(np.isnan(known), np.inf, known)
    for a in range(n):
        row = known[a]
        lower = np.fmax(lower, np.fabs(row[:, None] - row[None, :]))
        upper = np.minimum(upper, upper[:, a, None] + upper[None, a])
    # With a peer right beside i the two bounds meet. Otherwise the truth is more often near the upper bound.
    estimate = np.where(np.isfinite(upper), 0.25 * lower + 0.75 * upper, np.nan)
    near = _or(_of_rows(np.nanmedian, measured), np.full(n, DEFAULT_LATENCY_S))
    estimate = np.where(np.isnan(estimate), np.maximum(near[:, None], near[None, :]), estimate)
    return np.where(np.isnan(known), estimate, known)


def _cards(peers: tuple[MeasuredPeer, ...], latency: Floats) -> Ints:
    """Return [N], for each peer the index of the first peer on its network card: equal numbers mean one card."""
    first: dict[str, int] = {}
    card = np.arange(len(peers))
    for index, peer in enumerate(peers):
        if not peer.machine:
            continue
        other = first.setdefault(peer.machine, index)
        if not latency[index, other] >= SAME_MACHINE_S:  # the two may not have been measured towards each other
            card[index] = other
    return card


def _between(known: Floats, up: Floats, down: Floats, latency: Floats) -> Floats:
    """Return [N, N], bytes/s of a bottleneck from i to j, by the links from peers near i to peers near j; inf: none."""
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
    """Return [N], the factor between the true and the estimated rates of each peer's links: the median of the peer's
    known `ratio` if most of these are far below 1, else 1. Args: ratio: [N, N], measured / estimated; NaN: unknown."""
    seen, slow = (~np.isnan(ratio)).sum(axis=1), (ratio < CENSORED).sum(axis=1)
    is_slow = (slow >= SLOW_LINKS_MIN) & (slow > LIMITED * seen)
    slower = np.ones(len(ratio))
    if is_slow.any():
        slower[is_slow] = np.nanmedian(ratio[is_slow], axis=1)
    return slower


def _of_card(rates: Floats, card: Ints) -> Floats:
    """Return [N], the best known rate of any peer behind the same network card; NaN: none is known."""
    best = np.full(len(rates), np.nan)
    np.fmax.at(best, card, rates)
    return best[card]


def _of_rows(of_known: Callable[..., Floats], matrix: Floats) -> Floats:
    """Return [N]: `of_known` (a function such as nanmax) of each row; NaN for a row without a known value."""
    found = np.full(len(matrix), np.nan)
    known = ~np.isnan(matrix).all(axis=1)
    if known.any():
        found[known] = of_known(matrix[known], axis=1)
    return found


def _or(values: Floats, claims: Floats) -> Floats:
    """Replace NaN in `values`: by `claims`, else by the median of the known values, else by `DEFAULT_BYTES_PER_S`."""
    known = values[~np.isnan(values)]
    values = np.where(np.isnan(values), claims, values)
    return np.where(np.isnan(values), float(np.median(known)) if len(known) else DEFAULT_BYTES_PER_S, values)


def placement_of(stages: Sequence[Stage], peers: tuple[MeasuredPeer, ...]) -> Placement:
    """Return a plan's stages as a placement with peers numbered as in `peers`, without members that `peers` lacks."""
    number = {peer.peer: device for device, peer in enumerate(peers)}
    return Placement(
        stages=tuple(tuple(sorted(number[p] for p in stage.peers if p in number)) for stage in stages),
        bounds=(0, *(stage.last_layer for stage in stages)),
    )


def predict_step_time(
    snapshot: SwarmSnapshot, stages: Sequence[Stage], wire: WireBytes | None = None
) -> Foreseen | None:
    """Predict the tokens/s and the bottleneck of `stages`; None: a stage has no known peer, or they are impossible.

    Args:
        snapshot: with workload and network. Peers that are not in it are left out of the stages.
        wire: the bytes of tensors on the wire; None: as in the snapshot's workload."""
    workload = snapshot.workload
    assert workload is not None
    placement = placement_of(stages, snapshot.peers)
    if not all(placement.stages):
        return None
    cost = ThroughputObjective(topology_of(snapshot), workload).cost(placement, wire)
    return None if cost.bound is None else Foreseen(cost.parts["tokens_per_s"], *cost.bound)


def choose_formats(
    snapshot: SwarmSnapshot, stages: Sequence[Stage], takes: FormatBytes, *, kept: Formats | None = None
) -> Formats:
    """Choose the wire formats of the stages' tensors (`cost/format_choice.py`); the narrowest if a stage has no known
    peer. Args: takes: the bytes of tensors in each format. kept: the present formats of the stages."""
    assert snapshot.workload is not None
    placement = placement_of(stages, snapshot.peers)
    if not all(placement.stages):
        return takes.thinnest(len(stages))
    return formats_of(topology_of(snapshot), snapshot.workload, placement, takes, kept=kept)
