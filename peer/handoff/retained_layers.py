"""The layers that this peer held when a layout ended, kept for their holders in the next layout.

A layout ends at a version that its plan names (`Plan.cutover_version`), and commits nothing after it. The next one
begins from just that version, as an era begins from a snapshot, but from the memory of those that held the layers.
"""

from collections.abc import Mapping

from shoal.peer.model.state import LayerState
from shoal.protocol.messages import Holding
from shoal.protocol.plan import Plan


class RetainedLayers:
    """Layers at one version of one era."""

    def __init__(self) -> None:
        self._at = -1, 0
        """(era, version)."""
        self._layers: dict[str, LayerState] = {}

    @property
    def holding(self) -> Holding | None:
        """The kept layers, for heartbeats."""
        if not self._layers:
            return None
        return Holding(era=self._at[0], version=self._at[1], layers=tuple(self._layers))

    def take(self, plan: Plan, version: int, layers: Mapping[str, LayerState]) -> None:
        """Keep the layers of our group, which is at `version`, if the layout of `plan` ends there."""
        if plan.cutover_version and plan.cutover_version == version:
            self._begin((plan.era, version))
            self._layers.update(layers)

    def read(self, era: int, version: int) -> Mapping[str, LayerState]:
        """Return the layers of that version of that era; none if another was kept."""
        return self._layers if self._at == (era, version) else {}

    def follow(self, plan: Plan) -> None:
        """Forget layers that are neither the end of `plan` nor its beginning: all that need them have them."""
        ends, begins = (plan.era, plan.cutover_version), (plan.restore_era, plan.restore_version)
        if not (plan.cutover_version and self._at == ends) and not (plan.not_started and self._at == begins):
            self._begin((-1, 0))

    def _begin(self, at: tuple[int, int]) -> None:
        if at != self._at:
            self._at, self._layers = at, {}
