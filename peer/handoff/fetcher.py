"""Fetches state: ranges of one version from all its holders at once. Each layer is checked against the digest that most
holders name; if the check fails, the layer is fetched again from other holders. `range_fetch.py` plans the requests.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.peer.base.tolerating import Tolerating
from shoal.peer.handoff.inbox import RANGE_TIMEOUT_S, WEIGHTS, ChunkInbox
from shoal.peer.handoff.initial import begun_numel
from shoal.peer.handoff.range_fetch import Range, RangeFetch, RangeRequest
from shoal.peer.handoff.relay import Relay
from shoal.peer.handoff.server import INITIAL, TRAINED
from shoal.peer.model.state import LayerState, RoundedWeights, StageState, state_numels
from shoal.peer.replica.attestations import is_majority
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import FETCH_SOURCES_MAX
from shoal.protocol.messages import FetchedKind, FetchStatus, StateChunkRequest, StateOffer, StateRequest
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Unfinished:
    """The received part of a layer, with which a later fetch of the same version and digest can go on. The part has not
    been checked against the digest: the fetch that completes the layer checks it."""

    version: int
    digest: str
    tensors: tuple[Tensor, Tensor, Tensor]
    """Parameters and moments at full length, of which only the ranges in `here` are filled."""
    here: set[tuple[int, int]]
    """(tensor, first element) of each range that has arrived; tensor 0: parameters, 1 and 2: moments."""


@dataclass(slots=True)
class FetchProgress:
    """Progress of a fetch: `done` of `total` elements have arrived (`total` is 0 while holders are asked). If a layer
    is fetched again, its elements are subtracted from `done`."""

    done: int = 0
    total: int = 0
    what: FetchedKind = "state"
    sent: Counter[PeerID] = field(default_factory=Counter)
    """Peer -> number of elements that it has sent."""
    _began_s: float | None = None

    def status(self, now_s: float) -> FetchStatus:
        """Return the status to report; the time left follows from the rate since this was first called."""
        self._began_s = now_s if self._began_s is None else self._began_s
        number_bytes, left = 2 if self.what == "weights" else 4, max(0, self.total - self.done)
        return FetchStatus(
            what=self.what,
            total_bytes=number_bytes * self.total,
            left_bytes=number_bytes * left,
            left_s=round((now_s - self._began_s) * left / self.done) if self.done > 0 else None,
            sources=tuple(peer for peer, _ in self.sent.most_common(FETCH_SOURCES_MAX)),
        )


class StateFetcher:
    """One fetch of the layers `keys` at one version."""

    def __init__(
        self,
        spec: RunSpec,
        keys: tuple[str, ...],
        inbox: ChunkInbox,
        *,
        device: torch.device | None = None,
        patience_s: float = RANGE_TIMEOUT_S,
        may_ask: asyncio.Event | None = None,
        progress: FetchProgress | None = None,
    ) -> None:
        """
        Args:
            device: the device to put the state on; None: the host.
            patience_s: the longest time that one range may take.
            may_ask: cleared while other traffic needs our line: then no new range is requested.
            progress: that of several fetches, one of which this is; None: of this fetch alone.
        """
        self._patience_s = patience_s
        self._spec = spec
        self._keys = keys
        self._inbox, self._endpoint, self._compute = inbox, inbox.endpoint, inbox.compute
        self._vectors = inbox.vectors
        self._device = device or inbox.vectors.host
        self._digests: dict[str, str] = {}
        self._version = -1
        self._stored_era = TRAINED
        self._base: RoundedWeights | None = None
        self._with_base: set[PeerID] = set()
        """Holders that also have the weights `_base`, so that they can send the difference from these."""
        self._may_ask = may_ask
        self._relay = Relay(vectors=self._vectors)
        self._ranges = RangeFetch(inbox.endpoint.peer_id)
        self._renewed_s: dict[PeerID, float] = {}
        """Holder that refused a range, and has sent none since -> the time at which it offered the state again."""
        self.progress = progress or FetchProgress()

    async def fetch(
        self,
        holders: Sequence[PeerID],
        *,
        version: int = -1,
        stored_era: int = TRAINED,
        is_witnessed: Callable[[StateOffer], bool] | None = None,
        voters: Sequence[PeerID] | None = None,
        at_least: int = 0,
        base: RoundedWeights | None = None,
        known: Mapping[str, LayerState] | None = None,
        expected: Mapping[str, str] | None = None,
        begun: Mapping[str, Unfinished] | None = None,
        relay: Relay | None = None,
        carriers: Sequence[PeerID] = (),
    ) -> StageState:
        """Fetch `version`; -1: the newest version that a holder has.

        Args:
            stored_era: the kind of state: that which is trained now (`TRAINED`), a snapshot of this era (>= 0), the
                initial parameters (`INITIAL`), or the trained parameters in bf16 (`WEIGHTS`). The last two have no
                moments.
            is_witnessed: for the newest version: accept only offers for which this returns True.
            voters: for the newest version: accept the one that more than half of these peers offer with equal digests.
            at_least: with `voters`: the oldest acceptable version.
            base: with `WEIGHTS`: weights that we have; holders that have them too send the difference from them.
            known: layers that the caller believes it has at that version; a layer that differs from its holders' digest
                is fetched.
            expected: layer -> the digest that the run's spec or the plan certifies.
            begun: with `version`: partly received layers, which are completed only if their digests are still offered.
            relay: shares received ranges with the group peers that it names.
            carriers: peers to ask to fetch ranges from a single holder for us.
        Raises: Unreachable: a layer has no holder, or has lost all of them. RemoteError: a layer's only holder sent
            numbers that contradict its digest.
        """
        self._version, self._stored_era, self._base = version, stored_era, base
        self._relay = relay or self._relay
        self._ranges = RangeFetch(self._endpoint.peer_id, self._relay.group_peers, carriers)
        begun = begun or {}
        only = dict(expected or {}) | {key: at.digest for key, at in begun.items()}
        digests = self._digests = self._choose(await self._offers(holders, is_witnessed, voters, at_least), only)
        self._relay.at = self._stored_era, self._version
        logger.info("fetching version %d of %d layers", self._version, len(self._keys))
        has = {key: layer for key, layer in (known or {}).items() if key in digests}
        for key in await self._differing(has):
            logger.warning("layer %s is not what its holders have: fetching it", key)
            del has[key]
        missing = [key for key in self._keys if key not in has]
        for key in missing:
            self._relay.begin(key, begun[key].tensors if key in begun else self._empty(key))
        for key, layer in has.items():
            self._relay.begin(key, layer.tensors, whole=True)
        if not self.progress.total:
            self.progress.total = sum(tensor.numel() for key in missing for tensor in self._relay.tensors[key])
        for key, at in begun.items():
            self._ranges.helped[key] = True
            for index, start, stop in self._relay.ranges_of(key):
                if (index, start) in at.here:
                    self._came(key, index, start, stop)
        while missing:
            await self._fetch_layers(missing)
            come = {key: self._vectors.layer_state(*self._relay.tensors[key]) for key in missing}
            missing = await self._differing(come)
            for key in missing:
                self._again(key)
        layers = await self._compute.run_on_host(lambda: {key: self._on_device(key) for key in self._keys})
        return StageState(version=self._version, layers=layers)

    def unfinished(self) -> dict[str, Unfinished]:
        """Return the received part of each layer, for another fetch of the same version after this one has failed."""
        return {
            key: Unfinished(self._version, self._digests[key], self._relay.tensors[key], here)
            for key, here in self._relay.here.items()
            if here
        }

    # --- holders ---

    async def _offers(
        self,
        holders: Sequence[PeerID],
        is_witnessed: Callable[[StateOffer], bool] | None,
        voters: Sequence[PeerID] | None,
        at_least: int,
    ) -> dict[PeerID, StateOffer]:
        """Ask holders for offers, and choose a version (`_version`). Return holder -> its offer of that version."""
        first = await self._ask_all(holders, self._version)
        if self._version >= 0 or not first:
            return first
        sound = first
        if voters is not None:
            sound = self._of_most(first, voters, at_least)
        elif is_witnessed is not None:
            sound = {peer: offer for peer, offer in first.items() if is_witnessed(offer)}
            if not sound:
                me = self._endpoint.peer_id
                raise Unreachable(me, "nobody offers a state that most of its holders have signed")
        self._version = max(offer.version for offer in sound.values())
        same = {peer: offer for peer, offer in sound.items() if offer.version == self._version}
        others = [peer for peer in holders if peer not in same]
        same |= await self._ask_all(others, self._version)
        if is_witnessed is None and voters is None:
            return same
        # A holder that was asked for the version by its number need not have signatures: equal digests are enough.
        digests = dict(next(iter(same.values())).digests)
        return {peer: offer for peer, offer in same.items() if dict(offer.digests) == digests}

    def _of_most(
        self, offers: dict[PeerID, StateOffer], voters: Sequence[PeerID], at_least: int
    ) -> dict[PeerID, StateOffer]:
        """Return the offers that more than half of the voters make with equal version and digests."""
        said = {peer: (offer.version, tuple(sorted(offer.digests))) for peer, offer in offers.items()}
        votes = Counter(said[peer] for peer in voters if peer in said)
        named = [word for word, num in votes.items() if is_majority(num, voters) and word[0] >= at_least]
        if not named:
            raise Unreachable(self._endpoint.peer_id, "most holders do not offer the same version yet")
        return {peer: offer for peer, offer in offers.items() if said[peer] == named[0]}

    def _choose(self, offers: dict[PeerID, StateOffer], only: Mapping[str, str]) -> dict[str, str]:
        """Return layer -> the digest that most of its holders offer. These holders become the layer's sources. Args:
        only: layer -> the only digest that may be chosen."""
        digests: dict[str, str] = {}
        said = {peer: dict(offer.digests) for peer, offer in offers.items()}
        for key in self._keys:
            named = {peer: of_peer[key] for peer, of_peer in said.items() if key in of_peer}
            if key in only:
                others = [peer[-8:] for peer, digest in named.items() if digest != only[key]]
                if others and self._stored_era == INITIAL:
                    what = "not the weights that the run begins with"
                    logger.warning("%s of %s: %s", ", ".join(others), key, what)
                named = {peer: digest for peer, digest in named.items() if digest == only[key]}
            if not named:
                raise Unreachable(self._endpoint.peer_id, f"nobody offers the state of {key}")
            votes = Counter(named.values())
            digests[key] = max(votes, key=lambda digest: votes[digest])
            self._ranges.sources[key] = [peer for peer, digest in named.items() if digest == digests[key]]
        return digests

    async def _ask_all(self, holders: Sequence[PeerID], version: int) -> dict[PeerID, StateOffer]:
        base = self._base.version if self._base is not None else -1
        request = StateRequest(layers=self._keys, version=version, stored_era=self._stored_era, base=base)

        offers: dict[PeerID, StateOffer] = {}

        async def ask(peer: PeerID) -> None:
            self._with_base.discard(peer)
            with Tolerating(logger.debug, "no state"):
                offer = await self._endpoint.ask(peer, request, StateOffer)
                if version < 0 or offer.version == version:
                    offers[peer] = offer
                    if offer.base == base >= 0:
                        self._with_base.add(peer)

        await asyncio.gather(*(ask(peer) for peer in holders))
        return {peer: offers[peer] for peer in holders if peer in offers}

    # --- the bytes ---

    async def _fetch_layers(self, keys: Sequence[str]) -> None:
        """Fill the tensors of `keys`. A holder that fails is asked for no layer any more."""
        loop, asking = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        for key in keys:
            self._ranges.begin(key, self._relay.ranges_of(key), self._relay.here[key], loop.time())
        try:
            while self._ranges.left:
                now_s, orphan = loop.time(), self._ranges.orphan()
                if orphan is not None and not asking:
                    raise Unreachable(self._endpoint.peer_id, f"all holders of {orphan} were lost while fetching")
                if self._may_ask is not None and not self._may_ask.is_set():
                    await self._held_up(asking, self._may_ask)
                elif orphan is not None:
                    await asyncio.wait(asking)  # what is on its way may serve a later fetch
                else:
                    asking |= {asyncio.create_task(self._get(ask)) for ask in self._ranges.due(now_s)}
                    await _first_of(asking, self._ranges.next_s(now_s) - now_s)
                for ended in [task for task in asking if task.done()]:
                    asking.remove(ended)
                    ended.result()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _held_up(self, asking: Collection[asyncio.Task[None]], may_ask: asyncio.Event) -> None:
        """Wait until a request ends or the fetch may go on. Without requests for long, a holder drops the version."""
        may_go_on = asyncio.create_task(may_ask.wait())
        if not await _first_of((*asking, may_go_on), 10.0):
            await self._ask_all(self._ranges.holders, self._version)
        may_go_on.cancel()

    async def _get(self, ask: RangeRequest) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._fetch_range(ask.peer, ask.wanted, via=ask.via)
        except (Unreachable, Refused, RemoteError) as error:
            goes_on = isinstance(error, Refused) and (ask.helps or await self._is_offered_again(ask))
            if not goes_on:
                logger.warning("lost a source of state: %s", error)
            self._ranges.failed(ask, loop.time(), is_lost=not goes_on)
        else:
            self._renewed_s.pop(ask.peer, None)
            if self._ranges.came(ask, loop.time()):
                self.progress.sent[ask.peer] += ask.wanted.stop - ask.wanted.start
                self._came(ask.wanted.key, ask.wanted.tensor, ask.wanted.start, ask.wanted.stop)

    async def _is_offered_again(self, ask: RangeRequest) -> bool:
        """True if a holder that has refused a range still offers the same state. The holder may have dropped the
        version because we requested nothing while group peers brought the ranges. If the holder refuses a range that
        was requested after it offered the state again, it is not asked once more."""
        if (renewed_s := self._renewed_s.get(ask.peer)) is not None:
            return ask.at_s < renewed_s
        offer = (await self._ask_all([ask.peer], self._version)).get(ask.peer)
        self._renewed_s[ask.peer] = asyncio.get_running_loop().time()
        named = dict(offer.digests) if offer is not None else {}
        return all(named.get(k) == self._digests[k] for k, peers in self._ranges.sources.items() if ask.peer in peers)

    def _came(self, key: str, tensor: int, start: int, stop: int) -> None:
        self.progress.done += stop - start
        self._relay.came(key, tensor, start)

    def _again(self, key: str) -> None:
        """Discard a layer that failed its check, so that it is fetched again. Raises: RemoteError: a single holder sent
        the whole layer."""
        tensors, culprit = self._relay.tensors[key], self._ranges.again(key)
        self._relay.begin(key, tensors)
        if culprit is not None:
            raise RemoteError(culprit, f"sent a state of {key} that its own digest contradicts")
        logger.warning("layer %s did not match its digest: fetching it again", key)
        self.progress.done -= sum(tensor.numel() for tensor in tensors)

    async def _fetch_range(self, peer: PeerID, wanted: Range, *, via: PeerID | None = None) -> None:
        base = self._base if peer in self._with_base else None
        request = StateChunkRequest(
            stored_era=self._stored_era,
            version=self._version,
            layer=wanted.key,
            tensor=wanted.tensor,
            start=wanted.start,
            stop=wanted.stop,
            via=via,
            base=base.version if base is not None else -1,
        )
        await self._inbox.fetch(
            peer,
            request,
            self._relay.tensors[wanted.key][wanted.tensor],
            before_N=base.params[wanted.key] if base is not None else None,
            patience_s=self._patience_s,
        )

    # --- layers ---

    def _empty(self, key: str) -> tuple[Tensor, Tensor, Tensor]:
        vectors, (param, moment1, moment2) = self._vectors, state_numels(self._spec, key)
        if self._stored_era == INITIAL:
            return vectors.empty(begun_numel(self._spec, key)), vectors.empty(0), vectors.empty(0)
        if self._stored_era == WEIGHTS:
            return vectors.empty_rounded(param), vectors.empty(0), vectors.empty(0)
        return vectors.empty(param), vectors.empty(moment1), vectors.empty(moment2)

    async def _differing(self, layers: Mapping[str, LayerState]) -> list[str]:
        """Return the layers with a digest other than the one that we chose from the holders' offers."""
        return await self._compute.run_on_host(
            lambda: [key for key, layer in layers.items() if layer.secure_digest() != self._digests[key]]
        )

    def _on_device(self, key: str) -> LayerState:
        return self._vectors.layer_state(*(tensor.to(self._device) for tensor in self._relay.tensors[key]))


async def _first_of(tasks: Collection["asyncio.Task[Any]"], timeout_s: float) -> bool:
    """Wait at most `timeout_s` seconds, or for ever if that is inf, until a task ends. Returns: True if one has."""
    if not tasks:
        await asyncio.sleep(timeout_s)
        return False
    timeout = None if math.isinf(timeout_s) else timeout_s
    ended, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    return bool(ended)
