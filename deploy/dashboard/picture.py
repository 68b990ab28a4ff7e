"""Computes the traffic between peers and the placement of experts, as far as known. Pure.

Measured traffic takes precedence. On other links it is estimated from the plan's shares and the present tokens/s: each
token takes an activation one way and a gradient back.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from shoal.deploy.dashboard.view import ExpertView, LinkView
from shoal.deploy.record.report import Contribution
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PeerStatus, SwarmStatus

LINKS_MAX = 400
"""The most links (pairs of peers) to draw. With more, the page shows only the traffic between stages."""


def links(
    peers: Sequence[PeerStatus], contributions: Mapping[PeerID, Contribution], bytes_per_s: Sequence[float]
) -> tuple[LinkView, ...]:
    """Return the traffic of each pair of peers, both directions added.

    Args: bytes_per_s: [K - 1] for K stages: bytes/s from each stage to the next, in one direction, at the present rate.
    """
    listed = {peer.peer for peer in peers}
    found: dict[tuple[PeerID, PeerID], LinkView] = {}
    for source, told in contributions.items():
        for target, sent, received in told.links:
            if source in listed and target in listed:
                pair = min(source, target), max(source, target)
                before = found.get(pair)
                rate = max(sent + received, before.bytes_per_s if before else 0.0)
                found[pair] = LinkView(*pair, round(rate), True)
    by_stage: dict[int, list[PeerStatus]] = {}
    for peer in peers:
        if peer.stage is not None and peer.share > 0.0:
            by_stage.setdefault(peer.stage, []).append(peer)
    if sum(len(group) * len(by_stage.get(stage + 1, ())) for stage, group in by_stage.items()) > LINKS_MAX:
        return ()
    for stage, group in by_stage.items():
        if not 0 <= stage < len(bytes_per_s):
            continue
        for a in group:
            for b in by_stage.get(stage + 1, ()):
                pair = min(a.peer, b.peer), max(a.peer, b.peer)
                if pair not in found and not (a.peer in contributions or b.peer in contributions):
                    found[pair] = LinkView(*pair, round(2 * bytes_per_s[stage] * a.share * b.share), False)
    return tuple(found[pair] for pair in sorted(found))


def expert_views(status: SwarmStatus) -> tuple[ExpertView, ...]:
    """Return the experts in the table's order. Impossible entries are left out: another peer made the table."""
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
