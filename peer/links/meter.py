"""Measures a peer's links to other peers by the calls and frames that it sends anyway.

| figure       | source                                                            | error                             |
|--------------|-------------------------------------------------------------------|-----------------------------------|
| round trip   | the quickest of the last calls; some are answered without work    | too high while all answers are    |
|              |                                                                   | slow                              |
| rate towards | the best of the last three probes, or of the last two if these   | too low if a line is busy; too    |
|              | have fallen; without probes, the best of recent frames            | high if buffers take in a burst   |
| rate from    | two full chunks of bulk, one right after the other; the best seen | too low; bounds what others claim |
| failed tries | calls and frames since the last answer that did not get through   | too high while a link is jammed;  |
|              |                                                                   | a probe's answer ends it          |

A link that has become slow is always busy, so it cannot be probed. Therefore, while the run is slower than the
coordinator's figures explain (`HeartbeatReply.in_doubt`), the frames of a link that stays busy count as a probe
(`look`), unless they wait for our own network card.

A plan needs the rate that a link **can** carry. While this peer sends to several others, each gets a part of its
uplink, and the rate to one peer says little about its link. So a probe or a frame counts only if no other link was
sending at the same time. Once there are probes, frames no longer count: their rate seems lower if another peer shares
the card or the far end is busy, and higher if a buffer or a quick card takes them before the far end has them.

`MeteredTransport` sits between an endpoint and its transport, and reports the traffic to a `LinkMeter`.
"""

import heapq
import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import BULK_CHUNK_BYTES, LINKS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import LinkReport
from shoal.protocol.ports import CallHandler, Clock, FrameHandler, Payload, Priority, Transport

REPORTED_MAX: Final = 64
"""Number of links that a peer reports: those with the most traffic. 64 are enough in a swarm of a thousand peers."""
REPORTS_PER_BEAT: Final = 4
"""Number of links in a heartbeat; all are reported in turn. A report has about 80 bytes, so a thousand peers send 320
kB per heartbeat interval."""
_KEPT_MAX = 256
_SAMPLE_BYTES = 256 * 1024
"""Frames are added up until they have this size, since the time of a small frame says little."""
SLOWED = 0.5
"""A rate below this fraction of an earlier one means that the link has become slow."""
_LOOK_S, _LOOK_S_MAX = 4.0, 20.0
"""Seconds between two calls of `look`: after less than the first, a call does nothing; after more than the second, it
draws no conclusion. A link that was busy for half of the first counts as busy for long."""
FAILED_TOLD_MAX: Final = 8
"""A heartbeat has at most this many failed links. (A peer without a network has failed links to all others.)"""
_RATE_MAX = 1e12
"""Higher rates are reported as this rate, in bytes/s: in a simulation a link may take no time at all."""


@dataclass(slots=True)
class _Link:
    round_trips: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=16))
    samples: deque[tuple[float, float]] = field(init=False, default_factory=lambda: deque(maxlen=8))
    chunks: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=32))
    probes: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=3))
    pending: tuple[float, float] = 0.0, 0.0
    """(Bytes, seconds) of the frames sent so far for the next sample of the rate (`_SAMPLE_BYTES`)."""
    is_shared: bool = False
    """True if another link was sending at the same time: the bytes since the last sample then make no sample."""
    mark: int = 0
    """`LinkMeter._num_mixed` when this link last began to send, or was last checked for traffic on other links."""
    chunk_at_s: float | None = None
    num_sending: int = 0
    num_failed: int = 0
    """Number of failed tries since the last answer."""
    busy_s: float = 0.0
    """Seconds in which the link was sending, up to the end of the last send."""
    busy_since_s: float = 0.0
    """Time when the link last began to send."""
    looked: tuple[float, float] = 0.0, 0.0
    """This link's (seconds of sending, bytes sent) in all, when `LinkMeter.look` last ran."""
    since_s: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        return self.sent_bytes + self.received_bytes

    @property
    def sent_rate(self) -> float:
        """Rate towards the peer in bytes/s; 0: the rate is not known."""
        if self.probes:
            return max(list(self.probes)[-2:]) if self.has_fallen else max(self.probes)
        return max((_rate(*sample) for sample in self.samples), default=0.0)

    @property
    def has_fallen(self) -> bool:
        """True if the last two probes agree, and are far below the best of the last three: the link has become slow."""
        late = list(self.probes)[-2:]
        return len(late) == 2 and max(late) < min(SLOWED * max(self.probes), 1.5 * min(late))

    def report(self, peer: PeerID) -> LinkReport | None:
        round_trip_s = min(self.round_trips, default=0.0)
        sent, received = self.sent_rate, max(self.chunks, default=0.0)
        if not (round_trip_s or sent or received or self.num_failed):
            return None
        return LinkReport(
            peer=peer,
            round_trip_s=round_trip_s,
            bytes_per_s=sent,
            received_bytes_per_s=received,
            num_probes=len(self.probes),
            num_failed=self.num_failed,
            has_fallen=self.has_fallen,
        )


class LinkMeter:
    """Figures of our links to all peers. It holds no socket: its caller reports each event."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links: dict[PeerID, _Link] = {}
        self._turn: list[PeerID] = []
        self._news: dict[PeerID, None] = {}
        """Links probed since they were last reported, in the order of the probes."""
        self._failures: dict[PeerID, None] = {}
        """Links on which a try has failed, or succeeded again, since they were last reported; in order."""
        self._reports_max = LINKS_PER_HEARTBEAT_MAX
        """The next heartbeat has at most this many links: many until the coordinator has heard of each, then few."""
        self._num_busy = 0
        self._num_mixed = 0
        """Number of times that a link began to send while another was sending."""
        self._num_sending = 0
        self._since_s = 0.0
        self._sending_s = 0.0
        self._looked = -math.inf, 0.0
        """(Time of the last `look`, `sending_s` at that time)."""

    @property
    def sending_s(self) -> float:
        """Seconds so far in which this peer was sending to at least one other peer."""
        return self._sending_s + (self._clock.now_s() - self._since_s if self._num_sending else 0.0)

    def traffic(self) -> dict[PeerID, tuple[float, float]]:
        """Return peer -> bytes of frames (sent, received) so far; counts of a peer long idle may restart at 0."""
        return {peer: (link.sent_bytes, link.received_bytes) for peer, link in self._links.items()}

    def called(self, peer: PeerID, took_s: float) -> None:
        """Record that `peer` answered a call after `took_s` seconds."""
        link = self._link(peer)
        link.round_trips.append(took_s)
        if link.num_failed:
            link.num_failed = 0
            self._failures[peer] = None

    def cannot_reach(self, peer: PeerID) -> bool:
        """True if two or more tries to reach `peer` have failed since its last answer. A single failure may be a broken
        connection, which the next try replaces."""
        link = self._links.get(peer)
        return link is not None and link.num_failed >= 2

    def has_met(self, peer: PeerID) -> bool:
        """True if `peer` has answered a call of ours, as far as we remember."""
        link = self._links.get(peer)
        return link is not None and bool(link.round_trips)

    def failed(self, peer: PeerID) -> None:
        """Record that a call or a frame to `peer` did not get through."""
        link = self._link(peer)
        link.num_failed = min(link.num_failed + 1, 99)
        self._failures[peer] = None

    @property
    def is_quiet(self) -> bool:
        """True if nothing is being sent."""
        return self._num_busy == 0

    @property
    def mark(self) -> tuple[int, int]:
        """Two counts that change if other traffic begins: read before a probe, then passed to `probed` as `since`."""
        return self._num_mixed, self._num_busy

    def probed(self, report: LinkReport, *, since: tuple[int, int] = (0, 0)) -> bool:
        """Record the result of a probe: the rate at which its bytes really arrived. If another link was sending at the
        same time, the probe counts only if it was faster than earlier ones. Args: since: `mark` before the probe.

        Returns: True if the probe counts and is far below earlier ones. Then another probe shows whether the link has
            become slow or was busy."""
        link = self._link(report.peer)
        best = max(link.probes, default=0.0)
        if since != (self._num_mixed, 0) and report.bytes_per_s <= (best or math.inf):
            return False
        link.probes.append(report.bytes_per_s)
        self._news[report.peer] = None
        return report.bytes_per_s < SLOWED * best and not link.has_fallen

    def look(self, beside: Collection[PeerID] = ()) -> float | None:
        """Count the traffic since the last call as a probe of each link that was busy for long, unless our network card
        carried half of the best probe's rate or more in all: it may be the limit.

        Args: beside: peers on our machine, which may send as much as we do over the same card. Traffic to them does not
        pass the card.
        Returns: bytes/s over all links if several had traffic, each at under half of that (our line limits); else None.
        """
        now_s = self._clock.now_s()
        apart_s = now_s - self._looked[0]
        if apart_s < _LOOK_S:
            return None
        sending_s, before_s = self.sending_s, self._looked[1]
        self._looked = now_s, sending_s
        found: dict[PeerID, tuple[float, float]] = {}
        """Link with enough traffic -> (bytes/s, seconds)."""
        total_bytes, best = 0.0, 0.0
        for peer, link in self._links.items():
            busy_s = link.busy_s + (now_s - link.busy_since_s if link.num_sending else 0.0)
            (then_s, then_bytes), link.looked = link.looked, (busy_s, link.sent_bytes)
            if peer in beside:
                continue
            nbytes, seconds = link.sent_bytes - then_bytes, busy_s - then_s
            total_bytes += nbytes
            best = max(best, *link.probes, 0.0)
            if nbytes >= _SAMPLE_BYTES and seconds > 0.0:
                found[peer] = nbytes / seconds, seconds
        card_bytes = total_bytes * (1 + len(beside))
        if apart_s > _LOOK_S_MAX or card_bytes >= SLOWED * best * (sending_s - before_s):
            return None
        most = max((rate for rate, _ in found.values()), default=0.0)
        is_our_line = len(found) > 1 and most < SLOWED * best
        for peer, link in self._links.items():
            rate, seconds = found.get(peer, (0.0, 0.0))
            if seconds >= _LOOK_S / 2.0:
                link.probes.append(rate)
            elif is_our_line and link.sent_rate > most and peer not in found and peer not in beside:
                link.probes.append(most)
            else:
                continue
            self._news[peer] = None
        return total_bytes / (sending_s - before_s) if is_our_line else None

    def tell_all(self) -> None:
        """Report all links again, since a new coordinator knows none of them."""
        self._turn = []
        self._reports_max = LINKS_PER_HEARTBEAT_MAX
        self._failures |= {peer: None for peer, link in self._links.items() if link.num_failed}

    def send_begins(self, peer: PeerID) -> None:
        link = self._link(peer)
        if link.num_sending == 0:
            link.since_s = link.busy_since_s = self._clock.now_s()
            self._num_busy += 1
            if self._num_busy > 1:
                self._num_mixed += 1
                link.is_shared = True
            link.mark = self._num_mixed
        link.num_sending += 1
        if self._num_sending == 0:
            self._since_s = self._clock.now_s()
        self._num_sending += 1

    def send_ends(self, peer: PeerID, nbytes: int, *, left: bool) -> None:
        """Record the end of a send. Args: left: the frame was sent; if not, its time says nothing about the link."""
        link = self._links[peer]
        now_s = self._clock.now_s()
        link.num_sending -= 1
        self._num_sending -= 1
        if link.num_sending == 0:
            link.busy_s += now_s - link.busy_since_s
            self._num_busy -= 1
        if self._num_sending == 0:
            self._sending_s += now_s - self._since_s
        if self._num_mixed != link.mark:
            link.mark, link.is_shared = self._num_mixed, True
        before_bytes, before_s = link.pending
        link.pending = (before_bytes + nbytes, before_s + now_s - link.since_s) if left else (0.0, 0.0)
        link.since_s = now_s
        link.sent_bytes += nbytes
        if link.pending[0] >= _SAMPLE_BYTES:
            if not link.is_shared:
                link.samples.append(link.pending)
            link.pending = 0.0, 0.0
        if link.pending[0] == 0.0:
            link.is_shared = self._num_busy > 1 and link.num_sending > 0

    def sent_little(self, peer: PeerID, nbytes: int) -> None:
        """Record a sent frame that is too small to delay others, such as the answer to a probe."""
        self._link(peer).sent_bytes += nbytes

    def received(self, peer: PeerID, nbytes: int) -> None:
        """Record that a frame with `nbytes` of payload has arrived."""
        link = self._link(peer)
        link.received_bytes += nbytes
        if nbytes != BULK_CHUNK_BYTES:  # only after a full chunk may the sender have more to send
            link.chunk_at_s = None
            return
        now_s = self._clock.now_s()
        # Chunks that arrive further apart were not sent one right after the other.
        if link.chunk_at_s is not None and now_s - link.chunk_at_s <= 2.0:
            link.chunks.append(_rate(nbytes, now_s - link.chunk_at_s))
        link.chunk_at_s = now_s

    def report(self) -> tuple[LinkReport, ...]:
        """Return link reports for a heartbeat: first failed tries and new probes, then the busiest links in turn."""
        if not self._turn:
            self._turn = heapq.nlargest(REPORTED_MAX, self._links, key=lambda peer: (self._links[peer].bytes, peer))
            self._turn.reverse()
        told = list(self._failures)[:FAILED_TOLD_MAX]
        told += list(self._news)[: LINKS_PER_HEARTBEAT_MAX - len(told)]
        for peer in told:
            self._failures.pop(peer, None)
            self._news.pop(peer, None)
        told = [peer for peer in told if peer in self._links]
        told += [self._turn.pop() for _ in range(min(self._reports_max - len(told), len(self._turn)))]
        if not self._turn:
            self._reports_max = REPORTS_PER_BEAT
        reports = (link.report(peer) for peer in dict.fromkeys(told) if (link := self._links.get(peer)) is not None)
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
    """Implements `Transport` around `transport`, and reports all traffic to `meter`."""

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
        try:
            reply = await self._transport.call(peer, request, timeout_s=timeout_s)
        except Unreachable:
            self._meter.failed(peer)
            raise
        self._meter.called(peer, self._clock.now_s() - asked_s)
        return reply

    async def send(
        self, peer: PeerID, meta: bytes, payload: Payload, *, priority: Priority, again: bytes | None = None
    ) -> None:
        left, nbytes = False, _size(payload)
        if nbytes < 1024:
            await self._transport.send(peer, meta, payload, priority=priority, again=again)
            self._meter.sent_little(peer, nbytes)
            return
        self._meter.send_begins(peer)
        try:
            await self._transport.send(peer, meta, payload, priority=priority, again=again)
            left = True
        except Unreachable:
            self._meter.failed(peer)
            raise
        finally:
            self._meter.send_ends(peer, nbytes, left=left)

    async def close(self) -> None:
        await self._transport.close()


def _size(payload: Payload) -> int:
    return payload.nbytes if isinstance(payload, memoryview) else len(payload)


def _rate(nbytes: float, seconds: float) -> float:
    return min(nbytes / seconds, _RATE_MAX) if seconds > 0.0 else _RATE_MAX
