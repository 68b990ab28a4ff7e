"""Gets a replica its stage's state: from the run's seed or initial weights, from snapshots, or from its group.

While the group's state comes slowly, the replica may be a learner, a member with weights alone (`learner.py`).
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping

from shoal.peer.base.tolerating import Tolerating
from shoal.peer.group.catching_up import CatchingUp
from shoal.peer.group.witnesses import is_witnessed
from shoal.peer.handoff.fetcher import FetchProgress, StateFetcher
from shoal.peer.handoff.initial import begins_with_weights, first_state, initial_digests, layers_of
from shoal.peer.handoff.server import INITIAL
from shoal.peer.membership.learner import Learner
from shoal.peer.model.state import LayerState, StageState
from shoal.peer.pipeline.shard import Shard
from shoal.peer.replica.member import MemberCore
from shoal.peer.replica.views import GroupView
from shoal.peer.services.services import Services
from shoal.protocol.certificate import layers_at
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan

logger = logging.getLogger(__name__)


_RETRY_S = 1.0


class Joining:
    """Gets one member of a group (a stage's or an expert's) its state.

    Args:
        core: the member's decision logic, which has the newest plan that the member follows.
        take_over: makes the member continue from a state; when it returns, the pipeline and the group know the state.
    """

    def __init__(
        self,
        services: Services,
        core: MemberCore,
        runtime: Shard,
        catching_up: CatchingUp,
        *,
        take_over: Callable[[StageState], Awaitable[None]],
    ) -> None:
        self._endpoint, self._compute, self._layers = services.endpoint, services.compute, services.layers
        self._core = core
        self._group: GroupView = core.group
        self._runtime = runtime
        self._catching_up = catching_up
        self._take_over = take_over
        self._light: Learner | None = None
        self._stepped = asyncio.Event()
        self._progress: FetchProgress | None = None

    @property
    def progress(self) -> FetchProgress | None:
        """Progress of the fetch that is under way; None: there is none."""
        of_light = self._light.progress if self._light is not None else None
        return self._progress if of_light is None else of_light

    def stepped(self) -> None:
        """Record that the pipeline has made a step."""
        self._stepped.set()

    async def run(self, plan: Plan, learner: Learner | None = None) -> None:
        """Return when we hold the group's state, or the state with which the era of `plan` begins. Retry until we do.
        Args: learner: lets us train as a learner while the state comes slowly; None: this group has no learners."""
        self._light = learner
        try:
            await self._acquire(plan)
        finally:
            self._progress = self._light = None

    async def _acquire(self, plan: Plan) -> None:
        if not plan.not_started or not self._layers.archive.begin_era(plan.era, self._group.stage):
            await self._from_group_peers()
        elif plan.restore_version:
            await self._from_snapshots(plan)
        elif begins_with_weights(self._runtime.spec):
            await self._from_initial_weights()
        else:
            await self._from_seed()

    async def _from_seed(self) -> None:
        runtime = self._runtime
        timed = await self._compute.run("step", runtime.initial_state, flop=runtime.step_flop)
        await self._take_over(timed.value)

    async def _from_initial_weights(self) -> None:
        """Fetch the weights that the run's spec names. We ask all members, but only the host offers them."""
        runtime = self._runtime
        wanted, digests = layers_of(runtime.keys), initial_digests(runtime.spec)
        while True:
            with Tolerating(logger.info, "no initial weights"):
                fetch = self._fetcher(wanted).fetch(self._to_ask(), version=0, stored_era=INITIAL, expected=digests)
                layers = (await fetch).layers
                break
            await asyncio.sleep(_RETRY_S)
        begin = functools.partial(first_state, runtime.spec, runtime.keys, layers, runtime.device)
        timed = await self._compute.run("step", begin, flop=runtime.step_flop)
        await self._take_over(timed.value)

    async def _from_snapshots(self, plan: Plan) -> None:
        """Begin the plan's era (the versions since the last roll-back or repartitioning) at its first version. Use the
        layers that we have kept of the last layout, and those fetched ahead if their digests are right. Fetch the
        others from peers (ourselves first) that have kept them or have them on disk. If the era is under way, join the
        group instead: peers may have dropped the layers that they kept."""
        keys, version = self._runtime.keys, plan.restore_version
        carried = self._layers.retained.read(plan.restore_era, version)
        missing = tuple(key for key in keys if key not in carried)
        ahead = await self._layers.ahead.ended(plan.restore_era, version, self._to_ask()) if missing else {}
        known = {key: ahead[key] for key in missing if key in ahead}
        if missing:
            logger.info("%d layers to get, %d of them fetched ahead", len(missing), len(known))
        wait_s = 0.1  # the holders of our layers may hear of the layout later than we do
        while True:
            with Tolerating(logger.warning, f"cannot begin at version {version} yet"):
                fetched = await self._with_group_peers(missing, plan, known) if missing else {}
                layers = {key: carried[key] if key in carried else fetched[key] for key in keys}
                await self._take_over(StageState(version=version, layers=layers))
                return await self._follow_who_began()
            newest = self._core.plan
            if newest.era == plan.era and not newest.not_started:
                return await self._from_group_peers()
            await asyncio.sleep(wait_s)
            wait_s = min(2.0 * wait_s, _RETRY_S)

    async def _follow_who_began(self) -> None:
        """Replay the steps of members that began the era before us: a step that only one member has is lost if the
        member dies. If this fails, go on: we catch up later, in our group's rounds."""
        with Tolerating(logger.info, "cannot replay yet the steps of members that began before us"):
            while self._group.holders and not await self._is_current():
                pass

    async def _with_group_peers(
        self, missing: tuple[str, ...], plan: Plan, known: Mapping[str, LayerState]
    ) -> Mapping[str, LayerState]:
        """Fetch the layers with which an era begins, and share them with the members of our group that lack them too.
        Raises: the errors of `StateFetcher.fetch`."""
        version, era, holders = plan.restore_version, plan.restore_era, self._to_ask()
        with self._layers.server.sharing(self._group.group_peers) as relay:
            state = await self._fetcher(missing).fetch(
                holders,
                version=version,
                stored_era=era,
                known=known,
                expected=layers_at(plan.certified, (era, version)),
                relay=relay,
                carriers=holders[1:],
            )
        return state.layers

    def _to_ask(self) -> list[PeerID]:
        """Return the peers to ask for layers on disks: ourselves, then all members of the newest plan. That plan may
        name a host, or a keeper of a copy, that was away when the era began."""
        me = self._endpoint.peer_id
        return [me, *(peer for peer in self._core.plan.members if peer != me)]

    async def _from_group_peers(self) -> None:
        """Fetch the newest state that most of its holders have signed, then replay the later commits."""
        group, keys = self._group, self._runtime.keys
        while True:
            with Tolerating(logger.info, "no state yet"):
                learner = self._light if self._runtime.state is None else None  # else we lack only steps
                if learner is not None and await learner.begin():
                    await self._take_over(await learner.run())
                    return
                with self._layers.server.sharing(group.joining) as relay:
                    state = await self._fetcher().fetch(
                        group.holders,
                        is_witnessed=lambda offer: is_witnessed(self._endpoint, offer, keys, group.voters(group.me)),
                        relay=relay,
                    )
                if state.version >= self._group.version:
                    await self._take_over(state)
                while not await self._is_current():
                    pass
                return
            await asyncio.sleep(0.25)  # holders may still be signing their state, which takes a round trip

    async def _is_current(self) -> bool:
        """Replay one commit of the group. Returns: True if no commit was left to replay."""
        self._stepped.clear()
        if not await self._replay_next():
            return True
        await self._stepped.wait()
        return False

    async def _replay_next(self) -> bool:
        """Get the gradient of the next commit from a holder. Members that join at the same time ask different holders:
        a single holder could not send a step's gradient to many members before the next step ends. Returns: False: the
        holder has not committed the step. Raises: Unreachable: no holder can be reached; Refused."""
        holders = self._group.holders
        joining = sorted((self._group.me, *self._group.joining))
        first = joining.index(self._group.me) % len(holders) if holders else 0
        error = Unreachable(self._endpoint.peer_id, "all other members have gone")
        for holder in (*holders[first:], *holders[:first]):
            try:
                return await self._catching_up.fetch(holder, self._group.version) == "taken"
            except Unreachable as unreachable:
                error = unreachable
        raise error

    def _fetcher(self, keys: tuple[str, ...] | None = None) -> StateFetcher:
        runtime = self._runtime
        fetcher = StateFetcher(runtime.spec, keys or runtime.keys, self._layers.inbox, device=runtime.device)
        self._progress = fetcher.progress
        return fetcher
