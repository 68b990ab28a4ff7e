"""One tenure in the group of one expert's holders."""

from torch import Tensor

from shoal.peer.membership.group_membership import GroupMembership, MemberSeat, make_commit
from shoal.peer.model.state import StageState
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.events import Contributed
from shoal.peer.replica.member import ExpertCore
from shoal.peer.services.expert_server import ExpertWork
from shoal.peer.services.services import Services
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ExpertPlace
from shoal.protocol.plan import Plan


class ExpertMembership(GroupMembership):
    """Our tenure in group `group_id` of `plan`: one expert of all layers of a stage, ours or another."""

    def __init__(self, services: Services, seat: MemberSeat, plan: Plan, group_id: int, *, incarnation: int) -> None:
        unit = plan.experts[group_id - len(plan.stages)]
        self.stage = unit.stage
        self.layers = plan.stages[unit.stage].layers
        self.work = ExpertWork(services.arithmetic.expert(*self.layers, unit.expert), unit.stage, upwards=self)
        group = make_commit(services, group_id, incarnation=incarnation, has_loss=False)
        super().__init__(services, seat, ExpertCore(group, plan), self.work.runtime, incarnation=incarnation)

    def is_place_of(self, plan: Plan) -> bool:
        """True if the group still stands for the same expert and layers in `plan`."""
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

    # --- what it works at ---

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
        # The plan's number of replicas must be there without us, or the next death could lose the expert.
        promised = min(len(group.group_peers), self._s.spec.swarm.expert_replicas)
        return len(group.ready_members) < promised and not is_over

    def pause(self, *, at_once: bool) -> None:
        """Args: at_once: refuse tokens, so that they go to other holders."""
        super().pause(at_once=at_once)
        self._pause_requests(at_once)

    def resume(self) -> None:
        self._pause_requests(False)
        super().resume()

    def _pause_requests(self, is_paused: bool) -> None:
        self.work.is_paused = is_paused
        self._s.experts.wake()  # waiting requests are refused

    def depart(self, plan: Plan) -> None:
        """Follow a plan without us while we drain: its leader must be able to close our last rounds."""
        if self.is_place_of(plan):
            self.follow(plan)

    def peer_died(self, peer: PeerID) -> None:
        super().peer_died(peer)
        self.work.runtime.open_runs.drop(peer)

    def peer_reborn(self, peer: PeerID, incarnation: int) -> None:
        super().peer_reborn(peer, incarnation)  # its PresenceUpdate says the rest
        self.work.runtime.open_runs.drop(peer, incarnation)
