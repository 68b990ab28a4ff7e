"""Keeps a peer's bytes within its rate limits: frames to send wait in one priority queue, and reading is paused.

Two limits apply to sending: the volunteer's rate limit, if there is one, and that of the uplink itself (`uplink.py`).
Calls never wait: they are small, and their callers wait for the answers.

We count our own frames and calls, times the network's overhead (`WIRE_FACTOR`). The daemon's own traffic (directory,
pings, keepalive) is small and not counted.
"""

import asyncio
import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal.protocol.frames import PIECE_BYTES
from shoal.protocol.identity import PeerID
from shoal.protocol.live.uplink import Uplink
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.token_bucket import RateLimits, TokenBucket

WIRE_FACTOR: Final = 1.045
"""Bytes of IP packets per byte of a frame, on Ethernet: TCP and IP headers take 52 of each 1,500 bytes, TLS adds 22
bytes to each 16 KiB, and libp2p's yamux adds 12 bytes to each piece."""
ACK_FACTOR: Final = 0.018
"""Bytes sent back per byte received: an acknowledgement of 52 bytes for two packets."""
CARRIED: Final = 2.5
"""Priority of traffic that we carry for other peers (`carrier.py`): after our own gradients, activations and
reductions, for which the swarm waits, and before copies of state, which are long."""
_SLICE_S: Final = 0.025
"""Seconds that the line takes to send a slice of a frame: an urgent frame waits until the present slice is sent."""
_PATIENCE_S: Final = 6 * _SLICE_S
"""Longest time for which urgent frames may delay a slice. It lets a copy of state send 4 MiB in 40 s at 5 Mbit/s; the
receiver of the copy gives up after 60 s."""


class RateLimiter(TokenBucket):
    """Keeps one direction within the volunteer's rate limit."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(bytes_per_s, asyncio.get_running_loop().time)
        self.slice_bytes = _slice_bytes(bytes_per_s)

    def charge(self, nbytes: float) -> None:
        """Count bytes that pass, even if they exceed the limit: then later bytes wait longer."""
        self.take(nbytes * WIRE_FACTOR)

    def charge_acknowledgements(self, received_bytes: int) -> None:
        self.take(received_bytes * ACK_FACTOR)


@dataclass(order=True, slots=True)
class _Waiting:
    priority: float
    arrival: int
    peer: PeerID = field(compare=False)
    nbytes: int = field(compare=False)
    since_s: float = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


class SendLine:
    """The queue of all outgoing frames of this peer, over any link. Frames pass by priority, then in order of arrival;
    a frame lets others pass while its own connection takes no more bytes. Every sixth slice belongs to the frame that
    has waited longest, so that copies of state get at least a sixth of the line.

    Args:
        limiter: the volunteer's rate limit; None: there is none.
        uplink: limits the bytes queued before the line; None: nothing does.
    """

    def __init__(self, limiter: RateLimiter | None = None, uplink: Uplink | None = None) -> None:
        self.limiter = limiter
        self.uplink = uplink
        self._waiting: list[_Waiting] = []
        self._arrivals = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False
        self._eldest_passed_s = -math.inf
        if uplink is not None:
            uplink.on_room = self._serve

    async def admit(self, nbytes: int, priority: float, peer: PeerID) -> None:
        """Wait until `nbytes` may leave for `peer`."""
        turn = self.ask(nbytes, priority, peer)
        if turn is not None:
            await turn

    def ask(self, nbytes: int, priority: float, peer: PeerID) -> asyncio.Future[None] | None:
        """Ask to send `nbytes` to `peer`. Return None if they may pass now, else a future that is done when they may. A
        caller that gives up must cancel or complete the future."""
        if not self._waiting and self._wait_s() == 0.0 and self._has_room(peer):
            self._pass(peer, nbytes)
            return None
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        bisect.insort(self._waiting, _Waiting(priority, next(self._arrivals), peer, nbytes, loop.time(), turn))
        if not self._is_due:
            self._serve()
        return turn

    def hurry(self, peer: PeerID, priority: Priority) -> None:
        """Raise the priority of the frame being sent to `peer`, since a frame of `priority` waits behind it."""
        for waiting in self._waiting:
            if waiting.peer == peer and priority < waiting.priority:
                waiting.priority = priority
        self._waiting.sort()

    def cut(self, pieces: Iterable[Payload], peer: PeerID) -> Iterator[Payload]:
        """Yield a frame's bytes in slices of at most `slice_bytes(peer)` bytes. The caller calls `ask` for each."""
        for piece in pieces:
            view, start = memoryview(piece), 0
            while start < view.nbytes:
                end = start + self.slice_bytes(peer)
                yield view[start:end]
                start = end

    def slice_bytes(self, peer: PeerID) -> int:
        """Return the most bytes of a frame to `peer` that are sent at one time (a slice)."""
        sizes = [PIECE_BYTES]
        if self.limiter is not None:
            sizes.append(self.limiter.slice_bytes)
        if self.uplink is not None and self.uplink.holds(peer):
            sizes.append(_slice_bytes(self.uplink.bytes_per_s))
        return min(sizes)

    def _wait_s(self) -> float:
        return 0.0 if self.limiter is None else self.limiter.wait_s()

    def _has_room(self, peer: PeerID) -> bool:
        return self.uplink is None or self.uplink.admits(peer)

    def _pass(self, peer: PeerID, nbytes: int) -> None:
        if self.limiter is not None:
            self.limiter.charge(nbytes)
        if self.uplink is not None:
            self.uplink.wrote(peer, nbytes)

    def _serve(self) -> None:
        """Let one slice pass, and serve again once the frame of that slice has had time to queue its next slice, so
        that other frames do not overtake it. If the uplink is full, `_serve` is called again once it has room."""
        self._is_due = False
        self._waiting = [waiting for waiting in self._waiting if not waiting.turn.done()]  # cancelled
        wait_s = self._wait_s()
        chosen = None if wait_s > 0.0 else self._choose([each for each in self._waiting if self._has_room(each.peer)])
        if chosen is not None:
            self._waiting.remove(chosen)
            self._pass(chosen.peer, chosen.nbytes)
            chosen.turn.set_result(None)
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._serve)
        elif wait_s > 0.0 and self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._ring)
        if self.uplink is not None:
            self.uplink.is_awaited = bool(self._waiting)

    def _choose(self, free: Sequence[_Waiting]) -> _Waiting | None:
        if not free:
            return None
        now_s, eldest = asyncio.get_running_loop().time(), min(free, key=lambda waiting: waiting.since_s)
        if now_s < max(eldest.since_s, self._eldest_passed_s) + _PATIENCE_S:
            return free[0]
        self._eldest_passed_s = now_s
        return eldest

    def _ring(self) -> None:
        self._timer = None
        self._serve()


def _slice_bytes(bytes_per_s: float) -> int:
    return int(min(256 * 1024, max(4 * 1024, _SLICE_S * bytes_per_s)))


class Throttle:
    """Limits both directions of a transport. Args: uplink: limits the queue before the line; None: no limit."""

    def __init__(self, limits: RateLimits | None = None, uplink: Uplink | None = None) -> None:
        limits = limits or RateLimits()
        self.uplink = uplink
        upload = RateLimiter(limits.upload_bytes_per_s) if limits.upload_bytes_per_s < math.inf else None
        self._upload = upload
        self.line = None if upload is None and uplink is None else SendLine(upload, uplink)
        """The queue of outgoing frames; None: sending never waits here."""
        self.relay_bytes_per_s = limits.relay_bytes_per_s
        """Rate limit of the traffic that we carry for other peers; 0: none is carried."""
        self.download = RateLimiter(limits.download_bytes_per_s) if limits.download_bytes_per_s < math.inf else None

    def limit_upload(self, bytes_per_s: float) -> None:
        """Change the volunteer's upload limit from now on. Infinite: there is none."""
        assert self.line is not None, "a link that was made without a line stays without one"
        self._upload = self.line.limiter = RateLimiter(bytes_per_s) if bytes_per_s < math.inf else None

    def sent(self, nbytes: int) -> None:
        """Count bytes that have been sent without waiting."""
        if self._upload is not None:
            self._upload.charge(nbytes)

    def called(self, *, sent: int, received: int) -> None:
        self.sent(sent)
        self.received(received)

    def received(self, nbytes: int) -> None:
        if self._upload is not None:
            self._upload.charge_acknowledgements(nbytes)
        if self.download is not None:
            self.download.charge(nbytes)


class Intake:
    """Pauses the reading of one stream while this peer exceeds its download limit; the sender then slows down."""

    def __init__(self, limiter: RateLimiter, transport: asyncio.ReadTransport, is_lost: Callable[[], bool]) -> None:
        self._limiter, self._transport, self._is_lost = limiter, transport, is_lost
        self._timer: asyncio.TimerHandle | None = None
        self.slice_bytes = limiter.slice_bytes

    def came(self) -> None:
        """Pause the stream if the limit is exceeded. The caller has already charged the arrived bytes."""
        wait_s = self._limiter.wait_s()
        if wait_s > 0.0 and self._timer is None and not self._is_lost():
            self._transport.pause_reading()
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._go_on)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _go_on(self) -> None:
        self._timer = None
        wait_s = self._limiter.wait_s()
        if self._is_lost():
            return
        if wait_s > 0.0:  # another stream has used the room
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._go_on)
        else:
            self._transport.resume_reading()
