"""Fetches the layers that this peer needs for the next layout while it still trains in the present one.

This begins with a plan that names the next layout (`Plan.next_layout`) and no version at which the present one ends.
Each layer is fetched, at its present version, from a peer that trains it. Then the layer is *replayed*: it makes the
same steps as that peer's group. For each step only the layer's part of the reduced gradient is fetched: a third of the
layer's state, or a sixth as bf16. So when the layout ends, only the last step's gradient is missing. If gradients come
faster than the line can carry them, fewer layers are replayed, and the others are fetched whole at the end. `Joining`
then compares replayed layers with the holders' digests; a layer that differs is fetched whole, too. All fetched layers
are dropped if a later plan drops the next layout.

The layers lie in the host's memory. A peer fetches nothing ahead if its free memory is less than twice their size, or
if the run places experts on peers of their own.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from shoal.peer.base.failures import Failures
from shoal.peer.base.tolerating import Tolerating
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.handoff.inbox import GRADIENT, ChunkInbox
from shoal.peer.model.layout import state_layout
from shoal.peer.model.state import LayerAt, LayerState, state_bytes, state_numels
from shoal.peer.presence.ports import Ports
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.messages import StateChunkRequest, StateOffer, StateRequest
from shoal.protocol.plan import Plan, Stage
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_ROOM_TIMES = 2.0
_LAG_STEPS = 2
"""A layer fetched ahead, one of the oldest version, is dropped if it lags this many steps behind its holder, and
the holder has made this many steps while we replayed fewer than one for each of our layers and its steps."""


@dataclass(slots=True)
class _Source:
    """A stage of the present layout, and the layers that we fetch from its members."""

    keys: tuple[str, ...]
    peers: tuple[PeerID, ...]
    turn: int = 0
    reached: int = -1
    """The newest known version of the stage's members."""
    since: int = -1
    """Value of `reached` when `num_replayed` was set to 0: a layer was then added or dropped."""
    num_replayed: int = 0
    """Steps replayed since version `since`; a step that is replayed for two layers counts twice."""
    came_bytes: int = 0
    """Bytes received of the layer that is being fetched."""
    was_in_vain: bool = False
    """The holder had dropped a gradient that we still had to replay, and we have replayed no step since. If this
    happens twice in a row, no layer is fetched any more: that would only take bandwidth from training."""
    is_full: bool = False
    """No further layer is fetched ahead from this stage."""
    task: asyncio.Task[None] | None = None

    @property
    def peer(self) -> PeerID:
        return self.peers[self.turn % len(self.peers)]

    def here(self, has: Mapping[str, LayerAt]) -> list[str]:
        """Return those of the stage's layers that we have fetched, oldest version first."""
        return sorted((key for key in self.keys if key in has), key=lambda key: has[key].version)

    def coming(self, has: Mapping[str, LayerAt]) -> tuple[str, ...]:
        """Return those of the stage's layers that we have yet to fetch before the present layout ends."""
        return () if self.is_full else tuple(key for key in self.keys if key not in has)

    def begin_to_count(self) -> None:
        self.since, self.num_replayed = self.reached, 0

    def cannot_follow(self, num_layers: int) -> bool:
        """True if we replay `num_layers` layers more slowly than the stage makes steps, so that they fall behind."""
        num_steps = self.reached - self.since
        return num_steps >= _LAG_STEPS and 0 < self.num_replayed < num_steps * num_layers


@dataclass(slots=True)
class _Preparing:
    era: int
    next_layout: tuple[Stage, ...]
    sources: dict[int, _Source] = field(default_factory=dict)
    has: dict[str, LayerAt] = field(default_factory=dict)


class FetchingAhead:
    """Fetches the layers that one peer needs for the next layout, and holds them until the present layout ends."""

    def __init__(
        self, ports: Ports, *, inbox: ChunkInbox, arithmetic: Arithmetic, spec: RunSpec, failures: Failures
    ) -> None:
        self._endpoint, self._compute, self._clock = ports.endpoint, ports.compute, ports.clock
        self._inbox, self._arithmetic, self._spec = inbox, arithmetic, spec
        self._failures = failures
        self._preparing: _Preparing | None = None

    @property
    def unfetched_bytes(self) -> int:
        """Bytes of layers that have yet to be fetched ahead; heartbeats report this number."""
        ready = self._preparing
        if ready is None:
            return 0
        left_bytes = 0
        for source in ready.sources.values():
            left_bytes += state_bytes(self._spec, source.coming(ready.has)) - source.came_bytes
            for key in source.here(ready.has):  # not counted: the last step's gradient, which is always under way
                left_bytes += self._gradients_bytes([key]) * max(0, source.reached - ready.has[key].version - 1)
        return left_bytes

    # --- plans ---

    def follow(self, plan: Plan) -> None:
        """Follow a newer plan: begin to fetch ahead, continue, or drop the fetched layers."""
        ready = self._preparing
        if ready is not None and plan.not_started and (plan.era, plan.restore_era) == (ready.era + 1, ready.era):
            self._stop(ready)  # `ended` will take the fetched layers
            return
        if ready is not None and (plan.era, plan.next_layout) != (ready.era, ready.next_layout):
            self.drop()
        if not plan.next_layout or plan.experts:
            return
        if self._preparing is None and plan.cutover_version:
            return  # the layout ends soon: a fetch now would only delay its last steps
        if self._preparing is None:
            self._preparing = self._begun(plan)
        for stage, source in self._preparing.sources.items():
            if source.task is not None and not plan.has(source.peer):
                source.task.cancel()  # the task may wait long for that peer's answer
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
        missing = [key for key in stage_layer_keys(model, *place.layers) if key not in has]
        wanted = [key for key in missing if state_bytes(self._spec, [key])]
        room = self._arithmetic.free_host_bytes()
        if _ROOM_TIMES * state_bytes(self._spec, wanted) > room:
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
        """Fetch one layer after the other. Before each, replay the steps that the layers fetched so far lack."""
        while True:
            try:
                here, newest = source.here(ready.has), -1
                if here:
                    newest = (await self._offer(source, here[0])).version
                    source.reached = max(source.reached, newest)
                lag_steps = newest - ready.has[here[0]].version if here else 0
                coming = source.coming(ready.has)
                if lag_steps >= _LAG_STEPS and source.cannot_follow(len(here)):
                    logger.info("cannot keep up with %d layers that are fetched ahead", len(here))
                    del ready.has[here[0]]
                    source.is_full = True
                    source.begin_to_count()
                elif lag_steps > 0:
                    await self._replay_or_drop(ready, source, here[0])
                elif coming:
                    source.reached = max(source.reached, await self._fetch(ready, source, coming[0]))
                    source.begin_to_count()
                elif here:
                    with contextlib.suppress(Refused):  # the holder has made no step for seconds
                        await self._replay(ready, source, here[0])
                else:
                    return
            except (Unreachable, Refused, RemoteError) as error:
                logger.info("fetching ahead: %s", error)
                source.turn += 1
                await asyncio.sleep(_RETRY_S)

    async def _replay_or_drop(self, ready: _Preparing, source: _Source, key: str) -> None:
        """Make the next step of the layer `key`, which the holder has made already. If the holder no longer keeps the
        gradient, drop all layers at that version. They are fetched again from another holder, except after two such
        drops in a row."""
        version = ready.has[key].version
        try:
            await self._replay(ready, source, key)
        except Refused as error:
            logger.info("fetching layers ahead anew: %s", error)
            ready.has = {key: at for key, at in ready.has.items() if key not in source.keys or at.version != version}
            source.turn += 1
            source.is_full |= source.was_in_vain
            source.was_in_vain = True
            source.begin_to_count()

    async def _offer(self, source: _Source, key: str) -> StateOffer:
        return await self._endpoint.ask(source.peer, StateRequest(layers=(key,), ahead=True), StateOffer)

    async def _fetch(self, ready: _Preparing, source: _Source, key: str) -> int:
        """Fetch the layer `key` at its holder's present version. Returns: the version."""
        version = (await self._offer(source, key)).version
        vectors = self._arithmetic.vectors
        tensors = [vectors.empty(size) for size in state_numels(self._spec, key)]

        def came(num_elements: int) -> None:
            source.came_bytes += 4 * num_elements

        try:
            for number, tensor in enumerate(tensors):
                request = StateChunkRequest(version=version, layer=key, tensor=number, start=0, stop=0)
                await self._inbox.fetch_tensor(source.peer, request, tensor, came)
        finally:
            source.came_bytes = 0
        ready.has[key] = LayerAt(version, vectors.layer_state(*tensors))
        return version

    async def _replay(self, ready: _Preparing, source: _Source, key: str) -> None:
        """Make one step of the layer `key`.
        Raises: Refused: the holder has not made the step, or no longer keeps its gradient."""
        at = ready.has[key]
        gradient_N = self._arithmetic.vectors.empty(state_layout(self._spec, key).numel)
        request = StateChunkRequest(
            stored_era=ready.era, version=at.version + 1, layer=key, tensor=GRADIENT, start=0, stop=0
        )
        await self._inbox.fetch_tensor(source.peer, request, gradient_N)
        stepped = await self._compute.run(
            "step",
            lambda: self._arithmetic.step_layer(key, at.layer, gradient_N, at.version),
            flop=20.0 * gradient_N.numel(),  # the count of `Shard.step_flop`
        )
        ready.has[key] = LayerAt(at.version + 1, stepped.value)
        source.num_replayed += 1
        source.was_in_vain = False

    # --- when it has ended ---

    async def ended(self, era: int, version: int, members: Collection[PeerID]) -> Mapping[str, LayerState]:
        """Replay the last steps, and return the layers that have reached `version`, at which the layout of `era` ended.
        The caller must check their digests. Args: members: of the newest plan; no other peers are asked."""
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
            num_steps = version - ready.has[here[0]].version
            if num_steps * self._gradients_bytes(here[:1]) > state_bytes(self._spec, here[:1]):
                del ready.has[here[0]]  # fetching the whole layer takes fewer bytes
                continue
            with Tolerating(logger.info, "the last steps of layers fetched ahead"):
                await self._replay(ready, source, here[0])
                continue
            source.turn += 1
            tries += 1
            await asyncio.sleep(_RETRY_S)

    def _gradients_bytes(self, keys: Iterable[str]) -> int:
        numel = sum(state_layout(self._spec, key).numel for key in keys)
        return self._arithmetic.vectors.mean_bytes * numel
