"""Fetches what this peer lacks for the following layout while it trains in the live one.

It begins with a plan that names the following layout, but no end yet (`Plan.next_layout`). Each layer is fetched from a
peer that trains it, at whatever version that is, and then steps with that peer's group: per step its part of the
reduced gradient travels, a third of its state, or a sixth as bf16. So when the layout ends, only one step's gradient is
still missing. Where gradients come faster than the line carries them, fewer layers are replayed, and the others are
fetched whole at the end. Replayed layers are then compared with the holders' (`Joining`); a layer that differs is
fetched whole, too. If the plan is called off, all fetched layers are dropped.

The layers lie in the host's memory. A peer with less than twice the room for them fetches nothing ahead, and neither
does any peer where experts are placed.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from shoal.peer.base.failures import Failures
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.handoff.inbox import GRADIENT, ChunkInbox
from shoal.peer.handoff.ranges import fetch_range, ranges
from shoal.peer.links.probing import LinkProbing
from shoal.peer.model.layout import state_layout
from shoal.peer.model.state import LayerState, moment2_numel
from shoal.peer.presence.ports import Ports
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.messages import StateChunkRequest, StateOffer, StateRequest
from shoal.protocol.plan import Plan, Stage
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_REFUSALS_MAX = 2
"""A holder that has stepped on and refuses a gradient this often has not kept it."""
_IN_VAIN_MAX = 1
"""If more layers in a row come too late to be replayed, further ones would only take bandwidth from the steps."""
_ROOM_TIMES = 2.0
_PART_OF_STEP = 0.8
"""Gradients of the replayed layers may take at most this part of a step's time: with more we fall behind."""
_SAMPLE_BYTES = 4 << 20
_SAMPLES_MIN = 3
"""Fewer samples say little: others may first fetch whole layers from the same holder beside our gradients."""
_LAG_STEPS = 2
"""If layers are this far behind, and their gradients come too slowly, there are too many."""
_SLOW_PART = 0.25
"""A holder that sends a layer at less than this part of our line's rate is too slow or too busy: try another one."""


@dataclass(slots=True)
class _Source:
    """A stage of the live layout, and what we fetch from it."""

    keys: tuple[str, ...]
    peers: tuple[PeerID, ...]
    turn: int = 0
    in_vain: int = 0
    """Layers in a row that came so late that the steps since were no longer kept."""
    refusals: int = 0
    reached: int = -1
    """The version of its holders, as far as we know."""
    began: tuple[float, int] = (0.0, -1)
    """When we first knew a version of theirs, and that version."""
    step_s: float = math.inf
    """Seconds of a step since then, at most."""
    byte_s: float = 0.0
    """Seconds in which a byte of a gradient comes, a recent average; 0: not known yet."""
    num_samples: int = 0
    rates: dict[PeerID, float] = field(init=False, default_factory=dict)
    came_bytes: int = field(init=False, default=0)
    is_full: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def peer(self) -> PeerID:
        return self.peers[self.turn % len(self.peers)]

    def here(self, has: Mapping[str, "_Replayed"]) -> list[str]:
        """Return its layers that are here, the one furthest behind first."""
        return sorted((key for key in self.keys if key in has), key=lambda key: has[key].version)

    def coming(self, has: Mapping[str, "_Replayed"]) -> tuple[str, ...]:
        """Return its layers that are to be fetched while the layout lasts."""
        return () if self.is_full else tuple(key for key in self.keys if key not in has)

    def heard(self, version: int, now_s: float) -> None:
        """Note that its holder is at `version`."""
        if self.began[1] < 0:
            self.began = now_s, version
        self.reached = max(self.reached, version)
        num_whole = self.reached - self.began[1] - 1  # the first step may have been almost over
        if num_whole > 0:
            self.step_s = (now_s - self.began[0]) / num_whole

    def came(self, num_bytes: int, took_s: float) -> None:
        """Note the transfer time of a gradient that was ready. A small layer's time says nothing about the rate."""
        if num_bytes < _SAMPLE_BYTES:
            return
        byte_s = took_s / num_bytes
        self.byte_s = (self.byte_s + byte_s) / 2.0 if self.byte_s else byte_s
        self.num_samples += 1

    def gave(self, num_bytes: int, took_s: float, *, line_bytes_per_s: float) -> None:
        """Note the time of a layer from the peer asked now. If it is far slower than our line, take the next layer from
        a peer that has given nothing yet, or else from the quickest."""
        if num_bytes < _SAMPLE_BYTES or took_s <= 0.0:
            return
        self.rates[self.peer] = num_bytes / took_s
        if self.rates[self.peer] < _SLOW_PART * line_bytes_per_s:
            turns = range(self.turn, self.turn + len(self.peers))
            self.turn = max(turns, key=lambda turn: self.rates.get(self.peers[turn % len(self.peers)], math.inf))

    def can_follow(self, num_bytes: int) -> bool:
        """True if gradients of that size come within a step, as far as we know."""
        return self.num_samples < _SAMPLES_MIN or self.byte_s * num_bytes <= _PART_OF_STEP * self.step_s


@dataclass(slots=True)
class _Replayed:
    version: int
    layer: LayerState


@dataclass(slots=True)
class _Preparing:
    era: int
    next_layout: tuple[Stage, ...]
    sources: dict[int, _Source] = field(default_factory=dict)
    has: dict[str, _Replayed] = field(default_factory=dict)


class FetchingAhead:
    """Fetches ahead for one peer."""

    def __init__(
        self,
        ports: Ports,
        *,
        inbox: ChunkInbox,
        arithmetic: Arithmetic,
        spec: RunSpec,
        links: LinkProbing,
        failures: Failures,
    ) -> None:
        self._endpoint, self._compute, self._clock = ports.endpoint, ports.compute, ports.clock
        self._inbox, self._arithmetic, self._spec = inbox, arithmetic, spec
        self._links, self._failures = links, failures
        self._preparing: _Preparing | None = None

    @property
    def unfetched_bytes(self) -> int:
        """Bytes still to come, for heartbeats."""
        ready = self._preparing
        if ready is None:
            return 0
        left_bytes = 0
        for source in ready.sources.values():
            left_bytes += sum(map(self._state_bytes, source.coming(ready.has))) - source.came_bytes
            for key in source.here(ready.has):  # the last step is always under way
                left_bytes += self._gradients_bytes([key]) * max(0, source.reached - ready.has[key].version - 1)
        return left_bytes

    # --- plans ---

    def follow(self, plan: Plan) -> None:
        """Follow a newer plan: begin, go on, or drop what is here."""
        ready = self._preparing
        if ready is not None and plan.not_started and (plan.era, plan.restore_era) == (ready.era + 1, ready.era):
            self._stop(ready)  # `ended` will ask for what is here
            return
        if ready is not None and (plan.era, plan.next_layout) != (ready.era, ready.next_layout):
            self.drop()
        if not plan.next_layout or plan.experts:
            return
        if self._preparing is None and plan.cutover_version:
            return  # it ends as soon as it can: a fetch now would only delay its last steps
        if self._preparing is None:
            self._preparing = self._begun(plan)
        for stage, source in self._preparing.sources.items():
            if source.task is not None and not plan.has(source.peer):
                source.task.cancel()  # it may wait for that peer's answer for long
                source.task = None
            source.peers = plan.stages[stage].peers
            if source.task is None:
                source.task = asyncio.create_task(self._get(self._preparing, source), name=f"fetch stage {stage} ahead")
                source.task.add_done_callback(self._failures.add_from)

    def _begun(self, plan: Plan) -> _Preparing:
        me, model = self._endpoint.peer_id, self._spec.model
        ready = _Preparing(plan.era, plan.next_layout)
        place = next((stage for stage in plan.next_layout if me in stage.peers), None)
        if place is None:
            return ready
        now = plan.stage_of(me)
        has = set(stage_layer_keys(model, *plan.stages[now].layers)) if now is not None else set[str]()
        wanted = [key for key in stage_layer_keys(model, *place.layers) if key not in has and self._state_bytes(key)]
        room = self._arithmetic.free_host_bytes()
        if _ROOM_TIMES * sum(map(self._state_bytes, wanted)) > room:
            logger.info("no room to fetch ahead: %d layers, %.1f GB free", len(wanted), room / 1e9)
            return ready
        for index, stage in enumerate(plan.stages):
            held = set(stage_layer_keys(model, *stage.layers))
            keys = tuple(key for key in wanted if key in held)
            # Peers that are to hold the same layers begin with different holders of them.
            turn = place.peers.index(me)
            if keys:
                ready.sources[index] = _Source(keys, stage.peers, turn)
        return ready

    def drop(self) -> None:
        """Drop all that was fetched."""
        if self._preparing is not None:
            self._stop(self._preparing)
            self._preparing = None

    def _stop(self, ready: _Preparing) -> None:
        for source in ready.sources.values():
            if source.task is not None:
                source.task.cancel()

    async def close(self) -> None:
        ready = self._preparing
        self.drop()
        tasks = [source.task for source in ready.sources.values() if source.task] if ready else []
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- while the layout lasts ---

    async def _get(self, ready: _Preparing, source: _Source) -> None:
        """Fetch layer after layer; before each, replay the steps of those that are here."""
        while True:
            try:
                here = source.here(ready.has)
                if here:
                    source.heard((await self._offer(source, here[0])).version, self._clock.now_s())
                lag_steps = source.reached - ready.has[here[0]].version if here else 0
                coming = source.coming(ready.has)
                if lag_steps >= _LAG_STEPS and not source.can_follow(self._gradients_bytes(here)):
                    logger.info("cannot keep up with %d layers that are fetched ahead", len(here))
                    del ready.has[here[0]]
                    source.is_full = True
                elif lag_steps > 0:
                    took_s = await self._replay(ready, source, here[0])
                    source.came(self._gradients_bytes(here[:1]), took_s)
                elif coming and source.can_follow(self._gradients_bytes([*here, coming[0]])):
                    began_s = self._clock.now_s()
                    version = await self._fetch(ready, source, coming[0])
                    now_s = self._clock.now_s()
                    source.heard(version, now_s)
                    took_s, line_bytes_per_s = now_s - began_s, self._links.bytes_per_s
                    source.gave(self._state_bytes(coming[0]), took_s, line_bytes_per_s=line_bytes_per_s)
                elif here:
                    source.is_full = bool(coming)
                    await self._replay(ready, source, here[0])  # waits until its holder has stepped
                else:
                    return
                source.refusals = 0
            except Refused as error:
                logger.debug("fetching ahead: %s", error)
                await self._refused(ready, source)
            except (Unreachable, RemoteError) as error:
                logger.info("fetching ahead: %s", error)
                source.turn += 1
                await asyncio.sleep(_RETRY_S)

    async def _refused(self, ready: _Preparing, source: _Source) -> None:
        """Handle a refused gradient: the step is not made yet, or its gradient is no longer kept. Then fetch the layers
        that lack it anew from another holder, unless that was in vain before."""
        source.refusals += 1
        oldest = min((ready.has[key].version for key in source.keys if key in ready.has), default=-1)
        try:
            newest = (await self._offer(source, source.keys[0])).version
        except (Unreachable, Refused, RemoteError):
            newest = -1
        if newest < 0:
            source.turn += 1
            await asyncio.sleep(_RETRY_S)
        elif newest > oldest and source.refusals > _REFUSALS_MAX:
            source.turn += 1
            source.refusals = 0
            source.in_vain += 1
            source.is_full = source.is_full or source.in_vain > _IN_VAIN_MAX
            for key in source.keys:
                if key in ready.has and ready.has[key].version == oldest:
                    del ready.has[key]

    async def _offer(self, source: _Source, key: str) -> StateOffer:
        return await self._endpoint.ask(source.peer, StateRequest(layers=(key,), ahead=True), StateOffer)

    async def _fetch(self, ready: _Preparing, source: _Source, key: str) -> int:
        """Fetch a layer. Returns: its version."""
        version = (await self._offer(source, key)).version
        numel = state_layout(self._spec, key).numel
        vectors = self._arithmetic.vectors
        tensors = [vectors.empty(size) for size in (numel, numel, moment2_numel(self._spec, key))]

        def came(num_elements: int) -> None:
            source.came_bytes += 4 * num_elements

        try:
            for number, tensor in enumerate(tensors):
                request = StateChunkRequest(version=version, layer=key, tensor=number, start=0, stop=0)
                await self._fetch_tensor(source.peer, request, tensor, came)
        finally:
            source.came_bytes = 0
        ready.has[key] = _Replayed(version, vectors.layer_state(*tensors))
        return version

    async def _replay(self, ready: _Preparing, source: _Source, key: str) -> float:
        """Make one step of one layer. Returns: seconds in which its gradient came.
        Raises: Refused: the holder has not made the step, or no longer keeps its gradient."""
        began_s = self._clock.now_s()
        at, vectors = ready.has[key], self._arithmetic.vectors
        gradient_N = vectors.empty(state_layout(self._spec, key).numel)
        request = StateChunkRequest(
            stored_era=ready.era, version=at.version + 1, layer=key, tensor=GRADIENT, start=0, stop=0
        )
        await self._fetch_tensor(source.peer, request, gradient_N)
        took_s = self._clock.now_s() - began_s
        stepped = await self._compute.run(
            "step",
            lambda: self._arithmetic.step_layer(key, at.layer, gradient_N, at.version),
            flop=20.0 * gradient_N.numel(),  # as `Shard` counts
        )
        ready.has[key] = _Replayed(at.version + 1, stepped.value)
        source.in_vain = 0
        return took_s

    async def _fetch_tensor(
        self,
        peer: PeerID,
        request: StateChunkRequest,
        into_N: Tensor,
        came: Callable[[int], None] = lambda num_elements: None,
    ) -> None:
        """Fill `into_N` with the tensor that `request` names, range by range in order; call `came` after each."""
        vectors = self._arithmetic.vectors
        todo = deque(ranges(into_N.numel(), vectors))

        async def work() -> None:
            while todo:
                start, stop = todo.popleft()
                wanted = msgspec.structs.replace(request, start=start, stop=stop)
                await fetch_range(peer, wanted, into_N, inbox=self._inbox, vectors=vectors)
                came(stop - start)

        working = [asyncio.create_task(work()) for _ in range(2)]  # so that the line does not idle between two
        try:
            await asyncio.gather(*working)
        finally:
            for task in working:
                task.cancel()

    # --- when it has ended ---

    async def ended(self, era: int, version: int, members: Collection[PeerID]) -> Mapping[str, LayerState]:
        """Replay the last steps, and return the layers that are then at the version at which the layout of `era` ended.
        The caller must compare them with the holders'. Args: members: of the newest plan; no other peer is asked."""
        ready = self._preparing
        if ready is None or ready.era != era:
            return {}
        for source in ready.sources.values():
            source.peers = tuple(peer for peer in source.peers if peer in members)
        found = (source for source in ready.sources.values() if source.peers)
        await asyncio.gather(*(self._finish(ready, source, version) for source in found))
        return {key: at.layer for key, at in ready.has.items() if at.version == version}

    async def _finish(self, ready: _Preparing, source: _Source, version: int) -> None:
        tries = 0
        while tries < 4:
            here = source.here(ready.has)
            if not here or ready.has[here[0]].version >= version:
                return
            if (version - ready.has[here[0]].version) * self._gradients_bytes(here[:1]) > self._state_bytes(here[0]):
                del ready.has[here[0]]  # the whole layer is smaller than all that it lacks
                continue
            try:
                await self._replay(ready, source, here[0])
            except (Unreachable, Refused, RemoteError) as error:
                logger.info("the last steps of layers fetched ahead: %s", error)
                source.turn += 1
                tries += 1
                await asyncio.sleep(_RETRY_S)

    def _state_bytes(self, key: str) -> int:
        return 4 * (2 * state_layout(self._spec, key).numel + moment2_numel(self._spec, key))

    def _gradients_bytes(self, keys: Iterable[str]) -> int:
        numel = sum(state_layout(self._spec, key).numel for key in keys)
        return self._arithmetic.vectors.mean_bytes * numel
