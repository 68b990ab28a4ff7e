"""All expert tenures of one peer: which of them begin, renew, drain and end, by the plans.

A drain blocks nothing, unlike a replica's: it takes a microbatch or two, and other tenures begin and go on meanwhile.
"""

import asyncio
import logging
from typing import Final

from shoal.peer.base.tasks import Tasks
from shoal.peer.membership.expert_holding import ExpertMembership
from shoal.peer.services.services import Services
from shoal.protocol.plan import Plan, SignedPlan

logger = logging.getLogger(__name__)

DRAIN_S: Final = 30.0


class ExpertSeats:
    """The expert tenures of one peer."""

    def __init__(self, services: Services) -> None:
        self._s = services
        self._me = services.endpoint.peer_id
        self._memberships: dict[int, ExpertMembership] = {}
        services.parts.experts = self._memberships
        self._draining: set[int] = set()
        self._renewing: set[int] = set()
        self._again = False
        self._followed: SignedPlan | None = None
        self._num_begun = 0
        self._transition: asyncio.Task[None] | None = None
        self._tasks = Tasks(services.failures.add)

    @property
    def memberships(self) -> list[ExpertMembership]:
        return [membership for _, membership in sorted(self._memberships.items())]

    # --- plans ---

    def follow_soon(self) -> None:
        if self._transition is None or self._transition.done():
            self._transition = asyncio.create_task(self._follow(), name="follow the plan's experts")
            self._transition.add_done_callback(self._s.failures.add_from)

    def renew(self, group: int) -> None:
        """Fetch the state of our part in `group` again: it differs from the group's."""
        self._renewing.add(group)
        self.follow_soon()

    async def drop_all(self) -> None:
        for group in sorted(self._memberships):
            await self._drop(group)

    async def close(self) -> None:
        if self._transition is not None:
            self._transition.cancel()
            await asyncio.gather(self._transition, return_exceptions=True)
        await self._tasks.cancel()
        await self.drop_all()

    async def _follow(self) -> None:
        plans, neighbours = self._s.plans, self._s.neighbours
        while (signed := plans.signed) is not None and (signed is not self._followed or self._renewing or self._again):
            if signed.plan.era != self._s.endpoint.era:
                self._followed = None
                await self.drop_all()
                return  # begin when this peer has moved to that era
            before, self._followed = self._followed, signed
            renewing, self._renewing, self._again = self._renewing, set(), False
            for group in sorted(self._memberships):
                if group not in self._memberships:
                    continue  # it drained while another one was dropped
                if group not in self._draining:
                    await self._follow_with(group, before, signed.plan, renew=group in renewing)
                elif group in signed.plan.groups_of(self._me) and self._memberships[group].is_place_of(signed.plan):
                    self._draining.discard(group)
                    self._memberships[group].stay(signed.plan)
                else:
                    self._memberships[group].depart(signed.plan)
            self._begin_missing(signed.plan)
            self._recall(before.plan if before is not None else None, signed.plan)
            neighbours.say_news(dict.fromkeys(peer for part in self.memberships for peer in part.audience))
            neighbours.announce()

    async def _follow_with(self, group: int, before: SignedPlan | None, plan: Plan, *, renew: bool) -> None:
        membership = self._memberships[group]
        if not membership.is_place_of(plan):
            await self._drop(group)  # the group means another expert now
        elif group not in plan.groups_of(self._me):
            counted_out = not plan.has(self._me) and not self._s.life.is_leaving
            if before is None or plan.previous != before.digest or counted_out:
                await self._drop(group)
                return
            membership.depart(plan)
            self._draining.add(group)
            self._tasks.spawn(self._leave(group, membership), f"leave group {group}")
        elif renew or (before is not None and plan.since_in(self._me, group) > before.plan.sequence):
            logger.warning("group %d: our state may differ from the group's: fetching it", group)
            await self._drop(group)
        else:
            membership.follow(plan)

    def _begin_missing(self, plan: Plan) -> None:
        for group in plan.groups_of(self._me):
            if group >= len(plan.stages) and group not in self._memberships and not self._s.life.is_leaving:
                self._num_begun += 1
                incarnation = self._s.endpoint.incarnation + self._num_begun
                membership = ExpertMembership(self._s, self, plan, group, incarnation=incarnation)
                self._memberships[group] = membership
                membership.start()
                for peer, presence in self._s.neighbours.words():
                    if peer in membership.audience:
                        membership.peer_state(peer, presence)

    def _recall(self, before: Plan | None, plan: Plan) -> None:
        """Process again the Hellos that may have come before the plan."""
        for peer, presence in self._s.neighbours.words():
            if before is not None and before.groups_of(peer) != plan.groups_of(peer):
                for membership in self.memberships:
                    if peer in membership.audience:
                        membership.peer_state(peer, presence)

    async def _leave(self, group: int, membership: ExpertMembership) -> None:
        await membership.drain(DRAIN_S, unless=lambda: self._memberships.get(group) is not membership)
        if self._memberships.get(group) is membership and membership.is_draining:
            await self._drop(group)
        self._again = True  # a plan may have given it back to us meanwhile
        self.follow_soon()

    async def _drop(self, group: int) -> None:
        """Drop a tenure with its state; others recompute what they still need of it."""
        membership = self._memberships.pop(group, None)
        if membership is None:
            return
        self._draining.discard(group)
        self._s.neighbours.say(membership.audience)  # nothing more will come from us
        await membership.close()
        self._s.layers.server.forget(membership.work.runtime.keys)
        self._s.neighbours.announce()
