"""Lets a peer leave the run without losing trained state.

If another member with the same layers stays, we drain: we finish our work and wait until it is committed
(`GroupMembership.drain`). If no such member stays, we are a last holder: alone, or with members that leave too. Our
layers would be lost to the run until we come back. So each last holder does three things:

    halt   ask stage 0's leader (`Halt`) to begin no further step; the answer is the version at which all stages stop
    save   at that version, write our layers to our disk and sign them: a majority of the group certifies a version.
           One last holder of the group also has all members of the run save (`Save`), and other peers keep copies
    stay   if a new plan gives our place to another peer, wait until that peer holds our layers

So the disks have a complete snapshot of one version, from which the run can go on, whether only we leave or all peers.
Uncommitted microbatches are computed again. Each of the three has a time limit, and so has the whole departure.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from shoal.peer.base.tolerating import Tolerating
from shoal.peer.model.state import StageState
from shoal.peer.presence.parts import Part
from shoal.peer.services.services import Services
from shoal.protocol.errors import Refused, RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import SAVES_OF_ONE_MAX
from shoal.protocol.messages import Halt, Halted, Save, Saved
from shoal.protocol.plan import Plan

logger = logging.getLogger(__name__)

_HALT_SHARE: Final = 0.6
"""Fraction of the departure's time for a halt. After half of it we ask stage 0 to give up the step under way."""
_ASK_AGAIN_S: Final = 1.0
"""Interval at which we repeat the request for a halt: stage 0 may have a new leader that has not heard it."""
_SAVE_S: Final = 60.0
"""Seconds that the write to our own disk may take, even beyond our time limit: without it our layers may be lost."""
_ANSWER_S: Final = 4.0
"""Seconds for which we delay the answer to a `Save` until we reach its version; less than a call's timeout."""
_PLAN_HEARTBEATS: Final = 2.0
"""Heartbeat intervals for which we wait for a plan with a successor: one for our next heartbeat, one for the votes."""
_POLL_S: Final = 0.02


class Departure:
    """Lets one peer leave the run, and answers the requests of other peers that leave."""

    def __init__(self, services: Services) -> None:
        self._endpoint, self._clock, self._spec = services.endpoint, services.clock, services.spec
        self._archive, self._copies = services.layers.archive, services.layers.copies
        self._plans, self._parts, self._neighbours = services.plans, services.parts, services.neighbours
        self._reports = services.reports
        self._saves: dict[PeerID, tuple[Plan, set[int]]] = {}
        """Leaving peer -> (the plan at its first `Save` request, the versions that we have saved for it since)."""
        self._answering: Counter[PeerID] = Counter()
        self._halts_at: int | None = None
        self.unsaved = ""
        """A sentence that names the steps lost when we leave, and why. Empty: a disk or another machine has all."""
        self._endpoint.on(Save, self._on_save)

    async def run(self, timeout_s: float) -> bool:
        """Leave all groups within `timeout_s`. Returns: True if all our work is committed or saved."""
        until_s = self._clock.now_s() + timeout_s
        left = await asyncio.gather(*(self._leave(membership, until_s) for membership in self._parts.all))
        return all(left)

    # --- one group ---

    async def _leave(self, membership: Part, until_s: float) -> bool:
        began_s = self._clock.now_s()
        saved = tried = False
        while (left_s := until_s - self._clock.now_s()) > 0.0:
            await self._until(lambda: self._is_known(membership), until_s)
            if not self._is_last(membership):
                if saved:
                    await self._until_counted_out(until_s)
                if await membership.drain(left_s, unless=lambda: self._is_last(membership)):
                    return True
                plan = self._plans.newest
                if not self._is_last(membership) or plan is None or plan.era != membership.core.plan.era:
                    return saved  # in another era our layers may be of other stages
                membership.stay(plan)  # we are the last holder now: take traffic until the halt
            elif not tried:
                await self._halt(membership, until_s)
                if self._is_last(membership):  # else a member that stays has joined meanwhile
                    tried, saved = True, await self._save(membership, until_s)
            elif not self._may_have_successor(membership, began_s):
                return saved
            else:
                await asyncio.sleep(_POLL_S)
        return saved

    def _is_known(self, membership: Part) -> bool:
        """True if each full member knows that we leave. Without this, two members that leave at the same moment would
        each believe that the other one stays."""
        return all(map(self._neighbours.knows_that_we_leave, membership.core.group.full_members))

    def _is_last(self, membership: Part) -> bool:
        """True if our group would lose its layers since all its full members leave. Else, or without a whole state, or
        after the run's last step: False."""
        group = membership.core.group
        if not membership.is_ready or group.is_learner or membership.version >= self._spec.training.steps:
            return False
        # members that no plan names drain already, and are not asked
        return all(self._neighbours.leaves(mate, membership) for mate in group.full_members)

    def _may_have_successor(self, membership: Part, began_s: float) -> bool:
        """True if a successor may still fetch our layers: a member that stays, or one that a coming plan may name."""
        plan = self._plans.newest
        if plan is None:
            return False
        group_peers = [
            peer for peer in membership.core.group.group_peers if not self._neighbours.leaves(peer, membership)
        ]
        is_early = self._clock.now_s() < began_s + _PLAN_HEARTBEATS * self._spec.swarm.heartbeat_s
        return bool(group_peers) or (is_early and len(plan.members) > len(plan.stages))

    async def _until_counted_out(self, until_s: float) -> None:
        """Wait until a plan gives us no place, for twice `_PLAN_HEARTBEATS` at most. If we left before the coordinator
        knows that a successor holds our layers, the coordinator would take the layers for lost."""
        until_s = min(until_s, self._clock.now_s() + 2 * _PLAN_HEARTBEATS * self._spec.swarm.heartbeat_s)
        me, plans = self._endpoint.peer_id, self._plans
        await self._until(lambda: plans.newest is None or not plans.newest.groups_of(me), until_s)

    async def _until(self, is_so: Callable[[], bool], until_s: float) -> bool:
        """Wait until `is_so()` is true, at most until `until_s`. Returns: True if it was true in time."""
        while not is_so():
            if self._clock.now_s() >= until_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    # --- halt ---

    async def _halt(self, membership: Part, until_s: float) -> None:
        """Ask for a halt, and wait until the group reaches the halt version or the deadline."""
        began_s = self._clock.now_s()
        half_s = (until_s - began_s) * _HALT_SHARE / 2
        heartbeat_s = self._spec.swarm.heartbeat_s
        answered_s = began_s
        while (now_s := self._clock.now_s()) < began_s + 2 * half_s and self._is_last(membership):
            halts_at = await self._ask_for_halt(at_once=now_s >= began_s + half_s)
            if halts_at is not None:
                self._halts_at, answered_s = halts_at, now_s
            elif now_s >= answered_s + _PLAN_HEARTBEATS * heartbeat_s:
                return  # stage 0 has no leader, so no step begins
            again_s = self._clock.now_s() + _ASK_AGAIN_S
            while self._clock.now_s() < again_s and self._is_last(membership):
                if self._halts_at is not None and membership.version >= self._halts_at:
                    return
                await asyncio.sleep(_POLL_S)
        if self._is_last(membership):
            logger.warning("leaving before the end of the step: version %d", membership.version)

    async def _ask_for_halt(self, *, at_once: bool) -> int | None:
        """Ask for a halt. Returns: the version at which all stages stop; None: stage 0 has no leader at present.

        Args: at_once: stage 0 is to give up the step under way."""
        plan = self._plans.newest
        for peer in plan.stages[0].peers if plan is not None else ():
            with Tolerating(logger.debug, "no halt"):
                return (await self._endpoint.ask(peer, Halt(at_once=at_once), Halted, timeout_s=_ASK_AGAIN_S)).version
        return None

    # --- save ---

    async def _save(self, membership: Part, until_s: float) -> bool:
        """Save our layers, which no other peer has, then have copies made. Returns: True if our disk has the layers."""
        state = await self._made(membership, until_s)
        if state is None:
            self.unsaved = f"step {membership.version} is not saved: the step after it did not end in time"
            return False
        if state.version == 0:
            return True  # every peer can make version 0
        keepers: list[PeerID] = []
        rank, _ = membership.core.group.standing
        others = self._ask_others_to_save(state.version, until_s) if rank == 0 else asyncio.sleep(0)
        asking = asyncio.create_task(others, name="ask others to save")
        saved = False
        keys = list(state.layers)
        layers = keys[0] if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"
        try:
            async with asyncio.timeout(max(_SAVE_S, until_s - self._clock.now_s())):
                saved = await self._copies.save(membership.group_id, state)
            if saved:
                await self._archive.note_rest(self._endpoint.era, state.version)
                self._reports.say(f"saved {layers} at step {state.version}: the run can go on from there")
            if rank == 0:
                keepers = await self._copies.give(membership.group_id, state, until_s=until_s)
            if keepers:
                machines = f"{len(keepers)} other machine{'s' if len(keepers) > 1 else ''}"
                self._reports.say(f"{machines} saved {layers} at step {state.version} too")
        except TimeoutError:
            logger.error("the disk took longer than %.0f s: version %d is not saved", _SAVE_S, state.version)
        finally:
            await asking
        if not saved and not keepers:
            self.unsaved = self._archive.unsaved or f"step {state.version} is not saved: the disk is too slow"
        return saved

    async def _made(self, membership: Part, until_s: float) -> StageState | None:
        """Return our state; during a step, the state after it. None: the step lasts beyond `_SAVE_S` and `until_s`."""
        await self._until(lambda: membership.state is not None, max(self._clock.now_s() + _SAVE_S, until_s))
        return membership.state

    async def _ask_others_to_save(self, version: int, until_s: float) -> None:
        plan = self._plans.newest
        others = [peer for peer in plan.members if peer != self._endpoint.peer_id] if plan is not None else []

        async def ask_to_save(peer: PeerID) -> None:
            with Tolerating(logger.info, f"{peer[-8:]} does not save"):  # the peer may have saved its layers and left
                saved = 0
                while saved < version and (left_s := until_s - self._clock.now_s()) > 0.0:
                    timeout_s = min(left_s, _ANSWER_S + 1.0)
                    reply = await self._endpoint.ask(peer, Save(version=version), Saved, timeout_s=timeout_s)
                    saved = reply.version

        await asyncio.gather(*map(ask_to_save, others))

    async def _on_save(self, source: PeerID, message: Save) -> Saved:
        me, plan = self._endpoint.peer_id, self._plans.newest
        if plan is None or not plan.groups_of(source):
            raise Refused(me, "does not know the sender as a holder")
        if not self._archive.keeps:
            raise Refused(me, "keeps nothing on disk")
        memberships = [
            membership for membership in self._parts.all if membership.is_ready and not membership.core.group.is_learner
        ]
        newest = max((membership.version for membership in memberships), default=message.version)
        if not 0 < message.version <= newest + 64:  # a version further ahead is an error of the sender
            raise RemoteError(source, f"asks for version {message.version} to be saved, at version {newest}")
        self._count_save(source, message.version, plan)
        self._archive.want(message.version)
        self._answering[source] += 1
        try:
            return await self._saved_version(message, memberships)
        finally:
            self._answering[source] -= 1

    def _count_save(self, source: PeerID, version: int, plan: Plan) -> None:
        """Count a version that we save for `source`. Raises: Refused: `source` stays, or has asked for too many
        versions."""
        me = self._endpoint.peer_id
        if source in self._parts.audience and self._neighbours.stays(source):
            raise Refused(me, "saves versions only for peers that leave")
        self._saves = {
            peer: (since, versions)
            for peer, (since, versions) in self._saves.items()
            if plan.has(peer) and peer not in plan.dropped_since(since)
        }
        self._answering = +self._answering
        _, versions = self._saves.setdefault(source, (plan, set()))
        if len(versions | {version}) > SAVES_OF_ONE_MAX or self._answering[source] >= SAVES_OF_ONE_MAX:
            raise Refused(
                me,
                f"has saved {len(versions)} versions for the sender, and saves no more until the sender has been away",
            )
        versions.add(version)

    async def _saved_version(self, message: Save, memberships: Sequence[Part]) -> Saved:
        until_s = self._clock.now_s() + _ANSWER_S
        for membership in memberships:
            while membership.is_ready and (membership.version < message.version or membership.is_stepping):
                if self._clock.now_s() >= until_s:
                    return Saved(version=membership.version)
                await asyncio.sleep(_POLL_S)
            state = membership.state
            if membership.is_ready and state is not None and state.version == message.version:
                await self._copies.save(membership.group_id, state)
        return Saved(version=message.version)
