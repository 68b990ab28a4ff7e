"""The layout of a plan: which peer is to hold which layers. Pure.

There are two types of a layout. A search works on a `Placement`, by device numbers of one topology. A `Layout` is in
the words of the plan: stages with their members' shares, and spares.
"""

from dataclasses import dataclass

from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Foreseen, Plan, Stage
from shoal.protocol.wire_format import Formats

NO_MOVES = "new shares"
"""The reason of a layout in which everybody stays."""

Places = tuple[tuple[tuple[int, int, tuple[PeerID, ...]], ...], tuple[PeerID, ...]]
"""(first layer, last layer, members) of each stage, and the spares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Era `era` begins at `version`, from the snapshots of `from_era`; at version 0 from the run's seed."""

    era: int
    version: int = 0
    from_era: int = 0
    loses: bool = True
    """Whether the run may have been further than `version`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The stages and spares that the next plan is to have. `reason` is one sentence for people."""

    stages: tuple[Stage, ...]
    spares: tuple[PeerID, ...]
    reason: str
    beginning: Beginning | None = None
    """Where the run goes back to with this layout; None: it goes on in the era of the plan before it."""
    ends_at: int = 0
    """The version at which this layout gives way to `following` (`Plan.ends_at`); 0: it does not."""
    following: tuple[Stage, ...] = ()
    """The stages after these; without an end, members fetch what they lack for them."""
    foreseen: Foreseen | None = None
    """How fast `stages` should be; None: nobody could say."""
    formats: Formats | None = None
    """How tensors travel (`Plan.formats`); None: not chosen yet."""

    @classmethod
    def of(cls, plan: Plan, reason: str) -> "Layout":
        """The layout of `plan` once more: nobody moves, and what was foreseen of it stands."""
        return cls(
            stages=plan.stages,
            spares=plan.spares,
            reason=reason,
            ends_at=plan.ends_at,
            following=plan.following,
            foreseen=plan.foreseen,
            formats=plan.formats,
        )

    def places(self) -> Places:
        """The layout without shares: two layouts with equal places move nobody."""
        return _places(self.stages, self.spares)


def places_of(plan: Plan) -> Places:
    """The places of a plan's members, without shares."""
    return _places(plan.stages, plan.spares)


def _places(stages: tuple[Stage, ...], spares: tuple[PeerID, ...]) -> Places:
    return tuple((stage.first_layer, stage.last_layer, stage.peers) for stage in stages), spares
