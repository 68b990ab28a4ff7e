"""How a replica comes by its stage's state: from the run's seed, from snapshots, or from its mates."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shoal.peer.arithmetic import Held
from shoal.peer.group.driver import GroupDriver
from shoal.peer.handoff.fetcher import StateFetcher
from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.pipeline.state import StageState
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.plan import Plan
from shoal.protocol.ports import Compute

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class Joining:
    """Args:
    take_over: make a state ours; the pipeline and the group know it when this returns.
    begin_era: whether we may begin an era from its beginning, which is once.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        compute: Compute,
        inbox: ChunkInbox,
        runtime: Held,
        group: GroupDriver,
        take_over: Callable[[StageState], Awaitable[None]],
        begin_era: Callable[[int], Awaitable[bool]],
    ) -> None:
        self._endpoint = endpoint
        self._compute = compute
        self._inbox = inbox
        self._runtime = runtime
        self._group = group
        self._take_over = take_over
        self._begin_era = begin_era
        self._stepped = asyncio.Event()

    def stepped(self) -> None:
        """The pipeline has stepped."""
        self._stepped.set()

    async def run(self, plan: Plan) -> None:
        """Until we hold what our mates hold, or what the era of `plan` begins with. Tries for as long as it takes."""
        if not plan.fresh or not await self._begin_era(plan.era):
            await self._from_mates()
        elif plan.restore_version:
            await self._from_snapshots(plan)
        else:
            await self._from_seed()

    async def _from_seed(self) -> None:
        runtime = self._runtime
        timed = await self._compute.run("step", runtime.initial_state, flop=runtime.step_flop)
        await self._take_over(timed.value)

    async def _from_snapshots(self, plan: Plan) -> None:
        """The version at which the era begins, from whoever has it on disk, ourselves first."""
        me = self._endpoint.peer_id
        holders = [me, *(peer for peer in plan.members if peer != me)]
        while True:
            try:
                state = await self._fetcher().fetch(holders, version=plan.restore_version, stored_era=plan.restore_era)
            except (Unreachable, Refused, RemoteError) as error:
                logger.warning("cannot go back to version %d yet: %s", plan.restore_version, error)
                await asyncio.sleep(_RETRY_S)
                continue
            await self._take_over(state)
            return

    async def _from_mates(self) -> None:
        """Fetch their state, replay what they committed meanwhile."""
        while True:
            try:
                state = await self._fetcher().fetch(self._group.core.holders)
                if state.version >= self._group.core.version:
                    await self._take_over(state)
                while not await self._is_current():
                    pass
            except (Unreachable, Refused, RemoteError) as error:
                logger.info("no state yet: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            return

    async def _is_current(self) -> bool:
        """Replay one commit of the mates; True if there is none left."""
        holders = self._group.core.holders
        if not holders:
            raise Unreachable(self._endpoint.peer_id, "all mates have gone")
        self._stepped.clear()
        if not await self._group.fetch_mean(holders[0], self._group.core.version):
            return True
        await self._stepped.wait()
        return False

    def _fetcher(self) -> StateFetcher:
        runtime = self._runtime
        return StateFetcher(
            runtime.spec,
            runtime.keys,
            endpoint=self._endpoint,
            inbox=self._inbox,
            device=runtime.device,
            vectors=runtime.vectors,
        )
