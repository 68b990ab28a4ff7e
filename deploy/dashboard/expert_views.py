"""Shows who holds which expert and what load it carries, from the coordinator's table. Pure."""

import math
from collections.abc import Iterable

from shoal.deploy.dashboard.view import ExpertView
from shoal.protocol.messages import SwarmStatus


def expert_views(status: SwarmStatus) -> tuple[ExpertView, ...]:
    """The experts in the table's order. Another peer wrote the table, so what cannot be is left out."""
    shown = [told for told in status.experts if 0 <= told.stage < len(status.stages)]
    counts = [0] * len(status.stages)
    loads = [0.0] * len(status.stages)
    for told in shown:
        counts[told.stage] += 1
        loads[told.stage] += _share(told.load)

    def peers(positions: Iterable[int]) -> tuple[int, ...]:
        return tuple(position for position in positions if 0 <= position < len(status.peers))

    return tuple(
        ExpertView(
            stage=told.stage,
            expert=told.expert,
            load=round(_share(told.load) * counts[told.stage], 3) if loads[told.stage] > 0.0 else None,
            replicas=len(peers(told.holders)),
            holders=peers(told.holders),
            coming=peers(told.coming),
        )
        for told in shown
    )


def _share(load: float) -> float:
    return min(1.0, max(0.0, load)) if math.isfinite(load) else 0.0
