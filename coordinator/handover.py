"""What a coordinator leaves to the next one, as much of it as a message takes. Pure."""

import msgspec

from shoal.coordinator.ballot import ENVELOPE_BYTES
from shoal.coordinator.roster import Roster
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CONTROL_BYTES_MAX
from shoal.protocol.messages import Advert, HandOver

ADVERTS_MAX = 64
"""The successor hears from everyone within a heartbeat anyway; adverts only spare it that wait for most."""
LEAST_NEEDED = ("roster", "plans", "absent", "records", "loads")
"""What a will too large for a message goes without, in this order. A plan leaves no room for it all from some hundreds
of peers on, of which the roster names 64; the plans of late, and since when somebody has been silent, are for people;
records choose among placements; without loads the heir shares out a hot expert's tokens as they are until it has
measured where they go."""


def adverts(roster: Roster, now_s: float) -> tuple[tuple[PeerID, Advert], ...]:
    """Of those alive."""
    known = ((peer, roster.presences[peer].advert) for peer in roster.alive(now_s))
    return tuple((peer, advert) for peer, advert in known if advert is not None)[:ADVERTS_MAX]


def fitting(will: HandOver) -> HandOver:
    """`will` without what makes it larger than a message. A plan that is that large alone goes nowhere."""
    for name in LEAST_NEEDED:
        if len(msgspec.msgpack.encode(will)) + ENVELOPE_BYTES <= CONTROL_BYTES_MAX:
            break
        will = msgspec.structs.replace(will, **{name: ()})
    return will
