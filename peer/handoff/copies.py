"""Copies of a group's state on peers outside the group (keepers): chooses keepers, and keeps others' copies."""

import asyncio
import logging

from shoal.peer.base.plans import Plans
from shoal.peer.base.tasks import Tasks
from shoal.peer.base.tolerating import Tolerating
from shoal.peer.disk.attesting import Attesting
from shoal.peer.handoff.base_layers import BaseLayers
from shoal.peer.handoff.fetcher import StateFetcher
from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.handoff.server import StateServer
from shoal.peer.model.state import StageState
from shoal.peer.presence.life import Life
from shoal.peer.presence.ports import Ports
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import group_keys
from shoal.protocol.limits import CALL_TIMEOUT_S, KEEPING_AT_ONCE_S, KEEPING_S_MIN, KEEPING_SHARE
from shoal.protocol.messages import Keep, Saved
from shoal.protocol.plan import Plan
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

WRITERS = 2
"""Number of members of a group that write a snapshot and have a copy made outside: one of them may die meanwhile."""


class Copies:
    """Has copies made of our groups' state, and keeps copies for other groups.

    Args:
        attesting: signs the saved states; its archive stores them.
        base: the frozen base of adapters, which a keeper keeps too; None: the run has no adapters.
    """

    def __init__(
        self,
        attesting: Attesting,
        ports: Ports,
        *,
        spec: RunSpec,
        server: StateServer,
        inbox: ChunkInbox,
        plans: Plans,
        life: Life,
        tasks: Tasks,
        base: BaseLayers | None = None,
    ) -> None:
        self._base = base
        self._archive = attesting.archive
        self._attesting = attesting
        self._endpoint, self._clock = ports.endpoint, ports.clock
        self._spec = spec
        self._server = server
        self._inbox = inbox
        self._plans, self._life = plans, life
        self._tasks = tasks
        self._fetching: dict[tuple[PeerID, tuple[str, ...]], int] = {}
        """(Sender of a Keep, layers) -> the version that we fetch for it."""
        self._failed: dict[tuple[PeerID, tuple[str, ...]], int] = {}
        """(Sender of a Keep, layers) -> the last version of which we tried in vain to keep a copy."""
        self._fetched_until_s: dict[PeerID, float] = {}
        """Member -> time until which its past copies count, each for 1 / `KEEPING_SHARE` times its fetch."""
        self._saving: dict[int, asyncio.Lock] = {}
        """Group -> lock of its writes: `save` may be called for a version that is being written."""
        self._given: dict[int, list[tuple[PeerID, int]]] = {}
        """Group -> (keeper, version) of the last copies that we asked for."""
        self._endpoint.on(Keep, self._on_keep)

    def preserve(self, group: int, state: StageState, *, rank: int, num_ready: int) -> None:
        """Save `state` and have it copied, if a snapshot of the state's version is due and we are one of the first
        `WRITERS` members. Args: rank: our rank in the group; num_ready: the group's ready members."""
        if self._archive.is_due(state.version) and rank < WRITERS:
            # If the group has one member, that member asks for both copies.
            copies = [rank] if num_ready > 1 else list(range(WRITERS))
            self._tasks.spawn(self._preserve(group, state, copies), f"snapshot {state.version}")

    async def _preserve(self, group: int, state: StageState, copies: list[int]) -> None:
        plan = self._plans.newest
        await self.save(group, state)
        if plan is not None and state.version == plan.cutover_version and moves_on(plan, group):
            return  # the next holders are about to fetch this state, and will have copies made of it
        # Each copy under way holds a state in memory, and one more copy would slow it down.
        under_way = self._given[group] = [at for at in self._given.get(group, ()) if self._server.is_giving(*at)]
        if under_way:
            return
        await self._server.pin(state)
        message = Keep(version=state.version, layers=tuple(state.layers))
        for copy in copies:
            for peer in self._to_ask(group, copy):
                with Tolerating(logger.debug, "no copy there"):
                    await self._endpoint.ask(peer, message, Saved)
                    under_way.append((peer, state.version))
                    self._server.gives_copy(peer, state.version, state.layers)
                    break

    async def save(self, group: int, state: StageState) -> bool:
        """Sign `state`, and write it to our disk if it is not there yet. Returns: True if the disk has it now."""
        await self._attesting.sign(state, era=self._endpoint.era)
        async with self._saving.setdefault(group, asyncio.Lock()):
            era = self._endpoint.era
            is_there = self._archive.has(state.layers, era=era, version=state.version)
            return is_there or await self._archive.write(state, era=era)

    async def give(self, group: int, state: StageState, *, until_s: float) -> list[PeerID]:
        """Have other peers keep `state` before we leave. Returns: the peers that have it on disk by `until_s`."""
        await self._server.pin(state)
        kept = await asyncio.gather(*(self._kept_by(group, state, copy, until_s) for copy in range(WRITERS)))
        return list(dict.fromkeys(peer for peer in kept if peer is not None))

    async def _kept_by(self, group: int, state: StageState, copy: int, until_s: float) -> PeerID | None:
        """Ask one peer after the other to keep `state`, until one has it on disk. None: no peer has by `until_s`."""
        message = Keep(version=state.version, layers=tuple(state.layers))
        for peer in self._to_ask(group, copy):
            with Tolerating(logger.info, "no copy there"):
                while (left_s := until_s - self._clock.now_s()) > 0.0:
                    answer_s = min(left_s, CALL_TIMEOUT_S)
                    if (await self._endpoint.ask(peer, message, Saved, timeout_s=answer_s)).version >= state.version:
                        return peer
                    await asyncio.sleep(0.25)
        return None

    def _to_ask(self, group: int, copy: int) -> list[PeerID]:
        """Return the keepers of `group` in the order in which copy number `copy` asks them. Each copy begins at another
        keeper, so that one gets both copies only if there is no other."""
        plan = self._plans.newest
        outside = keepers(plan, group) if plan is not None else []
        first = copy % max(1, len(outside))
        return outside[first:] + outside[:first]

    async def _on_keep(self, source: PeerID, message: Keep) -> Saved:
        me, copy = self._endpoint.peer_id, (source, message.layers)
        plan = self._plans.newest
        if not self._archive.keeps:
            raise Refused(me, "keeps nothing on disk")
        is_last = message.version >= self._spec.training.steps  # of the final version, leaving peers keep copies too
        if self._life.is_draining and not is_last:
            raise Refused(me, "is leaving, too")
        if plan is None or not plan.groups_of(source):
            raise Refused(me, "does not know the sender as a holder")
        if not any(message.layers == group_keys(self._spec.model, plan, group) for group in plan.groups_of(source)):
            raise RemoteError(source, "asks to keep layers that it does not hold")
        if self._archive.has(message.layers, era=self._endpoint.era, version=message.version):
            return Saved(version=message.version)
        if self._fetching.get(copy) == message.version:
            return Saved(version=0)
        if copy in self._fetching:
            raise Refused(me, "still fetches the previous copy")
        if self._failed.get(copy) == message.version:
            raise Refused(me, "could not keep that version")
        now_s = self._clock.now_s()
        self._fetched_until_s = {p: at_s for p, at_s in self._fetched_until_s.items() if at_s > now_s}
        if self._fetched_until_s.get(source, now_s) > now_s + KEEPING_AT_ONCE_S:
            raise Refused(me, "has spent its time for copies of the sender's state, and keeps no more for now")
        self._fetching[copy] = message.version
        self._tasks.spawn(self._keep(source, message), f"keep version {message.version} of {message.layers[0]}")
        return Saved(version=0)

    async def _keep(self, source: PeerID, message: Keep) -> None:
        era, began_s, copy = self._endpoint.era, self._clock.now_s(), (source, message.layers)
        fetcher = StateFetcher(self._spec, message.layers, self._inbox)
        self._failed[copy] = message.version
        try:
            state = await fetcher.fetch([source], version=message.version)
            if await self._archive.write(state, era=era):
                del self._failed[copy]
        except (Unreachable, Refused, RemoteError) as error:
            logger.warning("no copy of version %d: %s", message.version, error)
        finally:
            del self._fetching[copy]
            took_s = max(KEEPING_S_MIN, self._clock.now_s() - began_s)
            since_s = max(began_s, self._fetched_until_s.get(source, began_s))
            self._fetched_until_s[source] = since_s + took_s / KEEPING_SHARE
        if self._base is not None:
            await self._base.get_ready(message.layers, [source])


def moves_on(plan: Plan, group: int) -> bool:
    """True if in the plan's next layout each layer of the stage `group` has a holder outside the present group."""
    if group >= len(plan.stages):
        return False
    stage, members = plan.stages[group], {member.peer for member in plan.group_members(group)}
    return all(
        any(
            peer not in members
            for after in plan.next_layout
            if after.first_layer <= layer < after.last_layer
            for peer in after.peers
        )
        for layer in range(stage.first_layer, stage.last_layer)
    )


def keepers(plan: Plan, group: int) -> list[PeerID]:
    """Return the peers to ask to keep copies of `group`, in order: spare peers, the other stages in a circle from this
    one, the two neighbouring stages, and this group's own stage (for an expert, its members that do not hold it).
    Neighbours come late because their activations and gradients would wait behind the copies.

    The order changes only with the plan, so a new copy goes to the same peer and replaces the old one."""
    num_stages = len(plan.stages)
    members = {member.peer for member in plan.group_members(group)}
    stage = group if group < num_stages else plan.experts[group - num_stages].stage
    around = [(stage + i) % num_stages for i in range(1, num_stages)]
    order = [*sorted(around, key=lambda other: abs(other - stage) == 1), stage]
    later = [plan.stages[other].peers for other in order]
    return [peer for peer in (*plan.spares, *(peer for peers in later for peer in peers)) if peer not in members]
