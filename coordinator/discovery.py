"""Posts this peer's records in the directory and reads all: each peer's addresses, and the head of the plan chain."""

import asyncio
import logging
import math
from collections.abc import Container

import msgspec

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Advert, AdvertRecord, PlanHead
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.ports import Clock, Directory

logger = logging.getLogger(__name__)

ADVERT_EXPIRES_S = 60.0
ADVERT_RENEWED_S = 20.0
"""Interval at which our advert is renewed: two renewals may fail before the directory forgets us."""
HEAD_EXPIRES_S = 120.0
"""Seconds for which the directory still names the head of the chain to newcomers after the last coordinator's end. If
there are several records, the one with the highest plan counts."""
READERS = 64
"""A peer that knows fewer peers reads all adverts with each renewal of its own; a peer that knows more, less often."""
DIALS_MAX = 16
"""Maximum number of peers introduced to the transport at the same time. Dialling an absent peer takes seconds."""
MOVE_S = 5.0
MOVES_AT_ONCE = 4
"""A peer may report new addresses this many times, then one per `MOVE_S`, lest it make us dial many strangers."""


def peers_key(run: str) -> str:
    """Return the directory's key of all adverts."""
    return f"shoal/{run}/peers"


def plan_key(run: str) -> str:
    """Return the directory's key under which coordinators post the head of the chain."""
    return f"shoal/{run}/plan"


class Discovery:
    """Posts and reads records. A record counts only under the name of the peer that signed it."""

    def __init__(self, endpoint: Endpoint, directory: Directory, clock: Clock) -> None:
        self._endpoint, self._directory, self._clock = endpoint, directory, clock
        self._peers_key, self._plan_key = peers_key(endpoint.run), plan_key(endpoint.run)
        self._introduced: dict[PeerID, tuple[tuple[str, ...], float]] = {}
        """Peer -> (its addresses, the time at which it may again change them `MOVES_AT_ONCE` times in a row)."""
        self._dials = asyncio.Semaphore(DIALS_MAX)
        self._advert: Advert | None = None
        self._renew_at_s = self._read_at_s = 0.0
        self._has_posted = False

    def knows(self, peer: PeerID) -> bool:
        return peer == self._endpoint.peer_id or peer in self._introduced

    def should_read(self, plan: Plan) -> bool:
        """True if `plan` has a member with unknown addresses and we should read the directory now. We look up members
        of our own and neighbouring stages at once, other members only if we coordinate or after an interval: otherwise
        a thousand peers would read a thousand records each time that a peer joins."""
        me = self._endpoint.peer_id
        stage = plan.stage_of(me)
        near = [] if stage is None else plan.stages[max(0, stage - 1) : stage + 2]
        if not all(self.knows(peer) for part in near for peer in part.peers):
            return True
        may_read = plan.coordinator == me or self._clock.now_s() >= self._read_at_s
        return may_read and not all(self.knows(peer) for peer in plan.members)

    def is_due(self, advert: Advert) -> bool:
        """True, once, if `advertise` is due: our advert has changed or the posted one is about to expire."""
        now_s = self._clock.now_s()
        if advert == self._advert and now_s < self._renew_at_s:
            return False
        self._advert, self._renew_at_s = advert, now_s + ADVERT_RENEWED_S
        return True

    async def advertise(self, advert: Advert) -> None:
        """Post our advert and read the others'. A renewal reads first, to find another process with our key
        (`Endpoint.is_displaced`)."""
        is_renewal, self._has_posted = self._has_posted, True
        if not is_renewal:
            await self._store(self._peers_key, AdvertRecord(advert=advert), ADVERT_EXPIRES_S)
        if self._clock.now_s() >= self._read_at_s:
            await self.meet()
        if is_renewal:
            await self._store(self._peers_key, AdvertRecord(advert=advert), ADVERT_EXPIRES_S)

    async def publish(self, signed: SignedPlan) -> None:
        head = PlanHead(
            term=signed.plan.term,
            sequence=signed.plan.sequence,
            digest=signed.digest,
            coordinator=self._endpoint.peer_id,
            addresses=self._endpoint.transport.addresses(),
        )
        await self._store(self._plan_key, head, HEAD_EXPIRES_S)

    async def look_up(self, doubted: Container[PeerID] = ()) -> PlanHead | None:
        """Return the highest plan that coordinators have posted; one by a `doubted` peer only if there is no other."""
        records = await self._records(self._plan_key)
        heads = [head for peer, head in records if isinstance(head, PlanHead) and head.coordinator == peer]
        head = max(heads, key=lambda h: (h.coordinator not in doubted, h.term, h.sequence, h.coordinator), default=None)
        if head is not None and self.is_news(head.coordinator, head.addresses):
            await self.introduce(head.coordinator, head.addresses)
        return head

    async def meet(self) -> None:
        """Read the adverts of all peers; in a swarm of hundreds less often, because every peer reads every record."""
        await self.adverts()
        self._read_at_s = self._clock.now_s() + ADVERT_RENEWED_S * (len(self._introduced) // READERS)

    async def adverts(self) -> dict[PeerID, Advert]:
        """Return every peer's advert. Introduce new or moved peers to the transport."""
        records = await self._records(self._peers_key)
        adverts = {peer: record.advert for peer, record in records if isinstance(record, AdvertRecord)}
        news = [(peer, advert.addresses) for peer, advert in adverts.items() if self.is_news(peer, advert.addresses)]
        await asyncio.gather(*(self.introduce(peer, addresses) for peer, addresses in news))
        return adverts

    def is_news(self, peer: PeerID, addresses: tuple[str, ...]) -> bool:
        """True if the peer should be introduced under these addresses."""
        if not addresses or peer == self._endpoint.peer_id:
            return False
        known, full_s = self._introduced.get(peer, ((), -math.inf))
        return addresses != known and self._clock.now_s() + (MOVES_AT_ONCE - 1) * MOVE_S >= full_s

    async def introduce(self, peer: PeerID, addresses: tuple[str, ...]) -> None:
        """Tell the transport the addresses of a peer. This may take seconds, because the transport may dial at once."""
        _, full_s = self._introduced.get(peer, ((), -math.inf))
        self._introduced[peer] = addresses, max(self._clock.now_s(), full_s) + MOVE_S
        async with self._dials:
            await self._endpoint.transport.introduce(peer, addresses)

    async def _store(self, key: str, record: msgspec.Struct, expires_in_s: float) -> None:
        sealed = self._endpoint.seal_record(record)
        if not await self._directory.store(key, self._endpoint.peer_id, sealed, expires_in_s=expires_in_s):
            logger.warning("the directory did not take our %s", type(record).__name__)

    async def _records(self, key: str) -> list[tuple[PeerID, msgspec.Struct]]:
        """Return the records with valid signatures, in the order of the writers' names."""
        found: list[tuple[PeerID, msgspec.Struct]] = []
        for subkey, data in sorted((await self._directory.get(key)).items()):
            try:
                signer, record = self._endpoint.open_record(data, source=PeerID(subkey))
            except RemoteError as error:
                logger.info("ignored a record under %s: %s", key, error)  # nobody can do anything about it here
                continue
            if signer == subkey:
                found.append((signer, record))
        return found
