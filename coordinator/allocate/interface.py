"""Defines the inputs, the interface and the result of every allocator.

An assignment of layers to peers has two types. A search works on a `Placement`, which uses device numbers of one
topology. A `Layout` has the form of a plan: stages with their members' shares, and standbys (peers without a stage)."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from shoal.coordinator.allocate.measured import WIDE, MeasuredNetwork, Pair
from shoal.coordinator.cost.forecast_bias import UNBIASED, ForecastBias
from shoal.coordinator.cost.workload import Workload
from shoal.coordinator.experts.failure_records import HORIZON_S
from shoal.protocol.errors import ShoalError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Advert
from shoal.protocol.plan import Foreseen, Plan, Stage
from shoal.protocol.wire_format import Formats

SPEED_MAX = 1e15
"""The limit on claimed FLOP/s or bytes/s, so that sums stay finite. `measured.py` sets stricter limits to claims."""

FORECAST_ERROR = 0.1
"""`SwarmSnapshot.forecast_error` before any layout's speed has been compared with its prediction."""

NO_MOVES = "new shares"
"""The `reason` of a layout in which no peer moves."""

Place = tuple[int, int, tuple[PeerID, ...]]
"""A stage: (first layer, layer after the last, members)."""
Places = tuple[tuple[Place, ...], tuple[PeerID, ...]]
"""The stages and the standbys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeer:
    """One live peer. Rates are positive and finite."""

    peer: PeerID
    flop_per_s: float
    upload_bytes_per_s: float
    memory_bytes: int
    has_data: bool
    card_bytes_per_s: float = 0.0
    """The rate that the peer claims for its network card over all links at once; 0: unknown."""
    machine: str = ""
    """The machine that the peer claims to be on; peers of one machine share a network card. Empty: unknown."""
    draining: bool = False
    failure_probability: float = 0.0
    """The probability that the peer is lost without a good-bye within `failure_records.HORIZON_S` seconds."""
    synced_stage: int | None = None
    """The stage for which this peer holds the training state; None: it holds none."""
    speed_variance: float = WIDE
    """The variance of log(`flop_per_s`): small if measured on real microbatches, `WIDE` if on a probe."""
    homes: tuple[int, ...] = ()
    """The stages where this peer would start sooner: it holds their state, held it last, or has it on disk."""

    @classmethod
    def of(cls, peer: PeerID, advert: Advert, *, draining: bool, synced_stage: int | None) -> "MeasuredPeer":
        """Return `peer` as `advert` describes it. Rates are clipped to [1, `SPEED_MAX`]; non-finite ones become 1."""
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


class Chosen(NamedTuple):
    """What was known when the live layout was chosen."""

    tokens_per_s: float
    """Predicted tokens/s of the layout; 0: unknown."""
    peers: int
    """How many peers the run had; 0: unknown."""


NOT_CHOSEN = Chosen(0.0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmSnapshot:
    """All inputs of an allocator, besides the previous plan and a seed."""

    peers: tuple[MeasuredPeer, ...]
    """The peers, in the order of their identifiers."""
    layer_costs: tuple[float, ...]
    """The FLOP per token of each decoder layer; the first includes the embedding, the last the head."""
    num_stages: int | None
    """The required number of stages; None: the allocator chooses."""
    workload: Workload | None = None
    """The demand of a step on the devices; a search needs `workload` and `network`."""
    network: MeasuredNetwork | None = None
    """The measured links between `peers`, in the order of `peers`."""
    unreachable: frozenset[Pair] = frozenset()
    """The pairs of peers that cannot reach each other: they share no group and exchange no microbatch."""
    seen_tokens_per_s: float = 0.0
    """Tokens/s of the live layout, measured from its commits; 0: too few steps. It replaces a lower prediction."""
    chosen: Chosen = NOT_CHOSEN
    """What was known when the live layout was chosen."""
    forecast_error: float = FORECAST_ERROR
    """The root mean square of log(measured / predicted tokens/s) over the layouts of this run (`calibration.py`)."""
    forecast_bias: ForecastBias = UNBIASED
    """The ratio of measured to predicted tokens/s that this run leads us to expect, for each number of stages."""
    horizon_s: float = HORIZON_S
    """Seconds that a layout is expected to last: a gain after that time does not justify a move."""
    going_back_s: float = 0.0
    """Seconds lost when a stage's last holder dies: the work since the last snapshot, and the time to restore it."""

    def __post_init__(self) -> None:
        ids = [peer.peer for peer in self.peers]
        assert ids == sorted(set(ids)), "a snapshot lists each peer once, in order"
        assert self.num_stages is None or 0 < self.num_stages <= len(self.layer_costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The start of an era (the training from one restore point on): era `era` begins at `version`, from the snapshots
    of `from_era`, or at version 0 from the run's seed."""

    era: int
    version: int = 0
    from_era: int = 0
    loses: bool = True
    """True if the run may have trained past `version`, so that work is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The stages and standbys of the next plan. `reason` is a sentence for people on why they were chosen."""

    stages: tuple[Stage, ...]
    spares: tuple[PeerID, ...]
    reason: str
    beginning: Beginning | None = None
    """The new era that begins with this layout; None: the previous plan's era continues."""
    cutover_version: int = 0
    """The version at which `next_layout` replaces this layout (`Plan.cutover_version`); 0: that is not set yet."""
    next_layout: tuple[Stage, ...] = ()
    """The stages that will replace `stages`. Their members download missing layers before `cutover_version` is set."""
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
    """Return the layers and members of each stage, without shares: if two layouts give the same, no peer moves."""
    return tuple((stage.first_layer, stage.last_layer, stage.peers) for stage in layout.stages), layout.spares


class NoLayout(ShoalError):
    """The peers of a snapshot cannot hold the model; the message says what is missing."""


class Allocator(Protocol):
    """The interface of an allocator, which makes layouts."""

    def allocate(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> Layout:
        """Make a layout for the present swarm, within milliseconds. Pure: the same arguments give the same layout, bit
        for bit.
        Raises: NoLayout: the swarm cannot hold the model."""


@runtime_checkable
class Searching(Allocator, Protocol):
    """An allocator that answers a change at once with few moves, and searches for a better layout afterwards."""

    def prepare(self) -> None:
        """Do the slow preparations of the first search in advance, such as a minute of compiling."""

    def search(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        """Search for a better layout than `previous`, or for a first one. Pure. A search may take seconds, so it runs
        in a thread of its own.

        Args: snapshot: has workload and network; its peers are exactly the members of `previous`, if any.
        Returns: (layout, reason); the layout is None if none is worth the cost of the move.
        Raises: LocalError: the snapshot is impossible."""


def _rate(claimed: float) -> float:
    return min(max(claimed, 1.0), SPEED_MAX) if math.isfinite(claimed) else 1.0
