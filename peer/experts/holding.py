"""One tenure in the group of one expert's holders."""

from shoal.peer.experts.work import ExpertWork
from shoal.peer.replica.events import MemberElsewhere, MemberState
from shoal.peer.surroundings import Surroundings
from shoal.peer.tenures import Tenure
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ExpertPlace, Hello
from shoal.protocol.plan import Member, Plan

_ANY = 2**62
"""No incarnation is later."""


class ExpertTenure(Tenure):
    """Our part of `plan` in group `group_id`: an expert of all layers of a stage, be we of that stage or not."""

    def __init__(self, surroundings: Surroundings, plan: Plan, group_id: int, *, incarnation: int) -> None:
        unit = plan.experts[group_id - len(plan.stages)]
        self.stage = unit.stage
        self.layers = plan.stages[unit.stage].layers
        self.work = ExpertWork(
            surroundings.arithmetic.expert(*self.layers, unit.expert),
            unit.stage,
            compute=surroundings.compute,
            server=surroundings.experts,
            upwards=self,
        )
        super().__init__(surroundings, plan, group_id, self.work, incarnation=incarnation, has_loss=False)

    def is_place_of(self, plan: Plan) -> bool:
        """Whether its group and layers are in the plan what they are here."""
        at = self.group_id - len(plan.stages)
        if not 0 <= at < len(plan.experts):
            return False
        unit = plan.experts[at]
        place = (unit.stage, unit.expert, plan.stages[unit.stage].layers)
        return place == (self.stage, self.work.expert, self.layers)

    @property
    def place(self) -> ExpertPlace:
        """What our Hello says of it."""
        return ExpertPlace(
            group=self.group_id,
            incarnation=self.incarnation,
            version=self.version,
            ready=self.is_ready,
            is_open=self.is_open,
            draining=self.is_draining,
        )

    @property
    def serves(self) -> bool:
        return self.is_ready

    def _members(self, plan: Plan) -> tuple[Member, ...]:
        return plan.group_members(self.group_id)

    def _near(self) -> list[tuple[PeerID, ...]]:
        mates = tuple(member.peer for member in self._plan.group_members(self.group_id))
        return [self._plan.stages[self.stage].peers, mates]

    @property
    def _is_needed(self) -> bool:
        core = self.group.core
        is_over = self.version >= self._s.spec.training.steps
        # As many must have it without us as the plan promises, or the next death could be one too many.
        promised = min(len(core.mates), self._s.spec.swarm.expert_replicas)
        return len(core.ready_mates) < promised and not is_over

    def pause(self, *, at_once: bool) -> None:
        """Args: at_once: tokens are refused, and go to another holder."""
        super().pause(at_once=at_once)
        self.work.pause(at_once)

    def resume(self) -> None:
        self.work.pause(False)
        super().resume()

    def depart(self, plan: Plan) -> None:
        """A plan without us in this place, while we drain: whoever leads now must be able to close our last rounds."""
        if self.is_place_of(plan):
            self.follow(plan)

    def peer_state(self, peer: PeerID, hello: Hello) -> None:
        """What a peer says of itself."""
        for place in hello.experts:
            if place.group == self.group_id:
                self.group.handle(
                    MemberState(
                        peer,
                        place.ready,
                        place.is_open,
                        place.incarnation,
                        drains=place.draining,
                        has_moved=self._plan.has(peer),
                    )
                )
                break
        else:
            # Its Hellos are in order, and this one is later than what it was here.
            self.group.handle(MemberElsewhere(peer, incarnation=_ANY))
        self._open_if_fit()

    def peer_died(self, peer: PeerID) -> None:
        """The plan has dropped it, and it had not said that it would go."""
        self.mate_died(peer)
        self.work.source_lost(peer)

    def peer_reborn(self, peer: PeerID) -> None:
        """Its tenure in a stage has begun anew. Of what it holds as our mate its Hello says more."""
        self.work.source_lost(peer)
