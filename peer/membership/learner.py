"""Makes a newcomer with a slow line a *learner* (in the code also a *light* member) of its group, until its state is
whole.

To compute a microbatch, a newcomer needs weights but no moments, and bf16 is enough: a sixth of the state. A learner
fetches these weights, takes microbatches, and contributes its gradients to rounds, in which it reduces no part of the
sum. It does not make the group's steps: after each commit it fetches the next weights from members that have stepped.

Meanwhile it fetches the state, layer by layer. This download pauses while weights come. A fetched layer steps with the
group: its part of the reduced gradient comes by the round, in which the learner takes part anyway. So each layer is
fetched once, however many steps the group commits meanwhile; its weights follow from its state and need not be fetched
any more; and no holder has to keep a version of the whole state for a fetch that may take an hour. Once all layers are
here, and match the digests that most holders have signed, the learner is a full member from the next commit on. If
weights and rounds fill the learner's line, it stays a learner; its log says how many layers it has.

A learner computes only with weights of the digest that most holders name, and takes over only a state that most holders
have signed. So a minority of lying holders cannot make it train with wrong weights.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shoal.peer.base.shortage import is_out_of_memory
from shoal.peer.base.tolerating import Tolerating
from shoal.peer.group.catching_up import CatchingUp
from shoal.peer.group.reductions import Reductions
from shoal.peer.group.witnesses import is_witnessed
from shoal.peer.handoff.fetcher import FetchProgress, StateFetcher, Unfinished
from shoal.peer.handoff.inbox import WEIGHTS
from shoal.peer.model.layout import state_layout
from shoal.peer.model.state import LayerAt, RoundedWeights, StageState, state_bytes
from shoal.peer.pipeline.shard import Shard
from shoal.peer.replica.views import GroupView
from shoal.peer.services.services import Services
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.limits import LIGHT_STATE_S
from shoal.protocol.messages import StateOffer, StateRequest

logger = logging.getLogger(__name__)

_SEEN_S = 2.0
"""Minimum seconds for measuring the rate at which weights come; an eighth of them must have come, too."""
_SMALL_BYTES = 16 << 20
"""A smaller state is fetched without a learner phase: on most lines that takes no longer than measuring the rate."""
_RETRY_S = 1.0
_RETRY_MATES_S = 0.25
"""Seconds between requests to holders, which may be stepping or signing their state."""
_STILL_S = 60.0
"""Seconds without a new piece of a round after which we wait no longer for its result. On slow lines a member's pieces
wait for minutes behind activations, but pieces come from several members."""
_PATIENCE_S = 300.0
"""Seconds that fetching one range of a tensor may take: the holder may first send the pieces of a round for minutes."""
_LOOK_S = 0.1

_NEVER = 2**62


class Learner:
    """The learner phase of one membership.

    Args:
        reductions: our rounds, and the reduced gradients that we keep.
        catching_up: fetches reduced gradients that we do not have.
        take: makes the member compute with these weights; when it returns, the pipeline and the group know them.
        join: makes the member take part in rounds and accept microbatches.
    """

    def __init__(
        self,
        services: Services,
        group: GroupView,
        runtime: Shard,
        reductions: Reductions,
        catching_up: CatchingUp,
        *,
        take: Callable[[RoundedWeights], None],
        join: Callable[[], None],
    ) -> None:
        self._endpoint, self._compute, self._inbox = services.endpoint, services.compute, services.layers.inbox
        self._runtime = runtime
        self._group = group
        self._reductions, self._catching_up = reductions, catching_up
        self._sizes = {key: state_layout(runtime.spec, key).numel for key in runtime.keys}
        self._arithmetic = services.arithmetic
        self._take, self._join = take, join
        self._archive, self._server = services.layers.archive, services.layers.server
        self._era = -1
        self._weights: RoundedWeights | None = None
        self._gathered: dict[str, LayerAt] = {}
        """Layer -> its fetched state and version, in host memory."""
        self._unfinished: dict[str, Unfinished] = {}
        """Layer -> the part of it that a failed fetch has brought; at most one layer."""
        self.progress: FetchProgress | None = None
        """Progress of fetching the first weights, and later the state. None: no such fetch is under way."""
        self._may_gather = asyncio.Event()
        self._may_gather.set()
        """Cleared while weights are downloading: the download of the state pauses meanwhile."""
        self._is_behind = False
        self._news = asyncio.Event()
        self._takes_part = asyncio.Event()
        """Set once a round that we are in has ended: all later rounds will include us."""
        self._from = _NEVER
        """The first step with a gradient that the layer being fetched (or partly fetched by a failed fetch) needs in
        order to catch up. The group's reduced gradients are kept from this step on."""

    # --- what others see ---

    @property
    def num_layers(self) -> tuple[int, int]:
        """(Number of layers with their state here, number of all layers of the group)."""
        return len(self._gathered), len(self._sizes)

    # --- events ---

    def behind(self) -> None:
        """Record that a group member has a newer version than ours."""
        self._is_behind = True
        self._news.set()

    def reduced(self) -> None:
        """Record that a step's reduced gradient has arrived."""
        self._news.set()

    def took_part(self) -> None:
        """Record that a round that we took part in has ended."""
        self._takes_part.set()

    def needs_from(self) -> int:
        """Return the first step with a reduced gradient that a fetched layer, or the one being fetched, still needs."""
        return min((self._from, *(at.version for at in self._gathered.values())))

    # --- the life of a learner ---

    async def begin(self) -> bool:
        """Fetch the first weights, and become a learner. Returns: False: the state is small or comes quickly, so a
        learner phase is not worth it. Raises: Unreachable, Refused, RemoteError: the weights cannot be fetched."""
        group, keys = self._group, self._runtime.keys
        if state_bytes(self._runtime.spec, keys) < _SMALL_BYTES:
            return False
        fetcher = self._fetcher(keys)
        self.progress = fetcher.progress
        self.progress.what = "weights"
        fetch = self._fetched(fetcher, stored_era=WEIGHTS, voters=group.voters(group.me))
        fetching = asyncio.create_task(fetch, name=f"fetch weights of group {group.stage}")
        try:
            if await self._is_quick(fetching, fetcher.progress):
                return False
            fetched = await fetching
        finally:
            self.progress = None
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        self.progress = FetchProgress(total=state_bytes(self._runtime.spec, keys) // 4, what="state while training")
        await self._go_to(fetched.version, {key: layer.param_N for key, layer in fetched.layers.items()})
        self._join()
        return True

    async def _is_quick(self, fetching: "asyncio.Task[StageState]", progress: FetchProgress) -> bool:
        """True if the state would come within `LIGHT_STATE_S` seconds at the rate at which the weights come."""
        loop, since_s = asyncio.get_running_loop(), None
        while not fetching.done():
            await asyncio.wait([fetching], timeout=_LOOK_S)
            if progress.total and since_s is None:
                since_s = loop.time()
            is_enough = 8 * progress.done >= progress.total  # the first range may be a small one
            if since_s is not None and is_enough and (fetching.done() or loop.time() >= since_s + _SEEN_S):
                weights_s = (loop.time() - since_s) * progress.total / progress.done
                state_s = weights_s * state_bytes(self._runtime.spec, self._runtime.keys) / (2.0 * progress.total)
                logger.info("group %d: weights take %.0f s, the state %.0f", self._group.stage, weights_s, state_s)
                return state_s < LIGHT_STATE_S
        return False  # if the fetch has failed, the caller gets its error by awaiting it

    async def run(self) -> StageState:
        """Train as a learner until the state is whole. Returns: the state at the group's version."""
        self._era = self._endpoint.era
        for key, at in (await self._archive.take_partial(self._era, self._runtime.keys)).items():
            logger.info("layer %s of version %d is here from an earlier process", key, at.version)
            self._gathered[key] = at
            self._news.set()  # the layer lacks the steps since that version
        gathering = asyncio.create_task(self._gather(), name=f"gather the state of group {self._group.stage}")
        try:
            while (state := await self._whole()) is None:
                await self._next()
            return state
        finally:
            gathering.cancel()
            await asyncio.gather(gathering, return_exceptions=True)

    async def keep(self) -> None:
        """Store the incomplete state for this peer's next process."""
        if self._gathered and self._endpoint.era == self._era:
            timed = await self._compute.run("step", lambda: dict(self._gathered), flop=0.0)  # no step runs meanwhile
            logger.info("keeping %d layers for the next process", len(timed.value))
            await self._archive.keep_partial(self._era, timed.value)

    async def _next(self) -> None:
        await self._news.wait()
        self._news.clear()
        version = self._group.version
        await self._step_to(version, self._runtime.keys)  # layers that have been fetched meanwhile
        if all(self._has(key, version) for key in self._runtime.keys):
            if version in self._reductions.means or self._is_behind:
                await self._step()
        elif self._is_behind:
            await self._follow()

    # --- from one version to the next ---

    async def _follow(self) -> None:
        """Reach the newest version that most holders have: step layers with a state here, fetch weights for the others.
        Retry until this succeeds."""
        self._may_gather.clear()
        try:
            while True:
                if await self._is_fetched():
                    return
                await asyncio.sleep(_RETRY_MATES_S)
        finally:
            self._may_gather.set()

    async def _is_fetched(self) -> bool:
        runtime, group = self._runtime, self._group
        missing = tuple(key for key in runtime.keys if not self._has(key, group.version))
        fetcher = self._fetcher(missing)
        try:
            fetched = await self._fetched(
                fetcher,
                stored_era=WEIGHTS,
                voters=group.voters(group.me),
                at_least=group.version + 1,
                base=self._weights,
            )
        except (Unreachable, Refused, RemoteError) as error:
            logger.info("no weights yet: %s", error)
            return False
        for step in range(group.version, fetched.version):
            await self._mean_by_round(step)  # the next layer may need it, and a later version would end our round
        params = {key: layer.param_N for key, layer in fetched.layers.items()}
        stepped = [key for key in runtime.keys if key not in params]
        await self._step_to(fetched.version, stepped)
        if not all(self._has(key, fetched.version) for key in stepped):
            return False  # a fetched layer has been dropped
        await self._go_to(fetched.version, params)
        return True

    async def _step(self) -> None:
        version = self._group.version + 1
        await self._step_to(version, self._runtime.keys)
        if all(self._has(key, version) for key in self._runtime.keys):
            await self._go_to(version, {})
        else:
            self._news.set()  # dropped layers are fetched again

    async def _go_to(self, version: int, params: Mapping[str, Tensor]) -> None:
        """Compute with the weights of `version`. Args: params: weights of the layers without a state here."""
        gathered, vectors, keys = self._gathered, self._runtime.vectors, self._runtime.keys

        def make() -> dict[str, Tensor]:
            return {key: params[key] if key in params else vectors.rounded(gathered[key].layer.param_N) for key in keys}

        made = await self._compute.run_on_host(make)
        self._is_behind = False
        self._weights = RoundedWeights(version=version, params=made)
        self._take(self._weights)
        come = f"{len(gathered)} of {len(keys)} layers of the state are here"
        logger.info("group %d computes with weights of version %d: %s", self._group.stage, version, come)

    async def _step_to(self, version: int, keys: tuple[str, ...] | list[str]) -> None:
        """Step the layers `keys` to `version`. Drop a layer if one of its reduced gradients is not available."""
        oldest = min((self._gathered[key].version for key in keys if key in self._gathered), default=version)
        for step in range(oldest, version):
            due = [key for key in keys if key in self._gathered and self._gathered[key].version == step]
            if not due:
                continue
            mean_N = await self._mean(step, due)
            if mean_N is not None:
                await self._step_due(due, mean_N)
                continue
            for key in due:
                logger.info("layer %s lacks the gradient of step %d: fetching it again", key, step)
                del self._gathered[key]

    async def _step_due(self, due: list[str], mean_N: Tensor) -> None:
        """Step the layers `due` in one job. Separate jobs would each wait for a microbatch's job."""
        ends = list(itertools.accumulate(self._sizes.values()))
        parts = {key: slice(end - self._sizes[key], end) for key, end in zip(self._sizes, ends, strict=True)}
        left = list(due)

        def step() -> None:
            while left:  # one by one, so that each old state is freed as the new one comes
                at = self._gathered[left[0]]
                after = self._arithmetic.step_layer(left[0], at.layer, mean_N[parts[left[0]]], at.version)
                self._gathered[left[0]] = LayerAt(at.version + 1, after)
                del left[0]

        flop = self._runtime.step_flop * sum(self._sizes[key] for key in due) / self._runtime.num_parameters
        while left:
            try:
                await self._compute.run("step", step, flop=flop)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                logger.warning("no memory to step layer %s: trying again", left[0])
                await asyncio.sleep(_RETRY_S)

    async def _mean(self, step: int, due: list[str]) -> Tensor | None:
        """Return the reduced gradient of `step`, which the layers `due` need. None: the gradient is not available, or
        takes more bytes to fetch than the states of these layers."""
        mean_N = await self._mean_by_round(step)
        whole_bytes = self._runtime.vectors.mean_bytes * self._runtime.num_parameters
        if mean_N is not None or whole_bytes > state_bytes(self._runtime.spec, due):
            return mean_N
        for holder in self._group.holders:
            with Tolerating(logger.info, f"no gradient of step {step}"):
                await self._catching_up.fetch(holder, step)
            if (mean_N := self._reductions.means.get(step)) is not None:
                return mean_N
        return None

    async def _mean_by_round(self, step: int) -> Tensor | None:
        """Wait for our round of `step` to bring its reduced gradient. None: we have no such round, or it stalls."""
        loop = asyncio.get_running_loop()
        before, since_s = -1, loop.time()
        while step not in self._reductions.means:
            reduction = self._reductions.get(step)
            num = reduction.num_taken if reduction is not None else None
            if num != before:
                before, since_s = num if num is not None else -1, loop.time()
            if num is None or loop.time() >= since_s + _STILL_S:
                return None
            await asyncio.sleep(_LOOK_S)
        return self._reductions.means[step]

    # --- the state ---

    async def _gather(self) -> None:
        """Fetch the state layer by layer. Begin only when we have taken part in a round: the group may make the first
        step after we join without us, and a layer fetched before that step could not follow."""
        keys = self._runtime.keys
        await self._takes_part.wait()
        while True:
            missing = next((key for key in keys if key not in self._gathered), None)
            if missing is None:
                await asyncio.sleep(_RETRY_S)  # a layer may still be dropped
                continue
            with Tolerating(logger.info, f"layer {missing} of the state does not come yet"):
                await self._acquire(missing)
                self._news.set()
                continue
            await asyncio.sleep(_RETRY_S)

    async def _acquire(self, key: str) -> None:
        """Fetch the state of the layer `key`. If an earlier fetch left a part, first try to complete that part."""
        begun = self._unfinished.get(key)
        if begun is not None:
            with Tolerating(logger.info, f"no more of version {begun.version} of layer {key}"):
                return await self._fetch_layer(key, begun)
        await self._fetch_layer(key, None)

    async def _fetch_layer(self, key: str, begun: Unfinished | None) -> None:
        """Fetch the state of a layer. Args: begun: the part that a failed fetch has brought; None: no part. Raises: the
        errors of `StateFetcher.fetch`."""
        if self.progress is not None:
            self.progress.done = state_bytes(self._runtime.spec, self._gathered) // 4
        group, fetcher = self._group, self._fetcher((key,), may_ask=self._may_gather, progress=self.progress)
        is_over = self._is_behind or not self._may_gather.is_set()  # then the holders are past our version
        self._from = group.version + is_over if begun is None else begun.version
        try:
            newest: dict[str, Any] = {"voters": group.voters(group.me), "at_least": self._from}
            how = newest if begun is None else {"version": begun.version, "begun": {key: begun}}
            state = await self._fetched(fetcher, **how)
            self._gathered[key] = LayerAt(state.version, state.layers[key])
            self._unfinished = {}
        except (Unreachable, Refused, RemoteError):
            self._unfinished = fetcher.unfinished() or self._unfinished
            raise
        finally:
            self._from = min((at.version for at in self._unfinished.values()), default=_NEVER)

    async def _whole(self) -> StageState | None:
        """Return the state if all layers are here at the group's version and match the digests that most holders have
        signed; else None. Drop layers that differ."""
        version, gathered, keys = self._group.version, self._gathered, self._runtime.keys
        if not all(self._has(key, version) for key in keys):
            return None
        digests = await self._signed(version)
        if digests is None:
            self._news.set()
            await asyncio.sleep(_RETRY_MATES_S)
            return None
        layers = {key: gathered[key].layer for key in keys}
        proofs = await self._compute.run_on_host(lambda: {key: layer.secure_digest() for key, layer in layers.items()})
        differing = [key for key in keys if proofs[key] != digests[key]]
        for key in differing:
            logger.warning("layer %s differs from what its holders have signed: fetching it again", key)
            del gathered[key]
        if differing:
            self._news.set()
            return None
        device = self._runtime.device
        return StageState(version=version, layers={key: layer.to(device) for key, layer in layers.items()})

    async def _signed(self, version: int) -> Mapping[str, str] | None:
        """Return layer -> the digest at `version` that most holders have signed; None: not yet, or not any more."""
        group, keys = self._group, self._runtime.keys
        request = StateRequest(layers=keys, version=version, to_compare=True)
        for holder in group.holders:
            with Tolerating(logger.info, "nothing to compare the state with yet"):
                offer = await self._endpoint.ask(holder, request, StateOffer)
                if offer.version == version and is_witnessed(self._endpoint, offer, keys, group.voters(group.me)):
                    return dict(offer.digests)
        return None

    async def _fetched(self, fetcher: StateFetcher, **how: Any) -> StageState:
        """Fetch from the group's holders and from those that fetch the same. Args: how: see `StateFetcher.fetch`."""
        with self._server.sharing(self._group.joining) as relay:
            return await fetcher.fetch(self._group.holders, relay=relay, **how)

    def _has(self, key: str, version: int) -> bool:
        return key in self._gathered and self._gathered[key].version == version

    def _fetcher(self, keys: tuple[str, ...], **how: Any) -> StateFetcher:
        """Make a fetcher that puts layers into host memory, where they step. Weights are copied to the device later.
        Args: how: see `StateFetcher`."""
        return StateFetcher(self._runtime.spec, keys, self._inbox, patience_s=_PATIENCE_S, **how)
