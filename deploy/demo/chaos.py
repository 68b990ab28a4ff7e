"""Causes faults in a training demo. `--chaos` kills, restarts and suspends peers by a schedule drawn from a seed;
`--moe` kills one peer that holds the busiest expert.

The victim is a peer that the run can lose at that moment, never the sole holder of a stage or an expert: after the loss
of a stage the run goes back to a snapshot, which takes longer than a demo's recovery. Simulations test that case.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from shoal.deploy.demo.chronicle import Chronicle
from shoal.deploy.demo.crew import Crew, CrewMember
from shoal.deploy.demo.summary import FaultKind, FaultLine
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ExpertStatus, SwarmStatus

COMES_BACK_EVERY = 3
"""Every third peer that `--chaos` kills restarts with its name and folder. A new peer replaces each of the others."""
HEARD_S = 2.5
"""A peer that the coordinator has not heard for more seconds than this may be gone, so it is no holder of state."""
SETTLED_S = 5.0
"""Seconds after a process starts or resumes during which a status may still describe the peer as it was before: the
status is up to 2.5 s old, and its facts about a peer are up to `HEARD_S` older."""
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    seed: int = 0
    kill_every_s: float = 15.0
    suspend_s: float = 20.0

    def __post_init__(self) -> None:
        if self.kill_every_s <= 0 or self.suspend_s <= 0:
            raise ValueError("times between faults must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    at_s: float
    """Seconds from the demo's first step to the fault."""
    kind: Literal["kill", "kill_coordinator", "suspend"]
    comes_back: bool = False
    """True: the killed peer restarts; false: a new peer takes its place. A suspension does not use this."""


def schedule(options: ChaosOptions, rng: random.Random) -> Iterator[Act]:
    """Yield faults by time, without end: a kill at every multiple of `kill_every_s`, and one suspension, half-way
    between the first and second kill or the second and third. The first or the second kill hits the coordinator. `rng`
    draws which of the two it is in both cases."""
    coordinator_turn = 1 + rng.randrange(2)
    suspension_turn = 1 + rng.randrange(2)
    turn = 0
    while True:
        turn += 1
        kind: Literal["kill", "kill_coordinator"] = "kill_coordinator" if turn == coordinator_turn else "kill"
        yield Act(at_s=turn * options.kill_every_s, kind=kind, comes_back=turn % COMES_BACK_EVERY == 0)
        if turn == suspension_turn:
            yield Act(at_s=(turn + 0.5) * options.kill_every_s, kind="suspend")


def expendable(crew: Crew, status: SwarmStatus, *, now_s: float) -> list[CrewMember]:
    """Return the members that the run can lose now: each stage and expert that they hold has another reachable holder.

    A member that the status does not list has not joined, and holds nothing. Members do not count as holders if they
    are suspended, silent, leaving or fetching state, or started or resumed so lately that the status may be older.

    Args:
        status: the swarm's status, under the newest plan.
        now_s: the present time in `time.monotonic()`.
    """
    latest = {member.peer: member for member in crew.members}  # a restarted peer is two members
    unable: set[PeerID | None] = {
        peer
        for peer, member in latest.items()
        if member.suspended or not member.is_alive or now_s < member.awake_since_s + SETTLED_S
    }
    holders: dict[int, set[PeerID]] = {}
    stage_of: dict[PeerID | None, int] = {}
    for peer in status.peers:
        if peer.seen_s_ago > HEARD_S:
            unable.add(peer.peer)
        if peer.stage is not None:
            stage_of[peer.peer] = peer.stage
            if peer.synced and not peer.draining and peer.peer not in unable:
                holders.setdefault(peer.stage, set()).add(peer.peer)

    listed = [peer.peer for peer in status.peers]
    units = [{listed[at] for at in unit.holders if 0 <= at < len(listed)} - unable for unit in status.experts]

    def can_go(member: CrewMember) -> bool:
        stage = stage_of.get(member.peer)
        held = [unit for unit in units if member.peer in unit]
        if stage is not None:
            held.append(holders.get(stage, set()))
        return all(unit.difference({member.peer}) for unit in held)

    return [member for member in crew.alive if not member.suspended and can_go(member)]


def victim(crew: Crew, status: SwarmStatus, *, now_s: float) -> tuple[CrewMember, ExpertStatus] | None:
    """Return (member to kill, busiest expert). The member holds this expert, and the run can lose the member. The
    coordinator is chosen only if no other holder can be lost. None: the loads are unknown, or no holder can be lost.

    Args: status: the swarm's status, under the newest plan; now_s: the present time in `time.monotonic()`.
    """
    if not any(expert.load > 0.0 for expert in status.experts):
        return None
    busiest = max(status.experts, key=lambda expert: (expert.load, -expert.stage, -expert.expert))
    holders = {status.peers[at].peer for at in busiest.holders if 0 <= at < len(status.peers)}
    held = [member for member in expendable(crew, status, now_s=now_s) if member.peer in holders]
    chosen = min(held, key=lambda member: (member.peer == status.coordinator, member.name), default=None)
    return (chosen, busiest) if chosen is not None else None


async def _kill(crew: Crew, chronicle: Chronicle, member: CrewMember) -> None:
    left = await crew.kill(member)
    if left:
        chronicle.take_left_behind(member.name, left)


class Chaos:
    """Carries out a schedule on a crew.

    Args: until_s: the last time of a fault, in seconds after the first step; None: no limit.
    """

    def __init__(self, crew: Crew, chronicle: Chronicle, options: ChaosOptions, *, until_s: float | None) -> None:
        self._crew, self._chronicle = crew, chronicle
        self._options, self._until_s = options, until_s
        self._rng = random.Random(options.seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self.over = asyncio.Event()
        """Set when no further faults will come."""

    async def run(self) -> None:
        """Carry out the schedule until `until_s` or cancellation; then resume suspended peers."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()  # a fault that waits for a victim delays the later ones, too
        try:
            for act in schedule(self._options, self._rng):
                if self._until_s is not None and act.at_s > self._until_s:
                    break
                await asyncio.sleep(began_s + act.at_s - loop.time())
                member, status = await self._victim(act)
                began_s = max(began_s, loop.time() - act.at_s)
                await self._carry_out(act, member, status)
            self.over.set()
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry_out(self, act: Act, member: CrewMember, status: SwarmStatus) -> None:
        coordinates = member.peer == status.coordinator
        stage = next((peer.stage for peer in status.peers if peer.peer == member.peer), None)
        kind: FaultKind = "kill_coordinator" if act.kind == "kill" and coordinates else act.kind
        self._chronicle.take_fault(FaultLine(kind=kind, peer=member.name, stage=stage))
        if act.kind == "suspend":
            self._crew.suspend(member)
            self._spawn(self._resume_later(member))
            return
        self._spawn(_kill(self._crew, self._chronicle, member))
        await member.child.exited.wait()  # a restarted peer needs its folder
        newcomer = await self._crew.start(member.name if act.comes_back else "")
        await self._crew.let_in(newcomer)
        self._chronicle.take_fault(FaultLine(kind="return" if act.comes_back else "start", peer=newcomer.name))

    async def _victim(self, act: Act) -> tuple[CrewMember, SwarmStatus]:
        """Wait until the run can lose a peer that suits `act`. Return (this peer, the swarm's status that shows it)."""
        while True:
            status = self._chronicle.status
            if status is not None:
                members = expendable(self._crew, status, now_s=time.monotonic())
                if act.kind == "kill_coordinator":
                    members = [member for member in members if member.peer == status.coordinator]
                elif act.kind == "suspend":
                    members = [member for member in members if member.peer in {peer.peer for peer in status.peers}]
                if members:
                    return self._rng.choice(members), status
            await asyncio.sleep(_LOOK_S)

    async def _resume_later(self, member: CrewMember) -> None:
        try:
            await asyncio.sleep(self._options.suspend_s)
        finally:
            self._crew.resume(member)
        self._chronicle.take_fault(FaultLine(kind="resume", peer=member.name))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def kill_a_holder(crew: Crew, chronicle: Chronicle, *, is_time: Callable[[], bool]) -> None:
    """Kill one holder of the busiest expert as soon as `is_time` returns True, and start no peer in its place."""
    while True:
        status = chronicle.status if is_time() else None
        found = victim(crew, status, now_s=time.monotonic()) if status is not None else None
        if status is not None and found is not None:
            break
        await asyncio.sleep(_LOOK_S)
    member, expert = found
    kind: FaultKind = "kill_coordinator" if member.peer == status.coordinator else "kill"
    chronicle.take_fault(FaultLine(kind=kind, peer=member.name, stage=expert.stage, expert=expert.expert))
    await _kill(crew, chronicle, member)
