"""Fetch state: ranges from all holders of one version at once, each layer checked against the digest that most holders
name.

If a layer fails its check, other holders are asked. Peers that fetch the same layers at the same time (`group_peers`)
share what has arrived (`relay.py`).
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
"""A mate that refuses a range does not have it yet; a carrier fetches for itself now. Then it is asked again."""
_OTHERS_S_FIRST = 2.0
"""No holder is asked for the ranges of mates and carriers until it could have sent one to each fetching peer; until its
first range has come, that is taken to be this long. Asked sooner, it would send the same bytes twice, and where a layer
is a few ranges everybody waits for its uplink."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements [start, stop) of one tensor (0 parameters, 1 and 2 moments) of one layer."""

    key: str
    tensor: int
    start: int
    stop: int
    owner: PeerID
    """The fetching peer that gets this range from a holder."""


@dataclass(slots=True)
class Unfinished:
    """What is here of a layer, for a fetch of the layer at that version under that digest. It is not checked against
    the digest: the fetch that completes the layer does that."""

    version: int
    digest: str
    tensors: tuple[Tensor, Tensor, Tensor]
    """Parameters and moments at full length; filled where a range is `here`."""
    here: set[tuple[int, int]]
    """(Tensor, first element) of the ranges that have arrived."""


@dataclass(slots=True)
class FetchProgress:
    """Number of elements that have arrived, of `total` (0 while holders are asked); a repeated layer counts anew."""

    done: int = 0
    total: int = 0
    what: str = "state"
    """The thing that is fetched, in words for the user."""


class StateFetcher:
    """One fetch of the layers `keys`, at one version."""

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
            device: where the state is to be; None: on the host.
            patience_s: how long a range may take from one holder.
            may_ask: cleared while something else needs our line. Requests in flight continue.
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
        """Holders that can send the difference to `_base`."""
        self._may_ask = may_ask
        self._relay = Relay(TRAINED, -1, vectors=self._vectors)
        self._group_peers: set[PeerID] = set()
        """The relay's mates that are reachable."""
        self._carriers: list[PeerID] = []
        """Peers that may still be asked to get ranges of a single holder for us."""
        self._took_s: dict[PeerID, float] = {}
        """Holder -> seconds that its slowest range took."""
        self._passed: dict[str, bool] = {}
        """Layer -> True if some of it is not from its holders by our own requests; False: none may be any more."""
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
        """Fetch `version`, or the newest that a holder has.

        `stored_era` says of what: the trained state, a stored generation's snapshots, the initial parameters
        (`INITIAL`), or the trained parameters alone in bf16 (`WEIGHTS`). The last two have no moments.

        Args:
            is_witnessed: for the newest version: accept only offers for which this is true.
            voters: for the newest version: accept the one that more than half of these peers name by the same digests.
            at_least: with `voters`: the oldest acceptable version.
            base: with `WEIGHTS`: weights that we have; holders that have them, too, send the difference.
            known: layers that the caller believes it has at that version; those that differ from the holders' digests
                are fetched.
            expected: layer -> the digest that the run's spec or the plan certifies.
            begun: with `version`: layers of which a part is here. They are completed under their digests or not at all.
            relay: shares arrived ranges with mates that fetch the same layers, and names those mates.
            carriers: peers that are asked to get ranges of a single holder for us, over paths of their own.
        Raises: Unreachable: a layer has no holder, or lost all of them. RemoteError: a layer's only holder sent
            something else than its digest.
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
        """Return what has arrived of each begun layer, for another fetch of the same version after this one failed."""
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
        """Return the offers of one version, which becomes ours."""
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
        # A holder asked for the version by number need not prove its signatures: equal digests are enough.
        digests = dict(next(iter(same.values())).digests)
        return {peer: offer for peer, offer in same.items() if dict(offer.digests) == digests}

    def _of_most(
        self, offers: dict[PeerID, StateOffer], voters: Sequence[PeerID], at_least: int
    ) -> dict[PeerID, StateOffer]:
        """Return the offers that more than half of the voters agree on."""
        said = {peer: (offer.version, tuple(sorted(offer.digests))) for peer, offer in offers.items()}
        votes = Counter(said[peer] for peer in voters if peer in said)
        named = [word for word, num in votes.items() if is_majority(num, voters) and word[0] >= at_least]
        if not named:
            raise Unreachable(self._endpoint.peer_id, "most holders do not offer the same version yet")
        return {peer: offer for peer, offer in offers.items() if said[peer] == named[0]}

    def _choose(self, offers: dict[PeerID, StateOffer], only: Mapping[str, str]) -> dict[str, str]:
        """Return each layer's most frequent digest. The holders that name it become the layer's sources.
        Args: only: layer -> the one digest that may be chosen."""
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
        """Fill the tensors of `keys`. A holder that fails is removed from all sources."""
        left = dict.fromkeys(wanted for key in keys for wanted in self._ranges_of(key))
        while left:
            orphan = next((wanted.key for wanted in left if not self._sources[wanted.key]), None)
            if orphan is not None:
                raise Unreachable(self._endpoint.peer_id, f"all holders of {orphan} were lost while fetching")
            await self._fetch_ranges(left)

    async def _fetch_ranges(self, left: dict[_Range, None]) -> None:
        """Fetch the ranges in `left` from holders, mates and carriers at once, and remove each from `left` as it
        arrives. Return when `left` is empty, or when every holder has failed.

        A holder that has nothing else to send is also asked, after a while, for ranges that mates or carriers were to
        bring, so that a slow one holds nobody up.
        """
        loop = asyncio.get_running_loop()
        begun_s, under_way = loop.time(), Counter[PeerID]()
        todo, lent = list(left), dict[_Range, None]()
        """`todo`: ranges that nobody is asked for; `lent`: ranges that only mates and carriers are asked for."""
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
                    # The range that mates will reach last, or that helpers were asked for the longest time ago.
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
            """Have a mate bring the ranges that it owns, or a carrier those of a single holder."""
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
        """Wait until the fetch may go on, or until the holder's pin needs a request."""
        try:
            async with asyncio.timeout(10.0):  # ask the holder to keep its pin, which lapses unasked
                await may_ask.wait()
        except TimeoutError:
            await self._ask_all([peer], self._version)

    async def _is_offered_again(self, peer: PeerID) -> bool:
        """True if a holder that refused a range still offers the same state: its pin lapses while mates pass ranges
        on."""
        offer = (await self._ask_all([peer], self._version)).get(peer)
        named = dict(offer.digests) if offer is not None else {}
        return all(named.get(key) == self._digests[key] for key, sources in self._sources.items() if peer in sources)

    def _lose(self, peer: PeerID, error: Exception) -> None:
        logger.warning("lost a source of state: %s", error)
        for sources in self._sources.values():
            if peer in sources:
                sources.remove(peer)

    def _ranges_of(self, key: str) -> list[_Range]:
        """Return the ranges of a layer that are not here."""
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
        """Return the last range that only one other peer has; we get the first ones ourselves."""
        for wanted in reversed(todo):
            sources = self._sources[wanted.key]
            is_alone = len(sources) == 1 and sources[0] not in (carrier, self._endpoint.peer_id)
            if is_alone and self._passed.get(wanted.key, True):
                return wanted
        return None

    def _leaves_to_others_s(self, holder: PeerID) -> float:
        """Return how long after its start the fetch asks no holder for ranges of mates or carriers."""
        took_s = self._took_s.get(holder)
        return _OTHERS_S_FIRST if took_s is None else (2 + len(self._group_peers)) * took_s

    def _came(self, key: str, tensor: int, start: int, stop: int) -> None:
        self.progress.done += stop - start
        self._relay.came(key, tensor, start)

    def _again(self, key: str) -> None:
        """Begin a layer anew that did not match its digest. Raises: RemoteError: its only holder has sent all of it."""
        tensors, sources, culprit = self._relay.tensors[key], self._sources[key], self._sources[key][0]
        is_passed = self._passed.get(key, False)
        self._passed[key] = False
        self._relay.begin(key, tensors)
        if len(sources) == 1 and not is_passed:
            raise RemoteError(culprit, f"sent a state of {key} that its own digest contradicts")
        # With several sources the culprit is unknown: fetch again without one, then without the next.
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
        """Return the layers that differ from their holders' digests."""
        return await self._compute.run_on_host(
            lambda: [key for key, layer in layers.items() if layer.secure_digest() != self._digests[key]]
        )

    def _on_device(self, key: str) -> LayerState:
        return self._vectors.layer_state(*(tensor.to(self._device) for tensor in self._relay.tensors[key]))
