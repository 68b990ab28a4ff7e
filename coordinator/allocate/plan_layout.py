"""The layout of a plan: the assignment of layers to peers. Pure.

A layout has two types. A search works on a `Placement`, by device numbers of one topology. A `Layout` has the plan's
own terms: stages with their members' shares, and standbys.
"""

from dataclasses import dataclass

from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Foreseen, Plan, Stage
from shoal.protocol.wire_format import Formats

NO_MOVES = "new shares"
"""The reason of a layout in which no peer moves."""

Places = tuple[tuple[tuple[int, int, tuple[PeerID, ...]], ...], tuple[PeerID, ...]]
"""(first layer, last layer, members) of each stage, and the standbys."""


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

    def places(self) -> Places:
        """The layout without shares: equal places mean that no peer moves."""
        return _places(self.stages, self.spares)


def places_of(plan: Plan) -> Places:
    """Return the places of a plan's members, without shares."""
    return _places(plan.stages, plan.spares)


def _places(stages: tuple[Stage, ...], spares: tuple[PeerID, ...]) -> Places:
    return tuple((stage.first_layer, stage.last_layer, stage.peers) for stage in stages), spares
