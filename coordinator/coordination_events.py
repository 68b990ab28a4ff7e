"""What the core is told and what it asks for. Frozen values; plans in them are opened and verified by the driver."""

from dataclasses import dataclass

import msgspec

from shoal.coordinator.chain import ChainRecord
from shoal.coordinator.ledger import StepRecord
from shoal.coordinator.plan_layout import Layout
from shoal.coordinator.search_schedule import SearchJob
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Heartbeat, PlanHead
from shoal.protocol.plan import Mandate, SignedPlan

# --- events ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A call; the core answers with `Reply`. `plan` is the message's plan, `base` the plan that it builds on."""

    source: PeerID
    message: msgspec.Struct
    plan: SignedPlan | None = None
    base: SignedPlan | None = None
    mandate: Mandate | None = None
    """Of a `Reset`: the owner's leave to make a plan without votes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """`peer` answered `asked`. `live` is its newer live plan, `accepted` what it has voted for, `links` what we lack of
    the chain, oldest first, if it said so."""

    peer: PeerID
    asked: msgspec.Struct
    reply: msgspec.Struct
    live: SignedPlan | None = None
    accepted: SignedPlan | None = None
    links: tuple[SignedPlan, ...] = ()
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """`peer` did not answer `asked` within `took_s`, or declined. `refused`: nobody is there to answer, as it turned
    out at once."""

    peer: PeerID
    asked: msgspec.Struct
    reason: str
    refused: bool = False
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What we say of ourselves right now."""

    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFound:
    """Where the directory says the chain is; None: it does not say."""

    head: PlanHead | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expelled:
    """These peers have been excluded from the run: nothing may be planned with them."""

    peers: tuple[PeerID, ...]


@dataclass(frozen=True, slots=True)
class TimerFired:
    pass


@dataclass(frozen=True, slots=True)
class Leaving:
    """We want to go: give the role away now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What came of a `Search`. `is_possible`: whether another has a chance; `is_bug`: it broke down."""

    job: SearchJob
    reason: str
    layout: Layout | None = None
    is_possible: bool = True
    is_bug: bool = False


Event = Received | Answered | Unanswered | Beat | HeadFound | TimerFired | Leaving | Expelled | Searched

# --- commands, carried out in order ---


@dataclass(frozen=True, slots=True, kw_only=True)
class SendHeartbeat:
    target: PeerID


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Call `peer`; what comes back is an `Answered` or `Unanswered` with this very message."""

    peer: PeerID
    message: msgspec.Struct


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    message: msgspec.Struct


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Make durable before any later command of the list."""

    record: ChainRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Obey:
    """From now on this is the plan."""

    plan: SignedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Tell the directory where the chain is."""

    plan: SignedPlan


@dataclass(frozen=True, slots=True)
class LookUp:
    """Ask the directory where the chain is: `HeadFound`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Look for a better layout, however long it takes: `Searched`."""

    job: SearchJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """A step is complete."""

    record: StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A decision's reason, for the log."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Somebody has broken what must hold always; each is logged as an error."""

    text: str


Command = SendHeartbeat | Ask | Reply | Persist | Obey | Publish | LookUp | Search | Tell | Note | Alarm
