"""Finds what limits a peer's contribution, from its measurements and the coordinator's table. Pure.

The first row that holds is the answer. A device counts as the limit if it computes at least 85 % of the time, or 60 %
with work in its queue; an upload, if it sends at least 80 % of the time.

| answer | holds when |
|---|---|
| pause | the owner, or a limit that the owner has set, has paused the peer |
| place, state | the peer has no stage or is leaving; the peer fetches its stage's state |
| cap | work waits for a device with a limited share of the time; or *upload* holds, and the upload is limited |
| device | the device computes nearly all the time, or most of the time with work in its queue |
| upload | the peer is nearly always sending |
| swarm | the device waits for other peers: for the stage with the least capacity, if that is another one |
"""

from collections.abc import Sequence

from shoal.deploy.dashboard.view import LimitedBy
from shoal.deploy.record.report import Contribution
from shoal.protocol.messages import PeerStatus


def limited_by(mine: Contribution, peers: Sequence[PeerStatus], *, num_stages: int) -> LimitedBy:
    """Return what limits the peer. Args: peers: the rows of the coordinator's table; empty if unknown."""
    limits = mine.limits
    if limits is not None and limits.paused:
        return LimitedBy(kind="pause", text=f"paused: {limits.why}" if limits.why else "paused")
    if mine.stage is None and num_stages == 0:
        return LimitedBy(kind="place", text="no work yet: waiting for the coordinator's plan")
    if mine.stage is None:
        return LimitedBy(kind="place", text="no work yet: standing by, in case another peer leaves")
    if any(peer.peer == mine.peer and peer.draining for peer in peers):
        return LimitedBy(kind="place", text="leaving: finishing its work")
    if not mine.synced:
        others = any(peer.peer != mine.peer for peer in peers)
        source = "fetching the state of stage {} from other peers" if others else "getting the state of stage {} ready"
        return LimitedBy(kind="state", text=source.format(mine.stage))
    caps = limits.caps if limits is not None else ()
    resting = next((cap for cap in caps if "device's time" in cap), "")
    if resting and mine.waiting > 0:
        text = f"limited by what you have set: {resting} (it computes {100 * mine.busy:.0f} %)"
        return LimitedBy(kind="cap", text=text)
    # With queued microbatches the rest of the time is the program's overhead.
    if mine.busy >= (0.6 if mine.waiting > 0 else 0.85):
        return LimitedBy(kind="device", text=f"limited by the device: it computes {100 * mine.busy:.0f} % of the time")
    if mine.sending >= 0.8:
        cap = next((cap for cap in caps if "upload" in cap), "")
        if cap:
            return LimitedBy(kind="cap", text=f"limited by what you have set: {cap}")
        return LimitedBy(kind="upload", text=f"limited by the upload: it sends {100 * mine.sending:.0f} % of the time")
    if mine.busy == 0.0:
        return LimitedBy(kind="swarm", text="no work now: the other peers send it nothing to compute")
    slowest = slowest_stage(peers, num_stages=num_stages)
    waits = f"waiting for other peers: the device computes {100 * mine.busy:.0f} % of the time"
    if slowest is None or slowest == mine.stage:
        return LimitedBy(kind="swarm", text=waits)
    return LimitedBy(kind="swarm", text=f"{waits}, stage {slowest} is the slowest")


def slowest_stage(peers: Sequence[PeerStatus], *, num_stages: int) -> int | None:
    """Return the stage with the lowest capacity in microbatches/s; None if the capacity of some stage is unknown."""
    rates = [0.0] * num_stages
    for peer in peers:
        is_at_work = peer.synced or peer.light is not None
        if peer.stage is not None and peer.stage < num_stages and is_at_work and peer.forward_s > 0.0:
            # A backward costs two forwards. The last stage's `forward_s` includes both.
            times = 1.0 if peer.stage == num_stages - 1 else 3.0
            rates[peer.stage] += 1.0 / (times * peer.forward_s)
    if not rates or min(rates) == 0.0:
        return None
    return min(range(num_stages), key=lambda stage: (rates[stage], stage))
