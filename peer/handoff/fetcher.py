"""Fetches state: ranges from all holders of the same version at once, each layer checked against the digest that most
holders name; another holder is asked where one fails.
"""

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.handoff.ranges import fetch_range, ranges
from shoal.peer.handoff.server import INITIAL, TRAINED
from shoal.peer.model.layout import layer_layout
from shoal.peer.pipeline.state import LayerState, StageState, moment2_numel
from shoal.peer.vectors import VECTORS, Vectors
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import StateChunkRequest, StateOffer, StateRequest
from shoal.protocol.ports import Compute
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

_REQUESTS_A_HOLDER = 2


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements [start, stop) of one tensor (0 parameters, 1 and 2 moments) of one layer."""

    key: str
    tensor: int
    start: int
    stop: int


@dataclass(slots=True)
class FetchProgress:
    """Elements that are here, of how many; a layer that must come again counts anew. 0 of 0: it is being asked for."""

    done: int = 0
    total: int = 0


class StateFetcher:
    """One fetch of the layers `keys`, at one version."""

    def __init__(
        self,
        spec: RunSpec,
        keys: tuple[str, ...],
        *,
        endpoint: Endpoint,
        inbox: ChunkInbox,
        compute: Compute,
        device: torch.device,
        vectors: Vectors = VECTORS,
    ) -> None:
        self._vectors = vectors
        self._spec = spec
        self._keys = keys
        self._endpoint = endpoint
        self._inbox = inbox
        self._compute = compute
        self._device = device
        self._tensors: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self._sources: dict[str, list[PeerID]] = {}
        self._version = -1
        self._stored_era = TRAINED
        self._is_witnessed: Callable[[StateOffer], bool] | None = None
        self.progress = FetchProgress()

    async def fetch(
        self,
        holders: Sequence[PeerID],
        *,
        version: int = -1,
        stored_era: int = TRAINED,
        is_witnessed: Callable[[StateOffer], bool] | None = None,
        known: Mapping[str, LayerState] | None = None,
    ) -> StageState:
        """Get `version`, or the newest that a holder trains; of what they train, or of a stored era's snapshots, or of
        what the run begins with (`INITIAL`; then there are no moments).

        Args:
            is_witnessed: of the newest, take nothing but what this says of an offer.
            known: layers that the caller believes it has at that version: what most holders name otherwise is fetched.
        Raises: Unreachable: some layer has no holder, or all of its were lost on the way. RemoteError: the only holder
            of a layer sent something else than it had said.
        """
        self._version, self._stored_era, self._is_witnessed = version, stored_era, is_witnessed
        digests = self._choose(await self._offers(holders))
        logger.info("fetching version %d of %d layers", self._version, len(self._keys))
        has = dict(known or {})
        wrong = await self._compute.run_on_host(lambda: [key for key in has if has[key].proof() != digests.get(key)])
        for key in wrong:
            logger.warning("layer %s is not what its holders have: fetching it", key)
            del has[key]
        missing = [key for key in self._keys if key not in has]
        for key in missing:
            size = layer_layout(self._spec.model, key).numel
            empty = self._vectors.empty
            moments = (0, 0) if stored_era == INITIAL else (size, moment2_numel(self._spec, key))
            self._tensors[key] = (empty(size), empty(moments[0]), empty(moments[1]))
        self._tensors |= {key: layer.tensors for key, layer in has.items()}
        self.progress.total = sum(tensor.numel() for key in missing for tensor in self._tensors[key])
        while missing:
            await self._fetch_layers(missing)
            missing = await self._compute.run_on_host(functools.partial(self._differing, missing, digests))
            for key in missing:
                culprit = self._sources[key][0]
                if len(self._sources[key]) == 1:
                    raise RemoteError(culprit, f"sent a state of {key} that its own digest contradicts")
                # With several sources nobody knows who erred: fetch it again without one, then without the next.
                logger.warning("layer %s did not match its digest: fetching it again", key)
                self.progress.done -= sum(tensor.numel() for tensor in self._tensors[key])
                self._sources[key].remove(culprit)
        layers = await self._compute.run_on_host(lambda: {key: self._on_device(key) for key in self._keys})
        return StageState(version=self._version, layers=layers)

    # --- who has it ---

    async def _offers(self, holders: Sequence[PeerID]) -> dict[PeerID, StateOffer]:
        """Those of one version, which becomes ours."""
        first = await self._ask_all(holders, self._version)
        if self._version >= 0 or not first:
            return first
        sound = first if self._is_witnessed is None else self._witnessed(first)
        self._version = max(offer.version for offer in sound.values())
        same = {peer: offer for peer, offer in sound.items() if offer.version == self._version}
        others = [peer for peer in holders if peer not in same]
        same |= await self._ask_all(others, self._version)
        if self._is_witnessed is None:
            return same
        # Who was asked by the number has not had to show who else has signed it: the same digests are enough.
        digests = next(iter(same.values())).digests
        return {peer: offer for peer, offer in same.items() if offer.digests == digests}

    def _witnessed(self, offers: dict[PeerID, StateOffer]) -> dict[PeerID, StateOffer]:
        assert self._is_witnessed is not None
        sound = {peer: offer for peer, offer in offers.items() if self._is_witnessed(offer)}
        if not sound:
            raise Unreachable(self._endpoint.peer_id, "nobody offers a state that most of its holders have signed")
        return sound

    def _choose(self, offers: dict[PeerID, StateOffer]) -> dict[str, str]:
        """The digest that most holders name for each layer; who names it is a source of it."""
        digests: dict[str, str] = {}
        for key in self._keys:
            named = {peer: dict(offer.digests).get(key) for peer, offer in offers.items()}
            votes = Counter(digest for digest in named.values() if digest is not None)
            if not votes:
                raise Unreachable(self._endpoint.peer_id, f"nobody offers the state of {key}")
            digests[key] = max(votes, key=lambda digest: votes[digest])
            self._sources[key] = [peer for peer, digest in named.items() if digest == digests[key]]
        return digests

    async def _ask_all(self, holders: Sequence[PeerID], version: int) -> dict[PeerID, StateOffer]:
        request = StateRequest(layers=self._keys, version=version, stored_era=self._stored_era)

        async def ask(peer: PeerID) -> StateOffer | None:
            try:
                offer = await self._endpoint.ask(peer, request, StateOffer)
            except (Unreachable, Refused, RemoteError) as error:
                logger.debug("no state: %s", error)
                return None
            return offer if version < 0 or offer.version == version else None

        answers = await asyncio.gather(*(ask(peer) for peer in holders))
        return {peer: answer for peer, answer in zip(holders, answers, strict=True) if answer is not None}

    # --- the bytes ---

    async def _fetch_layers(self, keys: Sequence[str]) -> None:
        """Fill the tensors of `keys`; who fails is nobody's source any more."""
        todo = [
            _Range(key, index, start, stop)
            for key in keys
            for index, tensor in enumerate(self._tensors[key])
            for start, stop in ranges(tensor.numel(), self._vectors)
        ]

        async def work(peer: PeerID) -> None:
            while (wanted := next((r for r in todo if peer in self._sources[r.key]), None)) is not None:
                todo.remove(wanted)
                try:
                    await self._fetch_range(peer, wanted)
                except (Unreachable, Refused, RemoteError) as error:
                    logger.warning("lost a source of state: %s", error)
                    todo.append(wanted)
                    for sources in self._sources.values():
                        if peer in sources:
                            sources.remove(peer)

        while todo:
            orphan = next((r.key for r in todo if not self._sources[r.key]), None)
            if orphan is not None:
                raise Unreachable(self._endpoint.peer_id, f"all holders of {orphan} were lost while fetching")
            peers = dict.fromkeys(peer for key in keys for peer in self._sources[key])
            await asyncio.gather(*(work(peer) for peer in peers for _ in range(_REQUESTS_A_HOLDER)))

    async def _fetch_range(self, peer: PeerID, wanted: _Range) -> None:
        request = StateChunkRequest(
            stored_era=self._stored_era,
            version=self._version,
            layer=wanted.key,
            tensor=wanted.tensor,
            start=wanted.start,
            stop=wanted.stop,
        )
        into_N = self._tensors[wanted.key][wanted.tensor]
        await fetch_range(peer, request, into_N, endpoint=self._endpoint, inbox=self._inbox, vectors=self._vectors)
        self.progress.done += wanted.stop - wanted.start

    def _differing(self, keys: Sequence[str], digests: Mapping[str, str]) -> list[str]:
        """Which of these layers are not what their digests say."""
        return [key for key in keys if self._layer(key).proof() != digests[key]]

    def _layer(self, key: str) -> LayerState:
        return self._vectors.layer_state(*self._tensors[key])

    def _on_device(self, key: str) -> LayerState:
        param_N, moment1_N, moment2_N = (tensor.to(self._device) for tensor in self._tensors[key])
        return self._vectors.layer_state(param_N, moment1_N, moment2_N)
