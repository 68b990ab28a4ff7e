"""The experts that one peer holds. For each expert the peer is a member of a group, the expert's holders. These
memberships begin, are renewed, drain and end as plans say.

An expert's drain takes a microbatch or two. Unlike a replica's drain, it delays no other membership.
"""

import asyncio
import functools
import logging
from typing import Final

from torch import Tensor

from shoal.peer.base.tasks import Tasks
from shoal.peer.membership.group_membership import GroupMembership, Renew, make_commit
from shoal.peer.model.state import StageState
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.events import Contributed
from shoal.peer.replica.member import ExpertCore
from shoal.peer.services.expert_server import ExpertWork
from shoal.peer.services.services import Services
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ExpertPlace
from shoal.protocol.plan import Plan, SignedPlan

logger = logging.getLogger(__name__)

DRAIN_S: Final = 30.0


class ExpertMembership(GroupMembership):
    """Our membership in group `group_id` of `plan`. The group's members hold, in each layer of one stage, the expert
    with the same number. Our replica may be in another stage."""

    def __init__(self, services: Services, renew: Renew, plan: Plan, group_id: int, *, incarnation: int) -> None:
        unit = plan.experts[group_id - len(plan.stages)]
        self.stage = unit.stage
        self.layers = plan.stages[unit.stage].layers
        self.work = ExpertWork(services.arithmetic.expert(*self.layers, unit.expert), unit.stage, upwards=self)
        group = make_commit(services, group_id, incarnation=incarnation, has_loss=False)
        super().__init__(services, renew, ExpertCore(group, plan), self.work.runtime, incarnation=incarnation)

    def is_place_of(self, plan: Plan) -> bool:
        """True if group `group_id` of `plan` has the expert and the layers of this membership."""
        at = self.group_id - len(plan.stages)
        if not 0 <= at < len(plan.experts):
            return False
        unit = plan.experts[at]
        place = (unit.stage, unit.expert, plan.stages[unit.stage].layers)
        return place == (self.stage, self.work.expert, self.layers)

    @property
    def place(self) -> ExpertPlace:
        return ExpertPlace(
            group=self.group_id,
            incarnation=self.incarnation,
            version=self.version,
            ready=self.is_ready,
            is_open=self.is_open,
            draining=self.is_draining,
        )

    def wants(self, microbatch: Microbatch) -> bool:
        """True if our group lacks the expert's gradient of the microbatch."""
        return self.core.group.lacks(microbatch.step, microbatch.index)

    def contributed(self, microbatch: Microbatch, *, loss: float, staleness_steps: int, retried: bool) -> None:
        self.handle(Contributed(microbatch, staleness_steps, retried, loss))

    # --- computation ---

    @property
    def version(self) -> int:
        return self.work.version

    @property
    def is_idle(self) -> bool:
        return not self._s.experts.num_pending(self.work) and not self.work.runtime.open_runs

    def _install(self) -> None:
        self._s.experts.add(self.work)

    async def close(self) -> None:
        self.retire()
        self._s.experts.remove(self.work)
        await super().close()

    def _load(self, state: StageState) -> None:
        self.work.load(state)
        self._s.experts.wake()

    def _step(self, step: int, mean_gradient_N: Tensor) -> None:
        self._tasks.spawn(self._make_step(step, mean_gradient_N), f"step {step} of expert {self.work.expert}")

    async def _make_step(self, step: int, mean_gradient_N: Tensor) -> None:
        runtime = self.work.runtime
        timed = await self.compute.run("step", lambda: runtime.step(mean_gradient_N), flop=runtime.step_flop)
        if self.version != step:
            return  # a state was loaded meanwhile
        self.work.version = step + 1
        self.stepped(*timed.value)
        self._s.experts.wake()

    # --- membership ---

    def _near(self) -> list[tuple[PeerID, ...]]:
        plan = self.core.plan
        group_peers = tuple(member.peer for member in plan.group_members(self.group_id))
        return [plan.stages[self.stage].peers, group_peers]

    @property
    def _is_needed(self) -> bool:
        group = self.core.group
        is_over = self.version >= self._s.spec.training.steps
        # The promised number of holders must be ready without us, or the next death could lose the expert.
        promised = min(len(group.group_peers), self._s.spec.swarm.expert_replicas)
        return len(group.ready_members) < promised and not is_over

    def pause(self, *, at_once: bool) -> None:
        """Pause the membership. Args: at_once: also refuse tokens, so that they go to other holders."""
        super().pause(at_once=at_once)
        self._pause_requests(at_once)

    def resume(self) -> None:
        self._pause_requests(False)
        super().resume()

    def _pause_requests(self, is_paused: bool) -> None:
        self.work.is_paused = is_paused
        self._s.experts.wake()  # waiting requests are refused

    def depart(self, plan: Plan) -> None:
        """Follow a plan without us while we drain, if it keeps the expert's group: its leader closes our rounds."""
        if self.is_place_of(plan):
            self.follow(plan)

    def peer_died(self, peer: PeerID) -> None:
        super().peer_died(peer)
        self.work.runtime.open_runs.drop(peer)

    def peer_reborn(self, peer: PeerID, incarnation: int) -> None:
        super().peer_reborn(peer, incarnation)  # its presence update follows, and tells the group the rest
        self.work.runtime.open_runs.drop(peer, incarnation)


class ExpertSeats:
    """The expert memberships of one peer."""

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
        """Begin our membership in `group` anew: our state differs from the group's."""
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
                    continue  # this membership ended while another one was dropped
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
            await self._drop(group)  # the group has another expert in this plan
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
                renew = functools.partial(self.renew, group)
                membership = ExpertMembership(self._s, renew, plan, group, incarnation=incarnation)
                self._memberships[group] = membership
                membership.start()
                for peer, presence in self._s.neighbours.words():
                    if peer in membership.audience:
                        membership.peer_state(peer, presence)

    def _recall(self, before: Plan | None, plan: Plan) -> None:
        """Apply again the last presence update of each peer that `plan` moves: it may be older than `plan`."""
        for peer, presence in self._s.neighbours.words():
            if before is not None and before.groups_of(peer) != plan.groups_of(peer):
                for membership in self.memberships:
                    if peer in membership.audience:
                        membership.peer_state(peer, presence)

    async def _leave(self, group: int, membership: ExpertMembership) -> None:
        await membership.drain(DRAIN_S, unless=lambda: self._memberships.get(group) is not membership)
        if self._memberships.get(group) is membership and membership.is_draining:
            await self._drop(group)
        self._again = True  # a plan may have given the expert back to us meanwhile
        self.follow_soon()

    async def _drop(self, group: int) -> None:
        """End a membership and drop its state; other holders recompute the work that is lost."""
        membership = self._memberships.pop(group, None)
        if membership is None:
            return
        self._draining.discard(group)
        self._s.neighbours.say(membership.audience)  # nothing more will come from us
        await membership.close()
        self._s.layers.server.forget(membership.work.runtime.keys)
        self._s.neighbours.announce()
