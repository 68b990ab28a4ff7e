"""The inputs, the duties and the result of every allocator.

A layout has two types. A search works on a `Placement`, by device numbers of one topology. A `Layout` has the plan's
own terms: stages with their members' shares, and standbys."""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shoal.coordinator.allocate.measured import WIDE, MeasuredNetwork, Pair
from shoal.coordinator.cost.forecast_bias import UNBIASED, ForecastBias
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.errors import ShoalError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Advert
from shoal.protocol.plan import Foreseen, Plan, Stage
from shoal.protocol.wire_format import Formats

SPEED_MAX = 1e15
"""The limit on claimed FLOP/s or bytes/s, so that sums stay finite. Measurements limit a claim's value (`measured`)."""

HORIZON_S = 600.0
"""The least time that a layout is expected to last: volunteers come and go."""
FORECAST_ERROR = 0.1
"""`SwarmSnapshot.forecast_error` before any layout has been compared with its plan's promise."""

NO_MOVES = "new shares"
"""The reason of a layout in which no peer moves."""

Places = tuple[tuple[tuple[int, int, tuple[PeerID, ...]], ...], tuple[PeerID, ...]]
"""(first layer, last layer, members) of each stage, and the standbys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeer:
    """One live peer. Rates are positive and finite."""

    peer: PeerID
    flop_per_s: float
    upload_bytes_per_s: float
    memory_bytes: int
    has_data: bool
    card_bytes_per_s: float = 0.0
    """The claimed rate of its network card over all links at once; 0: unknown."""
    machine: str = ""
    """Peers with the same claimed machine share a network card. Empty: unknown."""
    draining: bool = False
    failure_probability: float = 0.0
    """The probability of loss without a good-bye within `failure_records.HORIZON_S`."""
    synced_stage: int | None = None
    """The stage of the state that it holds."""
    speed_variance: float = WIDE
    """The variance of the natural logarithm of `flop_per_s`: small for jobs, `WIDE` for a probe."""
    homes: tuple[int, ...] = ()
    """The stages where it would start sooner: it holds their state, held it last, or has it on disk."""

    @classmethod
    def of(cls, peer: PeerID, advert: Advert, *, draining: bool, synced_stage: int | None) -> "MeasuredPeer":
        """Make one from the advert of `peer`; impossible numbers become the smallest possible."""
        return cls(
            peer=peer,
            flop_per_s=_rate(advert.flop_per_s),
            upload_bytes_per_s=_rate(advert.upload_bytes_per_s),
            memory_bytes=max(0, advert.memory_bytes),
            has_data=advert.has_data,
            machine=advert.machine,
            card_bytes_per_s=_rate(advert.card_bytes_per_s),
            draining=draining,
            synced_stage=synced_stage,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmSnapshot:
    """All inputs of a layout, besides the previous plan and a seed."""

    peers: tuple[MeasuredPeer, ...]
    """The peers, in the order of their identifiers."""
    layer_costs: tuple[float, ...]
    """The FLOP per token of each decoder layer, with embedding and head at the ends."""
    num_stages: int | None
    """The required number of stages; None: the allocator chooses."""
    workload: Workload | None = None
    """The demand of a step on the devices; a search needs it and `network`."""
    network: MeasuredNetwork | None = None
    """The links between `peers`, in their order."""
    unreachable: frozenset[Pair] = frozenset()
    """The pairs of peers that cannot reach each other: they share no group and exchange no microbatch."""
    seen_tokens_per_s: float = 0.0
    """The rate of the live layout by its commits; 0: too few steps. A lower rate by the devices' figures is wrong."""
    chosen_tokens_per_s: float = 0.0
    """What was foreseen of the live layout when it was chosen; 0: unknown."""
    forecast_error: float = FORECAST_ERROR
    """The root mean square of log(seen / promised tokens/s) over the layouts of this run (`calibration`)."""
    forecast_bias: ForecastBias = UNBIASED
    """The objective's bias in this run, for each number of stages."""
    horizon_s: float = HORIZON_S
    """Seconds that a layout is expected to last: a gain that comes later does not justify a move."""
    going_back_s: float = 0.0
    """Seconds lost when a stage's last holder dies: the work since the last snapshot, and the way back to it."""

    def __post_init__(self) -> None:
        ids = [peer.peer for peer in self.peers]
        assert ids == sorted(set(ids)), "a snapshot lists each peer once, in order"
        assert self.num_stages is None or 0 < self.num_stages <= len(self.layer_costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Era `era` begins at `version`, from the snapshots of `from_era`; at version 0 from the run's seed."""

    era: int
    version: int = 0
    from_era: int = 0
    loses: bool = True
    """True if the run may have trained past `version`, so that work is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The stages and standbys of the next plan. `reason` is one sentence for people."""

    stages: tuple[Stage, ...]
    spares: tuple[PeerID, ...]
    reason: str
    beginning: Beginning | None = None
    """The new era that begins with this layout; None: the previous plan's era continues."""
    cutover_version: int = 0
    """The version at which `next_layout` replaces this layout (`Plan.cutover_version`); 0: no end is set."""
    next_layout: tuple[Stage, ...] = ()
    """The stages after these. Members download their missing layers, before an end is set."""
    foreseen: Foreseen | None = None
    """Predicted throughput of `stages`; None: no prediction."""
    formats: Formats | None = None
    """The formats of tensors (`Plan.formats`); None: not chosen yet."""

    @classmethod
    def of(cls, plan: Plan, reason: str) -> "Layout":
        """Return the layout of `plan` unchanged, with its prediction."""
        return cls(
            stages=plan.stages,
            spares=plan.spares,
            reason=reason,
            cutover_version=plan.cutover_version,
            next_layout=plan.next_layout,
            foreseen=plan.foreseen,
            formats=plan.formats,
        )


def places_of(layout: Layout | Plan) -> Places:
    """Return the places of the members, without shares: equal places mean that no peer moves."""
    return tuple((stage.first_layer, stage.last_layer, stage.peers) for stage in layout.stages), layout.spares


class NoLayout(ShoalError):
    """These peers cannot hold the model; the message says what is missing."""


class Allocator(Protocol):
    """Makes layouts."""

    def allocate(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> Layout:
        """Make a layout for the present swarm, within milliseconds. Pure: the same arguments give the same layout, bit
        for bit.
        Raises: NoLayout."""


@runtime_checkable
class Searching(Allocator, Protocol):
    """An allocator that answers a change at once with hardly any moves, and searches for a better layout afterwards."""

    def prepare(self) -> None:
        """Do slow preparations of the first search now, such as a minute of compiling."""

    def search(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        """Search for a better layout than `previous`, or for a first one. Pure; it may take seconds, in its own thread.

        Args: snapshot: with workload and network; its peers are exactly the members of `previous`, if there is one.
        Returns: (layout, why); the layout is None if none is worth its moves.
        Raises: LocalError: the snapshot is impossible."""


def _rate(claimed: float) -> float:
    return min(max(claimed, 1.0), SPEED_MAX) if math.isfinite(claimed) else 1.0
