"""What every allocator is given, and what it must do."""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shoal.coordinator.cost.forecast_bias import UNBIASED, ForecastBias
from shoal.coordinator.cost.workload import Workload
from shoal.coordinator.measured import MeasuredNetwork
from shoal.coordinator.plan_layout import Layout
from shoal.coordinator.reachability import Pair
from shoal.protocol.errors import ShoalError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Advert
from shoal.protocol.plan import Plan

SPEED_MAX = 1e15
"""A claim is cut at so many FLOP/s or bytes/s, so that sums stay finite. What others were measured to do bounds what a
claim is worth (`measured`)."""

HORIZON_S = 600.0
"""A layout is expected to last so long at least. Volunteers come and go."""
FORECAST_ERROR = 0.1
"""`Snapshot.forecast_error` before any layout has been compared with what its plan promised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeer:
    """One live peer. Rates are positive and finite."""

    peer: PeerID
    flop_per_s: float
    upload_bytes_per_s: float
    memory_bytes: int
    has_data: bool
    card_bytes_per_s: float = 0.0
    """What its network card sends over all links at once, as it says; 0: not known."""
    machine: str = ""
    """Peers that name the same one share a network card, as they say. Empty: not known."""
    draining: bool = False
    failure_probability: float = 0.0
    """The chance that it is lost without a good-bye within `failure_records.HORIZON_S`."""
    synced_stage: int | None = None
    """The stage whose state it holds."""
    homes: tuple[int, ...] = ()
    """The stages at which it would begin sooner than elsewhere: it holds their state, held it last, or has it on
    disk."""

    @classmethod
    def of(cls, peer: PeerID, advert: Advert, *, draining: bool, synced_stage: int | None) -> "MeasuredPeer":
        """Make one from what `peer` says of itself; impossible numbers are replaced by the smallest possible."""
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
class Snapshot:
    """All that a layout may depend on, besides the plan before it and a seed."""

    peers: tuple[MeasuredPeer, ...]
    """The peers, in the order of their identifiers."""
    layer_costs: tuple[float, ...]
    """The FLOP a token of each decoder layer, with embedding and head at the ends."""
    num_stages: int | None
    """How many stages there are to be; None: the allocator chooses."""
    workload: Workload | None = None
    """What a step asks of the devices; a search needs it, and `network`, besides the rest."""
    network: MeasuredNetwork | None = None
    """What lies between `peers`, in their order."""
    unreachable: frozenset[Pair] = frozenset()
    """The pairs of peers that cannot reach each other: no group has both, and no microbatch goes from one to the
    other."""
    seen_tokens_per_s: float = 0.0
    """How fast the live layout is, by what was committed; 0: it has made too few steps. Figures of devices and links
    that say less than this of it are wrong."""
    forecast_error: float = FORECAST_ERROR
    """The quadratic mean of log(seen / promised tokens/s) over the layouts of this run (`calibration`)."""
    forecast_bias: ForecastBias = UNBIASED
    """The objective errs by so much in this run, for each number of stages."""
    horizon_s: float = HORIZON_S
    """How long a layout is expected to last: what pays later than that is not worth moving for."""
    going_back_s: float = 0.0
    """What is lost when a stage's last holder dies: the work since the last snapshot, and the way back to it."""

    def __post_init__(self) -> None:
        ids = [peer.peer for peer in self.peers]
        assert ids == sorted(set(ids)), "a snapshot lists each peer once, in order"
        assert self.num_stages is None or 0 < self.num_stages <= len(self.layer_costs)


class NoLayout(ShoalError):
    """These peers cannot hold the model; the sentence says what is missing."""


class Allocator(Protocol):
    """Makes layouts."""

    def allocate(self, snapshot: Snapshot, previous: Plan | None, *, seed: int) -> Layout:
        """Make a layout for the swarm as it is, within milliseconds. The function is pure: the same arguments give the
        same layout, bit for bit.

        Raises: NoLayout.
        """
        ...


@runtime_checkable
class Searching(Allocator, Protocol):
    """An allocator that answers a change at once by hardly moving anybody, and then looks for something better."""

    def prepare(self) -> None:
        """Do what the first search would have to do first, such as a minute of compiling.

        Raises: ImportError.
        """
        ...

    def search(self, snapshot: Snapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        """Look for a better layout than `previous`, or for a first one. The function is pure; it may take seconds, and
        run in a thread of its own.

        Args: snapshot: with workload and network; of exactly the members of `previous`, if there is one.
        Returns: (layout, why); None: there is none that is worth its moves.
        Raises: ImportError: what searches is not installed. LocalError: the snapshot is impossible.
        """
        ...


def _rate(claimed: float) -> float:
    return min(max(claimed, 1.0), SPEED_MAX) if math.isfinite(claimed) else 1.0
