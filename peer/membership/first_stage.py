"""The driver of a replica of stage 0. It also makes and answers the calls by which members claim microbatches and the
leader grants them (`microbatch_queue.py`)."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from shoal.peer.base.outbox import Outbox
from shoal.peer.membership.group_membership import Renew
from shoal.peer.membership.replica_driver import Replica
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica import commands, events
from shoal.peer.replica.microbatch_queue import PATIENCE_S
from shoal.peer.replica.open_calls import OpenCalls
from shoal.peer.services.services import Services
from shoal.protocol.errors import DataError, Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Again, Claim, Done, Grant, Halt, Halted, PresenceUpdate, Repair, ValidationResult
from shoal.protocol.plan import Plan

logger = logging.getLogger(__name__)


class FirstReplica(Replica):
    """The driver of our replica of stage 0 under `plan`."""

    def __init__(self, services: Services, renew: Renew, plan: Plan, stage: int, *, incarnation: int) -> None:
        if not services.arithmetic.has_text:
            raise DataError("the plan puts this peer at stage 0, but it does not have the run's text")
        super().__init__(services, renew, plan, stage, incarnation=incarnation)
        self._calls = OpenCalls()
        self._results = Outbox(self._endpoint)
        self._claim: asyncio.Task[Grant] | None = None
        self._staying: set[PeerID] = set()
        """Peers that have said in their last presence update that they do not leave."""
        self._refused: set[tuple[PeerID, str]] = set()
        """(asker, reason) of refusals that are logged already: a peer may repeat its request all day."""

    def _install(self) -> None:
        endpoint = self._endpoint
        endpoint.on(Claim, self._on_claim)
        endpoint.on(Repair, self._on_repair)
        endpoint.on(Again, self._on_again)
        endpoint.on(ValidationResult, self._on_validation_result)
        endpoint.on(Halt, self._on_halt)
        super()._install()

    def peer_state(self, peer: PeerID, presence: PresenceUpdate) -> None:
        (self._staying.discard if presence.draining else self._staying.add)(peer)
        super().peer_state(peer, presence)

    async def close(self) -> None:
        self.retire()
        self._endpoint.off(self._on_claim, self._on_repair, self._on_again, self._on_validation_result, self._on_halt)
        if self._claim is not None:
            self._claim.cancel()
        self._calls.refuse(Refused(self._endpoint.peer_id, "has left stage 0"))
        await super().close()
        await self._results.close()

    # --- calls of other peers ---

    async def _on_claim(self, source: PeerID, message: Claim) -> Grant:
        self._refuse_if_closed()
        return await self._calls.answered(
            Grant, lambda call: self.handle(events.ClaimArrived(source, message.count, call))
        )

    async def _on_halt(self, source: PeerID, message: Halt) -> Halted:
        self._refuse_if_closed()
        with self._saying(source, "the run to stand still"):
            if source in self._staying and source in self.audience:  # else it tells us no more
                raise Refused(self._endpoint.peer_id, "halts only for peers that leave")
            return await self._calls.answered(
                Halted, lambda call: self.handle(events.HaltAsked(source, message.at_once, call))
            )

    async def _on_repair(self, source: PeerID, message: Repair) -> Done:
        with self._saying(source, "for microbatches to run again"):
            self.handle(events.RepairAsked(source, message.step, message.indices))
            return Done()

    @contextlib.contextmanager
    def _saying(self, source: PeerID, what: str) -> Iterator[None]:
        """Run a block that serves a request of `source`. If the block refuses it and we lead, log this; the same
        refusal is logged once. Args: what: the request, in words."""
        try:
            yield
        except Refused as refused:
            if (source, refused.reason) not in self._refused and self.core.group.is_leader:
                self._refused.add((source, refused.reason))
                logger.warning("%s asks %s; refused: %s", source[-8:], what, refused.reason)
            raise

    async def _on_again(self, source: PeerID, message: Again) -> Done:
        self.handle(events.RepairArrived(source, message.items))
        return Done()

    async def _on_validation_result(self, source: PeerID, message: ValidationResult) -> Done:
        self.handle(events.ValidationArrived(source, message.step, message.index, message.loss))
        return Done()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Refused(self._endpoint.peer_id, "has left stage 0")

    # --- our own calls ---

    def _perform(self, command: commands.Command) -> events.Event | None:
        match command:
            case commands.Answer():
                self._calls.answer(command)
            case commands.SendClaim(leader, count):
                # A claim stays open for seconds; `DropClaim` ends it earlier.
                ask = self._endpoint.ask(leader, Claim(count=count), Grant, timeout_s=2 * PATIENCE_S)
                self._claim = asyncio.ensure_future(ask)
                self._tasks.spawn(self._await_grant(leader, self._claim), f"claim {count} microbatches")
            case commands.DropClaim():
                if self._claim is not None:
                    self._claim.cancel()
            case commands.HandOut(member, microbatches):
                step, indices = microbatches[0].step, [m.index for m in microbatches]
                logger.info("microbatches %s of step %d run again at %s", indices, step, member[-8:])
                self._tasks.spawn(self._hand_out(member, microbatches), f"step {step} again at {member}")
            case commands.TellValidation(leader, result):
                self._results.post(leader, (result.step, result.index), result)
            case commands.ReportValidation(report):
                self._s.reports.validated(report)
            case _:
                return super()._perform(command)
        return None

    async def _await_grant(self, leader: PeerID, claim: "asyncio.Task[Grant]") -> None:
        try:
            await asyncio.wait({claim})
            if not claim.cancelled():
                grant = claim.result()
                self.handle(events.GrantArrived(leader, grant.items, grant.steps_ahead, grant.gain))
        except (Unreachable, Refused, RemoteError) as error:
            logger.debug("no grant: %s", error)
            self.handle(events.ClaimFailed(leader))
        finally:
            claim.cancel()

    async def _hand_out(self, member: PeerID, again: tuple[Microbatch, ...]) -> None:
        try:
            await self._endpoint.ask(member, Again(items=tuple((m.step, m.index) for m in again)), Done)
        except (Unreachable, Refused, RemoteError) as error:
            logger.info("%s declines repairs, which run here: %s", member[-8:], error)
            self.handle(events.RepairDeclined(member, again))
