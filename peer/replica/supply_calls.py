"""The calls of stage 0's supply: those between the members of its group, and those that later stages make."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from shoal.peer.outbox import Outbox
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.commands import Answer, DropClaim, HandOut, ReportValidation, SendClaim, TellValidation
from shoal.peer.replica.events import (
    ClaimArrived,
    ClaimFailed,
    GrantArrived,
    HaltAsked,
    RepairArrived,
    RepairAsked,
    RepairDeclined,
    SupplyEvent,
    ValidationArrived,
)
from shoal.peer.replica.supply import PATIENCE_S
from shoal.peer.tasks import Tasks
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Again, Claim, Done, Grant, Halt, Halted, Repair, ValidationReport, ValidationResult

logger = logging.getLogger(__name__)

SupplyDeed = Answer | SendClaim | DropClaim | HandOut | TellValidation | ReportValidation
"""What the supply asks for that is no other part's affair."""

A = TypeVar("A", bound=msgspec.Struct)


class SupplyCalls:
    """One stage-0 replica's.

    Args:
        post: hands the replica's core an event; raises `Refused` or `RemoteError` if it declines.
        on_validation: all validation microbatches of a version are back (only at the leader).
        on_failure: this peer cannot go on.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        post: Callable[[SupplyEvent], None],
        on_validation: Callable[[ValidationReport], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._endpoint = endpoint
        self._post = post
        self._on_validation = on_validation
        self._outbox = Outbox(endpoint)
        self._tasks = Tasks(on_failure)
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[msgspec.Struct]] = {}
        self._claim: asyncio.Task[Grant] | None = None
        self._closed = False

    def install(self) -> None:
        self._endpoint.on(Claim, self._on_claim)
        self._endpoint.on(Repair, self._on_repair)
        self._endpoint.on(Again, self._on_again)
        self._endpoint.on(ValidationResult, self._on_validation_result)
        self._endpoint.on(Halt, self._on_halt)

    async def close(self) -> None:
        self._closed = True
        self._endpoint.off(self._on_claim, self._on_repair, self._on_again, self._on_validation_result, self._on_halt)
        if self._claim is not None:
            self._claim.cancel()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(Refused(self._endpoint.peer_id, "has left stage 0"))
        await self._tasks.cancel()
        await self._outbox.close()

    # --- calls ---

    async def _on_claim(self, source: PeerID, message: Claim) -> Grant:
        return await self._answered(Grant, lambda call: ClaimArrived(source, message.count, call))

    async def _on_halt(self, source: PeerID, message: Halt) -> Halted:
        return await self._answered(Halted, lambda call: HaltAsked(source, message.at_once, call))

    async def _on_repair(self, source: PeerID, message: Repair) -> Done:
        self._post(RepairAsked(source, message.step, message.indices))
        return Done()

    async def _on_again(self, source: PeerID, message: Again) -> Done:
        self._post(RepairArrived(source, message.items))
        return Done()

    async def _on_validation_result(self, source: PeerID, message: ValidationResult) -> Done:
        self._post(ValidationArrived(source, message.step, message.index, message.loss))
        return Done()

    async def _answered(self, kind: type[A], event: Callable[[int], SupplyEvent]) -> A:
        """The core's answer to the call that `event` is about."""
        if self._closed:
            raise Refused(self._endpoint.peer_id, "has left stage 0")
        call = next(self._numbers)
        answer = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._post(event(call))
            reply = await answer
        finally:
            del self._calls[call]
        assert isinstance(reply, kind), f"a call was answered with {reply}"
        return reply

    # --- commands ---

    def perform(self, command: SupplyDeed) -> None:
        """Do what the core asks."""
        match command:
            case Answer(call, message):
                answer = self._calls.get(call)
                if answer is not None and not answer.done():  # else the caller has gone
                    answer.set_result(message)
            case SendClaim(leader, count):
                # A claim stays open for seconds; `DropClaim` ends it before.
                ask = self._endpoint.ask(leader, Claim(count=count), Grant, timeout_s=2 * PATIENCE_S)
                self._claim = asyncio.ensure_future(ask)
                self._tasks.spawn(self._await_grant(leader, self._claim), f"claim {count} microbatches")
            case DropClaim():
                if self._claim is not None:
                    self._claim.cancel()
            case HandOut(member, microbatches):
                step, indices = microbatches[0].step, [m.index for m in microbatches]
                logger.info("microbatches %s of step %d run again at %s", indices, step, member[-8:])
                self._tasks.spawn(self._hand_out(member, microbatches), f"step {step} again at {member}")
            case TellValidation(leader, result):
                self._outbox.post(leader, (result.step, result.index), result)
            case ReportValidation(report):
                self._on_validation(report)

    async def _await_grant(self, leader: PeerID, claim: "asyncio.Task[Grant]") -> None:
        try:
            await asyncio.wait({claim})
            if not claim.cancelled():
                grant = claim.result()
                self._post(GrantArrived(leader, grant.items, grant.steps_ahead, grant.gain))
        except (Unreachable, Refused, RemoteError) as error:
            logger.debug("no grant: %s", error)
            self._post(ClaimFailed(leader))
        finally:
            claim.cancel()

    async def _hand_out(self, member: PeerID, again: tuple[Microbatch, ...]) -> None:
        try:
            await self._endpoint.ask(member, Again(items=tuple((m.step, m.index) for m in again)), Done)
        except (Unreachable, Refused, RemoteError) as error:
            logger.info("runs itself again what %s does not: %s", member[-8:], error)
            self._post(RepairDeclined(member, again))
