"""Measures what this peer offers to the run: FLOP/s on the run's own layer shape, memory, and links to other peers."""

import asyncio
import contextlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.encoding.vectors import VECTORS, Vectors
from shoal.peer.model.flop import forward_flop
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import BULK_CHUNK_BYTES, TOGETHER_MAX
from shoal.protocol.messages import LinkReport, Ping, ProbeChunk, Probed, ProbeTogether
from shoal.protocol.ports import Clock, Compute, Payload, Priority
from shoal.protocol.spec import RunSpec

_DEVICE_S = 0.5
"""Seconds for which a device is measured: several periods of a container's quota, which are usually 0.1 s long."""
_FORWARDS_MAX = 64  # enough for a GPU, which has no such quota
_QUICK_S = 0.05
"""A transfer that takes fewer seconds gives no usable rate: reading clocks, waking up and answering take as long."""
_ROUND_TRIPS_MIN = 1.5
"""A transfer that takes fewer round trips may measure TCP's slow start and not the link: in slow start half of all data
arrives in the last round trip."""
FAR_S = 0.002
"""If a peer's round trip takes fewer seconds, it may be on this machine, where our traffic crosses no network card."""
_TOGETHER_S = 0.1
_TOGETHER_BYTES_MAX = 16 * BULK_CHUNK_BYTES
"""The most bytes sent on one link while several are measured together. If the quickest link would carry more in
`_TOGETHER_S`, all links send for a shorter time."""
_NOTHING = Probed(arrived=())
_MARK, _UNANSWERED = -1, -2
"""Nonces of probe frames without an answer. Real ones are >= 0, so no receiver takes these for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProbe:
    """A measured device. `flop_per_s` is the speed of repeated forwards of one decoder layer at the run's shape, in the
    dtype of the peer's matrix products."""

    device: str
    flop_per_s: float
    memory_bytes: int


async def probe_device(
    spec: RunSpec, compute: Compute, arithmetic: Arithmetic, *, memory_bytes: int | None = None
) -> DeviceProbe:
    """Time forwards of one decoder layer for `_DEVICE_S`. Args: memory_bytes: memory to report; None: the device's free
    memory."""
    forward = arithmetic.probe_job()
    flop = forward_flop(spec.model, "layers.0", spec.training.microbatch_size * spec.model.context)

    def repeat(times: int) -> None:
        for _ in range(times):
            forward()

    async def seconds(times: int) -> float:
        timed = await compute.run("probe", partial(repeat, times), flop=times * flop)
        return max(timed.ended_s - timed.started_s, 1e-9)

    await seconds(1)  # warms up
    times = min(math.ceil(_DEVICE_S / await seconds(1)), _FORWARDS_MAX)
    return DeviceProbe(
        device=arithmetic.device_name,
        flop_per_s=times * flop / await seconds(times),
        memory_bytes=arithmetic.free_bytes() if memory_bytes is None else memory_bytes,
    )


class LinkProbe:
    """Measures the round trip and the rate towards one peer at a time, and answers the probes of other peers.

    We send a warm-up frame, a tiny frame (the mark), and frames to be timed. The receiver reports the time from the
    mark to the last frame, which is right even if the report waits behind other data. We use at least the time that we
    took to send the frames. The warm-up frame ends TCP's slow start: without it, a transfer of 128 KiB over a home line
    of 20 Mbit/s and 60 ms looked like 5 Mbit/s.
    """

    def __init__(self, *, endpoint: Endpoint, clock: Clock, vectors: Vectors = VECTORS) -> None:
        self._vectors = vectors
        self._endpoint = endpoint
        self._clock = clock
        self._nonces = itertools.count()
        self._echoes: dict[tuple[PeerID, int], asyncio.Future[float]] = {}
        self._marks_s: OrderedDict[PeerID, float] = OrderedDict()
        self._rested_s = -math.inf
        """The time until which requests to send to several peers at once (`ProbeTogether`) get an empty answer."""
        endpoint.on(Ping, self._on_ping)
        endpoint.on(ProbeTogether, self._on_together)
        endpoint.on_frame(ProbeChunk, self._on_chunk)

    async def measure(self, peer: PeerID, *, payload_bytes: int = BULK_CHUNK_BYTES) -> LinkReport:
        """Measure the round trip with three pings, then the rate with a frame of an eighth of `payload_bytes`. If that
        was too quick to be exact, repeat with a frame of `payload_bytes`, and then with four such frames in a row.
        Raises: Unreachable, Refused, RemoteError."""
        round_trips = []
        for _ in range(3):
            sent_s = self._clock.now_s()
            await self._endpoint.ask(peer, Ping(), Ping)
            round_trips.append(self._clock.now_s() - sent_s)
        eighth, round_trip_s = payload_bytes // 8, min(round_trips)
        # The last part has several frames, since fast links carry one in milliseconds.
        parts = (eighth, eighth, 1), (payload_bytes // 2, payload_bytes, 1), (payload_bytes, payload_bytes, 4)
        for ahead, nbytes, times in parts:
            await self._send(peer, _UNANSWERED, self._zeros(ahead))
            await self._send(peer, _MARK, b"\0")
            seconds = max(await self._timed(peer, nbytes, times=times), 1e-6)
            if seconds >= max(_QUICK_S, _ROUND_TRIPS_MIN * round_trip_s):
                break
        return LinkReport(peer=peer, round_trip_s=round_trip_s, bytes_per_s=times * nbytes / seconds)

    def _zeros(self, nbytes: int) -> Payload:
        return self._vectors.payload_of(self._vectors.zeros(nbytes // 4))

    async def _send(self, peer: PeerID, nonce: int, payload: Payload, *, echo: bool = False) -> None:
        await self._endpoint.send(peer, ProbeChunk(nonce=nonce, echo=echo), payload, priority=Priority.BULK)

    async def _timed(self, peer: PeerID, nbytes: int, *, times: int) -> float:
        """Send `times` frames of `nbytes`. Returns: seconds from the mark (a small earlier frame) to the last frame."""
        payload = self._zeros(nbytes)
        nonce = next(self._nonces)
        echo = self._echoes[peer, nonce] = asyncio.get_running_loop().create_future()
        begun_s = self._clock.now_s()
        try:
            async with asyncio.timeout(20.0):
                for left in reversed(range(times)):
                    await self._send(peer, _UNANSWERED if left else nonce, payload, echo=left == 0)
                left_s = self._clock.now_s() - begun_s
                took_s = await echo
        except TimeoutError as error:
            raise Unreachable(peer, "a probe was not echoed") from error
        finally:
            del self._echoes[peer, nonce]
        # Use the other peer's figure only if it is possible: on its busy line the mark may have come late.
        whole_s = self._clock.now_s() - begun_s
        return max(left_s, took_s) if 0.0 <= took_s <= whole_s else whole_s

    async def measure_together(self, links: Sequence[LinkReport], beside: Sequence[PeerID] = ()) -> float:
        """Send to several peers at once: to each as many bytes as its link carries in `_TOGETHER_S`, or less.

        Args:
            links: the results of `measure` for these peers.
            beside: peers that may share our network card; those less than `FAR_S` away send as much at the same time.
        Returns: bytes/s of all senders together, a lower bound for the card's rate. 0: no answer from a link.
        """
        ours, *theirs = await asyncio.gather(self._together(links), *(self._asked(mate, links) for mate in beside))
        if not ours.arrived:
            return 0.0
        quickest_s = min(seconds for _, seconds in ours.arrived)
        arrived = [*ours.arrived]
        for probed in theirs:
            pairs = zip(ours.arrived, probed.arrived, strict=False)
            arrived += [(min(max(0, nbytes), most), max(quickest_s, seconds)) for (most, _), (nbytes, seconds) in pairs]
        return _carried(arrived)

    async def _asked(self, mate: PeerID, links: Sequence[LinkReport]) -> Probed:
        begun_s = self._clock.now_s()
        try:
            # A short call first: the meter takes the quickest call for the round trip, and the next call takes long.
            await self._endpoint.ask(mate, Ping(), Ping)
            if self._clock.now_s() - begun_s >= FAR_S:
                return _NOTHING
            return await self._endpoint.ask(mate, ProbeTogether(links=tuple(links)), Probed)
        except (Unreachable, Refused, RemoteError):
            return _NOTHING

    async def _together(self, links: Sequence[LinkReport]) -> Probed:
        begun_s = self._clock.now_s()
        together_s = min(_TOGETHER_S, _TOGETHER_BYTES_MAX / max(link.bytes_per_s for link in links))
        wanted = [max(4096, int(link.bytes_per_s * together_s)) for link in links]
        # Send several frames to each peer, since a card takes turns between links, frame by frame.
        frames = [max(8, -(-nbytes // BULK_CHUNK_BYTES)) for nbytes in wanted]
        sizes = [nbytes // times // 4 * 4 for nbytes, times in zip(wanted, frames, strict=True)]
        try:
            await asyncio.gather(*(self._send(link.peer, _MARK, b"\0") for link in links))
            marked_s = self._clock.now_s()
            probes = zip(links, sizes, frames, strict=True)
            took_s = await asyncio.gather(*(self._timed(link.peer, size, times=times) for link, size, times in probes))
        except (Unreachable, Refused, RemoteError):
            return _NOTHING
        sent = (size * times for size, times in zip(sizes, frames, strict=True))
        ended_s = (marked_s - begun_s + seconds for seconds in took_s)
        return Probed(arrived=tuple(zip(sent, ended_s, strict=True)))

    async def answers(self, peer: PeerID) -> bool:
        """True if `peer` can be reached at all; busy lines do not change the result. The timeout is half of the time
        that the coordinator waits before its first plan, so unreachable peers are known by then."""
        try:
            await self._endpoint.ask(peer, Ping(), Ping, timeout_s=4.0)
        except (Unreachable, Refused, RemoteError):
            return False
        return True

    async def measure_if_possible(self, peer: PeerID) -> LinkReport | None:
        try:
            return await self.measure(peer)
        except (Unreachable, Refused, RemoteError):
            return None

    async def _on_ping(self, source: PeerID, message: Ping) -> Ping:
        return message

    async def _on_together(self, source: PeerID, message: ProbeTogether) -> Probed:
        links = [
            link
            for link in message.links[:TOGETHER_MAX]
            if link.peer not in (source, self._endpoint.peer_id) and 1.0 <= link.bytes_per_s < math.inf
        ]
        now_s = self._clock.now_s()
        if not links or now_s < self._rested_s:
            return _NOTHING
        self._rested_s = now_s + 0.5  # each probe sends up to 128 MB
        return await self._together(links)

    async def _on_chunk(self, source: PeerID, meta: ProbeChunk, payload: Payload) -> None:
        if meta.nonce == _MARK:
            self._marks_s[source] = self._clock.now_s()
            self._marks_s.move_to_end(source)
            if len(self._marks_s) > 1024:
                self._marks_s.popitem(last=False)
        elif meta.echo:
            now_s = self._clock.now_s()
            answer = ProbeChunk(nonce=meta.nonce, echo=False, took_s=now_s - self._marks_s.get(source, now_s))
            with contextlib.suppress(Unreachable):  # the asker has gone and needs no answer
                await self._endpoint.send(source, answer, b"\0", priority=Priority.GRADIENT)
        elif (echo := self._echoes.get((source, meta.nonce))) is not None and not echo.done():
            echo.set_result(meta.took_s)


def _carried(arrived: Sequence[tuple[int, float]]) -> float:
    """Return the network card's rate in bytes/s: the highest of the mean rates from the start to each arrival. The mean
    to the last arrival can be too low, since transfers on slow lines may end long after the card is idle."""
    best, nbytes = 0.0, 0
    for more, seconds in sorted(arrived, key=lambda pair: pair[1]):
        nbytes += more
        best = max(best, nbytes / max(seconds, 1e-6))
    return best
