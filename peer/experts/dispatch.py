"""Sends the tokens of a stage's microbatches to the holders of experts, and collects the results.

One holder serves an expert for a whole microbatch (`choice.py`). For each layer, each holder gets one frame, without
padding. A holder that dies, refuses or is unreachable is replaced for the rest of the microbatch. At the end the
microbatch is *settled*: the replacement repeats the lost holder's backwards, and each holder adds the microbatch's
gradient to its sum. If none of an expert's holders can be reached, its tokens are *passed by*: they skip the expert,
and only the residual stream carries them on.
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from shoal.peer.base.tasks import Tasks
from shoal.peer.experts.asking import Asking
from shoal.peer.experts.choice import HolderRouter
from shoal.peer.pipeline.expert_call import ExpertCall
from shoal.peer.pipeline.expert_passage import ExpertPart, Passage
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.services.services import Services
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import EXPERTS_PER_FRAME_MAX
from shoal.protocol.messages import ExpertDone, ExpertOutput, ExpertTokens, PresenceUpdate
from shoal.protocol.plan import Plan
from shoal.protocol.ports import Payload

logger = logging.getLogger(__name__)

_RETRY_S: Final = 0.2
_PASS_BY_S: Final = 10.0
"""Tokens skip their expert (are passed by) once none of its holders could be reached for this many seconds."""


class ExpertDispatch:
    """This peer's traffic with experts, while it is a member of stage `stage`."""

    def __init__(self, services: Services, plan: Plan, stage: int, *, incarnation: int) -> None:
        self._s = services
        self._me = services.endpoint.peer_id
        self._plan = plan
        self._stage = stage
        self._incarnation = incarnation
        self._wire = services.arithmetic.tokens
        self._experts = range(plan.num_experts)
        self._routers: dict[int, HolderRouter] = {expert: HolderRouter(me=self._me) for expert in self._experts}
        self._numbers = itertools.count()
        self._asking = Asking(services, has_others=self._has_others)
        self._unsettled = 0
        self._absent: set[PeerID] = set()
        self._places: dict[PeerID, dict[int, int]] = {}
        """Holder -> expert (held or loading) -> incarnation, which grows at each restart; from its PresenceUpdate."""
        self._tasks = Tasks(services.failures.add)

    def install(self) -> None:
        self._s.endpoint.on_frame(ExpertOutput, self._on_output, stage=self._stage)

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._asking.close()

    @property
    def is_idle(self) -> bool:
        return self._unsettled == 0

    # --- membership ---

    def follow(self, plan: Plan) -> None:
        self._plan = plan
        senders = {member.peer: member.share for member in plan.stages[self._stage].members}
        for expert, router in self._routers.items():
            members = plan.group_members(plan.expert_group(self._stage, expert))
            router.follow({member.peer: member.share for member in members}, senders)

    def heard(self, peer: PeerID, presence: PresenceUpdate) -> None:
        self._absent.discard(peer)
        before, places = self._places.get(peer, {}), {place.group: place for place in presence.experts}
        now: dict[int, int] = {}
        for expert, router in self._routers.items():
            place = places.get(self._plan.expert_group(self._stage, expert))
            router.set_ready(peer, place is not None and place.is_open)
            if place is not None:
                now[expert] = place.incarnation
        self._places[peer] = now
        if any(now.get(expert) != incarnation for expert, incarnation in before.items()):
            self._asking.give_up(peer)  # it lost some of its experts; frames for its other experts are sent again

    def lost(self, peer: PeerID) -> None:
        self._absent.add(peer)
        self._places.pop(peer, None)
        for router in self._routers.values():
            router.set_ready(peer, False)
        self._asking.give_up(peer)

    # --- told by the pipeline ---

    def begin(self, microbatch: Microbatch) -> Passage:
        return Passage(next(self._numbers), microbatch)

    async def exchange(self, passage: Passage, call: ExpertCall) -> Payload:
        """Send one layer's P rows to their experts. Return the output, [P, D]; zeros for tokens that skip theirs."""
        output = self._wire.room(len(call.tokens))
        spans = self._wire.rows(dict(enumerate(call.counts)))
        todo = {expert for expert in self._experts if call.counts[expert]}
        for expert in sorted(todo):
            if call.gradients is None:
                passage.passed_by.discard((call.layer, expert))
            elif (call.layer, expert) in passage.passed_by:
                todo.remove(expert)
            else:
                rows, part = spans[expert], passage.part(expert)
                tokens, gradients = self._wire.part(call.tokens, rows), self._wire.part(call.gradients, rows)
                part.asked[call.layer] = (tokens, gradients)

        async def ask(holder: PeerID, experts: Sequence[int]) -> bool:
            pieces = [self._wire.part(call.tokens, spans[expert]) for expert in experts]
            if call.gradients is not None:
                pieces += [self._wire.part(call.gradients, spans[expert]) for expert in experts]
            counts = {expert: call.counts[expert] for expert in experts}
            answer = await self._answer(passage, call.layer, holder, counts, pieces, backward=call.backward)
            if answer is None:
                return False
            for expert, span in self._wire.rows(counts).items():
                self._wire.write(output, spans[expert], self._wire.part(answer, span))
                if call.backward:
                    passage.part(expert).done.add(call.layer)
            return True

        self._pass_by(passage, call, await self._serve_all(passage, todo, ask))
        return output

    def settle(self, passage: Passage, *, retried: bool) -> None:
        """Tell the holders, in the background, that the backward is done. Args: retried: it may have run before."""
        self._unsettled += 1
        self._tasks.spawn(self._settle(passage, retried), f"settle {passage.microbatch}")

    def abandon(self, passage: Passage) -> None:
        """Drop a run of a microbatch, because no peer needs the result any more."""
        for expert, part in passage.parts.items():
            self._release(expert, part)

    # --- a layer ---

    async def _serve_all(
        self, passage: Passage, todo: set[int], serve: Callable[[PeerID, Sequence[int]], Awaitable[bool]]
    ) -> set[int]:
        """Have the experts `todo` served; replace holders that fail. Return the experts that no holder could serve.

        Args: serve: (holder, some experts that it holds) -> True if it has served all of these, False if none.
        """
        began_s, wait_s = self._s.clock.now_s(), _RETRY_S
        while todo:
            by_holder = self._choose(passage, sorted(todo))
            if by_holder:
                began_s = self._s.clock.now_s()
                served = await asyncio.gather(*(serve(holder, experts) for holder, experts in by_holder))
                todo -= {e for (_, experts), done in zip(by_holder, served, strict=True) if done for e in experts}
            elif self._s.clock.now_s() - began_s >= _PASS_BY_S and all(self._is_lost(expert) for expert in todo):
                break
            if todo:
                await asyncio.sleep(wait_s)  # a new holder may come, or a holder may stop refusing
                # Wait longer after each refusal, because each try sends all tokens of the frame.
                wait_s = min(2 * wait_s, 1.6) if by_holder else _RETRY_S
        return todo

    def _choose(self, passage: Passage, experts: Sequence[int]) -> list[tuple[PeerID, list[int]]]:
        """Return (holder, its experts) for each frame to send, without the experts that have no holder."""
        by_holder: dict[PeerID, list[int]] = {}
        for expert in experts:
            holder = self._holder(expert, passage.part(expert))
            if holder is not None:
                by_holder.setdefault(holder, []).append(expert)
        return [
            (holder, held[at : at + EXPERTS_PER_FRAME_MAX])
            for holder, held in by_holder.items()
            for at in range(0, len(held), EXPERTS_PER_FRAME_MAX)
        ]

    def _holder(self, expert: int, part: ExpertPart) -> PeerID | None:
        if part.holder in self._absent:
            self._lose(expert, part)
        if part.holder is None:
            now_s, shunned = self._s.clock.now_s(), self._asking.shunned
            part.holder = self._routers[expert].pick(now_s=now_s, avoid=part.avoid, shunned=shunned)
        return part.holder

    async def _answer(
        self,
        passage: Passage,
        layer: int,
        holder: PeerID,
        counts: dict[int, int],
        pieces: Iterable[Payload],
        *,
        backward: bool,
    ) -> Payload | None:
        """Send a frame to `holder` and return its answer; None: the holder failed, and another one must be chosen.

        Args: counts: expert -> number of its rows; pieces: all rows, then in a backward the gradients of all rows.
        """
        microbatch = passage.microbatch
        meta = ExpertTokens(
            stage=self._stage,
            incarnation=self._incarnation,
            passage=passage.number,
            serial=self._asking.next_serial(),
            step=microbatch.step,
            index=microbatch.index,
            layer=layer,
            backward=backward,
            counts=tuple(counts.items()),
        )
        size = sum(counts.values()) * self._wire.row_bytes
        answer = await self._asking.ask(holder, meta, self._wire.joined(pieces), size=size)
        if answer is None:
            for expert in counts:
                part = passage.part(expert)
                if part.holder == holder:
                    self._lose(expert, part)
        return answer

    def _has_others(self, meta: ExpertTokens, holder: PeerID) -> bool:
        routers = (self._routers[expert] for expert, _ in meta.counts)
        return all(any(peer != holder and r.is_ready(peer) for peer in r.shares) for r in routers)

    async def _on_output(self, source: PeerID, meta: ExpertOutput, payload: Payload) -> None:
        if meta.incarnation == self._incarnation:
            self._asking.answered(source, meta, payload)

    # --- the end of a passage ---

    async def _settle(self, passage: Passage, retried: bool) -> None:
        try:
            await self._serve_all(passage, set(self._experts), functools.partial(self._close, passage, retried))
        finally:
            self._unsettled -= 1
            self.abandon(passage)

    async def _close(self, passage: Passage, retried: bool, holder: PeerID, experts: Sequence[int]) -> bool:
        """Have `holder` add this microbatch's gradients of `experts` to its sums. Return False if the holder failed."""
        for expert in experts:
            if not await self._do_again(passage, expert, holder):
                return False
        message = ExpertDone(
            stage=self._stage,
            incarnation=self._incarnation,
            passage=passage.number,
            step=passage.microbatch.step,
            index=passage.microbatch.index,
            experts=tuple((expert, len(passage.part(expert).asked)) for expert in experts),
            retried=retried or any(passage.part(expert).replaced for expert in experts),
        )
        if await self._asking.tell(holder, message):
            return True
        for expert in experts:
            self._lose(expert, passage.part(expert))
        return False

    async def _do_again(self, passage: Passage, expert: int, holder: PeerID) -> bool:
        """Have `holder` repeat an expert's backwards that only lost holders had run. Return False if `holder` fails."""
        part = passage.part(expert)
        for layer in sorted(part.asked.keys() - part.done, reverse=True):
            tokens, gradients = part.asked[layer]
            counts = {expert: len(tokens) // self._wire.row_bytes}
            answer = await self._answer(passage, layer, holder, counts, (tokens, gradients), backward=True)
            if answer is None:
                return False
            part.done.add(layer)
        return True

    # --- inside ---

    def _release(self, expert: int, part: ExpertPart) -> None:
        if part.holder is not None:
            self._routers[expert].returned(part.holder)

    def _lose(self, expert: int, part: ExpertPart) -> None:
        self._release(expert, part)
        part.lose()

    def _is_lost(self, expert: int) -> bool:
        """True if every peer that the plan names as a holder of the expert is lost or unreachable."""
        return all(peer in self._absent for peer in self._routers[expert].shares)

    def _pass_by(self, passage: Passage, call: ExpertCall, experts: Iterable[int]) -> None:
        for expert in experts:
            logger.warning(
                "no peer holds expert %d of stage %d: %d tokens of %s bypass it",
                expert,
                self._stage,
                call.counts[expert],
                passage.microbatch,
            )
            if call.gradients is None:
                passage.passed_by.add((call.layer, expert))
            else:
                passage.part(expert).asked.pop(call.layer, None)
