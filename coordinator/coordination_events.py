"""The events that the driver passes to the core, and the commands that the core returns. The driver opens and verifies
the plans in events."""

import msgspec

from shoal.coordinator.allocate.interface import Layout
from shoal.coordinator.chain import ChainRecord
from shoal.coordinator.ledger import StepRecord
from shoal.coordinator.search_schedule import SearchJob
from shoal.coordinator.voting import Acquaintance
from shoal.protocol.exclusion import Exclusion
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Advert, Heartbeat, PlanHead
from shoal.protocol.plan import Mandate, SignedPlan


class CoordinationEvent(msgspec.Struct, frozen=True):
    """Base of the events: what has happened."""


class Command(msgspec.Struct, frozen=True):
    """Base of the commands, which the driver carries out in order."""


# --- events ---


class Received(CoordinationEvent, frozen=True):
    """A call from a peer, to which the core replies. `plan`: the plan in the message; `base`: its predecessor, or the
    caller's live plan."""

    source: PeerID
    message: msgspec.Struct
    plan: SignedPlan | None = None
    base: SignedPlan | None = None
    mandate: Mandate | None = None
    """The owner's permission to make a plan without votes; only a `Reset` has it."""
    knows: Acquaintance = Acquaintance()
    """Members that a `PlanOffer` drops though we heard them, or excludes, and unknown ones that it adds."""


class Answered(CoordinationEvent, frozen=True):
    """`peer` has answered `asked`. The answer may contain `live`, that peer's newer live plan; `accepted`, the plan
    that it has voted for; and `links`, the plans of the chain that we lack, oldest first."""

    peer: PeerID
    asked: msgspec.Struct
    reply: msgspec.Struct
    live: SignedPlan | None = None
    accepted: SignedPlan | None = None
    links: tuple[SignedPlan, ...] = ()
    took_s: float = 0.0


class Unanswered(CoordinationEvent, frozen=True):
    """`peer` did not answer `asked` within `took_s`, or declined. `refused`: no process listens there."""

    peer: PeerID
    asked: msgspec.Struct
    reason: str
    refused: bool = False
    took_s: float = 0.0


class Beat(CoordinationEvent, frozen=True):
    """This peer's own heartbeat, which is about to be sent."""

    heartbeat: Heartbeat


class Heard(CoordinationEvent, frozen=True):
    """A message from `peer` other than a heartbeat has arrived. One event may stand for many such messages."""

    peer: PeerID


class ReportDue(CoordinationEvent, frozen=True):
    """This peer should send the coordinator a heartbeat now."""


class HeadFound(CoordinationEvent, frozen=True):
    """The directory has answered with the head of the chain (its newest plan); None: it knows none."""

    head: PlanHead | None


class ExclusionHeard(CoordinationEvent, frozen=True):
    """An exclusion order, or a vote for one, has arrived. `is_ours`: `order` comes from this machine."""

    order: Exclusion
    is_ours: bool


class Expelled(CoordinationEvent, frozen=True):
    """These peers have been excluded from the run; no plan may contain them."""

    peers: tuple[PeerID, ...]


class CoordinationTimerFired(CoordinationEvent, frozen=True):
    """The timer has fired."""


class Leaving(CoordinationEvent, frozen=True):
    """This peer leaves, and must transfer the coordinator's role if it has it."""


class Searched(CoordinationEvent, frozen=True):
    """A `Search` has ended. `is_bug`: it raised an unexpected exception."""

    job: SearchJob
    reason: str
    layout: Layout | None = None
    is_bug: bool = False


# --- commands ---


class SendHeartbeat(Command, frozen=True):
    target: PeerID


class Ask(Command, frozen=True):
    """Call `peer`. The result is an `Answered` or `Unanswered` event with this message as `asked`."""

    peer: PeerID
    message: msgspec.Struct


class Reply(Command, frozen=True):
    message: msgspec.Struct


class Persist(Command, frozen=True):
    """Make the record durable before carrying out later commands of the list."""

    record: ChainRecord


class Obey(Command, frozen=True):
    plan: SignedPlan


class SpreadOrder(Command, frozen=True):
    """Send this order to every member. `in_force`: True: its keys are excluded now; False: it is only a vote."""

    order: Exclusion
    in_force: bool
    is_ours: bool


class Publish(Command, frozen=True):
    """Publish the head of the chain in the directory."""

    plan: SignedPlan


class Introduce(Command, frozen=True):
    """Tell the transport the addresses of these peers."""

    peers: tuple[tuple[PeerID, Advert], ...]


class LookUp(Command, frozen=True):
    """Look up the head of the chain in the directory. The answer is a `HeadFound` event."""


class Search(Command, frozen=True):
    """Search for a better layout without a time limit. The answer is a `Searched` event."""

    job: SearchJob


class TellNode(Command, frozen=True):
    record: StepRecord


class LogReason(Command, frozen=True):
    text: str


class Alarm(Command, frozen=True):
    """Log an error: a peer has broken an invariant."""

    text: str
