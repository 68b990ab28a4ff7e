"""Selects what a coordinator transfers to the next one, within the size of a message. Pure."""

import msgspec

from shoal.coordinator.chain_log import ENVELOPE_BYTES
from shoal.coordinator.roster import Roster
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CONTROL_BYTES_MAX
from shoal.protocol.messages import Advert, TransferLeadership

ADVERTS_MAX = 64
"""Maximum number of adverts in a transfer. They spare the successor the wait for most heartbeats."""
LEAST_NEEDED = ("roster", "plans", "absent", "records", "loads", "unreachable", "arrivals")
"""Fields to drop, in this order, from a transfer that is too large for a message; from some hundreds of peers on the
plan leaves no room for all. The roster names 64 peers only; plans and absences are for people; records choose among
placements. Without loads the heir keeps a hot expert's shares until it has measured where tokens go; without
unreachable pairs it may group peers that cannot talk, until they report it; without arrivals it may remove a peer with
late heartbeats until it has learned its rhythm."""


def adverts(roster: Roster, now_s: float) -> tuple[tuple[PeerID, Advert], ...]:
    """Return the adverts of live peers, at most `ADVERTS_MAX`."""
    known = ((peer, roster.presences[peer].advert) for peer in roster.alive(now_s))
    return tuple((peer, advert) for peer, advert in known if advert is not None)[:ADVERTS_MAX]


def fitting(handover: TransferLeadership) -> TransferLeadership:
    """Drop fields from `handover` until it fits in a message. A plan that is too large alone cannot be sent at all."""
    for name in LEAST_NEEDED:
        if len(msgspec.msgpack.encode(handover)) + ENVELOPE_BYTES <= CONTROL_BYTES_MAX:
            break
        handover = msgspec.structs.replace(handover, **{name: ()})
    return handover
