"""Makes the layout of a given name: the planner's own, or a simple one for comparison."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from shoal.coordinator.allocate.at_once import plan_at_once
from shoal.coordinator.allocate.greedy import GreedyAllocator, partition
from shoal.coordinator.allocate.interface import SPEED_MAX, MeasuredPeer, NoLayout, SwarmSnapshot
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerID
from shoal.protocol.topology import Topology, WorkloadEntry

LayoutName = Literal["ours", "at-once", "dtfm", "given", "random", "mod", "greedy"]
"""`ours`: the throughput planner; `at-once`: its rule without a search; `dtfm`: our search with the DT-FM objective;
`given`: devices fill the stages in the file's order; `random`: in random order; `mod`: device i is in stage i mod K;
`greedy`: rules that balance the devices' speed over the stages."""
LAYOUT_NAMES: tuple[LayoutName, ...] = get_args(LayoutName)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutRequest:
    """All that a layout depends on: equal requests give equal layouts."""

    topology: Topology
    workload: Workload
    paper: WorkloadEntry | None = None
    """The constants of the DT-FM objective; None: they are derived from `workload`."""
    stages: int | None = None
    """The number of stages; None: the layout chooses."""
    seed: int = 0
    seconds: float = 1.0
    """About how many seconds a search may take on one core, as a fixed amount of work: so its result does not vary."""

    @property
    def objective(self) -> ThroughputObjective:
        return ThroughputObjective(self.topology, self.workload)

    @property
    def num_stages(self) -> int:
        """The number of stages for layouts that cannot choose it; by default one for every 8 devices, as in the DT-FM
        paper. Raises: LocalError: there are fewer devices or layers than stages."""
        most = min(self.topology.num_devices, self.workload.num_layers)
        if self.stages is not None and not 0 < self.stages <= most:
            raise LocalError(
                f"{self.stages} stages cannot be: there are {self.topology.num_devices} devices and "
                f"{self.workload.num_layers} layers"
            )
        return self.stages or max(1, min(most, math.ceil(self.topology.num_devices / 8)))

    @property
    def chosen_stages(self) -> int | None:
        """The number of stages; None: the layout chooses. Raises: LocalError: fewer devices or layers than stages."""
        return None if self.stages is None else self.num_stages

    @property
    def work(self) -> int:
        """The amount of work that the search may do. Every machine that we measured did it within `seconds`."""
        from shoal.coordinator.allocate.evolution import WORK_PER_SECOND

        return max(1, round(self.seconds * WORK_PER_SECOND))

    @property
    def constants(self) -> WorkloadEntry:
        """The constants of the DT-FM objective: those of `paper`, or else derived from `workload`. Raises: LocalError:
        there are more stages than devices or layers."""
        if self.paper is not None:
            return self.paper
        w, K = self.workload, self.num_stages
        replicas = self.topology.num_devices / K
        return WorkloadEntry(
            gradient_gigabytes_per_stage=w.gradient_bytes_per_parameter * sum(w.layer_parameters) / K / 1e9,
            activation_gigabytes_per_replica=w.cut_bytes * w.microbatches / replicas / 1e9,
            num_layers=w.num_layers,
        )


def layout(name: LayoutName, request: LayoutRequest) -> Placement:
    """Make the layout `name`. Raises: LocalError, NoLayout: the layout is impossible."""
    return _LAYOUTS[name](request)


def _ours(request: LayoutRequest) -> Placement:
    from shoal.coordinator.allocate.planner import plan  # numba takes a second to import

    stages = request.chosen_stages
    searched, searched_cost = plan(
        request.topology, request.workload, num_stages=stages, seed=request.seed, work=request.work
    )
    try:
        placement, cost = plan_at_once(request.topology, request.workload, num_stages=stages)
    except NoLayout:
        return searched
    return placement if cost.parts["foreseen_s"] < searched_cost.parts["foreseen_s"] else searched


def _at_once(request: LayoutRequest) -> Placement:
    return plan_at_once(request.topology, request.workload, num_stages=request.chosen_stages)[0]


def _dtfm(request: LayoutRequest) -> Placement:
    from shoal.coordinator.allocate.dtfm_search import plan_dtfm

    stages, seed, work = request.num_stages, request.seed, request.work
    found, _ = plan_dtfm(request.topology, request.constants, num_stages=stages, seed=seed, work=work)
    return _placement(request, found.stages)


def _greedy(request: LayoutRequest) -> Placement:
    """Return the layout by the rules of `greedy.py`, by which a live coordinator plans at once when members change."""
    t = request.topology
    peers = tuple(
        MeasuredPeer(
            peer=PeerID(f"{device:08}"),
            flop_per_s=float(t.flop_per_s[device]),
            upload_bytes_per_s=min(float(t.up_bytes_per_s[device]), SPEED_MAX),
            memory_bytes=int(t.memory_bytes[device]),
            has_data=bool(t.may_feed[device]),
        )
        for device in range(t.num_devices)
    )
    snapshot = SwarmSnapshot(peers=peers, layer_costs=request.workload.layer_flop, num_stages=request.num_stages)
    found = GreedyAllocator().allocate(snapshot, None, seed=request.seed)
    return Placement(
        stages=tuple(tuple(sorted(int(member.peer) for member in stage.members)) for stage in found.stages),
        bounds=(0, *(stage.last_layer for stage in found.stages)),
    )


def _given(request: LayoutRequest) -> Placement:
    return _dealt(request, range(request.topology.num_devices))


def _random(request: LayoutRequest) -> Placement:
    devices = list(range(request.topology.num_devices))
    random.Random(f"random layout/{request.seed}").shuffle(devices)
    return _dealt(request, devices)


def _mod(request: LayoutRequest) -> Placement:
    K, n = request.num_stages, request.topology.num_devices
    return _placement(request, [range(k, n, K) for k in range(K)])


def _dealt(request: LayoutRequest, devices: Sequence[int]) -> Placement:
    """Cut `devices`, in their order, into `num_stages` stages with nearly the same number of devices."""
    K, n = request.num_stages, len(devices)
    return _placement(request, [devices[n * k // K : n * (k + 1) // K] for k in range(K)])


def _placement(request: LayoutRequest, groups: Sequence[Sequence[int]]) -> Placement:
    return Placement(
        stages=tuple(tuple(sorted(group)) for group in groups),
        bounds=partition(request.workload.layer_flop, len(groups)),
    )


_LAYOUTS: dict[LayoutName, Callable[[LayoutRequest], Placement]] = {
    "ours": _ours,
    "at-once": _at_once,
    "dtfm": _dtfm,
    "given": _given,
    "random": _random,
    "mod": _mod,
    "greedy": _greedy,
}
