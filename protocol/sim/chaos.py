"""A random schedule of faults as plain data, and the coroutine that lets a world suffer it.

A schedule is drawn once, from one generator, before anything runs: it can be printed, kept, shortened by hand and
played again. Playing it draws nothing, so what a fault does never depends on what the peers did before.

Faults of one process (crash, pause, a dead daemon) never overlap on one peer, and at most `down_at_once_max` peers
are down at a time; everything else may coincide with everything.
"""

import asyncio
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from shoal.protocol.errors import LocalError
from shoal.protocol.sim.world import SimPeer, World


class FaultKind(StrEnum):
    """What `Fault.amount` is stands behind each; 0 where it is nothing."""

    CRASH = "crash"
    PAUSE = "pause"
    CUT = "cut"
    ONE_WAY_CUT = "one-way cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong, and when it is right again."""

    kind: FaultKind
    at_s: float
    """Seconds after `play` begins."""
    lasts_s: float | None
    """None: until the end of the world."""
    whom: tuple[str, ...]
    """Names of the peers that suffer it; of a fault between peers, one side."""
    others: tuple[str, ...] = ()
    """The other side."""
    amount: float = 0.0

    @property
    def ends_s(self) -> float:
        return math.inf if self.lasts_s is None else self.at_s + self.lasts_s

    def __str__(self) -> str:
        """`at 12.500 s for 8 s: crash of b`."""
        amount = f" {self.amount:g}" if self.amount else ""
        others = f" | {', '.join(self.others)}" if self.others else ""
        lasts = "for good" if self.lasts_s is None else f"for {self.lasts_s:.3g} s"
        return f"at {self.at_s:.3f} s {lasts}: {self.kind}{amount} of {', '.join(self.whom)}{others}"


Schedule = tuple[Fault, ...]
"""In order of `at_s`."""


def encode_schedule(schedule: Schedule) -> bytes:
    """As JSON, exactly: what `decode_schedule` reads is equal to it."""
    return msgspec.json.encode(schedule)


def decode_schedule(data: bytes) -> Schedule:
    """Raises: LocalError: not a schedule."""
    try:
        return msgspec.json.decode(data, type=tuple[Fault, ...])
    except msgspec.DecodeError as error:
        raise LocalError(f"this is not a schedule of faults: {error}") from error


# Drawing ------------------------------------------------------------------------------------------------------------

_PROCESS_KINDS = frozenset({FaultKind.CRASH, FaultKind.PAUSE})
"""Of these a peer has one at a time."""
_LASTS_S: Mapping[FaultKind, tuple[float, float]] = {
    FaultKind.CRASH: (2.0, 60.0),
    FaultKind.PAUSE: (0.1, 30.0),
    FaultKind.CUT: (0.5, 40.0),
    FaultKind.ONE_WAY_CUT: (0.5, 40.0),
}
"""Shortest and longest; drawn evenly on a logarithmic scale, since what is hard to survive sits near some timeout."""


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
    """Faults that begin and end within `duration_s`.

    Args:
        names: of the peers, in an order that is the same in every run.
        mean_gap_s: between two beginnings; the gaps are exponential.
        spared: who is never crashed, paused or left without a daemon (nor are those that are down already).
        down_at_once_max: how many peers may be down at one time; 0 leaves out what takes a peer down.
        recovers_s: a peer that was down is left alone at least so long, and counts as down.
    """
    faults: list[Fault] = []
    at_s = 0.0
    ordered = sorted(set(kinds), key=list(FaultKind).index)
    while ordered:
        at_s += rng.expovariate(1.0 / mean_gap_s)
        kind = rng.choice(ordered)
        shortest_s, longest_s = _LASTS_S[kind]
        lasts_s = math.exp(rng.uniform(math.log(shortest_s), math.log(longest_s)))
        if at_s >= duration_s:
            break
        lasts_s = min(lasts_s, duration_s - at_s)
        whom, others = _split(rng, names)
        if kind in _PROCESS_KINDS:
            down = {fault.whom[0] for fault in faults if _is_down(fault, at_s, recovers_s)}
            up = [name for name in names if name not in down and name not in spared]
            if not up or len(down) >= down_at_once_max:
                continue
            whom, others = (rng.choice(up),), ()
        faults.append(Fault(kind=kind, at_s=at_s, lasts_s=lasts_s, whom=whom, others=others))
    return tuple(faults)


def _is_down(fault: Fault, at_s: float, recovers_s: float) -> bool:
    return fault.kind in _PROCESS_KINDS and at_s < fault.ends_s + recovers_s


def _split(rng: random.Random, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Two sides, of any size from one."""
    shuffled = rng.sample(names, len(names))
    at = rng.randint(1, len(names) - 1)
    return tuple(sorted(shuffled[:at])), tuple(sorted(shuffled[at:]))


# Playing ------------------------------------------------------------------------------------------------------------


async def play(
    world: World,
    schedule: Schedule,
    *,
    on_return: Callable[[str], object],
    on_fault: Callable[[Fault], object] | None = None,
) -> None:
    """Let `world` suffer `schedule`, from now on; returns when the last fault that ends has ended.

    A fault whose peer is dead by then does nothing. Run it outside of any peer (a plain task), or it dies with one.

    Args:
        on_return: a crashed peer's time has come; adds a peer of that name to the world and starts its work, without
            waiting for it: a peer that crashes again would never let it end.
        on_fault: called at the beginning of each.
    """
    began_s = world.now_s()
    moments = [(fault.at_s, True, index) for index, fault in enumerate(schedule)]
    moments += [(fault.ends_s, False, index) for index, fault in enumerate(schedule) if fault.lasts_s is not None]
    ends: dict[int, Callable[[], object]] = {}
    for at_s, begins, index in sorted(moments):  # at one instant, what ends goes first
        await asyncio.sleep(began_s + at_s - world.now_s())
        if begins:
            if on_fault is not None:
                on_fault(schedule[index])
            ends[index] = _begin(world, schedule[index], on_return)
        else:
            ends.pop(index)()


def _begin(world: World, fault: Fault, on_return: Callable[[str], object]) -> Callable[[], object]:
    """Returns: what ends it."""
    for name in fault.whom + fault.others:
        if name not in world.peers:
            raise LocalError(f"{fault}: there is no {name!r} in this world")
    peers, others = ([world.peers[name] for name in side] for side in (fault.whom, fault.others))
    match fault.kind:
        case FaultKind.CRASH:
            for peer in peers:
                world.crash(peer)
            return lambda: [on_return(name) for name in fault.whom if not world.peers[name].is_alive]
        case FaultKind.PAUSE:
            paused = [peer for peer in peers if peer.is_alive]
            for peer in paused:
                world.pause(peer)
            return lambda: _resume(world, paused)
        case FaultKind.CUT | FaultKind.ONE_WAY_CUT:
            cut = world.partition(peers, others, one_way=fault.kind is FaultKind.ONE_WAY_CUT)
            return lambda: world.heal(cut)


def _resume(world: World, peers: Sequence[SimPeer]) -> None:
    for peer in peers:
        if peer.is_alive:
            world.resume(peer)
