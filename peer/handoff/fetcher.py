"""Fetches state: ranges of one version from all its holders at once. Each layer is checked against the digest that most
holders name; if the check fails, the layer is fetched again from other holders.

Two kinds of peers help besides the holders. *Group peers* fetch the same layers at the same time, and pass on what they
have received (`relay.py`). *Carriers* fetch ranges from a single holder for us, over network paths of their own.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.peer.base.tolerating import Tolerating
from shoal.peer.handoff.inbox import RANGE_TIMEOUT_S, WEIGHTS, ChunkInbox
from shoal.peer.handoff.initial import begun_numel
from shoal.peer.handoff.relay import Relay, owner_of
from shoal.peer.handoff.server import INITIAL, TRAINED
from shoal.peer.model.state import LayerState, RoundedWeights, StageState, state_numels
from shoal.peer.replica.attestations import is_majority
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import StateChunkRequest, StateOffer, StateRequest
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

_REFUSED_S = 1.0
"""Time after which a helper that refused a range is asked again: a group peer does not have the range yet, or a carrier
is fetching for itself."""
_OTHERS_S_FIRST = 2.0
"""Seconds for which we do not ask a holder for ranges that group peers or carriers should bring: otherwise the holder
would send the same bytes twice, and if a layer has few ranges, all fetching peers would wait for the holder's uplink. A
measured time replaces this value once the holder has sent us a range (`_leaves_to_others_s`)."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements [start, stop) of one tensor of one layer. `tensor`: 0 for the parameters, 1 and 2 for the moments."""

    key: str
    tensor: int
    start: int
    stop: int
    owner: PeerID
    """The fetching peer that gets this range from a holder, and passes it on."""


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
    what: str = "state"
    """The thing that is fetched, in words for the user."""


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
    ) -> None:
        """
        Args:
            device: the device to put the state on; None: the host.
            patience_s: the longest time that one range may take.
            may_ask: cleared while other traffic needs our line: then no new range is requested.
        """
        self._patience_s = patience_s
        self._spec = spec
        self._keys = keys
        self._inbox, self._endpoint, self._compute = inbox, inbox.endpoint, inbox.compute
        self._vectors = inbox.vectors
        self._device = device or inbox.vectors.host
        self._sources: dict[str, list[PeerID]] = {}
        self._digests: dict[str, str] = {}
        self._version = -1
        self._stored_era = TRAINED
        self._base: RoundedWeights | None = None
        self._with_base: set[PeerID] = set()
        """Holders that also have the weights `_base`, so that they can send the difference from these."""
        self._may_ask = may_ask
        self._relay = Relay(TRAINED, -1, vectors=self._vectors)
        self._group_peers: set[PeerID] = set()
        """Reachable group peers, which fetch the same layers as we do."""
        self._carriers: list[PeerID] = []
        """Peers that we ask to fetch ranges from a holder and send them on to us."""
        self._took_s: dict[PeerID, float] = {}
        """Holder -> seconds that its slowest range took."""
        self._passed: dict[str, bool] = {}
        """Layer -> True: helpers (group peers, carriers) were asked for a part of it, or an earlier fetch left a part;
        False: it failed the check of its digest, and is now fetched from holders only; absent: neither."""
        self.progress = FetchProgress()

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
        if relay is not None:
            self._relay, self._group_peers = relay, set(relay.group_peers)
        begun = begun or {}
        self._carriers = [peer for peer in carriers if peer not in self._group_peers][:32]
        only = dict(expected or {}) | {key: at.digest for key, at in begun.items()}
        digests = self._digests = self._choose(await self._offers(holders, is_witnessed, voters, at_least), only)
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
        self.progress.total = sum(tensor.numel() for key in missing for tensor in self._relay.tensors[key])
        for key, at in begun.items():
            self._passed[key] = True
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
            self._sources[key] = [peer for peer, digest in named.items() if digest == digests[key]]
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
        left = dict.fromkeys(wanted for key in keys for wanted in self._ranges_of(key))
        while left:
            orphan = next((wanted.key for wanted in left if not self._sources[wanted.key]), None)
            if orphan is not None:
                raise Unreachable(self._endpoint.peer_id, f"all holders of {orphan} were lost while fetching")
            await self._fetch_ranges(left)

    async def _fetch_ranges(self, left: dict[_Range, None]) -> None:
        """Fetch the ranges in `left` from holders, group peers and carriers at once. Remove each from `left` when it
        arrives. Return when `left` is empty, or when every holder has failed.

        After a while, a holder that has no other range to send is also asked for the ranges that group peers or
        carriers should bring, so that a slow helper does not delay the fetch.
        """
        loop = asyncio.get_running_loop()
        begun_s, under_way = loop.time(), Counter[PeerID]()
        todo, lent = list(left), dict[_Range, None]()
        """Ranges to fetch: in `todo`, no peer is asked for them now; in `lent`, only a helper is."""
        nothing_left = asyncio.Event()

        async def get(peer: PeerID, wanted: _Range, via: PeerID | None = None) -> None:
            await self._fetch_range(peer, wanted, via=via)
            if wanted in left:
                del left[wanted]
                self._came(wanted.key, wanted.tensor, wanted.start, wanted.stop)
            if not left:
                nothing_left.set()

        async def work(peer: PeerID) -> None:
            may_renew = True
            while True:
                if self._may_ask is not None and not self._may_ask.is_set():
                    await self._held_up(peer, self._may_ask)
                    continue
                wanted = self._next_own(peer, todo)
                if wanted is None:
                    # Take the range that helpers would ask for last, or the one that they were asked for first.
                    others = (*reversed(todo), *lent)
                    wanted = next((each for each in others if peer in self._sources[each.key]), None)
                    if wanted is None:
                        return
                    if under_way[peer] or loop.time() < begun_s + self._leaves_to_others_s(peer):
                        await asyncio.sleep(0.1)
                        continue
                if wanted in lent:
                    del lent[wanted]
                else:
                    todo.remove(wanted)
                began_s = loop.time()
                under_way[peer] += 1
                try:
                    await get(peer, wanted)
                    took_s = loop.time() - began_s
                    self._took_s[peer] = max(took_s, self._took_s.get(peer, 0.0))
                    may_renew = True
                except (Unreachable, Refused, RemoteError) as error:
                    if wanted in left:
                        todo.append(wanted)
                    if not (isinstance(error, Refused) and may_renew and await self._is_offered_again(peer)):
                        self._lose(peer, error)
                        return
                    may_renew = False
                finally:
                    under_way[peer] -= 1

        async def help_out(peer: PeerID, *, carries: bool) -> None:
            """Have a group peer bring the ranges that it owns, or a carrier bring ranges that only one holder has."""
            next_wanted = self._next_alone if carries else self._next_of_group_peer
            while (wanted := next_wanted(peer, todo)) is not None:
                self._passed[wanted.key] = True
                todo.remove(wanted)
                lent[wanted] = None
                is_refused = False
                try:
                    await get(peer, wanted, self._sources[wanted.key][0] if carries else None)
                except Refused:
                    is_refused = True
                except (Unreachable, RemoteError) as error:
                    logger.info("a peer passes no ranges on: %s", error)
                    self._group_peers.discard(peer)
                    return
                finally:
                    if wanted in lent:
                        del lent[wanted]
                        if wanted in left:
                            todo.append(wanted)
                if is_refused:
                    await asyncio.sleep(_REFUSED_S)

        peers = dict.fromkeys(peer for wanted in left for peer in self._sources[wanted.key])
        working = [asyncio.create_task(work(peer)) for peer in peers for _ in range(2)]
        helpers = [(peer, False) for peer in sorted(self._group_peers) for _ in range(2)]
        helpers += [(peer, True) for peer in self._carriers]
        helping = [asyncio.create_task(help_out(peer, carries=carries)) for peer, carries in helpers]
        worked = asyncio.gather(*working)
        here = asyncio.create_task(nothing_left.wait())
        try:
            await asyncio.wait((worked, here), return_when=asyncio.FIRST_COMPLETED)
        finally:
            worked.cancel()
            for task in (here, *helping):
                task.cancel()
            ended = await asyncio.gather(*working, *helping, return_exceptions=True)
            await asyncio.gather(worked, here, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _held_up(self, peer: PeerID, may_ask: asyncio.Event) -> None:
        """Wait until the fetch may go on; ask the holder every ten seconds, so that the holder keeps the version."""
        try:
            async with asyncio.timeout(10.0):  # without requests, the holder drops the version
                await may_ask.wait()
        except TimeoutError:
            await self._ask_all([peer], self._version)

    async def _is_offered_again(self, peer: PeerID) -> bool:
        """True if a holder that has refused a range still offers the same state. The holder may have dropped the
        version because we requested nothing while group peers brought the ranges."""
        offer = (await self._ask_all([peer], self._version)).get(peer)
        named = dict(offer.digests) if offer is not None else {}
        return all(named.get(key) == self._digests[key] for key, sources in self._sources.items() if peer in sources)

    def _lose(self, peer: PeerID, error: Exception) -> None:
        logger.warning("lost a source of state: %s", error)
        for sources in self._sources.values():
            if peer in sources:
                sources.remove(peer)

    def _ranges_of(self, key: str) -> list[_Range]:
        """Return the ranges of a layer that have not arrived."""
        group_peers = self._group_peers.difference(self._sources[key]) if self._passed.get(key, True) else ()
        fetching = sorted({self._endpoint.peer_id, *group_peers})
        numbers = Counter[int]()
        found = []
        for index, start, stop in self._relay.ranges_of(key):
            owner = owner_of(key, index, numbers[index], fetching)
            numbers[index] += 1
            if (index, start) not in self._relay.here[key]:
                found.append(_Range(key, index, start, stop, owner))
        return found

    def _next_own(self, holder: PeerID, todo: Sequence[_Range]) -> _Range | None:
        me = self._endpoint.peer_id
        return next((each for each in todo if each.owner == me and holder in self._sources[each.key]), None)

    def _next_of_group_peer(self, group_peer: PeerID, todo: Sequence[_Range]) -> _Range | None:
        if group_peer not in self._group_peers:
            return None
        return next((wanted for wanted in todo if wanted.owner == group_peer), None)

    def _next_alone(self, carrier: PeerID, todo: Sequence[_Range]) -> _Range | None:
        """Return for `carrier` the last range in `todo` with a single holder (we begin with the first), or None."""
        for wanted in reversed(todo):
            sources = self._sources[wanted.key]
            is_alone = len(sources) == 1 and sources[0] not in (carrier, self._endpoint.peer_id)
            if is_alone and self._passed.get(wanted.key, True):
                return wanted
        return None

    def _leaves_to_others_s(self, holder: PeerID) -> float:
        """Return for how many seconds we do not ask `holder` for ranges that group peers or carriers should bring."""
        took_s = self._took_s.get(holder)
        return _OTHERS_S_FIRST if took_s is None else (2 + len(self._group_peers)) * took_s

    def _came(self, key: str, tensor: int, start: int, stop: int) -> None:
        self.progress.done += stop - start
        self._relay.came(key, tensor, start)

    def _again(self, key: str) -> None:
        """Discard a layer that failed its check, and its first source if holders alone sent it, so that it is fetched
        again. Raises: RemoteError: a single holder sent the whole layer."""
        tensors, sources, culprit = self._relay.tensors[key], self._sources[key], self._sources[key][0]
        is_passed = self._passed.get(key, False)
        self._passed[key] = False
        self._relay.begin(key, tensors)
        if len(sources) == 1 and not is_passed:
            raise RemoteError(culprit, f"sent a state of {key} that its own digest contradicts")
        # With several sources we cannot know which one lied: fetch again without the first, then without the second.
        logger.warning("layer %s did not match its digest: fetching it again", key)
        self.progress.done -= sum(tensor.numel() for tensor in tensors)
        if not is_passed:
            sources.remove(culprit)

    async def _fetch_range(self, peer: PeerID, wanted: _Range, *, via: PeerID | None = None) -> None:
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
