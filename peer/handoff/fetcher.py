"""Fetch state: ranges from all holders of one version at once, each layer checked against the digest that most holders
name.

If a layer fails its check, other holders are asked. Peers that fetch the same layers at the same time (`group_peers`)
share what has arrived (`relay.py`).
"""

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.peer.encoding.vectors import VECTORS, Vectors
from shoal.peer.handoff.inbox import WEIGHTS, ChunkInbox
from shoal.peer.handoff.initial import begun_numel
from shoal.peer.handoff.ranges import RANGE_CHUNKS, RANGE_TIMEOUT_S, fetch_range, ranges
from shoal.peer.handoff.relay import Relay, owner_of
from shoal.peer.handoff.server import INITIAL, TRAINED
from shoal.peer.model.layout import state_layout
from shoal.peer.model.state import LayerState, RoundedWeights, StageState, moment2_numel
from shoal.peer.replica.attestations import is_majority
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import StateChunkRequest, StateOffer, StateRequest
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

_LESS = 0.7
"""If a direct range slows down to this fraction beside carried ones, all paths share one line: carrying stops."""


_OTHERS_TIMES_MAX = 8
"""A holder is not asked for ranges of mates and carriers until it could have sent one range to each fetching peer:
(number of such peers + 1), at most this number, times our slowest range. Asked sooner, it would send the same bytes
twice, and where a layer is a few ranges everybody waits for its uplink."""
_OTHERS_S_MIN = 0.5
_OTHERS_S_FIRST = 2.0
"""The same before anything has come from that holder."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements [start, stop) of one tensor (0 parameters, 1 and 2 moments) of one layer."""

    key: str
    tensor: int
    start: int
    stop: int
    owner: PeerID | None = None
    """The mate that gets this range from a holder; None: we do."""


@dataclass(slots=True)
class Unfinished:
    """What a failed fetch has received of a layer, for a fetch of the same layer at the same version under the same
    digest. It is not checked against the digest: the fetch that completes the layer does that."""

    version: int
    digest: str
    """The layer's, as most holders named it."""
    tensors: tuple[Tensor, Tensor, Tensor]
    """Parameters and moments at full length; filled where a range is `here`."""
    here: set[tuple[int, int]] = field(default_factory=set)
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
        device: torch.device,
        vectors: Vectors = VECTORS,
        patience_s: float = RANGE_TIMEOUT_S,
    ) -> None:
        """Args: patience_s: how long a range may take from one holder."""
        self._patience_s = patience_s
        self._vectors = vectors
        self._spec = spec
        self._keys = keys
        self._inbox, self._endpoint, self._compute = inbox, inbox.endpoint, inbox.compute
        self._device = device
        self._tensors: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self._sources: dict[str, list[PeerID]] = {}
        self._digests: dict[str, str] = {}
        self._expected: Mapping[str, str] = {}
        self._version = -1
        self._stored_era = TRAINED
        self._is_witnessed: Callable[[StateOffer], bool] | None = None
        self._voters: Sequence[PeerID] | None = None
        self._at_least = 0
        self._base: RoundedWeights | None = None
        self._with_base: set[PeerID] = set()
        """Holders that can send the difference to `_base`."""
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._relay: Relay | None = None
        self._group_peers: set[PeerID] = set()
        """The relay's mates that are reachable."""
        self._carriers: list[PeerID] = []
        """Peers that may still be asked to get ranges of a single holder for us."""
        self._alone: dict[PeerID, float] = {}
        """Holder -> bytes/s of the fastest direct range before anything was carried."""
        self._is_carried = False
        self._asked: dict[PeerID, int] = {}
        """Mate -> `_num_asked` when it was last asked; the least recently asked mate is next."""
        self._took_s: dict[PeerID, float] = {}
        """Holder -> seconds that its slowest range took."""
        self._num_asked = 0
        self._known: dict[str, int] = {}
        """Layer -> length of the parameter prefix that is already local."""
        self._begun: dict[str, Unfinished] = {}
        """Layers with ranges from an earlier fetch."""
        self._here: dict[str, set[tuple[int, int]]] = {}
        """Layer -> (tensor, first element) of the ranges that are here."""
        self._passed: dict[str, bool] = {}
        """Layer -> True if mates have given us a part of it; False: mates may give none any more."""
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
        begins: Mapping[str, Tensor] | None = None,
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
            expected: layer -> the digest that the plan certifies.
            begins: layer -> believed parameter prefix, float32; only the rest is fetched, unless the layer's digest
                disagrees.
            begun: with `version`: layers that an earlier fetch has begun. They are completed under that fetch's digests
                or not at all.
            relay: shares arrived ranges with mates that fetch the same layers, and names those mates.
            carriers: peers that are asked to get ranges of a single holder for us, over paths of their own.
        Raises: Unreachable: a layer has no holder, or lost all of them. RemoteError: a layer's only holder sent
            something
            else than its digest.
        """
        self._version, self._stored_era, self._is_witnessed = version, stored_era, is_witnessed
        self._voters, self._at_least, self._base = voters, at_least, base
        self._expected = expected or {}
        self._relay, self._group_peers = relay, set(relay.group_peers) if relay is not None else set()
        self._begun = dict(begun or {})
        self._carriers = [peer for peer in carriers if peer not in self._group_peers][:32]
        digests = self._digests = self._choose(await self._offers(holders))
        logger.info("fetching version %d of %d layers", self._version, len(self._keys))
        has = dict(known or {})
        wrong = await self._compute.run_on_host(
            lambda: [key for key in has if has[key].secure_digest() != digests.get(key)]
        )
        for key in wrong:
            logger.warning("layer %s is not what its holders have: fetching it", key)
            del has[key]
        missing = [key for key in self._keys if key not in has]
        for key in missing:
            param, moment1, moment2 = self._sizes(key)
            empty = self._vectors.empty
            of_params = self._vectors.empty_rounded if stored_era == WEIGHTS else empty
            at = self._begun.get(key)
            self._tensors[key] = (of_params(param), empty(moment1), empty(moment2)) if at is None else at.tensors
            self._begin(key)
        for key, layer in has.items():
            self._tensors[key] = layer.tensors
            self._begin(key, whole=True)
        self.progress.total = sum(tensor.numel() for key in missing for tensor in self._tensors[key])
        for key in missing:
            if key in (begins or {}):
                self._fill(key, (begins or {})[key])
            if key in self._begun:
                self._take_up(key, self._begun[key])
        while missing:
            await self._fetch_layers(missing)
            missing = await self._compute.run_on_host(functools.partial(self._differing, missing, digests))
            for key in missing:
                culprit = self._sources[key][0]
                is_begun = self._begun.pop(key, None) is not None
                is_passed = self._passed.get(key, False) or self._known.pop(key, 0) > 0 or is_begun
                if len(self._sources[key]) == 1 and not is_passed:
                    self._here[key] = set()
                    raise RemoteError(culprit, f"sent a state of {key} that its own digest contradicts")
                # With several sources the culprit is unknown: fetch again without one, then without the next.
                logger.warning("layer %s did not match its digest: fetching it again", key)
                self.progress.done -= sum(tensor.numel() for tensor in self._tensors[key])
                if not is_passed:
                    self._sources[key].remove(culprit)
                self._passed[key] = False
                self._begin(key)
        layers = await self._compute.run_on_host(lambda: {key: self._on_device(key) for key in self._keys})
        return StageState(version=self._version, layers=layers)

    def hold_up(self) -> None:
        """Pause until `go_on`: something else needs our line. Requests in flight continue."""
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    def unfinished(self) -> dict[str, Unfinished]:
        """Return what has arrived of each begun layer, for another fetch of the same version after this one failed."""
        return {
            key: Unfinished(self._version, self._digests[key], self._tensors[key], here)
            for key, here in self._here.items()
            if here
        }

    # --- holders ---

    async def _offers(self, holders: Sequence[PeerID]) -> dict[PeerID, StateOffer]:
        """Return the offers of one version, which becomes ours."""
        first = await self._ask_all(holders, self._version)
        if self._version >= 0 or not first:
            return first
        sound = first if self._is_witnessed is None else self._witnessed(first)
        if self._voters is not None:
            sound = self._of_most(first, self._voters)
        self._version = max(offer.version for offer in sound.values())
        same = {peer: offer for peer, offer in sound.items() if offer.version == self._version}
        others = [peer for peer in holders if peer not in same]
        same |= await self._ask_all(others, self._version)
        if self._is_witnessed is None and self._voters is None:
            return same
        # A holder asked for the version by number need not prove its signatures: equal digests are enough.
        digests = dict(next(iter(same.values())).digests)
        return {peer: offer for peer, offer in same.items() if dict(offer.digests) == digests}

    def _witnessed(self, offers: dict[PeerID, StateOffer]) -> dict[PeerID, StateOffer]:
        assert self._is_witnessed is not None
        sound = {peer: offer for peer, offer in offers.items() if self._is_witnessed(offer)}
        if not sound:
            raise Unreachable(self._endpoint.peer_id, "nobody offers a state that most of its holders have signed")
        return sound

    def _of_most(self, offers: dict[PeerID, StateOffer], voters: Sequence[PeerID]) -> dict[PeerID, StateOffer]:
        """Return the offers that more than half of the voters agree on."""
        said = {peer: (offer.version, tuple(sorted(offer.digests))) for peer, offer in offers.items()}
        votes = Counter(said[peer] for peer in voters if peer in said)
        named = [word for word, num in votes.items() if is_majority(num, voters) and word[0] >= self._at_least]
        if not named:
            raise Unreachable(self._endpoint.peer_id, "most holders do not offer the same version yet")
        return {peer: offer for peer, offer in offers.items() if said[peer] == named[0]}

    def _choose(self, offers: dict[PeerID, StateOffer]) -> dict[str, str]:
        """Return each layer's most frequent digest. The holders that name it become the layer's sources."""
        digests: dict[str, str] = {}
        for key in self._keys:
            named = {peer: dict(offer.digests).get(key) for peer, offer in offers.items()}
            if key in self._begun:
                before = self._begun[key].digest
                named = {peer: digest if digest == before else None for peer, digest in named.items()}
            if key in self._expected:
                named = {peer: digest if digest == self._expected[key] else None for peer, digest in named.items()}
            votes = Counter(digest for digest in named.values() if digest is not None)
            if not votes:
                raise Unreachable(self._endpoint.peer_id, f"nobody offers the state of {key}")
            digests[key] = max(votes, key=lambda digest: votes[digest])
            self._sources[key] = [peer for peer, digest in named.items() if digest == digests[key]]
        return digests

    async def _ask_all(self, holders: Sequence[PeerID], version: int) -> dict[PeerID, StateOffer]:
        base = self._base.version if self._base is not None else -1
        request = StateRequest(layers=self._keys, version=version, stored_era=self._stored_era, base=base)

        async def ask(peer: PeerID) -> StateOffer | None:
            try:
                offer = await self._endpoint.ask(peer, request, StateOffer)
            except (Unreachable, Refused, RemoteError) as error:
                logger.debug("no state: %s", error)
                return None
            return offer if version < 0 or offer.version == version else None

        answers = await asyncio.gather(*(ask(peer) for peer in holders))
        for peer, answer in zip(holders, answers, strict=True):
            has_base = self._base is not None and answer is not None and answer.base == self._base.version
            (self._with_base.add if has_base else self._with_base.discard)(peer)
        return {peer: answer for peer, answer in zip(holders, answers, strict=True) if answer is not None}

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
                self._came(wanted)
            if not left:
                nothing_left.set()

        async def work(peer: PeerID) -> None:
            may_renew = True
            while True:
                if not self._goes_on.is_set():
                    await self._held_up(peer)
                    continue
                wanted = self._next_own(peer, todo)
                if wanted is None:
                    wanted = self._last_of_group_peers(peer, todo) or self._next_lent(peer, lent)
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
                    self._compare(peer, wanted, took_s)
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

        async def borrow(peer: PeerID, wanted: _Range, via: PeerID | None = None) -> bool:
            """Return False if the request was refused."""
            todo.remove(wanted)
            lent[wanted] = None
            try:
                await get(peer, wanted, via)
            except Refused:
                return False
            finally:
                if wanted in lent:
                    del lent[wanted]
                    if wanted in left:
                        todo.append(wanted)
            return True

        async def ask_group_peers() -> None:
            while (wanted := self._next_of_group_peers(todo)) is not None:
                assert wanted.owner is not None
                self._passed[wanted.key] = True
                try:
                    if not await borrow(wanted.owner, wanted):
                        await asyncio.sleep(0.5)  # it does not have a range for us yet
                except (Unreachable, RemoteError) as error:
                    logger.info("a group peer does not share its ranges: %s", error)
                    self._group_peers.discard(wanted.owner)

        async def ask_carrier(peer: PeerID) -> None:
            while peer in self._carriers and (wanted := self._next_alone(peer, todo)) is not None:
                try:
                    if await borrow(peer, wanted, self._sources[wanted.key][0]):
                        self._is_carried = True
                    else:
                        await asyncio.sleep(2.0)  # it fetches for itself now
                except (Unreachable, RemoteError) as error:
                    logger.info("a peer carries nothing: %s", error)
                    return

        peers = dict.fromkeys(peer for wanted in left for peer in self._sources[wanted.key])
        working = [asyncio.create_task(work(peer)) for peer in peers for _ in range(2)]
        helping = [asyncio.create_task(ask_group_peers()) for _ in range(8 if self._group_peers else 0)]
        helping += [asyncio.create_task(ask_carrier(peer)) for peer in self._carriers]
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

    async def _held_up(self, peer: PeerID) -> None:
        """Wait until the fetch may go on, or until the holder's pin needs a request."""
        try:
            async with asyncio.timeout(10.0):  # ask the holder to keep its pin, which lapses unasked
                await self._goes_on.wait()
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
        me = self._endpoint.peer_id
        group_peers = self._group_peers.difference(self._sources[key]) if self._passed.get(key, True) else ()
        fetching = sorted({me, *group_peers})
        found = []
        for index, tensor in enumerate(self._tensors[key]):
            for number, (start, stop) in enumerate(ranges(tensor.numel(), self._vectors)):
                if (index, start) in self._here[key] or (index == 0 and stop <= self._known.get(key, 0)):
                    continue
                owner = owner_of(key, index, number, fetching)
                found.append(_Range(key, index, start, stop, owner if owner != me else None))
        return found

    def _fill(self, key: str, begin_N: Tensor) -> None:
        """Take over a layer's parameter prefix, in complete ranges."""
        into_N = self._tensors[key][0]
        for start, stop in ranges(into_N.numel(), self._vectors):
            if stop <= begin_N.numel():
                into_N[start:stop] = begin_N[start:stop]
                self._known[key] = stop
                self._came(_Range(key, 0, start, stop))

    def _take_up(self, key: str, at: Unfinished) -> None:
        for index, tensor in enumerate(self._tensors[key]):
            for start, stop in ranges(tensor.numel(), self._vectors):
                if (index, start) in at.here:
                    self._came(_Range(key, index, start, stop))

    def _next_own(self, holder: PeerID, todo: Sequence[_Range]) -> _Range | None:
        return next((each for each in todo if each.owner is None and holder in self._sources[each.key]), None)

    def _last_of_group_peers(self, holder: PeerID, todo: Sequence[_Range]) -> _Range | None:
        """Return the holder's range that mates will reach last. Call it when all of ours have been asked for."""
        return next((each for each in reversed(todo) if holder in self._sources[each.key]), None)

    def _leaves_to_others_s(self, holder: PeerID) -> float:
        """Return how long after its start the fetch asks no holder for ranges of mates or carriers."""
        took_s, times = self._took_s.get(holder), min(2 + len(self._group_peers), _OTHERS_TIMES_MAX)
        return _OTHERS_S_FIRST if took_s is None else max(_OTHERS_S_MIN, times * took_s)

    def _next_lent(self, holder: PeerID, lent: Mapping[_Range, None]) -> _Range | None:
        """Return the holder's range that mates or carriers were asked for the longest time ago."""
        return next((wanted for wanted in lent if holder in self._sources[wanted.key]), None)

    def _came(self, wanted: _Range) -> None:
        self.progress.done += wanted.stop - wanted.start
        self._here[wanted.key].add((wanted.tensor, wanted.start))
        if self._relay is not None:
            self._relay.came(wanted.key, wanted.tensor, wanted.start)

    def _next_of_group_peers(self, todo: Sequence[_Range]) -> _Range | None:
        """Return a range of the mate that was asked the longest time ago."""
        firsts: dict[PeerID, _Range] = {}
        for wanted in todo:
            if wanted.owner in self._group_peers:
                firsts.setdefault(wanted.owner, wanted)
        owner = min(firsts, key=lambda mate: (self._asked.get(mate, 0), mate), default=None)
        if owner is None:
            return None
        self._num_asked += 1
        self._asked[owner] = self._num_asked
        return firsts[owner]

    def _next_alone(self, carrier: PeerID, todo: Sequence[_Range]) -> _Range | None:
        """Return the last range that only one other peer has; we get the first ones ourselves."""
        for wanted in reversed(todo):
            sources = self._sources[wanted.key]
            if len(sources) == 1 and sources[0] not in (carrier, self._endpoint.peer_id):
                return wanted
        return None

    def _compare(self, holder: PeerID, came: _Range, took_s: float) -> None:
        """Compare a direct range's rate with earlier ones. Stop using carriers if they only slow down our own path."""
        if came.stop - came.start < RANGE_CHUNKS * self._vectors.chunk or took_s <= 0.0:
            return
        rate = 4.0 * (came.stop - came.start) / took_s
        if not self._is_carried:
            self._alone[holder] = max(rate, self._alone.get(holder, 0.0))
        elif rate < _LESS * self._alone.get(holder, 0.0):
            self._carriers = []

    def _sizes(self, key: str) -> tuple[int, int, int]:
        if self._stored_era == INITIAL:
            return begun_numel(self._spec, key), 0, 0
        numel = state_layout(self._spec, key).numel
        if self._stored_era == WEIGHTS:
            return numel, 0, 0
        return numel, numel, moment2_numel(self._spec, key)

    def _begin(self, key: str, *, whole: bool = False) -> None:
        self._here[key] = set()
        if self._relay is not None:
            self._relay.begin(key, self._tensors[key], whole=whole)

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
        into_N = self._tensors[wanted.key][wanted.tensor]
        await fetch_range(
            peer,
            request,
            into_N,
            inbox=self._inbox,
            vectors=self._vectors,
            before_N=base.params[wanted.key] if base is not None else None,
            patience_s=self._patience_s,
        )

    def _differing(self, keys: Sequence[str], digests: Mapping[str, str]) -> list[str]:
        return [key for key in keys if self._layer(key).secure_digest() != digests[key]]

    def _layer(self, key: str) -> LayerState:
        return self._vectors.layer_state(*self._tensors[key])

    def _on_device(self, key: str) -> LayerState:
        param_N, moment1_N, moment2_N = (tensor.to(self._device) for tensor in self._tensors[key])
        return self._vectors.layer_state(param_N, moment1_N, moment2_N)
