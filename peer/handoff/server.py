"""Serves state to newcomers, to peers that keep a copy, and, after all holders of a layer have died, to all members.

The requested version is pinned: kept for as long as peers ask for it (state is immutable, so a pin is a reference), and
served in ranges. Training does not stop meanwhile: holders go on committing, and keep the reduced gradients of the
steps after the oldest version that a newcomer fetches, so that the newcomer can replay these steps. A peer that keeps a
copy does not replay steps: at a step a second, the gradients of a long transfer's steps would be many times as large as
the state. An optimizer step destroys a state that is not pinned, so a request that comes during a step waits for the
next version.

A peer that prepares for the next layout (`StateRequest.ahead`) fetches layer by layer. During training these layers are
sent at the lowest priority; once the layout has ended, the whole run waits for them, and they are sent at the priority
of other state. Copies are always sent at the lowest priority.
"""

import asyncio
import functools
import logging
import math
from collections.abc import Collection, Iterable, Mapping

import msgspec
from torch import Tensor

from shoal.peer.base.plans import Plans
from shoal.peer.disk.archive import Archive
from shoal.peer.group.witnesses import Signatures, Witnessed
from shoal.peer.handoff.inbox import GRADIENT, RANGE_CHUNKS, WEIGHTS, ChunkInbox
from shoal.peer.handoff.initial import InitialWeights, bare_layer
from shoal.peer.handoff.range_fetch import RELAY_WAIT_S
from shoal.peer.handoff.relay import Relay
from shoal.peer.handoff.retained import GradientLog, RetainedLayers
from shoal.peer.model.state import LayerState, StageState
from shoal.peer.presence.parts import Parts
from shoal.peer.presence.ports import Ports
from shoal.protocol.errors import LocalError, Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PINNED_BYTES_MAX, PINNED_S_MAX, PINNED_VERSIONS_MAX
from shoal.protocol.messages import Done, StateChunk, StateChunkRequest, StateOffer, StateRequest
from shoal.protocol.ports import Payload, Priority

logger = logging.getLogger(__name__)

PINNED_S = 30.0
"""Seconds for which a requested version stays pinned (kept in memory for the peers that fetch it) after its last
request. `PINNED_S_MAX` limits the whole time."""
TRAINED = -1
"""Value of `stored_era` in a request: the state that is trained here now."""
INITIAL = -2
"""Value of `stored_era` in a request: the parameters that the run begins with, as version 0 without moments."""

_GRADIENT_WAIT_S = 4.0
"""The longest time that a request waits for the reduced gradient of a future step."""
_CARRIED_MAX = 4
"""The most ranges that this peer fetches for other peers at once."""
_STEP_WAIT_S = 2.0
"""The longest time that a request waits while the requested layers step; then the requester has to ask again."""
_LOOK_S = 0.005

_Key = tuple[int, int]
"""(stored era, version) of a pinned version. The stored era is an era, or a constant such as `TRAINED`."""


class _Pin:
    """Layers of one version, kept for other peers to fetch. Args: is_followed: learners compute with these weights, and
    will ask for a later version as the difference from them."""

    def __init__(self, born_s: float, *, is_followed: bool = False) -> None:
        self._born_s = born_s
        self._is_followed = is_followed
        self.until_s = born_s + PINNED_S
        self.num_sending = 0
        """Number of ranges being sent. On a busy line a range may take longer than `PINNED_S`."""
        self.is_asked_for = False
        """Another peer has asked for this version, so that it counts against the limits. Our own requests do not
        count."""
        self.layers: dict[str, LayerState] = {}
        self.digests: dict[str, str] = {}
        """Layer -> digest. A layer without a digest cannot be offered yet: the digest is being computed."""
        self.signatures: Signatures = ()
        """Signatures of this version by members of the group, which newcomers check."""
        self.is_replayed = False
        """A newcomer fetches this version, and will replay the steps after it."""
        self.left: dict[PeerID, int] = {}
        """Peer to which we offered this version -> number of elements that we have not sent it yet."""

    def asked_for(self, now_s: float) -> None:
        """Keep the layers for `PINNED_S` from now, because a peer asked for them, but no longer than `PINNED_S_MAX` in
        all. Weights that learners follow are kept for `PINNED_S_MAX` from now."""
        self.until_s = min(now_s + PINNED_S, self._born_s + PINNED_S_MAX)
        if self._is_followed:
            self.until_s = now_s + PINNED_S_MAX

    def is_over(self, now_s: float) -> bool:
        """True if the layers need not be kept. While they are being sent they are kept, up to `PINNED_S_MAX` in all."""
        return self.until_s < now_s and (self.num_sending == 0 or now_s > self._born_s + PINNED_S_MAX)

    def forget(self, keys: Collection[str]) -> None:
        for key in keys:
            self.layers.pop(key, None)
            self.digests.pop(key, None)


class StateServer:
    """Serves the states that this peer holds; one server per peer. A peer that no recent plan names is refused.

    Args:
        archive: has the states of snapshots. retained: has the states with which the preceding layout ended.
        inbox: receives the chunks that we fetch for other peers.
    """

    def __init__(
        self,
        ports: Ports,
        *,
        plans: Plans,
        parts: Parts,
        archive: Archive,
        retained: RetainedLayers,
        inbox: ChunkInbox,
    ) -> None:
        self.gradient_log = GradientLog()
        self._vectors = inbox.vectors
        self._endpoint, self._compute = ports.endpoint, ports.compute
        self._clock = ports.clock
        self._plans, self._parts = plans, parts
        self._archive, self._retained = archive, retained
        self._pins: dict[_Key, _Pin] = {}
        self._ahead: dict[PeerID, tuple[int, str, LayerState]] = {}
        """Peer that prepares for the next layout -> (version, key, state) of the layer that it now fetches from us."""
        self._copies: set[tuple[PeerID, int, str]] = set()
        """(peer, version, layer) of the copies that peers are about to fetch and keep."""
        self._relays: list[Relay] = []
        """Our own fetches, under way or just ended: group peers may ask us for the ranges that have arrived."""
        self._inbox = inbox
        self._leaving: dict[tuple[PeerID, StateChunkRequest], asyncio.Future[bool]] = {}
        """(Requester, range) of a transfer under way -> its result: True if the whole range was sent, else False."""
        self._carried: set[tuple[PeerID, StateChunkRequest]] = set()
        """(holder, range) that we are fetching for other peers."""
        self._newcomers: dict[PeerID, float] = {}
        """Newcomer (a peer that asked for the newest version) -> time until which we treat it as one: its later
        requests name a version, and the plan that places it may reach us late."""
        self.initial: InitialWeights | None = None
        """The run's initial weights, or the base of adapters; None: this peer does not have them."""
        self._endpoint.on(StateRequest, self._on_request)
        self._endpoint.on(StateChunkRequest, self._on_chunk_request)

    async def pin(self, state: StageState) -> None:
        """Keep a state, which the next step would destroy, for peers that are about to ask for it."""
        await self._pin((TRAINED, state.version), state.layers)

    def sharing(self, group_peers: Collection[PeerID]) -> Relay:
        """Return a relay that shares the ranges of a fetch of ours with `group_peers`, until a while after it."""
        self._forget_old()
        relay = Relay(group_peers, vectors=self._vectors)
        relay.until_s = self._clock.now_s() + PINNED_S
        if group_peers:
            self._relays.append(relay)
        return relay

    def pinned_from(self) -> int:
        """Return the oldest version from which a newcomer will replay steps; 2^62 if no newcomer will."""
        self._forget_old()
        replayed = (version for (era, version), pin in self._pins.items() if era == TRAINED and pin.is_replayed)
        return min(replayed, default=2**62)

    def is_giving(self, peer: PeerID, version: int) -> bool:
        """True if `peer` has not yet received all that we offered it of the trained state at `version`."""
        self._forget_old()
        pin = self._pins.get((TRAINED, version))
        return pin is not None and pin.left.get(peer, 0) > 0

    def gives_copy(self, peer: PeerID, version: int, keys: Iterable[str]) -> None:
        """Record that `peer` will fetch these layers for a copy, so that they are sent at the lowest priority."""
        self._copies.update((peer, version, key) for key in keys)

    def forget(self, keys: Collection[str]) -> None:
        """Drop pinned layers, trained or in bf16, that this peer no longer holds."""
        for (era, version), pin in list(self._pins.items()):
            if era in (TRAINED, WEIGHTS):
                pin.forget(keys)
                if not pin.layers:
                    del self._pins[era, version]
        self._copies = {copy for copy in self._copies if copy[2] not in keys}

    def forget_weights(self, keys: Collection[str]) -> None:
        """Drop the bf16 weights of these layers, because the group that holds the layers has no learner now."""
        for at in [at for at, pin in self._pins.items() if at[0] == WEIGHTS and not pin.layers.keys().isdisjoint(keys)]:
            del self._pins[at]

    def forget_ahead(self) -> None:
        """Drop the layers that peers fetch ahead: no plan names a next layout any more."""
        self._ahead.clear()

    def _forget_old(self) -> None:
        now_s = self._clock.now_s()
        self._pins = {key: pin for key, pin in self._pins.items() if not pin.is_over(now_s)}
        self._newcomers = {peer: until_s for peer, until_s in self._newcomers.items() if until_s >= now_s}
        self._relays = [relay for relay in self._relays if not (relay.is_done and relay.until_s < now_s)]

    async def _pin(
        self,
        key: _Key,
        layers: Mapping[str, LayerState],
        proofs: Mapping[str, str] | None = None,
        *,
        asked_by: PeerID | None = None,
    ) -> _Pin:
        """Keep `layers` as version `key`. Args: proofs: layer -> known digest; None: digests are computed here."""
        now_s = self._clock.now_s()
        pin = self._pins.setdefault(key, _Pin(now_s, is_followed=key[0] == WEIGHTS))
        pin.asked_for(now_s)
        if asked_by is not None:
            pin.is_asked_for = True
            pin.is_replayed |= asked_by in self._newcomers
        for name, layer in layers.items():
            pin.layers.setdefault(name, layer)
        unproved = {name: pin.layers[name] for name in layers if name not in pin.digests}
        if unproved and proofs is None:
            proofs = await self._compute.run_on_host(
                lambda: {k: layer.secure_digest() for k, layer in unproved.items()}
            )
            pin = self._pins.setdefault(key, pin)  # the digests of a large stage may take longer than `PINNED_S`
            pin.asked_for(self._clock.now_s())
        for name, proof in (proofs or {}).items():
            if name in pin.layers:  # else the layer has been dropped meanwhile
                pin.digests.setdefault(name, proof)
        return pin

    def _has_room(self, key: _Key, layers: Iterable[LayerState]) -> bool:
        """True if the limits for pinned versions let us keep version `key` at another peer's request."""
        counted = (at for at, pin in self._pins.items() if pin.is_asked_for and at[0] not in (INITIAL, WEIGHTS))
        others = [self._pins[at] for at in counted if at != key]
        kept = (layer for pin in others for layer in pin.layers.values())
        num_bytes = sum(layer.num_bytes for layer in (*layers, *kept))
        return not others or (len(others) < PINNED_VERSIONS_MAX and num_bytes <= PINNED_BYTES_MAX)

    async def _on_request(self, source: PeerID, message: StateRequest) -> StateOffer:
        me, era, version = self._endpoint.peer_id, message.stored_era, message.version
        if not self._plans.knows(source):
            raise Refused(me, "does not know the sender from a plan")
        if era in (TRAINED, WEIGHTS):
            await self._step_over(message.layers)
        self._forget_old()
        if message.ahead:
            return self._offer_ahead(source, message)
        if era == INITIAL:
            return await self._offer(source, message, (INITIAL, 0), await self._begun_with(message.layers))
        if era not in (TRAINED, WEIGHTS):
            layers = await self._stored(message)
            if not layers:
                raise Refused(me, "has no such snapshot")
            if not self._has_room((era, version), layers.values()):
                raise Refused(me, "is giving other versions to others; ask again")
            return await self._offer(source, message, (era, version), layers)
        if message.to_compare:
            return await self._signed(source, message)
        if version < 0 and era == TRAINED:
            self._newcomers[source] = self._clock.now_s() + PINNED_S
        pinned = self._pins.get((era, version))
        if pinned is not None and pinned.digests.keys() >= set(message.layers):
            return await self._offer(source, message, (era, version), {})
        state, given = self._parts.state_of(message.layers), None
        if state is None:
            raise Refused(me, "does not hold that state")
        if era == TRAINED:
            given = await self._parts.witnessed(source, message.layers, version)
        if given is not None:
            state = given.state
        elif version not in (-1, state.version):
            raise Refused(me, f"is at version {state.version}, not {version}")
        key, layers = (era, state.version), {name: state.layers[name] for name in message.layers}
        if era == WEIGHTS:
            layers = await self._rounded(key, layers)
        elif not self._has_room(key, layers.values()) and not (given is not None and key in self._pins):
            return await self._offer_pinned(source, message, signed=given is not None)
        return await self._offer(source, message, key, layers, given)

    async def _stored(self, message: StateRequest) -> dict[str, LayerState]:
        """Return those of the requested layers that this peer has at the requested version: kept from the layout
        before, or else read from a snapshot on this disk."""
        era, version = message.stored_era, message.version
        kept = self._retained.read(era, version)
        found = {key: kept[key] for key in message.layers if key in kept}
        missing = tuple(key for key in message.layers if key not in found)
        return found | (await self._archive.read(era, version, missing) if missing else {})

    async def _signed(self, source: PeerID, message: StateRequest) -> StateOffer:
        """Describe the requested version, with its holders' signatures, and pin nothing."""
        given = await self._parts.witnessed(source, message.layers, message.version)
        if given is None:
            raise Refused(self._endpoint.peer_id, f"has nothing signed of version {message.version} for the sender")
        digests = tuple((key, proof) for key, proof in given.proofs if key in message.layers)
        return StateOffer(version=given.state.version, digests=digests, pinned_s=0.0, signatures=given.signatures)

    async def _step_over(self, keys: Collection[str]) -> None:
        """Wait until a step of these layers has ended, at most `_STEP_WAIT_S`."""
        for _ in range(math.ceil(_STEP_WAIT_S / _LOOK_S)):
            if not self._parts.is_stepping(keys):
                return
            await asyncio.sleep(_LOOK_S)

    async def _offer_pinned(self, source: PeerID, message: StateRequest, *, signed: bool) -> StateOffer:
        """Offer the newest pinned version, since there is no room to pin another one. Raises: Refused: the request
        names a version, or no version is pinned."""
        kept = ((at, pin) for at, pin in self._pins.items() if at[0] == TRAINED and (pin.signatures or not signed))
        versions = [at for (_, at), pin in kept if pin.digests.keys() >= set(message.layers)]
        if message.version >= 0 or not versions:
            raise Refused(self._endpoint.peer_id, "is giving other versions to others; ask again")
        return await self._offer(source, message, (TRAINED, max(versions)), {})

    async def _rounded(self, key: _Key, layers: Mapping[str, LayerState]) -> dict[str, LayerState]:
        """Return, in bf16, the layers that are not pinned as version `key` yet. Drop all other pinned bf16 versions but
        the newest: each takes a sixth of the state, and a learner that misses one asks for the next."""
        for superseded in sorted(at for at in self._pins if at[0] == WEIGHTS and at != key)[:-1]:
            del self._pins[superseded]
        pin, vectors = self._pins.get(key), self._vectors
        missing = {name: layer for name, layer in layers.items() if pin is None or name not in pin.layers}
        return await self._compute.run_on_host(
            lambda: {name: bare_layer(vectors.rounded(layer.param_N), vectors) for name, layer in missing.items()}
        )

    async def _begun_with(self, keys: tuple[str, ...]) -> dict[str, LayerState]:
        me = self._endpoint.peer_id
        if self.initial is None:
            raise Refused(me, "does not have the initial weights of the run")
        try:
            pin = self._pins.get((INITIAL, 0))
            missing = [key for key in keys if pin is None or key not in pin.digests]
            read = await self.initial.read(missing)
            return {key: bare_layer(param_N, self._vectors) for key, param_N in read.items()}
        except LocalError as error:
            logger.error("cannot serve the initial weights of the run: %s", error)
            raise Refused(me, "cannot read the initial weights of the run") from error

    async def _offer(
        self,
        source: PeerID,
        message: StateRequest,
        key: _Key,
        layers: Mapping[str, LayerState],
        witnessed: Witnessed | None = None,
    ) -> StateOffer:
        """Offer `source` the layers of version `key` that it requested. Args: layers: to be pinned first, if needed."""
        wanted = set(message.layers)
        pin = await self._pin(key, layers, dict(witnessed.proofs) if witnessed else None, asked_by=source)
        if witnessed and message.version < 0:
            pin.signatures = witnessed.signatures
        sizes = [tensor.numel() for name in wanted & pin.layers.keys() for tensor in pin.layers[name].tensors]
        pin.left[source] = pin.left.get(source, 0) + sum(sizes)
        digests = tuple((name, digest) for name, digest in pin.digests.items() if name in wanted)
        before = self._pins.get((WEIGHTS, message.base)) if key[0] == WEIGHTS else None
        base = message.base if before is not None and before.layers.keys() >= wanted else -1
        return StateOffer(version=key[1], digests=digests, pinned_s=PINNED_S, signatures=pin.signatures, base=base)

    def _offer_ahead(self, source: PeerID, message: StateRequest) -> StateOffer:
        """Offer a layer that `source` now fetches for the next layout; forget the layer that it fetched before."""
        me = self._endpoint.peer_id
        if len(message.layers) != 1 or not self.gradient_log.is_wanted:
            raise Refused(me, "knows of no next layout, or was asked for several layers at once")
        state = self._parts.state_of(message.layers)
        if state is None:
            raise Refused(me, "does not hold that state")
        key = message.layers[0]
        self._ahead[source] = state.version, key, state.layers[key]
        self.gradient_log.wants(source, state.version + 1, at_least=True)
        return StateOffer(version=state.version, digests=(), pinned_s=PINNED_S)

    async def _on_chunk_request(self, source: PeerID, message: StateChunkRequest) -> Done:
        if not 0 <= message.tensor <= GRADIENT:
            raise RemoteError(source, f"asks for tensor {message.tensor} of a layer")
        if message.via is not None:
            await self._carry(source, message, message.via)
        elif message.tensor == GRADIENT:
            await self._give_gradient(source, message)
        elif (ahead := self._ahead_of(source, message)) is not None:
            await self._send(source, message, ahead.tensors[message.tensor], priority=self._ahead_priority)
        else:
            pin = self._pins.get((message.stored_era, message.version))
            layer = pin.layers.get(message.layer) if pin else None
            relay = next((relay for relay in self._relays if relay.is_asked(source, message)), None)
            if layer is None and relay is not None:
                await self._give_fetched(source, message, relay)
            elif pin is not None and source not in pin.left:
                raise Refused(self._endpoint.peer_id, "has offered the sender no such version")
            elif pin is None or layer is None:
                raise Refused(self._endpoint.peer_id, f"has not pinned version {message.version} of {message.layer}")
            else:
                await self._give_pinned(source, message, pin, layer.tensors[message.tensor])
        return Done()

    async def _give_pinned(self, source: PeerID, message: StateChunkRequest, pin: _Pin, values_N: Tensor) -> None:
        before_N = self._before(message)
        pin.asked_for(self._clock.now_s())
        while (leaving := self._leaving.get((source, message))) is not None:
            if await asyncio.shield(leaving):
                return
        leaving = self._leaving[source, message] = asyncio.get_running_loop().create_future()
        is_sent = False
        pin.num_sending += 1
        try:
            priority = Priority.BULK if self._is_copy(source, message) else Priority.STATE
            await self._send(source, message, values_N, priority=priority, before_N=before_N)
            is_sent = True
        finally:
            del self._leaving[source, message]
            leaving.set_result(is_sent)
            pin.num_sending -= 1
            pin.asked_for(self._clock.now_s())
        pin.left[source] = max(0, pin.left.get(source, 0) - (message.stop - message.start))

    def _before(self, message: StateChunkRequest) -> Tensor | None:
        """Return the tensor at version `message.base`, from which the requester wants the difference; None: it wants
        the numbers. Raises: Refused: we do not have that tensor."""
        if message.base < 0 or message.stored_era != WEIGHTS or message.tensor != 0:
            return None
        pin = self._pins.get((WEIGHTS, message.base))
        if pin is None or message.layer not in pin.layers:
            raise Refused(self._endpoint.peer_id, f"has not kept version {message.base} of {message.layer}")
        return pin.layers[message.layer].param_N

    async def _carry(self, source: PeerID, message: StateChunkRequest, via: PeerID) -> None:
        """Fetch a range from the holder `via` for `source`, and send it on; refuse while we fetch ourselves."""
        me = self._endpoint.peer_id
        is_fetching = any(not relay.is_done for relay in self._relays)
        if not self._plans.knows(source) or not self._plans.knows(via) or is_fetching:
            raise Refused(me, "carries no ranges for others now")
        length = message.stop - message.start
        is_range = message.start >= 0 and 0 < length <= RANGE_CHUNKS * self._vectors.chunk
        if not is_range or message.tensor == GRADIENT:
            raise RemoteError(source, f"asks for elements {message.start} to {message.stop} of tensor {message.tensor}")
        request = msgspec.structs.replace(message, via=None, base=-1)
        if (via, request) in self._carried or len(self._carried) >= _CARRIED_MAX:
            raise Refused(me, "already carries that range, or as many as it may")
        self._carried.add((via, request))
        try:
            wanted = StateRequest(layers=(message.layer,), version=message.version, stored_era=message.stored_era)
            await self._endpoint.ask(via, wanted, StateOffer)
            into_N = self._vectors.empty(length)
            await self._inbox.fetch(via, request, into_N, first=message.start)
            await self._send(source, message, into_N, first=message.start)
        except (Unreachable, RemoteError) as error:
            raise Refused(me, "cannot get that range") from error
        finally:
            self._carried.discard((via, request))

    async def _give_fetched(self, source: PeerID, message: StateChunkRequest, relay: Relay) -> None:
        """Send a range that we are fetching ourselves, once it has arrived."""
        relay.until_s = self._clock.now_s() + PINNED_S
        values_N = await relay.read(message, patience_s=RELAY_WAIT_S)
        if values_N is None:
            raise Refused(self._endpoint.peer_id, f"has yet to get that range of {message.layer}")
        await self._send(source, message, values_N)

    async def _give_gradient(self, source: PeerID, message: StateChunkRequest) -> None:
        """Send the gradient with which a layer stepped to the requested version; wait for a coming step."""
        me = self._endpoint.peer_id
        if not self._plans.knows(source):
            raise Refused(me, "does not know the sender from a plan")
        self.gradient_log.wants(source, message.version)
        gradient_N = await self.gradient_log.read(
            message.stored_era, message.version, message.layer, patience_s=_GRADIENT_WAIT_S
        )
        if gradient_N is None:
            raise Refused(me, f"has no gradient of {message.layer} to version {message.version}")
        await self._send(source, message, gradient_N, priority=self._ahead_priority)

    def _ahead_of(self, source: PeerID, message: StateChunkRequest) -> LayerState | None:
        """Return the requested layer if `source` is fetching it ahead, else None."""
        version, key, layer = self._ahead.get(source, (-1, "", None))
        return layer if (message.stored_era, message.version, message.layer) == (TRAINED, version, key) else None

    @property
    def _ahead_priority(self) -> Priority:
        """Priority of layers and gradients for the next layout: the lowest, or once the run waits, that of state."""
        return Priority.BULK if self.gradient_log.is_wanted else Priority.STATE

    async def _send(
        self,
        source: PeerID,
        message: StateChunkRequest,
        values_N: Tensor,
        *,
        priority: Priority = Priority.STATE,
        first: int = 0,
        before_N: Tensor | None = None,
    ) -> None:
        """Send a range, chunk by chunk; at the lowest priority, chunks go in smaller parts.

        Args:
            values_N: the tensor, from element `first` on.
            before_N: the same tensor at an earlier version: send the difference from it; None: send the numbers.
        Raises: RemoteError: the range does not exist or is too long. Refused: the requester is unreachable.
        """
        vectors, end = self._vectors, first + values_N.numel()
        if not first <= message.start < message.stop <= min(end, message.start + RANGE_CHUNKS * vectors.chunk):
            raise RemoteError(source, f"asks for elements {message.start} to {message.stop} of {end}")
        part = vectors.background_chunk if priority is Priority.BULK else vectors.chunk
        for at in range(message.start, message.stop, part):
            meta = StateChunk(
                stored_era=message.stored_era,
                version=message.version,
                layer=message.layer,
                tensor=message.tensor,
                start=at,
                base=message.base if before_N is not None else -1,
            )
            part_C = values_N[at - first : min(at + part, message.stop) - first]
            before_C = before_N[at : at + part_C.numel()] if before_N is not None else None
            payload = await self._compute.run_on_host(functools.partial(self._payload, message, part_C, before_C))
            try:
                await self._endpoint.send(source, meta, payload, priority=priority, again=meta)
            except Unreachable as error:
                raise Refused(self._endpoint.peer_id, "cannot reach the requester") from error

    def _payload(self, message: StateChunkRequest, part_C: Tensor, before_C: Tensor | None) -> Payload:
        vectors = self._vectors
        if before_C is not None:
            return vectors.difference_payload(before_C, part_C)
        if message.tensor == GRADIENT:
            return vectors.mean_payload(vectors.on_host(part_C))
        if message.stored_era == WEIGHTS:
            return vectors.rounded_payload(part_C)
        return vectors.payload_of(vectors.on_host(part_C))

    def _is_copy(self, source: PeerID, message: StateChunkRequest) -> bool:
        return message.stored_era == TRAINED and (source, message.version, message.layer) in self._copies
