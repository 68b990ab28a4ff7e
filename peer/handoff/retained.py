"""Gradients and layers that this peer keeps at the end of a layout, for peers that hold the layers in the next."""

import asyncio
from collections.abc import Mapping

from torch import Tensor

from shoal.peer.model.state import LayerState
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import REPLAYED_BYTES_MAX
from shoal.protocol.messages import Holding
from shoal.protocol.plan import Plan

TRAIL_STEPS_MIN = 4
"""The gradients of at least this many last steps are kept, whatever their size. Three are as large as the state, so a
peer that lacks more fetches the state instead; a fourth step may end while the first one's gradient is being sent."""


class GradientLog:
    """The reduced gradients of recent steps, for all groups of one peer, in one era (the versions since the last
    roll-back or repartitioning).

    When a layout is about to end, each peer of the next one fetches the layers that it will hold, each at the present
    version, and replays the later steps. A step of a layer needs only that layer's part of the reduced gradient. A
    gradient is kept until each such peer has replayed the step.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        """True while a plan names a next layout, for which peers may ask for gradients."""
        self._era = -1
        self._steps: dict[int, dict[str, Tensor]] = {}
        """Version -> layer -> the reduced gradient with which the layer stepped to that version."""
        self._wanted_from: dict[PeerID, int] = {}
        """Peer -> version to which it makes its next step; earlier gradients are not kept for it."""
        self._noted = asyncio.Event()

    def follow(self, plan: Plan) -> None:
        """Follow a plan. Gradients are kept from the announcement of a next layout until that layout is under way."""
        self.is_wanted = bool(plan.next_layout)
        is_last = plan.not_started and plan.restore_era == self._era
        if (self.is_wanted and plan.era == self._era) or is_last:
            return
        self._era = plan.era
        self._steps, self._wanted_from = {}, {}

    def note(self, era: int, version: int, gradients: Mapping[str, Tensor]) -> None:
        """Keep the reduced gradients, by layer, of the step to `version`."""
        if not self.is_wanted or era != self._era:
            return
        self._steps.setdefault(version, {}).update(gradients)
        keep_from = min((version, *self._wanted_from.values()))
        self._steps = {at: kept for at, kept in self._steps.items() if at >= keep_from}
        while len(self._steps) > TRAIL_STEPS_MIN and self.num_bytes > REPLAYED_BYTES_MAX:
            del self._steps[min(self._steps)]
        self._noted.set()
        self._noted = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        parts = (part_N for kept in self._steps.values() for part_N in kept.values())
        return sum(4 * part_N.numel() for part_N in parts)

    def wants(self, peer: PeerID, version: int, *, at_least: bool = False) -> None:
        """Record that `peer` has to replay the step to `version` and all later ones. Args: at_least: if the peer still
        has to replay earlier steps, too, those stay recorded."""
        self._wanted_from[peer] = min(version, self._wanted_from.get(peer, version)) if at_least else version

    async def read(self, era: int, version: int, key: str, *, patience_s: float) -> Tensor | None:
        """Return the layer's gradient of the step to `version`; None: dropped, or not made within `patience_s`."""
        try:
            async with asyncio.timeout(patience_s):
                while era == self._era and self.is_wanted and not self._has(version, key) and self._is_ahead(version):
                    await self._noted.wait()
        except TimeoutError:
            return None
        return self._steps.get(version, {}).get(key) if era == self._era else None

    def _has(self, version: int, key: str) -> bool:
        return key in self._steps.get(version, {})

    def _is_ahead(self, version: int) -> bool:
        return version >= max(self._steps, default=0)


class RetainedLayers:
    """The layers that this peer held when a layout ended, at one version of one era.

    A layout ends at a version that its plan names (`Plan.cutover_version`), and commits nothing later. The next layout
    begins at that version. The next layout is a new era, but its layers come from their former holders' memory, not
    from snapshots.
    """

    def __init__(self) -> None:
        self._at = -1, 0
        """(era, version) of the kept layers."""
        self._layers: dict[str, LayerState] = {}

    @property
    def holding(self) -> Holding | None:
        """The kept layers and their version, in the form that heartbeats report."""
        if not self._layers:
            return None
        return Holding(era=self._at[0], version=self._at[1], layers=tuple(self._layers))

    def take(self, plan: Plan, version: int, layers: Mapping[str, LayerState]) -> None:
        """Keep the layers of our group at `version`, if the layout of `plan` ends at that version."""
        if plan.cutover_version and plan.cutover_version == version:
            self._begin((plan.era, version))
            self._layers.update(layers)

    def read(self, era: int, version: int) -> Mapping[str, LayerState]:
        """Return the kept layers if they are of that era and version, else an empty mapping."""
        return self._layers if self._at == (era, version) else {}

    def follow(self, plan: Plan) -> None:
        """Drop the kept layers once the plan's layout neither begins nor ends at their version: no peer needs them."""
        ends, begins = (plan.era, plan.cutover_version), (plan.restore_era, plan.restore_version)
        if not (plan.cutover_version and self._at == ends) and not (plan.not_started and self._at == begins):
            self._begin((-1, 0))

    def _begin(self, at: tuple[int, int]) -> None:
        if at != self._at:
            self._at, self._layers = at, {}
