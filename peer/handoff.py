"""Hands a stage's state to newcomers, and fetches it as one.

The holder pins a version (state is immutable, so a pin is a reference) and serves ranges of it; the newcomer takes
ranges from all holders of the same version at once, checks each layer against the digest that the holders name, and
asks another holder where one fails. Nobody stops for it: holders go on committing, and keep the reduced gradients
since the pinned version, which the newcomer then replays.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.peer.group.reduce import CHUNK, payload_of
from shoal.peer.model.layout import layer_layout
from shoal.peer.pipeline.state import LayerState, StageState
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Done, StateChunk, StateChunkRequest, StateOffer, StateRequest
from shoal.protocol.ports import Clock, Payload, Priority
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

PINNED_S = 30.0
"""A pin outlives its last request by this much."""
_RANGE = 4 * CHUNK
"""Elements a chunk request asks for: 4 MiB, so that a round trip is small against the transfer."""
_REQUESTS_A_HOLDER = 2
_RANGE_TIMEOUT_S = 60.0

_Range = tuple[str, int, int, int]
"""Layer key, tensor (0 parameters, 1 and 2 moments), first element, end."""


class StateServer:
    """Serves this replica's state. `current` gives the state to pin, or None while there is none."""

    def __init__(self, *, endpoint: Endpoint, clock: Clock, current: Callable[[], StageState | None]) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._current = current
        self._pins: dict[int, tuple[StageState, float]] = {}
        self._digests: dict[int, tuple[tuple[str, str], ...]] = {}

    def install(self) -> None:
        self._endpoint.on(StateRequest, self._on_request)
        self._endpoint.on(StateChunkRequest, self._on_chunk_request)

    def pinned_from(self) -> int:
        """The oldest pinned version; far in the future if none is."""
        now_s = self._clock.now_s()
        for version in [v for v, (_, until_s) in self._pins.items() if until_s < now_s]:
            del self._pins[version], self._digests[version]
        return min(self._pins, default=2**62)

    async def _on_request(self, source: PeerID, message: StateRequest) -> StateOffer:
        self.pinned_from()
        state = self._current()
        if message.version in self._pins:
            state = self._pins[message.version][0]
        if state is None or not set(message.layers) <= set(state.layers):
            raise Refused(self._endpoint.peer_id, "does not hold that state")
        if message.version not in (-1, state.version):
            raise Refused(self._endpoint.peer_id, f"is at version {state.version}, not {message.version}")
        self._pins[state.version] = (state, self._clock.now_s() + PINNED_S)
        if state.version not in self._digests:
            self._digests[state.version] = tuple((key, layer.digest()) for key, layer in state.layers.items())
        return StateOffer(version=state.version, digests=self._digests[state.version], pinned_s=PINNED_S)

    async def _on_chunk_request(self, source: PeerID, message: StateChunkRequest) -> Done:
        pinned = self._pins.get(message.version)
        layer = pinned[0].layers.get(message.layer) if pinned else None
        if pinned is None or layer is None or not 0 <= message.tensor < 3:
            raise Refused(self._endpoint.peer_id, f"has not pinned version {message.version} of {message.layer}")
        values_N = layer.tensors[message.tensor].cpu()
        if not 0 <= message.start < message.stop <= min(values_N.numel(), message.start + _RANGE):
            raise RemoteError(source, f"asks for elements {message.start} to {message.stop} of {values_N.numel()}")
        self._pins[message.version] = (pinned[0], self._clock.now_s() + PINNED_S)
        for start in range(message.start, message.stop, CHUNK):
            meta = StateChunk(version=message.version, layer=message.layer, tensor=message.tensor, start=start)
            payload = payload_of(values_N[start : min(start + CHUNK, message.stop)])
            await self._endpoint.send(source, meta, payload, priority=Priority.BULK)
        return Done()


class StateFetcher:
    """Fetches one version of a stage's layers from its holders."""

    def __init__(self, spec: RunSpec, keys: tuple[str, ...], *, endpoint: Endpoint, device: torch.device) -> None:
        self._spec = spec
        self._keys = keys
        self._endpoint = endpoint
        self._device = device
        self._tensors: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self._arriving: dict[tuple[PeerID, str, int, int], asyncio.Event] = {}
        self._version = -1

    async def fetch(self, holders: Sequence[PeerID]) -> StageState:
        """Get the newest version that a holder offers.

        Raises: Unreachable: no holder has one, or all were lost on the way.
        """
        self._endpoint.on_frame(StateChunk, self._on_chunk)
        offers = await self._offers(holders)
        if not offers:
            raise Unreachable(holders[0] if holders else self._endpoint.peer_id, "nobody offers the stage's state")
        digests = dict(next(iter(offers.values())).digests)
        self._version = next(iter(offers.values())).version
        logger.info("fetching version %d of %d layers from %d peers", self._version, len(self._keys), len(offers))
        has_moment2 = self._spec.optimizer.name != "sgd"
        for key in self._keys:
            size = layer_layout(self._spec.model, key).numel
            self._tensors[key] = (torch.empty(size), torch.empty(size), torch.empty(size if has_moment2 else 0))
        missing = list(self._keys)
        while missing:
            if not offers:
                raise Unreachable(holders[0], f"all holders of version {self._version} were lost while fetching")
            await self._fetch_layers(missing, offers)
            if not offers:
                continue
            layers = {key: self._layer(key) for key in self._keys}
            wrong = [key for key in missing if layers[key].digest() != digests[key]]
            if wrong and len(offers) == 1:
                culprit = next(iter(offers))
                raise RemoteError(culprit, f"sent a state of {', '.join(wrong)} that its own digest contradicts")
            if wrong:
                # With several sources nobody knows who erred: fetch the layer again from one, then from the next.
                logger.warning("layers %s did not match their digest: fetching them again", ", ".join(wrong))
                offers.pop(next(iter(offers)))
            missing = wrong
        layers = {
            key: LayerState(
                param_N=layer.param_N.to(self._device),
                moment1_N=layer.moment1_N.to(self._device),
                moment2_N=layer.moment2_N.to(self._device),
            )
            for key, layer in layers.items()
        }
        return StageState(version=self._version, layers=layers)

    async def _offers(self, holders: Sequence[PeerID]) -> dict[PeerID, StateOffer]:
        """Holders that pinned one and the same state: the newest that most of them name."""
        first = await self._ask_all(holders, -1)
        if not first:
            return {}
        newest = max(offer.version for offer in first.values())
        same = {peer: offer for peer, offer in first.items() if offer.version == newest}
        others = [peer for peer in holders if peer in first and peer not in same]
        same |= await self._ask_all(others, newest)
        counts: dict[object, int] = {}
        for offer in same.values():
            counts[offer.digests] = counts.get(offer.digests, 0) + 1
        digests = max(counts, key=lambda d: counts[d])
        return {peer: same[peer] for peer in holders if peer in same and same[peer].digests == digests}

    async def _ask_all(self, holders: Sequence[PeerID], version: int) -> dict[PeerID, StateOffer]:
        async def ask(peer: PeerID) -> StateOffer | None:
            try:
                offer = await self._endpoint.ask(peer, StateRequest(layers=self._keys, version=version), StateOffer)
            except (Unreachable, Refused, RemoteError) as error:
                logger.debug("no state: %s", error)
                return None
            return offer if {key for key, _ in offer.digests} >= set(self._keys) else None

        answers = await asyncio.gather(*(ask(peer) for peer in holders))
        return {peer: answer for peer, answer in zip(holders, answers, strict=True) if answer is not None}

    async def _fetch_layers(self, keys: Sequence[str], offers: dict[PeerID, StateOffer]) -> None:
        """Fill the tensors of `keys`; holders that fail are taken out of `offers`."""
        todo: deque[_Range] = deque()
        for key in keys:
            for index, tensor in enumerate(self._tensors[key]):
                todo += [
                    (key, index, start, min(start + _RANGE, tensor.numel()))
                    for start in range(0, tensor.numel(), _RANGE)
                ]

        async def work(peer: PeerID) -> None:
            while todo and peer in offers:
                wanted = todo.popleft()
                try:
                    await self._fetch_range(peer, wanted)
                except (Unreachable, Refused, RemoteError) as error:
                    logger.warning("lost a source of state: %s", error)
                    todo.append(wanted)
                    offers.pop(peer, None)

        while todo and offers:
            await asyncio.gather(*(work(peer) for peer in tuple(offers) for _ in range(_REQUESTS_A_HOLDER)))

    async def _fetch_range(self, peer: PeerID, wanted: _Range) -> None:
        key, tensor, start, stop = wanted
        events = []
        for at in range(start, stop, CHUNK):
            self._arriving[peer, key, tensor, at] = event = asyncio.Event()
            events.append(event)
        request = StateChunkRequest(version=self._version, layer=key, tensor=tensor, start=start, stop=stop)
        try:
            async with asyncio.timeout(_RANGE_TIMEOUT_S):
                await self._endpoint.ask(peer, request, Done, timeout_s=_RANGE_TIMEOUT_S)
                for event in events:
                    await event.wait()
        except TimeoutError as error:
            raise Unreachable(peer, "state did not arrive in time") from error
        finally:
            for at in range(start, stop, CHUNK):
                self._arriving.pop((peer, key, tensor, at), None)

    async def _on_chunk(self, source: PeerID, meta: StateChunk, payload: Payload) -> None:
        event = self._arriving.get((source, meta.layer, meta.tensor, meta.start))
        if event is None or meta.version != self._version:
            return
        tensor = self._tensors[meta.layer][meta.tensor]
        values_C = torch.frombuffer(payload, dtype=torch.float32)
        if values_C.numel() > min(CHUNK, tensor.numel() - meta.start):
            raise RemoteError(source, f"sent {values_C.numel()} numbers at {meta.start} of {meta.layer}")
        tensor[meta.start : meta.start + values_C.numel()] = values_C
        event.set()

    def _layer(self, key: str) -> LayerState:
        param_N, moment1_N, moment2_N = self._tensors[key]
        return LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)
