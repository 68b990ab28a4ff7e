"""What a coordinator leaves to the next one, cut to what a message takes. Pure."""

import msgspec

from shoal.coordinator.chain_log import ENVELOPE_BYTES
from shoal.coordinator.roster import Roster
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CONTROL_BYTES_MAX
from shoal.protocol.messages import Advert, HandOver

ADVERTS_MAX = 64
"""How many adverts are handed over. The successor hears from every peer within a heartbeat anyway; the adverts spare it
that wait for most of them."""
LEAST_NEEDED = ("roster", "plans", "absent", "records", "loads", "unreachable", "arrivals")
"""A hand-over that is too large for a message goes without these, in this order. From some hundreds of peers on the
plan leaves no room for all of it. The roster names 64 peers only; plans and absences are for people; records choose
among placements; without loads the heir leaves a hot expert's shares as they are until it has measured where tokens go;
without unreachable pairs it may make groups of peers that cannot talk, until they say so;
without arrivals it may count out a peer whose heartbeats come late for as long as it has not learned that.
"""


def adverts(roster: Roster, now_s: float) -> tuple[tuple[PeerID, Advert], ...]:
    """The adverts of peers that are alive."""
    known = ((peer, roster.presences[peer].advert) for peer in roster.alive(now_s))
    return tuple((peer, advert) for peer, advert in known if advert is not None)[:ADVERTS_MAX]


def fitting(handover: HandOver) -> HandOver:
    """Drop from `handover` what makes it larger than a message. A plan that is that large alone goes nowhere."""
    for name in LEAST_NEEDED:
        if len(msgspec.msgpack.encode(handover)) + ENVELOPE_BYTES <= CONTROL_BYTES_MAX:
            break
        handover = msgspec.structs.replace(handover, **{name: ()})
    return handover
