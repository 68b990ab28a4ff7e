"""Random fault schedules as plain data, and the coroutine that applies one to a world.

A schedule is drawn before anything runs, so it can be printed, stored, shortened by hand and replayed. Playing it draws
nothing more, so the faults never depend on what the peers did before.

Faults that take a peer down (crash, pause, dead daemon, power cut) never overlap on one peer, and at most
`down_at_once_max` peers are down at a time. Faults of one kind never overlap on one peer. All other faults may overlap.
The end of one disk fault also ends the peer's other disk faults.
"""

import asyncio
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.protocol.errors import LocalError
from shoal.protocol.sim.paths import Disturbance
from shoal.protocol.sim.world import SimPeer, World


class FaultKind(StrEnum):
    """Kinds of faults: first those of one peer, then those of the paths between peers."""

    CRASH = "crash"
    PAUSE = "pause"
    DEAD_DAEMON = "dead daemon"
    SLOW_DEVICE = "slow device"
    """`amount`: the factor by which jobs take longer."""
    CLOCK_JUMP = "clock jump"
    """`amount`: seconds by which the clock goes forward (back if negative); at the fault's end it jumps back."""
    DISK_FULL = "full disk"
    DISK_ERRORS = "disk errors"
    POWER_CUT = "power cut"
    """A crash in the middle of the next disk operation, if one comes; the peer returns at the fault's end."""
    CUT = "cut"
    ONE_WAY_CUT = "one-way cut"
    SLOW_LINK = "slow link"
    """`amount`: the factor by which the path's rate falls."""
    LOSS = "loss"
    """`amount`: the probability that a message is lost. (In CORRUPTION: damaged. In DUPLICATION: delivered twice.)"""
    CORRUPTION = "corruption"
    DUPLICATION = "duplication"
    SPIKES = "spikes"
    """`amount`: the longest spike in seconds. A tenth of the messages is delayed, so calls overtake each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a schedule, with its times in seconds from the beginning of the schedule."""

    kind: FaultKind
    at_s: float
    lasts_s: float | None
    """Duration; None: until the end of the simulation."""
    whom: tuple[str, ...]
    """The affected peers; for a fault between peers, those of one side."""
    others: tuple[str, ...] = ()
    """The affected peers of the other side of a fault between peers."""
    amount: float = 0.0

    @property
    def ends_s(self) -> float:
        return math.inf if self.lasts_s is None else self.at_s + self.lasts_s

    def __str__(self) -> str:
        """Describe the fault in one line, such as `at 12.500 s for 8 s: crash of b`."""
        amount = f" {self.amount:g}" if self.amount else ""
        others = f" | {', '.join(self.others)}" if self.others else ""
        lasts = "for good" if self.lasts_s is None else f"for {self.lasts_s:.3g} s"
        return f"at {self.at_s:.3f} s {lasts}: {self.kind}{amount} of {', '.join(self.whom)}{others}"


Schedule = tuple[Fault, ...]


# Drawing ------------------------------------------------------------------------------------------------------------

_DOWN = frozenset({FaultKind.CRASH, FaultKind.PAUSE, FaultKind.DEAD_DAEMON, FaultKind.POWER_CUT})
_OF_ONE_PEER = _DOWN | {FaultKind.SLOW_DEVICE, FaultKind.CLOCK_JUMP, FaultKind.DISK_FULL, FaultKind.DISK_ERRORS}

Range = tuple[float, float]
_LASTS_S: Mapping[FaultKind, Range] = {
    FaultKind.CRASH: (2.0, 60.0),
    FaultKind.PAUSE: (0.1, 30.0),
    FaultKind.DEAD_DAEMON: (0.5, 15.0),
    FaultKind.SLOW_DEVICE: (5.0, 60.0),
    FaultKind.CLOCK_JUMP: (5.0, 60.0),
    FaultKind.DISK_FULL: (5.0, 60.0),
    FaultKind.DISK_ERRORS: (1.0, 30.0),
    FaultKind.POWER_CUT: (2.0, 60.0),
    FaultKind.CUT: (0.5, 40.0),
    FaultKind.ONE_WAY_CUT: (0.5, 40.0),
    FaultKind.SLOW_LINK: (5.0, 60.0),
    FaultKind.LOSS: (5.0, 60.0),
    FaultKind.CORRUPTION: (5.0, 60.0),
    FaultKind.DUPLICATION: (5.0, 60.0),
    FaultKind.SPIKES: (5.0, 60.0),
}
"""The range of each kind's duration. Durations and amounts are log-uniform, since the hard cases lie near some timeout
of the peers, and timeouts differ by orders of magnitude."""
_AMOUNT: Mapping[FaultKind, Range] = {
    FaultKind.SLOW_DEVICE: (2.0, 100.0),
    FaultKind.CLOCK_JUMP: (1.0, 60.0),
    FaultKind.SLOW_LINK: (2.0, 100.0),
    FaultKind.LOSS: (0.005, 0.3),
    FaultKind.CORRUPTION: (0.001, 0.1),
    FaultKind.DUPLICATION: (0.01, 0.5),
    FaultKind.SPIKES: (0.2, 10.0),
}


def draw_schedule(
    rng: random.Random,
    names: Sequence[str],
    *,
    duration_s: float,
    mean_gap_s: float = 20.0,
    kinds: Collection[FaultKind] = tuple(FaultKind),
    spared: Collection[str] = (),
    down_at_once_max: int = 1,
    recovers_s: float = 10.0,
) -> Schedule:
    """Draw faults that begin and end within `duration_s`.

    Args:
        names: the peers, in an order that is the same in every run.
        mean_gap_s: the mean time from the beginning of one fault to that of the next; the times are exponential.
        spared: peers that are never taken down.
        down_at_once_max: the most peers that are down at a time; 0: no faults that take a peer down.
        recovers_s: the seconds for which a peer still counts as down after such a fault.
    """
    faults: list[Fault] = []
    wanted = [kind for kind in FaultKind if kind in kinds]
    at_s = rng.expovariate(1.0 / mean_gap_s)
    while wanted and at_s < duration_s:
        kind = rng.choice(wanted)
        lasts_s = min(_between(rng, _LASTS_S[kind]), duration_s - at_s)
        amount = _between(rng, _AMOUNT[kind]) if kind in _AMOUNT else 0.0
        whom, others = tuple[str, ...](), tuple[str, ...]()
        if kind is FaultKind.CLOCK_JUMP:
            amount *= rng.choice((-1.0, 1.0))
        if kind in _OF_ONE_PEER:
            free = _free(faults, kind, at_s, names, spared, down_at_once_max, recovers_s)
            whom = (rng.choice(free),) if free else ()
        else:
            whom, others = _split(rng, names)
        if whom:
            faults.append(Fault(kind=kind, at_s=at_s, lasts_s=lasts_s, whom=whom, others=others, amount=amount))
        at_s += rng.expovariate(1.0 / mean_gap_s)
    return tuple(faults)


def _between(rng: random.Random, bounds: Range) -> float:
    least, most = bounds
    return math.exp(rng.uniform(math.log(least), math.log(most)))


def _free(
    faults: Sequence[Fault],
    kind: FaultKind,
    at_s: float,
    names: Sequence[str],
    spared: Collection[str],
    down_at_once_max: int,
    recovers_s: float,
) -> list[str]:
    if kind not in _DOWN:
        suffering = {fault.whom[0] for fault in faults if fault.kind is kind and at_s < fault.ends_s}
        return [name for name in names if name not in suffering]
    down = {fault.whom[0] for fault in faults if fault.kind in _DOWN and at_s < fault.ends_s + recovers_s}
    if len(down) >= down_at_once_max:
        return []
    return [name for name in names if name not in down and name not in spared]


def _split(rng: random.Random, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the peers into two sides; in half of the cases one side is a single peer. With one peer both sides are
    empty."""
    if len(names) < 2:
        return (), ()
    shuffled = rng.sample(names, len(names))
    at = rng.choice((1, rng.randint(1, len(names) - 1)))
    return tuple(sorted(shuffled[:at])), tuple(sorted(shuffled[at:]))


# Playing ------------------------------------------------------------------------------------------------------------


async def play(
    world: World,
    schedule: Schedule,
    *,
    on_return: Callable[[str], object],
    on_fault: Callable[[Fault], object] | None = None,
) -> None:
    """Apply `schedule` to `world` from now on; return when the last fault that ends has ended.

    A fault that takes a peer down does nothing if the peer is dead already. Run this coroutine as a plain task: a task
    of a peer dies with that peer.

    Args:
        on_return: called with the name of a crashed peer when that peer must return. It adds a peer of this name and
            starts the peer's work, without waiting for the work: if the peer crashes again, its work never ends.
        on_fault: called at the beginning of each fault.
    """
    began_s = world.now_s()
    moments = [(fault.at_s, True, index) for index, fault in enumerate(schedule)]
    moments += [(fault.ends_s, False, index) for index, fault in enumerate(schedule) if fault.lasts_s is not None]
    ends: dict[int, Callable[[], object]] = {}
    for at_s, begins, index in sorted(moments):  # at one instant, ends go first
        await asyncio.sleep(began_s + at_s - world.now_s())
        if begins:
            if on_fault is not None:
                on_fault(schedule[index])
            ends[index] = _begin(world, schedule[index], on_return)
        else:
            ends.pop(index)()


def _begin(world: World, fault: Fault, on_return: Callable[[str], object]) -> Callable[[], object]:
    for name in fault.whom + fault.others:
        if name not in world.peers:
            raise LocalError(f"{fault}: there is no {name!r} in this world")
    peers, others = ([world.peers[name] for name in side] for side in (fault.whom, fault.others))
    alive = [peer for peer in peers if peer.is_alive]
    match fault.kind:
        case FaultKind.CRASH:
            _each(alive, world.crash)
            return lambda: [on_return(name) for name in fault.whom if not world.peers[name].is_alive]
        case FaultKind.PAUSE:
            _each(alive, world.pause)
            return lambda: _resume(world, alive)
        case FaultKind.DEAD_DAEMON:
            for peer in alive:
                world.kill_daemon(peer, restarts_in_s=math.inf if fault.lasts_s is None else fault.lasts_s)
            return lambda: None
        case FaultKind.SLOW_DEVICE:
            _each(peers, lambda peer: world.slow_device(peer, fault.amount))
            return lambda: _each(peers, lambda peer: world.slow_device(peer, 1.0))
        case FaultKind.CLOCK_JUMP:
            _each(peers, lambda peer: world.jump_clock(peer, fault.amount))
            return lambda: _each(peers, lambda peer: world.jump_clock(peer, -fault.amount))
        case FaultKind.DISK_FULL:
            _each(peers, lambda peer: world.limit_disk(peer, 0))
            return lambda: _each(peers, world.mend_disk)
        case FaultKind.DISK_ERRORS:
            _each(peers, world.fail_disk)
            return lambda: _each(peers, world.mend_disk)
        case FaultKind.POWER_CUT:
            _each(alive, world.cut_power)
            return lambda: _after_power_cut(world, alive, on_return)
        case FaultKind.CUT | FaultKind.ONE_WAY_CUT:
            cut = world.partition(peers, others, one_way=fault.kind is FaultKind.ONE_WAY_CUT)
            return lambda: world.heal(cut)
        case _:
            disturbed = world.disturb(peers, others, _DISTURBANCE[fault.kind](fault.amount))
            return lambda: world.calm(disturbed)


_DISTURBANCE: Mapping[FaultKind, Callable[[float], Disturbance]] = {
    FaultKind.SLOW_LINK: lambda factor: Disturbance(slowness=factor),
    FaultKind.LOSS: lambda share: Disturbance(loss=share),
    FaultKind.CORRUPTION: lambda share: Disturbance(corruption=share),
    FaultKind.DUPLICATION: lambda share: Disturbance(duplication=share),
    FaultKind.SPIKES: lambda longest_s: Disturbance(spikes=0.1, spike_s=longest_s),
}


def _each(peers: Sequence[SimPeer], do: Callable[[SimPeer], None]) -> None:
    for peer in peers:
        do(peer)


def _after_power_cut(world: World, peers: Sequence[SimPeer], on_return: Callable[[str], object]) -> None:
    for peer in peers:
        if peer.is_alive:
            world.mend_disk(peer)
        elif not world.peers[peer.name].is_alive:
            on_return(peer.name)


def _resume(world: World, peers: Sequence[SimPeer]) -> None:
    _each([peer for peer in peers if peer.is_alive], world.resume)
