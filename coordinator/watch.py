"""What a peer knows of the coordinator: who it is, and when its silence means that it is gone. Pure."""

from shoal.coordinator.roster import Arrivals
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import HeartbeatReply, PlanHead
from shoal.protocol.plan import Plan

Order = tuple[int, int]


class CoordinatorWatch:
    """Args:
    owner: to whom everyone reports before there is a plan.
    """

    def __init__(self, *, owner: PeerID, heartbeat_s: float, now_s: float) -> None:
        self._owner, self._heartbeat_s = owner, heartbeat_s
        self._beats = Arrivals(heartbeat_s, now_s)
        self._hint: tuple[Order, PeerID] | None = None
        self.head_known = False
        """The directory has been asked where the chain is."""

    def target(self, live: Plan | None) -> PeerID:
        """To whom to report: the coordinator of our plan, or of a higher one that we have heard of and do not have."""
        if self._hint is not None and self._hint[0] > (live.order if live else (0, 0)):
            return self._hint[1]
        return live.coordinator if live else self._owner

    @property
    def run_exists(self) -> bool:
        """Somebody has a plan of this run that we do not have."""
        return self._hint is not None

    @property
    def suspect_at_s(self) -> float:
        return self._beats.suspect_at_s

    def heard_lately(self, now_s: float) -> bool:
        """Whether to back the coordinator against a candidate that thinks it gone: half of what we would wait."""
        return now_s < self._beats.last_s + self._beats.patience_s / 2

    def obeys(self, plan: Plan, *, new_term: bool, now_s: float) -> None:
        """A plan of ours changed; in a new term there is another to listen to."""
        if new_term:
            self._beats = Arrivals(self._heartbeat_s, now_s)
        if self._hint is not None and self._hint[0] <= plan.order:
            self._hint = None

    def excuse(self, now_s: float) -> None:
        self._beats.excuse(now_s)

    def replied(self, peer: PeerID, reply: HeartbeatReply, live: Plan | None, *, me: PeerID, now_s: float) -> None:
        """The answer to a heartbeat of ours; `live` is what we obey after it."""
        if reply.is_coordinator and (live is None or peer == live.coordinator):
            self._beats.arrived(now_s)
        elif not reply.is_coordinator and reply.coordinator not in (me, peer):
            self._hear_of((reply.term, 0), reply.coordinator, live)

    def found(self, head: PlanHead | None, live: Plan | None, *, me: PeerID) -> bool:
        """What the directory says. Returns: whether it is news."""
        self.head_known = True
        if head is None or head.coordinator == me:
            return False
        return self._hear_of((head.term, head.sequence), head.coordinator, live)

    def _hear_of(self, order: Order, coordinator: PeerID, live: Plan | None) -> bool:
        if order <= (live.order if live else (0, 0)) or (self._hint is not None and order <= self._hint[0]):
            return False
        self._hint = order, coordinator
        return True
