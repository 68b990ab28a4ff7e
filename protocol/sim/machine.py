"""Holds what stays where it is when a process ends."""

from dataclasses import dataclass

from shoal.protocol.sim.disk import SimDisk


@dataclass(slots=True, eq=False)
class Machine:
    """The machine on which a peer runs; a peer that comes back after a crash finds it as it left it."""

    place: int
    """Row of the network's matrix."""
    disk: SimDisk
    clock_ahead_s: float = 0.0
    """How far its wall clock is ahead of the right time."""
    slowdown: float = 1.0
    """How many times longer than they should its device's jobs take."""
