"""The `Transport` port in virtual time."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

import xxhash

from shoal.protocol.ending import end_tasks
from shoal.protocol.errors import LocalError, RemoteError, Unreachable
from shoal.protocol.frames import wire_bytes
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CONTROL_BYTES_MAX, FRAME_META_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX
from shoal.protocol.ports import CallHandler, FrameHandler, Payload, Priority
from shoal.protocol.sim.clock import Agenda
from shoal.protocol.sim.links import Links
from shoal.protocol.sim.loop import owned_context
from shoal.protocol.sim.phantom import Phantom
from shoal.protocol.sim.post import Condition, Post
from shoal.protocol.sim.stream import NetworkCard, Plug, SimFrame, Stream
from shoal.protocol.sim.trace import Kind, Trace

logger = logging.getLogger(__name__)


class SimTransport:
    """Calls and frames between the peers of one world.

    As with libp2p, a peer can reach peers that were introduced to it with a valid address, and peers that have called
    or sent to it first.

    Args:
        acquainted: if True, this peer can reach every peer.
        find: returns the transport of a peer's running or last process.
        failed: called with errors of handlers, except `RemoteError`, which is the other peer's fault.
    """

    def __init__(
        self,
        peer_id: PeerID,
        *,
        number: int,
        place: int,
        plug: Plug,
        links: Links,
        post: Post,
        agenda: Agenda,
        trace: Trace,
        find: "Callable[[PeerID], SimTransport | None]",
        failed: Callable[[Exception], None],
        acquainted: bool = False,
    ) -> None:
        self._peer_id = peer_id
        self.card = NetworkCard(
            number=number, place=place, peer_id=peer_id, plug=plug, frame_arrived=self._frame_arrived
        )
        self._links = links
        self._post = post
        self._agenda = agenda
        self._trace = trace
        self._find = find
        self._acquainted = acquainted
        self._failed = failed
        self._on_call: CallHandler | None = None
        self._on_frame: FrameHandler | None = None
        self._addresses_of: dict[PeerID, set[str]] = {}
        self._met: set[PeerID] = set()
        self._early: list[Callable[[], None]] = []
        self._calls: dict[asyncio.Future[bytes], PeerID] = {}
        self._is_closing = False
        self._handlers: dict[asyncio.Task[None], asyncio.Future[bytes] | None] = {}
        """Running handler -> the reply that it must complete; None: it handles frames, or a call that gets no reply."""

    @property
    def peer_id(self) -> PeerID:
        return self._peer_id

    def addresses(self) -> tuple[str, ...]:
        place = self.card.place
        host = f"10.{place >> 16 & 255}.{place >> 8 & 255}.{place & 255}"
        return (f"/ip4/{host}/tcp/4001/p2p/{self._peer_id}",)

    def serve(self, *, on_call: CallHandler, on_frame: FrameHandler) -> None:
        if self._on_call is not None:
            raise LocalError("a transport serves once")
        self._on_call, self._on_frame = on_call, on_frame
        self._links.opened(self.card)
        early, self._early = self._early, []
        for accept in early:
            accept()

    async def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        if not self._acquainted:
            self._addresses_of.setdefault(peer, set()).update(addresses)

    async def close(self) -> None:
        """Wait at most two seconds until sent frames are handled, then stop everything. Safe to call twice."""
        self._is_closing = True
        if self.card.is_alive:
            with suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._links.flush(self.card)
        if not self.card.is_alive:
            return
        self._trace.add(self._agenda.now_s(), Kind.CLOSED, self.card.number, -1)
        self._links.gone(self.card, why="this peer is closing")
        await end_tasks(*(task for task in self._handlers if task is not asyncio.current_task()))

    # The daemon's death -------------------------------------------------------------------------------------------

    def daemon_died(self, others: "Iterable[SimTransport]") -> None:
        """Break every connection of this peer; its process lives on. The `others` notice that one latency later."""
        why = "our own network daemon died"
        self._links.disconnected(self.card, why=why)
        for reply, peer in self._calls.items():
            if not reply.done():
                reply.set_exception(Unreachable(peer, why))
        for task, answered in list(self._handlers.items()):
            if answered is not None:
                task.cancel()  # as the live transport does when its daemon dies; received frames are still handled
        self.abandon_calls()
        for other in others:
            for reply in [reply for reply, peer in other._calls.items() if peer == self._peer_id]:
                self._hang_up(other, reply, "its connection broke")

    def daemon_restarted(self) -> None:
        self.card.is_up = True
        self.card.came_up.set()
        if self._on_call is not None:
            self._links.opened(self.card)

    async def _wait_for_daemon(self, peer: PeerID, timeout_s: float) -> float:
        """Wait until our network daemon runs. Returns: the seconds waited. Raises: Unreachable: after `timeout_s`."""
        began_s = self._agenda.now_s()
        try:
            async with asyncio.timeout(timeout_s):
                await self.card.came_up.wait()
        except TimeoutError:
            raise Unreachable(peer, f"our own network daemon did not restart within {timeout_s:g} s") from None
        return self._agenda.now_s() - began_s

    def _hang_up(self, caller: "SimTransport", reply: asyncio.Future[bytes], why: str) -> None:
        """Tell `caller` that its call has failed, even if our network daemon is dead."""
        error = Unreachable(self._peer_id, why)
        accept = caller._accept_reply
        self._post.send(self.card, caller.card, b"", lambda _, how: accept(self, error, 0, how, reply))

    def abandon_calls(self) -> None:
        """Cancel the handlers that are answering our calls at other peers."""
        for reply, peer in self._calls.items():
            if (target := self._find(peer)) is not None:
                self._abandon(target, reply)

    def _abandon(self, target: "SimTransport", reply: asyncio.Future[bytes]) -> None:
        self._post.send(self.card, target.card, b"", lambda _, how: target._stop_answering(self, reply))

    def _stop_answering(self, caller: "SimTransport", reply: asyncio.Future[bytes]) -> None:
        for task, answered in self._handlers.items():
            if answered is reply:
                self._record(Kind.CALL_ABANDONED, caller.card, self.card, 0, 0)
                # The cancellation belongs to this peer: if this peer is paused, it takes effect after `resume`.
                self._agenda.loop.call_soon(task.cancel, context=owned_context(self.card.number))

    # Calls --------------------------------------------------------------------------------------------------------

    async def call(self, peer: PeerID, request: bytes, *, timeout_s: float) -> bytes:
        """Return a peer's reply. Raises: Unreachable. ValueError: `request` is larger than any peer accepts."""
        if len(request) > CONTROL_BYTES_MAX:
            raise ValueError(f"a call of {len(request)} bytes is larger than any peer accepts")
        if not self.card.is_up:
            timeout_s -= await self._wait_for_daemon(peer, timeout_s)
        reply: asyncio.Future[bytes] = self._agenda.loop.create_future()
        target = self._reach(peer)
        if target is not None:
            digest = xxhash.xxh3_64_intdigest(request)
            self._record(Kind.CALL_SENT, self.card, target.card, len(request), digest)
            accept = target._accept_call
            self._post.send(self.card, target.card, request, lambda data, how: accept(self, data, digest, how, reply))
        self._calls[reply] = peer
        why = f"no answer within {timeout_s:g} s" if target is not None else "no valid address is known"
        late = Unreachable(peer, why)
        timer = self._agenda.loop.call_later(timeout_s, _fail, reply, late)  # a quarter of asyncio.timeout's cost
        try:
            return await reply
        finally:
            timer.cancel()
            del self._calls[reply]
            given_up = reply.cancelled() or (reply.done() and reply.exception() is late)
            if given_up and target is not None and self.card.is_alive and self.card.is_up:
                self._abandon(target, reply)

    def _accept_call(
        self, caller: "SimTransport", request: bytes, digest: int, how: Condition, reply: asyncio.Future[bytes]
    ) -> None:
        if not self.card.is_up:
            self._hang_up(caller, reply, "none of its addresses answers")
            return
        if self._on_call is None:
            self._early.append(lambda: self._accept_call(caller, request, digest, how, reply))
            return
        self._met.add(caller.peer_id)
        self._record(Kind.CALL_ARRIVED, caller.card, self.card, len(request), digest)
        heard = None if how == "repeated" else reply
        work = self._answer(caller, self._on_call, request, heard, is_damaged=how == "damaged")
        self._spawn(work, f"call from {caller.peer_id[-8:]}", answers=heard)

    async def _answer(
        self,
        caller: "SimTransport",
        on_call: CallHandler,
        request: bytes,
        reply: asyncio.Future[bytes] | None,
        *,
        is_damaged: bool,
    ) -> None:
        """Handle a call and send the reply. A repeated call (`reply` is None) gets no reply; the caller of a damaged
        call gets Unreachable."""
        answer: bytes | Unreachable
        try:
            answer = await on_call(caller.peer_id, request)
            if len(answer) > CONTROL_BYTES_MAX:
                raise ValueError(f"a reply of {len(answer)} bytes is larger than any peer accepts")
        except Exception as error:
            self._note(error)
            answer = Unreachable(self._peer_id, "its handler failed")
        if reply is None or not (self.card.is_alive and self.card.is_up):
            return
        if is_damaged:
            answer = Unreachable(self._peer_id, "its connection broke")
        data = answer if isinstance(answer, bytes) else b""
        digest = xxhash.xxh3_64_intdigest(data) if isinstance(answer, bytes) else 0
        self._record(Kind.REPLY_SENT, self.card, caller.card, len(data), digest)
        accept = caller._accept_reply
        self._post.send(self.card, caller.card, data, lambda _, how: accept(self, answer, digest, how, reply))

    def _accept_reply(
        self,
        answerer: "SimTransport",
        answer: bytes | Unreachable,
        digest: int,
        how: Condition,
        reply: asyncio.Future[bytes],
    ) -> None:
        if how == "damaged":
            # A real connection is encrypted, so it finds the damage and breaks; an honest peer must not be blamed.
            answer = Unreachable(answerer.peer_id, "its reply was damaged on the way")
        nbytes = len(answer) if isinstance(answer, bytes) else 0
        self._record(Kind.REPLY_ARRIVED, answerer.card, self.card, nbytes, digest)
        if reply.done():
            return  # the caller gave up
        if isinstance(answer, bytes):
            reply.set_result(answer)
        else:
            reply.set_exception(answer)

    # Frames -------------------------------------------------------------------------------------------------------

    async def send(
        self,
        peer: PeerID,
        meta: bytes,
        payload: Payload | Phantom,
        *,
        priority: Priority,
        again: bytes | None = None,
    ) -> None:
        """Send a frame; return when its last byte has left. `payload` is copied at once. `again` has no effect here.

        Raises: Unreachable. ValueError: the frame is larger than any peer accepts.
        """
        nbytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        if len(meta) > FRAME_META_BYTES_MAX or nbytes > FRAME_PAYLOAD_BYTES_MAX:
            raise ValueError(f"a frame of {len(meta)} + {nbytes} bytes is larger than any peer accepts")
        if not self.card.is_up:
            await self._wait_for_daemon(peer, 10.0)  # a live transport's timeout
        target = self._reach(peer)
        if target is None:
            await asyncio.sleep(self._links.stall_s)
            raise Unreachable(peer, "no valid address is known")
        digest = xxhash.xxh3_64_intdigest(meta)
        if not isinstance(payload, Phantom):
            payload = bytearray(payload)
            digest = xxhash.xxh3_64_intdigest(payload, seed=digest)
        frame = SimFrame(
            meta=meta,
            payload=payload,
            priority=priority,
            nbytes=wire_bytes(len(meta), nbytes),
            digest=digest,
            left=self._agenda.loop.create_future(),
        )
        self._links.send(self.card, target.card, frame)
        try:
            await frame.left
        except asyncio.CancelledError:
            self._links.given_up(self.card, target.card)
            raise

    def _frame_arrived(self, stream: Stream) -> None:
        stream.serving = self._spawn(self._serve_stream(stream), f"frames from {stream.source.peer_id[-8:]}")

    async def _serve_stream(self, stream: Stream) -> None:
        assert self._on_frame is not None  # frames start only towards a serving card
        source = stream.source.peer_id
        self._met.add(source)
        try:
            while stream.arrived:
                frame = stream.arrived.pop(0)
                # Only simulated peers that compute nothing get phantoms.
                await self._on_frame(source, frame.meta, cast(Payload, frame.payload))
                self._links.handled(stream, frame)
        except Exception as error:
            self._note(error)
            self._links.reset(stream, "it refused a frame")
        finally:
            stream.serving = None

    # --------------------------------------------------------------------------------------------------------------

    def _reach(self, peer: PeerID) -> "SimTransport | None":
        if self._is_closing or not self.card.is_alive:
            raise Unreachable(peer, "this peer is closing")
        if peer == self._peer_id:
            raise Unreachable(peer, "a peer does not dial itself")
        target = self._find(peer)
        if target is None:
            return None
        known = (
            self._acquainted
            or peer in self._met
            or not self._addresses_of.get(peer, set()).isdisjoint(target.addresses())
        )
        return target if known else None

    def _spawn(
        self, work: Coroutine[Any, Any, None], name: str, *, answers: asyncio.Future[bytes] | None = None
    ) -> asyncio.Task[None]:
        context = owned_context(self.card.number)
        task = self._agenda.loop.create_task(work, name=f"{self._peer_id[-8:]}: {name}", context=context)
        self._handlers[task] = answers
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._handlers.pop(task, None)

    def _note(self, error: Exception) -> None:
        if isinstance(error, RemoteError):
            logger.warning("%s", error)
        else:
            self._failed(error)

    def _record(self, kind: Kind, source: NetworkCard, destination: NetworkCard, nbytes: int, digest: int) -> None:
        self._trace.add(self._agenda.now_s(), kind, source.number, destination.number, nbytes, digest)


def _fail(reply: asyncio.Future[bytes], error: Unreachable) -> None:
    if not reply.done():
        reply.set_exception(error)
