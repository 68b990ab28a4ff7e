"""Keeps a peer's bytes within its limits: who wants to send waits in line, what is read too fast is read later.

What is counted is our own frames and calls, times what the network adds to them (`WIRE_FACTOR`). What the daemon says
on its own account (the directory, pings, keeping connections open) is small and not counted.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from shoal.protocol.ports import Payload, Priority
from shoal.protocol.token_bucket import RateLimits, TokenBucket

WIRE_FACTOR: Final = 1.045
"""Bytes of IP packets per byte of a frame, on Ethernet: TCP and IP headers are 52 of each 1,500 bytes, TLS adds 22 to
each 16 KiB, yamux 12 to each piece."""
ACK_FACTOR: Final = 0.018
"""Bytes that go back per byte received: an acknowledgement of 52 bytes for two packets."""
_SLICE_S: Final = 0.05
"""The slice of data that is written at a time, in seconds of the rate: a gradient need not wait for a megabyte."""
_SLICE_BYTES_MIN: Final = 4 * 1024
_SLICE_BYTES_MAX: Final = 256 * 1024


class RateLimiter:
    """One direction. Who waits passes by priority, then in the order of arrival."""

    def __init__(self, bytes_per_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._bucket = TokenBucket(rate=bytes_per_s, now_s=self._loop.time())
        self._line: list[tuple[Priority, int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self.slice_bytes = int(min(_SLICE_BYTES_MAX, max(_SLICE_BYTES_MIN, _SLICE_S * bytes_per_s)))

    def charge(self, nbytes: float) -> None:
        """These pass without waiting."""
        self._bucket.take(nbytes * WIRE_FACTOR, now_s=self._loop.time())

    def charge_acknowledgements(self, received_bytes: int) -> None:
        self._bucket.take(received_bytes * ACK_FACTOR, now_s=self._loop.time())

    def wait_s(self) -> float:
        """The seconds until something may pass."""
        return self._bucket.wait_s(now_s=self._loop.time())

    async def admit(self, nbytes: int, priority: Priority) -> None:
        """Wait until `nbytes` may pass."""
        if not self._line and self.wait_s() == 0.0:
            self.charge(nbytes)
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        heapq.heappush(self._line, (priority, next(self._arrivals), nbytes, turn))
        self._arm()
        await turn

    def cut(self, pieces: Iterable[Payload]) -> Iterator[Payload]:
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, view.nbytes, self.slice_bytes):
                yield view[start : start + self.slice_bytes]

    def _arm(self) -> None:
        if self._timer is None and self._line:
            self._timer = self._loop.call_later(self.wait_s(), self._serve)

    def _serve(self) -> None:
        self._timer = None
        while self._line and self.wait_s() == 0.0:
            _, _, nbytes, turn = heapq.heappop(self._line)
            if not turn.done():  # else whoever waited was cancelled
                self.charge(nbytes)
                turn.set_result(None)
        self._arm()


class Throttle:
    """Both directions of one transport; None where there is no limit."""

    def __init__(self, limits: RateLimits | None = None) -> None:
        limits = limits or RateLimits()
        self.upload = RateLimiter(limits.upload_bytes_per_s) if limits.upload_bytes_per_s < math.inf else None
        self.download = RateLimiter(limits.download_bytes_per_s) if limits.download_bytes_per_s < math.inf else None

    def sent(self, nbytes: int) -> None:
        """Something that must not wait has gone out."""
        if self.upload is not None:
            self.upload.charge(nbytes)

    def called(self, *, sent: int, received: int) -> None:
        self.sent(sent)
        self.received(received)

    def received(self, nbytes: int) -> None:
        if self.upload is not None:
            self.upload.charge_acknowledgements(nbytes)
        if self.download is not None:
            self.download.charge(nbytes)


class Intake:
    """Pauses a stream that brings more than the limit; the sender's own flow control does the rest."""

    def __init__(self, limiter: RateLimiter, transport: asyncio.ReadTransport, is_lost: Callable[[], bool]) -> None:
        self._limiter, self._transport, self._is_lost = limiter, transport, is_lost
        self._timer: asyncio.TimerHandle | None = None
        self.slice_bytes = limiter.slice_bytes

    def came(self) -> None:
        """Pause the stream if need be; the caller has charged the bytes that came."""
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
        if wait_s > 0.0:  # another stream was first
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._go_on)
        else:
            self._transport.resume_reading()
