"""The events that the core is told of, and the commands that it asks for. All are frozen values; the driver opens and
verifies the plans in them."""

import msgspec

from shoal.coordinator.chain import ChainRecord
from shoal.coordinator.judge import NOBODY, Acquaintance
from shoal.coordinator.ledger import StepRecord
from shoal.coordinator.plan_layout import Layout
from shoal.coordinator.search_schedule import SearchJob
from shoal.protocol.exclusion import Exclusion
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Advert, Heartbeat, PlanHead
from shoal.protocol.plan import Mandate, SignedPlan

# --- events ---


class Received(msgspec.Struct, frozen=True):
    """A peer calls; the core answers with `Reply`. `plan` is the message's plan, `base` the plan that it builds on."""

    source: PeerID
    message: msgspec.Struct
    plan: SignedPlan | None = None
    base: SignedPlan | None = None
    mandate: Mandate | None = None
    """The owner's leave to make a plan without votes, in a `Reset`."""
    knows: Acquaintance = NOBODY
    """What the driver knows of the peers in a `PlanOffer`."""


class Answered(msgspec.Struct, frozen=True):
    """`peer` has answered `asked`. If the answer says so, `live` is its newer live plan, `accepted` the plan that it
    has voted for, and `links` the part of the chain that we lack, oldest first."""

    peer: PeerID
    asked: msgspec.Struct
    reply: msgspec.Struct
    live: SignedPlan | None = None
    accepted: SignedPlan | None = None
    links: tuple[SignedPlan, ...] = ()
    took_s: float = 0.0


class Unanswered(msgspec.Struct, frozen=True):
    """`peer` did not answer `asked` within `took_s`, or declined. `refused`: it turned out at once that no process is
    there to answer."""

    peer: PeerID
    asked: msgspec.Struct
    reason: str
    refused: bool = False
    took_s: float = 0.0


class Beat(msgspec.Struct, frozen=True):
    """This is what our heartbeat says of us right now."""

    heartbeat: Heartbeat


class Heard(msgspec.Struct, frozen=True):
    """Something of `peer` has come that is no heartbeat: a call or a frame, maybe one of many."""

    peer: PeerID


class ReportDue(msgspec.Struct, frozen=True):
    """The coordinator should hear of this peer at once."""


class HeadFound(msgspec.Struct, frozen=True):
    """The directory says where the chain is; None: it does not say."""

    head: PlanHead | None


class ExclusionHeard(msgspec.Struct, frozen=True):
    """There is an order of exclusion, or a vote for one. `is_ours`: it comes from this machine."""

    order: Exclusion
    is_ours: bool


class Expelled(msgspec.Struct, frozen=True):
    """These peers have been excluded from the run: nothing may be planned with them."""

    peers: tuple[PeerID, ...]


class TimerFired(msgspec.Struct, frozen=True):
    """The timer has fired."""


class Leaving(msgspec.Struct, frozen=True):
    """This peer wants to go: the role moves on now."""


class Searched(msgspec.Struct, frozen=True):
    """A `Search` has ended. `is_possible`: another one has a chance; `is_bug`: it broke down."""

    job: SearchJob
    reason: str
    layout: Layout | None = None
    is_possible: bool = True
    is_bug: bool = False


Event = (
    Received
    | Answered
    | Unanswered
    | Beat
    | ReportDue
    | HeadFound
    | Heard
    | TimerFired
    | Leaving
    | ExclusionHeard
    | Expelled
    | Searched
)

# --- commands, carried out in order ---


class SendHeartbeat(msgspec.Struct, frozen=True):
    target: PeerID


class Ask(msgspec.Struct, frozen=True):
    """Call `peer`. The answer is an `Answered` or `Unanswered` event with this very message."""

    peer: PeerID
    message: msgspec.Struct


class Reply(msgspec.Struct, frozen=True):
    message: msgspec.Struct


class Persist(msgspec.Struct, frozen=True):
    """Make the record durable before any later command of the list is carried out."""

    record: ChainRecord


class Obey(msgspec.Struct, frozen=True):
    """Obey this plan from now on."""

    plan: SignedPlan


class PutOut(msgspec.Struct, frozen=True):
    """Treat the keys of this order as excluded, and tell every member."""

    order: Exclusion
    is_ours: bool


class SpreadOrder(msgspec.Struct, frozen=True):
    """Tell every member of an order that excludes nobody yet, such as our vote for one."""

    order: Exclusion


class Publish(msgspec.Struct, frozen=True):
    """Tell the directory where the chain is."""

    plan: SignedPlan


class Introduce(msgspec.Struct, frozen=True):
    """Tell the transport where these peers are."""

    peers: tuple[tuple[PeerID, Advert], ...]


class LookUp(msgspec.Struct, frozen=True):
    """Ask the directory where the chain is. The answer is a `HeadFound` event."""


class Search(msgspec.Struct, frozen=True):
    """Look for a better layout, however long it takes. The answer is a `Searched` event."""

    job: SearchJob


class Tell(msgspec.Struct, frozen=True):
    """A step is complete: tell the node."""

    record: StepRecord


class Note(msgspec.Struct, frozen=True):
    """Log a decision's reason."""

    text: str


class Alarm(msgspec.Struct, frozen=True):
    """Log an error: a peer has broken what must hold always."""

    text: str


Command = (
    SendHeartbeat
    | Ask
    | Reply
    | Persist
    | Obey
    | PutOut
    | SpreadOrder
    | Publish
    | Introduce
    | LookUp
    | Search
    | Tell
    | Note
    | Alarm
)
