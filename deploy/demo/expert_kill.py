"""`shoal demo --moe` kills one peer that holds the busiest expert, when half of the demo is over."""

import asyncio
import time
from collections.abc import Callable

from shoal.deploy.demo.chaos import expendable
from shoal.deploy.demo.crew import Crew, Member
from shoal.deploy.demo.summary import FaultKind, FaultLine
from shoal.protocol.messages import ExpertStatus, SwarmStatus

_LOOK_S = 0.2


def victim(crew: Crew, status: SwarmStatus, *, now_s: float) -> tuple[Member, ExpertStatus] | None:
    """A holder of the busiest expert that the run can lose; the coordinator is the last choice.

    None: nobody has told of loads yet, or the run can lose none of them now. `status`, `now_s`: see `expendable`.
    """
    if not any(expert.load > 0.0 for expert in status.experts):
        return None
    busiest = max(status.experts, key=lambda expert: (expert.load, -expert.stage, -expert.expert))
    holders = {status.peers[at].peer for at in busiest.holders if 0 <= at < len(status.peers)}
    held = [member for member in expendable(crew, status, now_s=now_s) if member.peer in holders]
    chosen = min(held, key=lambda member: (member.peer == status.coordinator, member.name), default=None)
    return (chosen, busiest) if chosen is not None else None


class ExpertKill:
    """Args:
    is_time: whether half is over.
    status, on_fault, on_left_behind: as `Chaos` has them.
    """

    def __init__(
        self,
        crew: Crew,
        *,
        is_time: Callable[[], bool],
        status: Callable[[], SwarmStatus | None],
        on_fault: Callable[[FaultLine], None],
        on_left_behind: Callable[[str, list[int]], None],
    ) -> None:
        self._crew = crew
        self._is_time = is_time
        self._status = status
        self._on_fault = on_fault
        self._on_left_behind = on_left_behind

    async def run(self) -> None:
        """Wait for the time and kill. Nobody comes in the place of the killed peer."""
        while True:
            status = self._status() if self._is_time() else None
            found = victim(self._crew, status, now_s=time.monotonic()) if status is not None else None
            if status is not None and found is not None:
                break
            await asyncio.sleep(_LOOK_S)
        member, expert = found
        kind: FaultKind = "kill_coordinator" if member.peer == status.coordinator else "kill"
        self._on_fault(FaultLine(kind=kind, peer=member.name, stage=expert.stage, expert=expert.expert))
        left = await self._crew.kill(member)
        if left:
            self._on_left_behind(member.name, left)
