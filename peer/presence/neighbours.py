"""The presence of the peers that work with this one (`PresenceUpdate`), and which of them are unreachable.

A plan says where each peer should be; the peer's presence update says where it is. Two updates may overtake each other
(one in a call, one in the answer to another call), so each has a number, and an older one is ignored. A new incarnation
of a peer (after a restart or a renewal) has none of the state that the earlier one held.
"""

import logging
from collections.abc import Iterable

import msgspec

from shoal.peer.base.outbox import Outbox
from shoal.peer.base.plans import Plans
from shoal.peer.presence.own_word import OwnWord
from shoal.peer.presence.parts import Part, Parts
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PresenceUpdate
from shoal.protocol.plan import Plan
from shoal.protocol.ports import Clock

logger = logging.getLogger(__name__)

_KEY = "hello"


class Neighbours:
    """Sends and receives one peer's presence updates. Ignores peers that no recent plan names, so that strangers cannot
    fill the tables.

    Args: silence_s: for how many seconds a peer counts as silent after a failure to reach it.
    """

    def __init__(
        self, endpoint: Endpoint, clock: Clock, plans: Plans, parts: Parts, own: OwnWord, *, silence_s: float
    ) -> None:
        self._endpoint, self._clock = endpoint, clock
        self._plans, self._parts, self._own = plans, parts, own
        self._silence_s = silence_s
        self._count = 0
        self._presences: dict[PeerID, PresenceUpdate] = {}
        self._silent: dict[PeerID, float] = {}
        self._posted: dict[PeerID, PresenceUpdate] = {}
        self._told: dict[PeerID, PresenceUpdate] = {}  # peer -> our last presence that it has answered
        self._outbox = Outbox(endpoint, expect=PresenceUpdate, on_reply=self._on_reply, on_trouble=self.unreachable)
        endpoint.on(PresenceUpdate, self._on_hello)

    def say(self, audience: Iterable[PeerID]) -> None:
        """Send our presence to each peer in `audience`."""
        for peer in audience:
            word = self._next()
            self._posted[peer] = _where(word)
            self._outbox.post(peer, _KEY, word)

    def say_news(self, audience: Iterable[PeerID]) -> None:
        """Send our presence to the peers that have not acknowledged it as it is now. With a thousand peers a new plan
        comes every few seconds, and a hundred neighbours need not hear each time that our place is unchanged."""
        now = _where(self._own.presence())
        self.say(peer for peer in audience if self._told.get(peer) != now)

    def announce(self) -> None:
        """Tell all peers that work with us that our presence has changed."""
        self.say(self._parts.audience)
        if self._parts.stage is not None:
            self._parts.stage.experts_at(self._endpoint.peer_id, self._own.presence())

    def drains(self, peer: PeerID, stage: int | None) -> bool:
        """True if the last update of `peer` says that it drains at `stage` (None: at no stage)."""
        presence = self._presences.get(peer)
        return presence is not None and presence.draining and presence.stage == (-1 if stage is None else stage)

    def stays(self, peer: PeerID) -> bool:
        """True if the last update of `peer` says that it does not leave; it sends another update before it leaves."""
        presence = self._presences.get(peer)
        return presence is not None and not presence.draining

    def knows_that_we_leave(self, peer: PeerID) -> bool:
        """True if the peer has acknowledged an update which says that we leave, or is silent. Its acknowledgement is an
        update too, so from now on one of us knows if both leave."""
        told = self._told.get(peer)
        return peer in self.silent or (told is not None and told.draining)

    def leaves(self, peer: PeerID, part: Part) -> bool:
        """True if the last update of `peer` says that it leaves the group of `part`, or the whole run."""
        if part is self._parts.stage:
            return self.drains(peer, part.group_id)
        presence = self._presences.get(peer)
        places = presence.experts if presence is not None else ()
        return presence is not None and any(
            place.group == part.group_id and (place.draining or presence.draining) for place in places
        )

    def words(self) -> list[tuple[PeerID, PresenceUpdate]]:
        """Return (peer, its last presence update) for each peer, in the order of peer IDs."""
        return sorted(self._presences.items())

    def forget(self, peer: PeerID) -> None:
        """Forget a peer and its presence updates, and drop our messages to it that have not left."""
        self._presences.pop(peer, None)
        self._silent.pop(peer, None)
        self._told.pop(peer, None)
        self._posted.pop(peer, None)
        self._outbox.forget(peer)

    def forget_all(self) -> None:
        for peer in self._everybody:
            self.forget(peer)

    def forget_strangers(self) -> None:
        """Forget the peers that no recent plan names."""
        for peer in self._everybody:
            if not self._plans.knows(peer):
                self.forget(peer)

    def count_out(self, before: Plan, plan: Plan) -> None:
        """Forget the members that plans after `before` have dropped; those that do not drain count as dead."""
        for peer in (peer for peer in plan.dropped_since(before) if peer != self._endpoint.peer_id):
            # A member that was to move elsewhere did not leave on its own: it died on the way.
            drains = self.drains(peer, before.stage_of(peer)) and not plan.has(peer)
            self.forget(peer)
            if not drains:
                self._parts.died(peer)
            else:
                self.say([peer])  # a draining peer still answers; if it does not, it has died

    @property
    def _everybody(self) -> set[PeerID]:
        return set(self._presences) | set(self._silent) | set(self._told)

    @property
    def silent(self) -> tuple[PeerID, ...]:
        """Peers that we failed to reach within the last `silence_s` seconds."""
        since_s = self._clock.now_s() - self._silence_s
        self._silent = {peer: at_s for peer, at_s in self._silent.items() if at_s >= since_s}
        return tuple(sorted(self._silent))

    def unreachable(self, peer: PeerID) -> None:
        """Record that a call or a frame to `peer` has failed: the network or the peer may be to blame."""
        self._silent[peer] = self._clock.now_s()
        plan = self._plans.newest
        if plan is not None and not plan.has(peer):
            self._parts.died(peer)  # it fell silent while it drained, or right after
            return
        self._parts.silent(peer)
        if peer in self._parts.audience:
            self.say([peer])  # its answer says that it is there again

    async def flush(self, timeout_s: float) -> None:
        await self._outbox.flush(timeout_s)

    async def close(self) -> None:
        await self._outbox.close()

    def _next(self) -> PresenceUpdate:
        self._count += 1
        return msgspec.structs.replace(self._own.presence(), count=self._count)

    async def _on_hello(self, source: PeerID, message: PresenceUpdate) -> PresenceUpdate:
        if not self._plans.knows(source):
            # A newer plan may name the sender. When it reaches us, we send our presence to all new neighbours.
            raise Refused(self._endpoint.peer_id, "does not know the sender from a plan")
        self._heard(source, message)
        return self._next()

    def _on_reply(self, source: PeerID, reply: object) -> None:
        assert isinstance(reply, PresenceUpdate)
        if self._outbox.is_empty(source) and (posted := self._posted.pop(source, None)) is not None:
            self._told[source] = posted
        self._heard(source, reply)

    def _heard(self, source: PeerID, presence: PresenceUpdate) -> None:
        self._silent.pop(source, None)
        before = self._presences.get(source)
        if before is not None and (presence.incarnation, presence.count) <= (before.incarnation, before.count):
            return  # overtaken by a later update
        self._presences[source] = presence
        if before is not None and presence.incarnation > before.incarnation:
            logger.info("%s begins anew", source[-8:])
            self._told.pop(source, None)
            self._outbox.forget(source)  # a call to the earlier incarnation may be under way
            self.say([source])  # the new incarnation has not received what we told the earlier one
            self._parts.reborn(source, presence.incarnation)
        self._parts.heard(source, presence)


def _where(presence: PresenceUpdate) -> PresenceUpdate:
    """Return a presence update without the fields that its receivers do not act on."""
    experts = tuple(msgspec.structs.replace(place, version=0) for place in presence.experts)
    return msgspec.structs.replace(presence, count=0, plan_sequence=0, version=0, experts=experts)
