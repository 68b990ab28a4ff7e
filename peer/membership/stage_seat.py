"""Gives the peer its place in a stage: begins, renews, drains and ends the peer's replica as plans say."""

import asyncio
import logging

from shoal.peer.membership.expert_seats import DRAIN_S, ExpertSeats
from shoal.peer.membership.first_stage import FirstReplica
from shoal.peer.membership.replica_driver import Replica
from shoal.peer.services.services import Services
from shoal.protocol.plan import Plan, SignedPlan

logger = logging.getLogger(__name__)


class StageSeat:
    """Gives one peer its place in a stage. Args: experts: the peer's expert memberships; a new era ends them, too."""

    def __init__(self, services: Services, experts: ExpertSeats) -> None:
        self._s = services
        self._me = services.endpoint.peer_id
        self._experts = experts
        self._replica: Replica | None = None
        self._followed: SignedPlan | None = None
        self._renewing = False
        self._transition: asyncio.Task[None] | None = None

    @property
    def replica(self) -> Replica | None:
        return self._replica

    @replica.setter
    def replica(self, replica: Replica | None) -> None:
        self._replica = self._s.parts.stage = replica

    def obey(self, before: Plan, plan: Plan) -> None:
        """Have a draining replica follow `plan` at once. The change of place waits until the drain has ended, and the
        drain may be waiting for members that only this plan names."""
        if self.replica and self.replica.is_draining:
            self.replica.depart(plan)
            self._recall(before, plan)
            self._s.neighbours.say_news(self.replica.audience)

    def follow_soon(self) -> None:
        if self._transition is None or self._transition.done():
            self._transition = asyncio.create_task(self._follow(), name="follow the plan")
            self._transition.add_done_callback(self._s.failures.add_from)

    def renew(self) -> None:
        """Begin the replica anew, as a newcomer: its state differs from the group's."""
        self._renewing = True
        self.follow_soon()

    async def settle(self) -> None:
        """Wait until the newest plan has been followed."""
        if self._transition:
            await asyncio.gather(self._transition, return_exceptions=True)

    async def cancel(self) -> None:
        if self._transition:
            self._transition.cancel()
            await asyncio.gather(self._transition, return_exceptions=True)

    async def close(self) -> None:
        if self.replica:
            await self.replica.close()
            await self.replica.keep()

    async def _follow(self) -> None:
        plans, neighbours = self._s.plans, self._s.neighbours
        while (signed := plans.signed) is not None and (signed is not self._followed or self._renewing):
            before, self._followed = self._followed, signed
            plan = signed.plan
            if before is not None and before.plan.era != plan.era:
                await self._drop()
                await self._experts.drop_all()
                neighbours.forget_all()
            self._s.endpoint.era = plan.era
            self._experts.follow_soon()
            replica = self.replica
            await self._take_place(before, plan)
            self._recall(before.plan if before is not None and replica is self.replica else None, plan)
            if self.replica:
                neighbours.say_news(self.replica.audience)

    def _recall(self, before: Plan | None, plan: Plan) -> None:
        """Pass to our replica the last presence update of each peer that has other places in `plan` than in `before`.
        Args: before: the plan that the replica followed until now; None: the replica is new, and gets all updates."""
        audience = frozenset(self.replica.audience) if self.replica else frozenset()
        for peer, presence in self._s.neighbours.words():
            is_known = before is not None and before.groups_of(peer) == plan.groups_of(peer)
            if self.replica and peer in audience and not is_known:
                self.replica.peer_state(peer, presence)

    async def _take_place(self, before: SignedPlan | None, plan: Plan) -> None:
        replica, life = self.replica, self._s.life
        stage = plan.stage_of(self._me)
        place = None if stage is None else (stage, *plan.stages[stage].layers, bool(plan.experts))
        renewing, self._renewing = self._renewing, False
        if replica is not None and place != (replica.stage, *replica.layers, replica.experts_placed):
            is_counted_out = not plan.has(self._me) and not life.is_leaving
            if before is not None and plan.previous == before.digest and not is_counted_out:
                replica.depart(plan)
                await replica.drain(DRAIN_S, unless=lambda: self._drains_in_vain(plan, replica.stage))
            # Else the group has gone on without us, or may have, since we missed a plan: draining is of no use.
            await self._drop()
        elif replica is not None and (
            renewing or (before is not None and plan.since_of(self._me) > before.plan.sequence)
        ):
            logger.warning("stage %d: our state may differ from the group's: fetching it", replica.stage)
            await self._drop()
        if stage is None or (self.replica is None and life.is_leaving):
            return
        if self.replica is not None:
            self.replica.follow(plan)
            return
        kind = FirstReplica if stage == 0 else Replica
        self.replica = kind(self._s, self.renew, plan, stage, incarnation=life.begin_anew())
        self._s.layers.saved_s = self._s.clock.now_s()
        self.replica.start()
        self.replica.experts_at(self._me, self._s.own.presence())

    def _drains_in_vain(self, plan: Plan, stage: int) -> bool:
        """True if a drain would be in vain: our stage is gone, or one of its members cannot be reached."""
        newest = self._s.plans.newest
        if newest is None or newest.era != self._s.endpoint.era or stage >= len(plan.stages):
            return True
        return any(self._s.ports.meter.cannot_reach(peer) for peer in plan.stages[stage].peers)

    async def _drop(self) -> None:
        """Close the replica and drop its state; other peers recompute the work that is lost."""
        replica, self.replica = self.replica, None
        if replica is not None:
            self._s.neighbours.say(replica.audience)  # no peer needs to wait for us any more
            await replica.close()
            self._s.layers.server.forget(replica.runtime.keys)
