"""Evaluates a run's model through the swarm's own stages, so that no machine needs the whole model.

`SwarmModel` works in an event loop; `SwarmPredictor` gives the same model to code without one, such as lm-eval.

B rows   T tokens
"""

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from shoal.deploy.ship.predictor import Origin
from shoal.deploy.visitor.entrance import entering
from shoal.peer.data.labels import IGNORED
from shoal.peer.data.tokenizer import Tokenizer
from shoal.peer.model.generate import Sampler
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.invite import Invite
from shoal.protocol.limits import INFERENCE_TOKENS_MAX, INFERENCES_OF_ONE_MAX
from shoal.protocol.messages import InferenceAnswer, InferenceRequest
from shoal.protocol.spec import ModelSpec, RunSpec

logger = logging.getLogger(__name__)

Work = TypeVar("Work")

_TRIES: Final = 5
"""The most attempts of `through_swarm` at work that must use one model version throughout."""
_KEEP_S: Final = 5.0
"""Seconds of silence after which a small request makes stages keep the version; lm-eval may load for 30 s."""


class VersionGone(LocalError):
    """The swarm has answered with a second version of the model: repartitioning the layers ended the first version."""


class _Anew(Exception):
    """The stages have lost the state of a session's tokens; send the session again from its first token."""


class SwarmModel:
    """The model of one run. Args: peers: any members of the run; a request goes to each in turn until one answers."""

    def __init__(self, endpoint: Endpoint, peers: Sequence[PeerID], model: ModelSpec) -> None:
        self._endpoint, self._peers, self.model = endpoint, list(peers), model
        self.answered: set[tuple[int, int]] = set()
        """(training generation, model version) of every answer so far."""
        self._version = -1
        self._way = _new_number()
        self._asked_s = -math.inf
        self._few, self._finding = asyncio.Semaphore(INFERENCES_OF_ONE_MAX), asyncio.Lock()

    async def log_likelihoods(
        self, tokens_BT: Tensor, targets_BT: Tensor, begins_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (log-likelihood of each target in nats, float32 [B, T]; True where it is the likeliest token, [B, T]).

        Args: begins_BT: bool, True where a document begins; None: attention crosses documents.
        Raises: LocalError: no peer answers; the sentence has the last reason.
        """
        B, T = tokens_BT.shape
        if T > INFERENCE_TOKENS_MAX:
            if begins_BT is not None:
                raise LocalError(f"packed documents of {T:,} tokens cannot be evaluated through a swarm")
            found = [await self._long_row(tokens_BT[row], targets_BT[row]) for row in range(B)]
        else:
            rows = max(1, 1024 // T)  # small concurrent requests: each stage has work, and training waits briefly
            parts = [slice(at, at + rows) for at in range(0, B, rows)]
            begins = [None if begins_BT is None else begins_BT[part] for part in parts]
            found = await asyncio.gather(
                *(self._likelihoods(tokens_BT[p], targets_BT[p], b) for p, b in zip(parts, begins, strict=True))
            )
        values, likeliest = zip(*found, strict=True)
        return torch.cat(values), torch.cat(likeliest)

    async def candidates(self, session: int, position: int, tokens: Sequence[int]) -> Tensor:
        """Return the logits of the token that follows `tokens`, float32 [V]. If the vocabulary is large, the swarm
        omits the least likely tokens; their logit is -inf.

        Args:
            session: the number under which the stages keep earlier tokens' state; 0: they keep none.
            position: the number of earlier tokens in the session.
        Raises: _Anew: the session is lost. LocalError: no peer answers.
        """
        answer = await self._ask(InferenceRequest(session=session, position=position, tokens=_ints(tokens)))
        num = len(answer.payload) // 8
        token_K = torch.frombuffer(bytearray(answer.payload[: 4 * num]), dtype=torch.int32).long()
        logit_K = torch.frombuffer(bytearray(answer.payload[4 * num : 8 * num]), dtype=torch.float32)
        if (
            num == 0
            or len(answer.payload) % 8
            or not 0 <= int(token_K.min()) <= int(token_K.max()) < self.model.vocab_size
        ):
            raise LocalError("the swarm's last stage names tokens that the model does not have")
        if not bool(logit_K.isfinite().all()):
            raise LocalError("the swarm's model gives numbers that are not finite")
        return torch.full((self.model.vocab_size,), -math.inf).scatter(0, token_K, logit_K)

    async def keep_version(self) -> None:
        """Send a small request after every `_KEEP_S` without a request, so that the stages keep the version."""
        while True:
            await asyncio.sleep(_KEEP_S)
            is_idle = asyncio.get_running_loop().time() - self._asked_s >= _KEEP_S
            if is_idle and self._version >= 0:
                nothing = InferenceRequest(tokens=_ints([0]), targets=_ints([IGNORED]))
                with contextlib.suppress(LocalError):
                    await self._ask(nothing)

    async def stream(self, prompt: Sequence[int], sampler: Sampler) -> AsyncIterator[int]:
        """Yield the tokens that follow the prompt, without end. Raises: LocalError: no peer answers."""
        if not prompt:
            raise ValueError("the prompt must have at least one token")
        tokens, context = list(prompt), self.model.context
        session, known = 0, 0
        while True:
            if len(tokens) > context:
                # Each new token shifts the window by one, so no cached state is valid.
                window = tokens[-context:]
                session = 0 if context <= INFERENCE_TOKENS_MAX else _new_number()
                logits_V = await self._logits(session, 0, window)
            else:
                session = session or _new_number()
                try:
                    logits_V = await self._logits(session, known, tokens[known:])
                except _Anew:
                    session, known = 0, 0
                    continue
                known = len(tokens)
            tokens.append(sampler.choose(logits_V))
            yield tokens[-1]

    async def _logits(self, session: int, position: int, tokens: Sequence[int]) -> Tensor:
        """Send `tokens` in requests of at most INFERENCE_TOKENS_MAX, and return the logits [V] after the last token."""
        for at in range(0, len(tokens), INFERENCE_TOKENS_MAX):
            part = tokens[at : at + INFERENCE_TOKENS_MAX]
            logits_V = await self.candidates(session, position + at, part)
        return logits_V

    async def _long_row(self, tokens_T: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        while True:
            session, found = _new_number(), []
            try:
                for at in range(0, len(tokens_T), INFERENCE_TOKENS_MAX):
                    part = slice(at, at + INFERENCE_TOKENS_MAX)
                    tokens_1T, targets_1T = tokens_T[None, part], targets_T[None, part]
                    found.append(await self._likelihoods(tokens_1T, targets_1T, None, session, at))
            except _Anew:
                continue
            values, likeliest = zip(*found, strict=True)
            return torch.cat(values, 1), torch.cat(likeliest, 1)

    async def _likelihoods(
        self, tokens_BT: Tensor, targets_BT: Tensor, begins_BT: Tensor | None, session: int = 0, position: int = 0
    ) -> tuple[Tensor, Tensor]:
        B, T = tokens_BT.shape
        answer = await self._ask(
            InferenceRequest(
                session=session,
                position=position,
                rows=B,
                tokens=_ints(tokens_BT),
                targets=_ints(targets_BT),
                begins=b"" if begins_BT is None else begins_BT.to(torch.uint8).numpy().tobytes(),
            )
        )
        if len(answer.payload) != 5 * B * T:
            raise LocalError(f"the swarm's last stage answers {B} rows of {T} tokens with {len(answer.payload)} bytes")
        value_BT = torch.frombuffer(bytearray(answer.payload[: 4 * B * T]), dtype=torch.float32).view(B, T)
        likeliest_BT = torch.frombuffer(bytearray(answer.payload[4 * B * T :]), dtype=torch.uint8).view(B, T).bool()
        return value_BT, likeliest_BT

    async def _ask(self, request: InferenceRequest) -> InferenceAnswer:
        """Send `request` to peers in turn until one answers. Raises: _Anew: session lost. LocalError: no answer."""
        async with self._few:
            if self._version < 0:
                async with self._finding:  # the first request fixes the version of the others
                    if self._version < 0:
                        return await self._ask_until_answered(request)
            return await self._ask_until_answered(request)

    async def _ask_until_answered(self, request: InferenceRequest) -> InferenceAnswer:
        # Peers may leave, and layers may move to other stages, while the request waits: so ask for up to 120 s.
        until_s, why, told = asyncio.get_running_loop().time() + 120.0, "no peer is known", ""
        while self._peers:
            peer, way, version = self._peers[0], self._way, self._version
            self._asked_s = asyncio.get_running_loop().time()
            asked = msgspec.structs.replace(request, way=way, version=version)
            try:
                answer = await self._endpoint.ask(peer, asked, InferenceAnswer, timeout_s=60.0)
            except (Unreachable, RemoteError, Refused) as error:
                why = error.reason if isinstance(error, Refused) else str(error)
                if self._peers[0] == peer:
                    self._peers.append(self._peers.pop(0))
            else:
                if not answer.is_past:
                    self._version = answer.version
                    self.answered.add((answer.era, answer.version))
                    return answer
                why = f"version {version} is gone"
            if why != told:
                logger.info("asking again: %s", why)
                told = why
            if self._way == way:  # otherwise another request has already chosen a new way
                self._version, self._way = -1, _new_number()  # ask for the newest version, through any peers
            if asyncio.get_running_loop().time() >= until_s:
                break
            await asyncio.sleep(0.5)
            if request.position:
                raise _Anew
        raise LocalError(f"the swarm does not answer: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmPredictor:
    """Implements `Predictor` for a thread without an event loop; requests run in `loop`."""

    asked: SwarmModel
    spec: RunSpec
    run: str
    tokenizer: Tokenizer
    loop: asyncio.AbstractEventLoop
    keeps_version: bool = False
    """True: an answer with a second version raises VersionGone; false: every version is accepted."""

    @property
    def model(self) -> ModelSpec:
        return self.asked.model

    @property
    def name(self) -> str:
        versions = sorted(version for _, version in self.asked.answered)
        if not versions:
            return f"run {self.run}"
        through = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"
        return f"run {self.run}, {through}, through its stages"

    @property
    def origin(self) -> Origin | None:
        if len(self.asked.answered) != 1:
            return None
        ((era, version),) = self.asked.answered
        return Origin(self.run, era, version)

    def loss_sum(self, tokens_BT: Tensor, targets_BT: Tensor, begins_BT: Tensor | None = None) -> float:
        value_BT, _ = self._wait(self.asked.log_likelihoods(tokens_BT, targets_BT, begins_BT))
        return -float(value_BT[targets_BT != IGNORED].double().sum())

    def log_likelihoods(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        return self._wait(self.asked.log_likelihoods(tokens_BT, targets_BT))

    def stream(self, prompt: Sequence[int], sampler: Sampler) -> Iterator[int]:
        tokens = self.asked.stream(prompt, sampler)
        while True:
            yield self._wait(anext(tokens))  # type: ignore[arg-type]

    def _wait(self, asking: Coroutine[Any, Any, Work]) -> Work:
        found = asyncio.run_coroutine_threadsafe(asking, self.loop).result()
        if self.keeps_version and len(self.asked.answered) > 1:
            raise VersionGone("the layers of the run were repartitioned meanwhile")
        return found


async def through_swarm(
    invite: Invite,
    work: Callable[[SwarmPredictor], Work],
    *,
    tokenizer: Callable[[RunSpec], Tokenizer],
    keeps_version: bool = False,
) -> Work:
    """Run `work` in a thread with the run's model.

    Args: keeps_version: use a single version of the model; if the swarm loses it, restart `work` with the newest.
    Raises: LocalError: the run cannot be found, does not answer, or lost the version too often. Any error of `work`.
    """
    async with entering(invite) as entrance:
        vocabulary, left = tokenizer(entrance.spec), _TRIES
        while True:
            asked = SwarmModel(entrance.endpoint, entrance.peers, entrance.spec.model)
            predictor = SwarmPredictor(
                asked=asked,
                spec=entrance.spec,
                run=invite.run,
                tokenizer=vocabulary,
                loop=asyncio.get_running_loop(),
                keeps_version=keeps_version,
            )
            keeping = asyncio.create_task(asked.keep_version(), name="keep the version")
            try:
                return await asyncio.to_thread(work, predictor)
            except VersionGone as gone:
                left -= 1
                if not left:
                    raise LocalError(f"{gone}, {_TRIES} times: try again when fewer peers come and go") from gone
                logger.warning("%s: beginning again with the newest version", gone)
            finally:
                keeping.cancel()


def _new_number() -> int:
    return secrets.randbits(62) + 1


def _ints(tokens: Sequence[int] | Tensor) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()
