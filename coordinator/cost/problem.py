"""Builds the tables of `pipeline.py` from a topology and a workload."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shoal.coordinator.cost.pipeline import AHEAD, CROWDED, NEEDED, PAIRS, PipelineInput, PipelineState
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.workload import WireBytes, Workload
from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.topology import Floats, Ints, Topology

_ROWS = 512
"""The rows of a table that are computed at once; more would take more memory."""


def problem_of(
    topology: Topology,
    workload: Workload,
    *,
    weight: Ints | None = None,
    current: Placement | None = None,
    horizon_s: float = np.inf,
    cuts: Sequence[float] = (),
) -> PipelineInput:
    """Return the tables of `pipeline.py` for a swarm and a workload.

    Args:
        weight: int64 [N], the number of devices in each unit of `topology` (`allocate/planner.py`); None: 1 each.
            FLOP/s and cards of a unit are sums, memory and paths are those of one device.
        current: the placement in force; the cost of moving state to another placement is spread over `horizon_s`.
        cuts: bytes of a microbatch between two stages, for each format in use besides the workload's.
    """
    t, w, n = topology, workload, topology.num_devices
    weights: Floats = np.ones(n) if weight is None else weight.astype(np.float64)
    cards, card = np.unique(t.card, return_inverse=True)
    slower = np.minimum(t.up_bytes_per_s, t.down_bytes_per_s)
    card_rate = np.zeros(len(cards))
    card_rate[card] = slower
    cut_bytes = tuple(dict.fromkeys((w.cut_bytes, *cuts)))
    q = _both_ways(t, weights, cut_bytes)
    home, fetch_rate, carries = _homes(t, q[0] * w.cut_bytes, current)
    costs = (  # in the order of their positions
        w.microbatches,
        1.0 + w.backward_per_forward,
        w.loss_per_forward,
        w.s_max,
        horizon_s,
        w.reduced.tied_parameters,
        w.memory.resident_bytes_per_parameter,
        w.state_bytes_per_parameter,
        w.memory.workspace_bytes,
    )
    none = (0.0,) * w.num_layers
    experts, fixed = w.experts.parameters if w.experts else none, w.memory.layer_fixed_bytes or none
    layers = (w.layer_flop, w.layer_parameters, w.layer_held_bytes, experts, fixed)
    stage_sizes = range(1, round(float(weights.sum())) + 1)
    beyond = [0, *(w.experts.beyond(devices) if w.experts else 0 for devices in stage_sizes)]
    up, down = t.up_bytes_per_s / weights, t.down_bytes_per_s / weights
    return PipelineInput(
        units=np.stack((t.flop_per_s, weights, t.memory_bytes, up, down, fetch_rate, carries)),
        holds=np.concatenate((home, t.may_feed[None, :])),
        card=card.astype(np.int64),
        card_rate=card_rate,
        shared_cards=bool(np.isfinite(slower).any()) and len(cards) < n,
        latency=_fixed(t.latency_s),
        rate=_fixed(t.bytes_per_s),
        cut_bytes=np.array(cut_bytes),
        q=q,
        layers=np.array([np.cumsum((0.0, *of)) for of in layers]),
        beyond=np.array(beyond, dtype=np.float64),
        costs=np.array(costs, dtype=np.float64),
    )


def state_of(
    problem: PipelineInput, workload: Workload, num_stages: int, wire: WireBytes | None = None
) -> PipelineState:
    """Return an empty placement on `num_stages` stages. Args: wire: bytes of tensors between stages and in reductions
    (`problem` must have these sizes); None: the workload's bytes."""
    n, K = len(problem.card), num_stages
    wire = wire or WireBytes.same(workload, K)
    known = problem.cut_bytes.tolist()
    return PipelineState(
        stage=np.full(n, -1, dtype=np.int64),
        at=np.zeros(n, dtype=np.int64),
        members=np.zeros((K, n), dtype=np.int64),
        count=np.zeros(K, dtype=np.int64),
        bounds=np.zeros(K + 1, dtype=np.int64),
        cut_size=np.array([*map(known.index, wire.cuts), 0], dtype=np.int64),
        sum_bytes=np.array(wire.sums, dtype=np.float64),
        loads=np.zeros((NEEDED + 1, n)),
        times=np.zeros((CROWDED + 1, K)),
        step=np.zeros(AHEAD + 1),
        dirty=np.ones((PAIRS + 1, K), dtype=np.bool_),
        card_load=np.zeros(len(problem.card_rate)),
    )


def _fixed(array: Floats) -> Floats:
    """Return a read-only view in C order. All tables get this one form, because numba compiles anew for each form."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _both_ways(topology: Topology, weights: Floats, sizes: Sequence[float]) -> Floats:
    """Return `PipelineInput.q`: frames a second in the slower direction, because a gradient of the same size answers
    each activation. A stream carries at most STREAM_CREDIT_BYTES of unacknowledged frames, or one larger frame. A
    frame's credit returns after its own time on the path and a round trip (`protocol/frames.py`)."""
    rate, latency, n = topology.bytes_per_s, topology.latency_s, topology.num_devices
    q = np.zeros((len(sizes), n, n), dtype=rate.dtype)
    for first in range(0, n, _ROWS):
        rows = slice(first, first + _ROWS)
        slower = np.minimum(rate[rows], rate[:, rows].T).astype(np.float64)
        trip_s = latency[rows].astype(np.float64) + latency[:, rows].T
        paths = weights[rows, None] * weights[None, :]
        for table, frame_bytes in zip(q, sizes, strict=True):
            frames = max(1.0, np.floor(STREAM_CREDIT_BYTES / frame_bytes))
            with np.errstate(divide="ignore"):
                credited = frames / (frame_bytes / slower + trip_s)
            table[rows] = np.where(slower > 0.0, np.minimum(slower / frame_bytes, credited) * paths, 0.0)
    for table in q:
        np.fill_diagonal(table, 0.0)
    return q


def _homes(topology: Topology, rate: Floats, current: Placement | None) -> tuple[Ints, Floats, Floats]:
    """Return (each device's range of layers in `current` [2, N], its bytes/s for fetching other layers [N], its share
    of its stage's work [N]). Args: rate: float [N, N], bytes/s between two devices."""
    n = topology.num_devices
    home, fetch_rate, carries = np.zeros((2, n), dtype=np.int64), np.ones(n), np.zeros(n)
    if current is None:
        return home, fetch_rate, carries
    for members, bounds in zip(current.stages, pairwise(current.bounds), strict=True):
        for device in members:
            home[:, device] = bounds
            carries[device] = topology.flop_per_s[device] / topology.flop_per_s[list(members)].sum()
    placed = np.array(sorted(device for stage in current.stages for device in stage), dtype=np.int64)
    best = rate[np.ix_(placed, placed)].max(axis=0, initial=0.0)
    fetch_rate[placed] = np.maximum(1.0, np.minimum(best, topology.down_bytes_per_s[placed]))
    return home, fetch_rate, carries
