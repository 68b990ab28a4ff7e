"""Typed messages over a `Transport`, with each call and reply in an envelope (`envelope.py`).

This is the one place where bytes from the network are decoded and where the table of `access.py` is enforced: no
handler sees a message that its sender may not send. The transport authenticates the sender. Handlers register by
message type; a message that does not decode, or that has no handler, is refused with a reason.

A caller encloses its certificate in its calls until the receiver has answered one. If the receiver no longer has a
valid certificate of the caller (it restarted, or the certificate expired), it refuses the call before any handler runs,
and the caller repeats the call with its certificate.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from shoal.protocol import messages
from shoal.protocol.access import Gate, Verdict
from shoal.protocol.envelope import Envelope, ReplayGuard, decoded
from shoal.protocol.errors import Refused, RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import CALL_TIMEOUT_S, PEERS_MAX, PLAN_WAIT_S, REFUSALS_LOGGED_S, WAITING_FOR_PLAN_MAX
from shoal.protocol.membership import AccessLevel
from shoal.protocol.plan import Plan
from shoal.protocol.ports import Payload, Priority, Transport
from shoal.protocol.seals import SEALS, Seals

logger = logging.getLogger(__name__)

_Address = tuple[type, int | None]
"""(message type, number of a group in the plan) of a handler; None: it serves groups without a handler of their own."""
_MessageHandler = Callable[[PeerID, Any], Awaitable[msgspec.Struct]]
_FrameHandler = Callable[[PeerID, Any, Payload], Awaitable[None]]
H = TypeVar("H")
R = TypeVar("R", bound=msgspec.Struct)
M = TypeVar("M", bound=msgspec.Struct)

_ENCODER = msgspec.msgpack.Encoder()
_MESSAGES: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(messages.Message)
_FRAMES: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(messages.FrameMeta)
_RECORDS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(messages.Record)
_UNKNOWN = "a message that this version does not know"
_SHOW = "show your certificate"
_NOT_NEW = (
    "sent an old call: another process runs from a copy of its state folder, and each machine needs a state folder of "
    "its own; or its clock was set back before it was started again"
)
_WAITING_OF_ONE_MAX = WAITING_FOR_PLAN_MAX // 16


class Endpoint:
    """Sends and receives one peer's messages over one transport, within one run.

    Args:
        gate: the access rules; `gate.members.certificate` is our own certificate, which we show to others.
        first_sequence: the first sequence number of our envelopes; after a restart it is higher than all that other
            peers have seen.
    Attributes:
        term: the leadership term in outgoing envelopes: the term of the plan that this peer obeys.
        era, revision: training generation and spec revision in outgoing training messages (`EraMessage`). A received
            message with another era or revision is refused; a received frame is dropped.
    """

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        *,
        run: str,
        gate: Gate,
        first_sequence: int = 0,
        seals: Seals = SEALS,
    ) -> None:
        self.identity = identity
        self.peer_id = identity.peer_id
        self.transport = transport
        self.run = run
        self.gate = gate
        self.members = gate.members
        self.seals = seals
        self.incarnation = first_sequence
        self.term = 0
        self.era = 0
        self.revision = 0
        self._next_sequence = first_sequence
        self.is_displaced = False
        """True once another process has used our key: other peers then ignore this process."""
        self._guard = ReplayGuard()
        self._knows_us: set[PeerID] = set()
        """Peers that have answered one of our calls, and so have seen our certificate."""
        self.on_heard: Callable[[PeerID], None] = lambda peer: None
        """Called with the PeerID of the member that sent a call or frame, before the message's handler runs."""
        self._new_plan = asyncio.Event()
        self._waiting: Counter[PeerID] = Counter()
        self._log_again_s = 0.0
        self._on_message: dict[_Address, _MessageHandler] = {}
        self._on_frame: dict[_Address, _FrameHandler] = {}
        transport.serve(on_call=self._handle_call, on_frame=self._handle_frame)

    def obey(self, plan: Plan) -> None:
        """Take the members' roles from `plan` from now on, and check again the messages that wait for a plan."""
        self.gate.obey(plan)
        self._new_plan.set()
        self._new_plan = asyncio.Event()

    def on(
        self, kind: type[M], handler: Callable[[PeerID, M], Awaitable[msgspec.Struct]], *, stage: int | None = None
    ) -> None:
        """Answer messages of type `kind` with `handler`. To decline, it returns a `Refusal` or raises `Refused`.

        Args:
            stage: handle messages of this group (their field `stage`); None: of every group without its own handler.
        """
        self._on_message[kind, stage] = handler

    def on_frame(
        self, kind: type[M], handler: Callable[[PeerID, M, Payload], Awaitable[None]], *, stage: int | None = None
    ) -> None:
        self._on_frame[kind, stage] = handler

    def leave_stage(self, stage: int) -> None:
        """Remove the handlers of group `stage`. From now on messages to it are refused, and frames to it dropped."""
        for table in (self._on_message, self._on_frame):
            for address in [address for address in table if address[1] == stage]:
                del table[address]

    def off(self, *handlers: Callable[..., object]) -> None:
        """Remove these handlers, so that their owner can be freed. A handler that has replaced one of them stays."""
        for table in (self._on_message, self._on_frame):
            for address in [address for address, handler in table.items() if handler in handlers]:
                del table[address]

    async def ask(
        self, peer: PeerID, message: msgspec.Struct, expect: type[R], *, timeout_s: float = CALL_TIMEOUT_S
    ) -> R:
        """Call `peer` and return its answer.

        Raises: Unreachable; Refused: the peer declined; RemoteError: the answer is not of type `expect`.
        """
        message = self._stamped(message)
        if peer == self.peer_id:
            reply = await self._dispatch(peer, message)
        else:
            reply = await self._call(peer, message, timeout_s)
        if isinstance(reply, messages.Refusal):
            raise Refused(peer, reply.reason)
        if not isinstance(reply, expect):
            raise RemoteError(peer, f"answered {type(message).__name__} with {type(reply).__name__}")
        return reply

    async def _call(self, peer: PeerID, message: msgspec.Struct, timeout_s: float) -> msgspec.Struct:
        """Call `peer`, without our certificate if it answered us before; repeat the call with it if `peer` asks."""
        shown = self.members.certificate
        for certificate in (b"", shown) if peer in self._knows_us else (shown,):
            request = self._seal("call", message, certificate)
            raw = await self.transport.call(peer, request, timeout_s=timeout_s)
            body = self.seals.unseal(raw, "reply", run=self.run, source=peer).body
            reply: msgspec.Struct = decoded(_MESSAGES, body, peer, _UNKNOWN)
            if not isinstance(reply, messages.Refusal) or not reply.keeps_out:
                break
        if len(self._knows_us) >= PEERS_MAX:
            self._knows_us.clear()
        self._knows_us.add(peer)
        return reply

    async def send(
        self,
        peer: PeerID,
        meta: msgspec.Struct,
        payload: Payload,
        *,
        priority: Priority,
        again: msgspec.Struct | None = None,
    ) -> None:
        """Send one tensor frame (`payload` under the header `meta`) to `peer`.

        Args: again: the header for one repetition, if the stream breaks before the frame is known to be handled; None:
            the frame is not repeated.
        Raises: Unreachable.
        """
        meta = self._stamped(meta)
        if peer == self.peer_id:
            handler = _handler(self._on_frame, meta)
            if handler is not None:
                await handler(peer, meta, payload)
            return
        repeated = None if again is None else _ENCODER.encode(self._stamped(again))
        await self.transport.send(peer, _ENCODER.encode(meta), payload, priority=priority, again=repeated)

    def seal_record(self, record: msgspec.Struct) -> bytes:
        """Sign `record` for the directory and enclose our certificate."""
        return self._seal("record", record, self.members.certificate)

    def open_record(self, data: bytes, *, source: PeerID) -> tuple[PeerID, Any]:
        """Check a directory record that `source` stored. Returns: (signer, record). Raises: RemoteError."""
        envelope, _ = _opened_record(self.seals, self.run, data, source)
        if envelope.sender == self.peer_id and envelope.sequence >= self._next_sequence:
            self.is_displaced = True  # signed with our key, but not by this process
        return open_signed_record(self.seals, self.gate, self.run, data, source)

    def _stamped(self, message: msgspec.Struct) -> msgspec.Struct:
        if isinstance(message, messages.EraMessage) and (message.era, message.revision) != (self.era, self.revision):
            return msgspec.structs.replace(message, era=self.era, revision=self.revision)
        return message

    def _seal(self, domain: Any, message: msgspec.Struct, certificate: bytes = b"") -> bytes:
        self._next_sequence += 1
        return self.seals.seal(
            self.identity,
            domain,
            run=self.run,
            term=self.term,
            sequence=self._next_sequence - 1,
            body=_ENCODER.encode(message),
            certificate=certificate,
        )

    async def _handle_call(self, source: PeerID, request: bytes) -> bytes:
        """Answer a call. Raises: RemoteError: a stranger's call is invalid; an answer would name our run to it."""
        try:
            envelope = self.seals.unseal(request, "call", run=self.run, source=source)
            reply = await self._answer(source, envelope)
        except Refused as refused:
            reply = messages.Refusal(reason=refused.reason)
        except RemoteError as error:
            if self.members.access_level(source) is AccessLevel.STRANGER:
                raise  # an answer would tell the stranger which run this is
            self._log_refused(error)
            reply = messages.Refusal(reason=str(error))
        return self._seal("reply", reply)

    async def _answer(self, source: PeerID, envelope: Envelope) -> msgspec.Struct:
        self.members.show(source, envelope.certificate)
        if self.members.access_level(source) is AccessLevel.STRANGER:
            return messages.Refusal(reason=self.members.why_stranger(source) or _SHOW, keeps_out=True)
        if not self._guard.accept(source, envelope.sequence):
            raise RemoteError(source, _NOT_NEW)
        self.on_heard(source)
        return await self._dispatch(source, decoded(_MESSAGES, envelope.body, source, _UNKNOWN))

    def _log_refused(self, error: RemoteError) -> None:
        """Log at most one line per `REFUSALS_LOGGED_S`, so that a member's invalid calls cannot fill the disk."""
        now_s = time.monotonic()  # real time even in a simulation, since people read the log
        if now_s >= self._log_again_s:
            logger.warning("refused a call: %s", error)
            self._log_again_s = now_s + REFUSALS_LOGGED_S

    async def _is_allowed(self, source: PeerID, kind: type) -> bool:
        """True if `source` may send us a message of `kind`, now or by a plan that arrives within `PLAN_WAIT_S`."""
        verdict = self.gate.verdict(source, kind)
        if verdict is not Verdict.WAIT or not self._may_wait(source):
            return verdict is Verdict.ALLOWED
        self._waiting[source] += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(PLAN_WAIT_S):
                    while (verdict := self.gate.verdict(source, kind)) is Verdict.WAIT:
                        await self._new_plan.wait()
        finally:
            self._waiting[source] -= 1
            if not self._waiting[source]:
                del self._waiting[source]
        return verdict is Verdict.ALLOWED

    def _may_wait(self, source: PeerID) -> bool:
        return self._waiting[source] < _WAITING_OF_ONE_MAX and self._waiting.total() < WAITING_FOR_PLAN_MAX

    async def _dispatch(self, source: PeerID, message: msgspec.Struct) -> msgspec.Struct:
        if not await self._is_allowed(source, type(message)):
            return messages.Refusal(reason=f"a {type(message).__name__} is not yours to send here")
        handler = _handler(self._on_message, message)
        if handler is None:
            stage = getattr(message, "stage", None)
            where = "here" if stage is None else f"for stage {stage} here"
            return messages.Refusal(reason=f"{type(message).__name__} is not answered {where}")
        if isinstance(message, messages.EraMessage):
            if message.revision != self.revision:
                return messages.Refusal(reason=f"trains by revision {self.revision}, not {message.revision}")
            if message.era != self.era:
                return messages.Refusal(reason=f"trains in era {self.era}, not {message.era}")
        return self._stamped(await handler(source, message))

    async def _handle_frame(self, source: PeerID, meta: bytes, payload: Payload) -> None:
        if self.members.access_level(source) < AccessLevel.MEMBER:
            raise RemoteError(source, "sent a frame, which only members may")
        self.on_heard(source)
        header = decoded(_FRAMES, meta, source, _UNKNOWN)
        kind = type(header).__name__
        if not await self._is_allowed(source, type(header)):
            logger.debug("dropped a %s frame of %s: its sender may not send it", kind, source[-8:])
            return
        handler = _handler(self._on_frame, header)
        if handler is None:
            logger.debug("dropped a %s frame from %s: no handler", kind, source[-8:])
            return
        if isinstance(header, messages.EraMessage) and (header.era != self.era or header.revision != self.revision):
            logger.debug("dropped a %s frame of era %d and revision %d", kind, header.era, header.revision)
            return
        await handler(source, header, payload)


def _handler(handlers: dict[_Address, H], message: msgspec.Struct) -> H | None:
    kind = type(message)
    return handlers.get((kind, getattr(message, "stage", None))) or handlers.get((kind, None))


def open_signed_record(seals: Seals, gate: Gate, run: str, data: bytes, source: PeerID) -> tuple[PeerID, Any]:
    """Return (signer, record) of `data`. Raises: RemoteError: it is invalid, or the signer may not store the record."""
    envelope, record = _opened_record(seals, run, data, source)
    gate.members.show(envelope.sender, envelope.certificate)
    if not gate.may_sign(envelope.sender, type(record)):
        raise RemoteError(source, f"stored a {type(record).__name__}, which it may not store")
    return envelope.sender, record


@lru_cache(maxsize=4096)  # shared by all runs in this process
def _opened_record(seals: Seals, run: str, data: bytes, source: PeerID) -> tuple[Envelope, Any]:
    """Decode a directory record. Cached, since a record has rarely changed when it is read again."""
    envelope = seals.unseal(data, "record", run=run, source=source, relayed=True)
    return envelope, decoded(_RECORDS, envelope.body, source, _UNKNOWN)
