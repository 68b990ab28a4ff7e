"""A peer's mouth and ears: typed messages over a Transport, each call and reply in a signed envelope.

One place where bytes from the network become values. Handlers register by message type; a message of a type that
nobody handles, or that does not decode, is the sender's fault and says so.
"""

import itertools
import logging
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from shoal.protocol import messages
from shoal.protocol.envelope import ReplayGuard
from shoal.protocol.errors import Refused, RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import CALL_TIMEOUT_S
from shoal.protocol.ports import Payload, Priority, Transport
from shoal.protocol.seals import SEALS, Seals

logger = logging.getLogger(__name__)

_Address = tuple[type, int | None]
"""A kind of message and a group."""
_MessageHandler = Callable[[PeerID, Any], Awaitable[msgspec.Struct]]
_FrameHandler = Callable[[PeerID, Any, Payload], Awaitable[None]]
H = TypeVar("H")
R = TypeVar("R", bound=msgspec.Struct)
M = TypeVar("M", bound=msgspec.Struct)

_ENCODER = msgspec.msgpack.Encoder()
_MESSAGES: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(messages.Message)
_FRAMES: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(messages.FrameMeta)
_RECORDS_KEPT = 4096
"""Opened records of the directory, of all runs of this process."""
_RECORDS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(messages.Record)


class Endpoint:
    """One peer's identity on one transport, within one run.

    `term` stamps outgoing envelopes; the node raises it with every plan it obeys. `era` and `revision` stamp what
    concerns training (`EraMessage`), and such a message of another era or revision is refused, a frame dropped.
    """

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        *,
        run: str,
        first_sequence: int = 0,
        seals: Seals = SEALS,
    ) -> None:
        # After a restart under the same identity sequences must not begin again below what others have seen:
        # `first_sequence` is then the wall clock in microseconds.
        self.identity = identity
        self.transport = transport
        self.run = run
        self.seals = seals
        self.incarnation = first_sequence
        self.term = 0
        self.era = 0
        self.revision = 0
        self._sequence = itertools.count(first_sequence)
        self._guard = ReplayGuard()
        self._on_message: dict[_Address, _MessageHandler] = {}
        self._on_frame: dict[_Address, _FrameHandler] = {}
        transport.serve(on_call=self._handle_call, on_frame=self._handle_frame)

    @property
    def peer_id(self) -> PeerID:
        return self.identity.peer_id

    def on(
        self, kind: type[M], handler: Callable[[PeerID, M], Awaitable[msgspec.Struct]], *, stage: int | None = None
    ) -> None:
        """Answer messages of `kind`; a `Refusal` (returned, or raised as `Refused`) tells the sender why not.

        Args:
            stage: those for this group alone, by the message's `stage`; None: all that no group takes.
        """
        self._on_message[kind, stage] = handler

    def on_frame(
        self, kind: type[M], handler: Callable[[PeerID, M, Payload], Awaitable[None]], *, stage: int | None = None
    ) -> None:
        self._on_frame[kind, stage] = handler

    def leave_stage(self, stage: int) -> None:
        """Whatever still comes for this group is refused, and its frames are dropped."""
        for handlers in (self._on_message, self._on_frame):
            for address in [address for address in handlers if address[1] == stage]:
                del handlers[address]

    def off(self, *handlers: Callable[..., object]) -> None:
        """Answer nothing by these any more, but by who replaced them: a handler keeps alive what it belongs to."""
        for table in (self._on_message, self._on_frame):
            for address in [address for address, handler in table.items() if handler in handlers]:
                del table[address]

    async def ask(
        self, peer: PeerID, message: msgspec.Struct, expect: type[R], *, timeout_s: float = CALL_TIMEOUT_S
    ) -> R:
        """Call `peer` and return its answer.

        Raises: Unreachable; Refused: it declined; RemoteError: the answer is not an `expect`.
        """
        message = self._stamped(message)
        if peer == self.peer_id:
            reply = await self._dispatch(peer, message)
        else:
            request = self._seal("call", message)
            raw = await self.transport.call(peer, request, timeout_s=timeout_s)
            reply = _decode(_MESSAGES, self.seals.unseal(raw, "reply", run=self.run, source=peer).body, peer)
        if isinstance(reply, messages.Refusal):
            raise Refused(peer, reply.reason)
        if not isinstance(reply, expect):
            raise RemoteError(peer, f"answered {type(message).__name__} with {type(reply).__name__}")
        return reply

    async def send(self, peer: PeerID, meta: msgspec.Struct, payload: Payload, *, priority: Priority) -> None:
        """Put one tensor frame on the stream to `peer`. Raises: Unreachable."""
        meta = self._stamped(meta)
        if peer == self.peer_id:
            handler = _handler(self._on_frame, meta)
            if handler is not None:
                await handler(peer, meta, payload)
            return
        await self.transport.send(peer, _ENCODER.encode(meta), payload, priority=priority)

    def seal_record(self, record: msgspec.Struct) -> bytes:
        """Sign `record` for the directory."""
        return self._seal("record", record)

    def open_record(self, data: bytes, *, source: PeerID) -> tuple[PeerID, Any]:
        """Returns: (signer, record). Raises: RemoteError."""
        return open_signed_record(self.seals, self.run, data, source)

    def _stamped(self, message: msgspec.Struct) -> msgspec.Struct:
        if isinstance(message, messages.EraMessage) and not self._is_ours(message):
            return msgspec.structs.replace(message, era=self.era, revision=self.revision)
        return message

    def _is_ours(self, message: messages.EraMessage) -> bool:
        return message.era == self.era and message.revision == self.revision

    def _seal(self, domain: Any, message: msgspec.Struct) -> bytes:
        return self.seals.seal(
            self.identity,
            domain,
            run=self.run,
            term=self.term,
            sequence=next(self._sequence),
            body=_ENCODER.encode(message),
        )

    async def _handle_call(self, source: PeerID, request: bytes) -> bytes:
        try:
            envelope = self.seals.unseal(request, "call", run=self.run, source=source)
            if not self._guard.accept(source, envelope.sequence):
                raise RemoteError(source, f"repeated its call {envelope.sequence}")
            reply = await self._dispatch(source, _decode(_MESSAGES, envelope.body, source))
        except Refused as refused:
            reply = messages.Refusal(reason=refused.reason)
        except RemoteError as error:
            logger.warning("refused a call: %s", error)
            reply = messages.Refusal(reason=str(error))
        return self._seal("reply", reply)

    async def _dispatch(self, source: PeerID, message: msgspec.Struct) -> msgspec.Struct:
        handler = _handler(self._on_message, message)
        if handler is None:
            stage = getattr(message, "stage", None)
            where = "here" if stage is None else f"for stage {stage} here"
            return messages.Refusal(reason=f"{type(message).__name__} is not answered {where}")
        if isinstance(message, messages.EraMessage) and not self._is_ours(message):
            if message.revision != self.revision:
                return messages.Refusal(reason=f"trains by revision {self.revision}, not {message.revision}")
            return messages.Refusal(reason=f"trains in era {self.era}, not {message.era}")
        return self._stamped(await handler(source, message))

    async def _handle_frame(self, source: PeerID, meta: bytes, payload: Payload) -> None:
        header = _decode(_FRAMES, meta, source)
        handler = _handler(self._on_frame, header)
        if handler is None:
            logger.debug("dropped a %s frame from %s: nobody here takes it", type(header).__name__, source[-8:])
            return
        if isinstance(header, messages.EraMessage) and not self._is_ours(header):
            kind = type(header).__name__
            logger.debug("dropped a %s frame of era %d and revision %d", kind, header.era, header.revision)
            return
        await handler(source, header, payload)


def _handler(handlers: dict[_Address, H], message: msgspec.Struct) -> H | None:
    """The group's that it is for, else everybody's."""
    kind = type(message)
    return handlers.get((kind, getattr(message, "stage", None))) or handlers.get((kind, None))


@lru_cache(maxsize=_RECORDS_KEPT)
def open_signed_record(seals: Seals, run: str, data: bytes, source: PeerID) -> tuple[PeerID, Any]:
    """(signer, record) of what `source` stored. Most records are the same at the next reading, and immutable.

    Raises: RemoteError.
    """
    envelope = seals.unseal(data, "record", run=run, source=source, relayed=True)
    return envelope.sender, _decode(_RECORDS, envelope.body, source)


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", body: bytes, source: PeerID) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteError(source, f"sent a message that this version does not know ({error})") from error
