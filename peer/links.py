"""What a peer measures of the ways to others, from the calls and frames that it sends anyway.

| figure       | from                                                              | errs                              |
|--------------|-------------------------------------------------------------------|-----------------------------------|
| round trip   | the quickest of the last calls; some are answered without work    | up, while every answer takes long |
| rate towards | bytes sent / time in which something was being sent               | up, if a burst vanishes in        |
|              |                                                                   | buffers; down, if its end is busy |
| rate from    | two full chunks of bulk, one right after the other; the best seen | down; bounds what others claim    |

`MeteredTransport` goes between an endpoint and its transport and is the only thing that an endpoint sees of it.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Final

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import BULK_CHUNK_BYTES
from shoal.protocol.messages import LinkReport
from shoal.protocol.ports import CallHandler, Clock, FrameHandler, Payload, Priority, Transport

REPORTED_MAX: Final = 64
"""Links that a peer tells of, those with the most traffic: its mates and neighbours. With 64 a thousand peers say all
that a coordinator needs."""
REPORTS_PER_BEAT: Final = 4
"""In turn. A report is about 80 bytes, so a thousand peers tell a coordinator 320 kB a heartbeat; a successor has heard
all links of a peer after 16 heartbeats at most, of one in a small group after two."""
_KEPT_MAX = 256
_CALLS = 16
_SAMPLES = 8
_SAMPLE_BYTES = 256 * 1024
"""Frames are added up until there are so many, for the time that a small one takes says little."""
_CHUNKS = 32
_BOAST = 4.0
"""Buffers swallow the beginning of a burst: what seems to leave is believed up to so many times what an echo has shown
to arrive (`probed`)."""
_RATE_MAX = 1e12
"""Bytes/s; a link of a simulated world may take no time at all."""


class _Link:
    __slots__ = (
        "chunk_at_s",
        "chunks",
        "num_sending",
        "pending",
        "probed",
        "received_bytes",
        "round_trips",
        "samples",
        "sent_bytes",
        "since_s",
    )

    def __init__(self) -> None:
        self.round_trips: deque[float] = deque(maxlen=_CALLS)
        self.samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self.chunks: deque[float] = deque(maxlen=_CHUNKS)
        self.pending = 0.0, 0.0  # (bytes, seconds) since the last sample
        self.probed: float | None = None
        self.chunk_at_s: float | None = None
        self.num_sending = 0
        self.since_s = 0.0
        self.sent_bytes = 0.0
        self.received_bytes = 0.0

    @property
    def bytes(self) -> float:
        return self.sent_bytes + self.received_bytes

    @property
    def sent_rate(self) -> float:
        """Bytes/s towards the peer; 0: not known."""
        if not self.samples:
            return self.probed or 0.0
        rate = _rate(sum(nbytes for nbytes, _ in self.samples), sum(seconds for _, seconds in self.samples))
        return rate if self.probed is None else min(rate, _BOAST * self.probed)

    def report(self, peer: PeerID) -> LinkReport | None:
        round_trip_s = min(self.round_trips, default=0.0)
        sent, received = self.sent_rate, max(self.chunks, default=0.0)
        if not (round_trip_s or sent or received):
            return None
        return LinkReport(peer=peer, round_trip_s=round_trip_s, bytes_per_s=sent, received_bytes_per_s=received)


class LinkMeter:
    """Figures of all peers that we exchange something with. Holds no socket; the caller says when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links: dict[PeerID, _Link] = {}
        self._turn: list[PeerID] = []
        self._num_sending = 0
        self._since_s = 0.0
        self._sending_s = 0.0

    @property
    def sending_s(self) -> float:
        """Seconds so far in which something was on its way out, to whomever."""
        return self._sending_s + (self._clock.now_s() - self._since_s if self._num_sending else 0.0)

    def traffic(self) -> dict[PeerID, tuple[float, float]]:
        """Bytes of frames (sent, received) so far, by peer. Who was idle for long begins at 0 again."""
        return {peer: (link.sent_bytes, link.received_bytes) for peer, link in self._links.items()}

    def called(self, peer: PeerID, took_s: float) -> None:
        """`peer` answered a call after `took_s`."""
        self._link(peer).round_trips.append(took_s)

    def probed(self, report: LinkReport) -> None:
        """An echo has shown what really arrives."""
        self._link(report.peer).probed = report.bytes_per_s

    def send_begins(self, peer: PeerID) -> None:
        link = self._link(peer)
        if link.num_sending == 0:
            link.since_s = self._clock.now_s()
        link.num_sending += 1
        if self._num_sending == 0:
            self._since_s = self._clock.now_s()
        self._num_sending += 1

    def send_ends(self, peer: PeerID, nbytes: int, *, left: bool) -> None:
        """Args: left: whether it went out; if not, how long that took says nothing of the link."""
        link = self._links[peer]
        now_s = self._clock.now_s()
        link.num_sending -= 1
        self._num_sending -= 1
        if self._num_sending == 0:
            self._sending_s += now_s - self._since_s
        before_bytes, before_s = link.pending
        link.pending = (before_bytes + nbytes, before_s + now_s - link.since_s) if left else (0.0, 0.0)
        link.since_s = now_s
        link.sent_bytes += nbytes
        if link.pending[0] >= _SAMPLE_BYTES:
            link.samples.append(link.pending)
            link.pending = 0.0, 0.0

    def received(self, peer: PeerID, nbytes: int) -> None:
        """A frame with `nbytes` of payload is here."""
        link = self._link(peer)
        link.received_bytes += nbytes
        if nbytes != BULK_CHUNK_BYTES:  # a full chunk has another behind it: the sender had more to send
            link.chunk_at_s = None
            return
        now_s = self._clock.now_s()
        if link.chunk_at_s is not None:
            link.chunks.append(_rate(nbytes, now_s - link.chunk_at_s))
        link.chunk_at_s = now_s

    def report(self) -> tuple[LinkReport, ...]:
        """What to tell in this heartbeat: the busiest links take turns."""
        if not self._turn:
            self._turn = heapq.nlargest(REPORTED_MAX, self._links, key=lambda peer: (self._links[peer].bytes, peer))
            self._turn.reverse()
        told = [self._turn.pop() for _ in range(min(REPORTS_PER_BEAT, len(self._turn)))]
        reports = (link.report(peer) for peer in told if (link := self._links.get(peer)) is not None)
        return tuple(report for report in reports if report is not None)

    def _link(self, peer: PeerID) -> _Link:
        link = self._links.get(peer)
        if link is None:
            if len(self._links) >= _KEPT_MAX:
                self._forget_idle()
            link = self._links[peer] = _Link()
        return link

    def _forget_idle(self) -> None:
        idle = [peer for peer, link in self._links.items() if link.num_sending == 0]
        for peer in heapq.nsmallest(_KEPT_MAX // 2, idle, key=lambda peer: (self._links[peer].bytes, peer)):
            del self._links[peer]


class MeteredTransport:
    """Implements `Transport`: `transport`, with what passes noted in `meter`."""

    def __init__(self, transport: Transport, meter: LinkMeter, clock: Clock) -> None:
        self._transport, self._meter, self._clock = transport, meter, clock

    @property
    def peer_id(self) -> PeerID:
        return self._transport.peer_id

    def addresses(self) -> tuple[str, ...]:
        return self._transport.addresses()

    def serve(self, *, on_call: CallHandler, on_frame: FrameHandler) -> None:
        async def metered(source: PeerID, meta: bytes, payload: Payload) -> None:
            self._meter.received(source, _size(payload))
            await on_frame(source, meta, payload)

        self._transport.serve(on_call=on_call, on_frame=metered)

    async def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        await self._transport.introduce(peer, addresses)

    async def call(self, peer: PeerID, request: bytes, *, timeout_s: float) -> bytes:
        asked_s = self._clock.now_s()
        reply = await self._transport.call(peer, request, timeout_s=timeout_s)
        self._meter.called(peer, self._clock.now_s() - asked_s)
        return reply

    async def send(self, peer: PeerID, meta: bytes, payload: Payload, *, priority: Priority) -> None:
        left, nbytes = False, _size(payload)
        self._meter.send_begins(peer)
        try:
            await self._transport.send(peer, meta, payload, priority=priority)
            left = True
        finally:
            self._meter.send_ends(peer, nbytes, left=left)

    async def close(self) -> None:
        await self._transport.close()


def _size(payload: Payload) -> int:
    return payload.nbytes if isinstance(payload, memoryview) else len(payload)


def _rate(nbytes: float, seconds: float) -> float:
    return min(nbytes / seconds, _RATE_MAX) if seconds > 0.0 else _RATE_MAX
