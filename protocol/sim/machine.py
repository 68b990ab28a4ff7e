"""A simulated machine, which outlives its processes."""

from dataclasses import dataclass

from shoal.protocol.sim.dirt import DevicePace
from shoal.protocol.sim.disk import SimDisk


@dataclass(slots=True, eq=False)
class Machine:
    """A peer's machine. A peer that returns after a crash gets it back, with what the crash has left on the disk."""

    place: int
    disk: SimDisk
    clock_ahead_s: float = 0.0
    slowdown: float = 1.0
    """The factor by which jobs on its device take longer."""
    pace: DevicePace | None = None
    """The progress of jobs on a device with varying speed (`dirt.py`); None: the device's speed is constant."""
