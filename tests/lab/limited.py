"""A device that its owner lends for a share of the time, in virtual time: as `ThreadCompute` rests a real one."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import TypeVar

from shoal.protocol.duty import Duty
from shoal.protocol.ports import Compute, JobKind, Timed

T = TypeVar("T")


class LimitedCompute:
    """Implements `Compute`: `compute` at its full speed, which rests once it has worked more than `share` of the time.

    Args: probe_times: how often faster a probe finds the device than it is at work, as a real peer's probe does: it
    times one layer, alone on the machine. The first plan is made with that speed.

    A device that waited for others makes up for that by its next jobs (`duty.py`), so that a step of a pipeline, in
    which each device waits most of the time, is quicker than with devices of `share` times the speed.
    """

    def __init__(self, compute: Compute, share: float, *, probe_times: float = 1.0) -> None:
        self._compute, self._share, self._probe_times = compute, share, probe_times
        self._duty, self._turn = Duty(share), asyncio.Lock()

    async def run(self, kind: JobKind, work: Callable[[], T], *, flop: float) -> Timed[T]:
        """The job is said to have taken as long as the share takes to earn it, as in life.

        Raises: whatever `work` raises. LocalError: the device is closed.
        """
        async with self._turn:
            await asyncio.sleep(self._duty.rest_s(asyncio.get_running_loop().time()))
            timed = await self._compute.run(kind, work, flop=flop / self._probe_times if kind == "probe" else flop)
            took_s = timed.ended_s - timed.started_s
            self._duty.spend(took_s)
        return dataclasses.replace(timed, ended_s=timed.started_s + took_s / self._share)

    async def run_on_host(self, work: Callable[[], T]) -> T:
        return await self._compute.run_on_host(work)

    def close(self) -> None:
        self._compute.close()
