"""Carries streams between two members that cannot reach each other: this peer forwards bytes in both directions.

A carrier can neither read nor change these bytes (`secure_channel.py`). It carries only between members that are
already connected to it, and dials no peer for a stream. There are limits on the streams of one member, on all streams,
and on the bytes per second (`--limit relay_mbit_s`). The bytes count towards the volunteer's upload limit; frames also
queue behind this peer's own gradients. A carrier reads no faster than it can pass bytes on: this slows the sender.

A request beyond a limit is refused with the reason, and the opener asks the next carrier.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

from shoal.protocol.ending import end_tasks
from shoal.protocol.errors import RemoteError, TransportError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CARRIED_STREAMS_MAX, CARRIED_STREAMS_OF_ONE_MAX
from shoal.protocol.live.carriage import CarriageAnswer, Carried, Carry, Streams, check_member, encode, plain_tcp, read
from shoal.protocol.live.doorway import Doorway
from shoal.protocol.live.secure_channel import Purpose
from shoal.protocol.live.throttle import CARRIED, RateLimiter, Throttle
from shoal.protocol.membership import Members

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S: Final = 5.0
"""Time limit for the opener's request; a second one, as long, for connecting to the other end and for its answer."""
_PIECE_BYTES: Final = 64 * 1024


class CarriageRefused(Exception):
    """A stream is not carried; the error's text is a sentence for the opener."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Carriage:
    source: PeerID
    to: PeerID
    purpose: Purpose
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Carrier:
    """Carries streams for members.

    Args:
        relay_bytes_per_s: limit of the forwarded bytes, both directions together.
        connected: returns the peers to which the daemon is connected now, with their remote multiaddrs.
        open_stream: opens a stream that is to be carried to a peer, over an existing connection.
        find_connection: tells the uplink (`uplink.py`) which connection the stream to a peer uses.
    """

    def __init__(
        self,
        members: Members,
        throttle: Throttle,
        *,
        relay_bytes_per_s: float,
        connected: Callable[[], Awaitable[Mapping[PeerID, Sequence[str]]]],
        open_stream: Callable[[PeerID], Awaitable[Streams]],
        find_connection: Callable[[PeerID], Awaitable[None]],
    ) -> None:
        self._members, self._throttle = members, throttle
        # Calls have a rate limit of their own and do not wait for frames; frames also pay for the bytes of calls.
        self._frames, self._calls = _Gate(relay_bytes_per_s), _Gate(relay_bytes_per_s)
        self._connected, self._open_stream, self._find_connection = connected, open_stream, find_connection
        self._doorway = Doorway()
        self._carried: list[_Carriage] = []
        self.carried_bytes = 0

    async def carry(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle a request for a stream; return when the stream ends. Never raises on network input."""
        source = PeerID(info.peer_id.to_base58())
        try:
            with self._doorway.waits(source, writer.transport.abort):
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    asked = await read(reader, Carry, source)
            await self._put_through(source, asked, (reader, writer))
        except RemoteError as error:
            logger.warning("refused to carry for %s: %s", source[-8:], error)
        except (OSError, EOFError, TimeoutError) as error:
            logger.debug("a stream of %s was not carried: %r", source[-8:], error)
        finally:
            writer.close()

    def cut(self, is_cut: Callable[[PeerID], bool]) -> None:
        """End the streams from or to the peers for which `is_cut` returns True."""
        for carriage in self._carried:
            if is_cut(carriage.source) or is_cut(carriage.to):
                carriage.cut()

    async def _put_through(self, source: PeerID, asked: Carry, there: Streams) -> None:
        carriage = _Carriage(source=source, to=PeerID(asked.to), purpose=asked.purpose, writers=[there[1]])
        try:
            check_member(self._members, source, asked.certificate)
            with self._admit(carriage):
                on, seen_at = await self._reach(carriage, asked.certificate)
                carriage.writers.append(on[1])
                try:
                    there[1].write(encode(CarriageAnswer("", self._members.certificate, seen_at)))
                    logger.info("carries %s from %s to %s", carriage.purpose, source[-8:], carriage.to[-8:])
                    await self._pass_both_ways(carriage, there, on)
                finally:
                    on[1].close()
        except CarriageRefused as refusal:
            there[1].write(encode(CarriageAnswer(str(refusal), self._members.certificate)))

    @contextmanager
    def _admit(self, carriage: _Carriage) -> Iterator[None]:
        """Count a stream against the limits during this context. Raises: CarriageRefused: a limit is reached, both ends
        are the same peer, or the other end is excluded from the run."""
        if carriage.to == carriage.source:
            raise CarriageRefused("both ends are the same peer")
        if self._members.is_excluded(carriage.to):
            raise CarriageRefused("the other end is excluded from the run")
        for end, whose in ((carriage.source, "your"), (carriage.to, "the other end's")):
            of_end = sum(end in (other.source, other.to) for other in self._carried)
            if of_end >= CARRIED_STREAMS_OF_ONE_MAX:
                raise CarriageRefused(f"it carries {of_end} of {whose} streams, its limit for one member")
        if len(self._carried) >= CARRIED_STREAMS_MAX:
            raise CarriageRefused(f"it carries {len(self._carried)} streams, its limit")
        self._carried.append(carriage)
        try:
            yield
        finally:
            self._carried.remove(carriage)

    async def _reach(self, carriage: _Carriage, certificate: bytes) -> tuple[Streams, tuple[str, ...]]:
        """Return a new stream to the other end, and the addresses from which that end is connected.

        Raises: CarriageRefused: the other end is not connected, does not accept the stream, or is no member.
        """
        to, connected = carriage.to, await self._connected()
        if to not in connected:
            raise CarriageRefused("it has no connection with the other end")
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                reader, writer = await self._open_stream(to)
                seen_at = plain_tcp(connected.get(carriage.source, ()))
                writer.write(encode(Carried(carriage.source, carriage.purpose, certificate, seen_at)))
                answer = await read(reader, CarriageAnswer, to)
            check_member(self._members, to, answer.certificate)
            if answer.refusal:
                raise CarriageRefused(f"the other end says: {answer.refusal}"[:120])
            await self._find_connection(to)
            await self._find_connection(carriage.source)
        except (RemoteError, TransportError, P2PDaemonError, OSError, EOFError, ValueError) as error:
            if writer is not None:
                writer.close()
            logger.debug("cannot carry to %s: %r", to[-8:], error)
            raise CarriageRefused("the other end does not take it") from error
        except BaseException:
            if writer is not None:
                writer.close()
            raise
        return (reader, writer), plain_tcp(connected[to])

    async def _pass_both_ways(self, carriage: _Carriage, a: Streams, b: Streams) -> None:
        """Forward bytes both ways, until one end has ended its stream and its bytes have passed, or a stream breaks."""
        ways = [
            asyncio.create_task(self._pass(carriage, a[0], b[1], carriage.to), name="carry there"),
            asyncio.create_task(self._pass(carriage, b[0], a[1], carriage.source), name="carry back"),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(*ways)

    async def _pass(
        self, carriage: _Carriage, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: PeerID
    ) -> None:
        with suppress(OSError, EOFError):
            while piece := await reader.read(self._piece_bytes(to)):
                await self._wait(carriage.purpose, len(piece), to)
                writer.write(piece)
                await writer.drain()

    def _piece_bytes(self, to: PeerID) -> int:
        line = self._throttle.line
        return min(
            _PIECE_BYTES, self._frames.limiter.slice_bytes, _PIECE_BYTES if line is None else line.slice_bytes(to)
        )

    async def _wait(self, purpose: Purpose, nbytes: int, to: PeerID) -> None:
        throttle = self._throttle
        self.carried_bytes += nbytes
        throttle.received(nbytes)
        if throttle.download is not None and (wait_s := throttle.download.wait_s()) > 0.0:
            await asyncio.sleep(wait_s)
        if purpose == "calls":
            await self._calls.admit(nbytes)
            self._frames.limiter.charge(nbytes)
            throttle.sent(nbytes)
            return
        await self._frames.admit(nbytes)
        if throttle.line is not None:
            await throttle.line.admit(nbytes, CARRIED, to)


class _Gate:
    """Lets pieces of all carried streams (of frames, or of calls) pass within one rate limit, by arrival."""

    def __init__(self, bytes_per_s: float) -> None:
        self.limiter = RateLimiter(bytes_per_s)
        self._turn = asyncio.Lock()

    async def admit(self, nbytes: int) -> None:
        async with self._turn:
            await asyncio.sleep(self.limiter.wait_s())
            self.limiter.charge(nbytes)
