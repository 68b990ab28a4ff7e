"""What a simulated device's timeline says."""

from collections.abc import Sequence

from shoal.protocol.sim.compute import SimJob


def busy_fraction(timeline: Sequence[SimJob], from_s: float, to_s: float) -> float:
    """The fraction of that span in which a job ran."""
    busy_s = sum(max(0.0, min(job.ended_s, to_s) - max(job.started_s, from_s)) for job in timeline)
    return busy_s / (to_s - from_s)
