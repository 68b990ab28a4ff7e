"""Measures what this peer can give: arithmetic on the run's own layer shape, memory, and the way to other peers."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, MutableMapping, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.peer.arithmetic import Arithmetic
from shoal.peer.model.flop import forward_flop
from shoal.peer.vectors import VECTORS, Vectors
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import BULK_CHUNK_BYTES
from shoal.protocol.messages import Advert, LinkReport, Ping, ProbeChunk
from shoal.protocol.ports import Clock, Compute, Payload, Priority
from shoal.protocol.spec import RunSpec

_REPEATS = 5
_PINGS = 3
_ECHO_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProbe:
    """`flop_per_s`: forward of one decoder layer in fp32 at the run's shape, median of a few."""

    device: str
    flop_per_s: float
    memory_bytes: int

    def advert(self, name: str, bytes_per_s: float, addresses: tuple[str, ...], *, has_data: bool) -> Advert:
        """What a peer with this device claims. Args: bytes_per_s: of its best link, 0 if none is known."""
        return Advert(
            name=name,
            device=self.device,
            flop_per_s=self.flop_per_s,
            memory_bytes=self.memory_bytes,
            upload_bytes_per_s=bytes_per_s,
            download_bytes_per_s=bytes_per_s,
            addresses=addresses,
            has_data=has_data,
        )


async def probe_device(
    spec: RunSpec, compute: Compute, arithmetic: Arithmetic, *, memory_bytes: int | None = None
) -> DeviceProbe:
    """Time one decoder layer on `compute`. Takes a few forwards, after one that is not counted.

    Args:
        memory_bytes: how much memory to claim; None: what is free on the device now.
    """
    forward = arithmetic.probe_job()
    flop = forward_flop(spec.model, "layers.0", spec.training.microbatch_size * spec.model.context)
    seconds = []
    for _ in range(1 + _REPEATS):
        timed = await compute.run("probe", forward, flop=flop)
        seconds.append(timed.ended_s - timed.started_s)
    return DeviceProbe(
        device=arithmetic.device_name,
        flop_per_s=flop / max(median(seconds[1:]), 1e-9),
        memory_bytes=arithmetic.free_bytes() if memory_bytes is None else memory_bytes,
    )


PROBES_MAX = 24
"""Links that a newcomer measures before it has used them. In large stages traffic shows the others."""


class LinkProbe:
    """Measures round trip and rate towards one peer at a time; answers others who do."""

    def __init__(self, *, endpoint: Endpoint, clock: Clock, vectors: Vectors = VECTORS) -> None:
        self._vectors = vectors
        self._endpoint = endpoint
        self._clock = clock
        self._nonces = itertools.count()
        self._echoes: dict[tuple[PeerID, int], asyncio.Event] = {}
        endpoint.on(Ping, self._on_ping)
        endpoint.on_frame(ProbeChunk, self._on_chunk)

    async def measure(self, peer: PeerID, *, payload_bytes: int = BULK_CHUNK_BYTES) -> LinkReport:
        """A few pings, then `payload_bytes` and their echo: rate = bytes / (time - round trip).

        Raises: Unreachable, Refused, RemoteError.
        """
        round_trips = []
        for _ in range(_PINGS):
            sent_s = self._clock.now_s()
            await self._endpoint.ask(peer, Ping(), Ping)
            round_trips.append(self._clock.now_s() - sent_s)
        round_trip_s = min(round_trips)
        nonce = next(self._nonces)
        self._echoes[peer, nonce] = event = asyncio.Event()
        try:
            # The stream's first frame pays for opening it; a small one goes ahead.
            await self._endpoint.send(peer, ProbeChunk(nonce=-1, echo=False), b"\0", priority=Priority.BULK)
            sent_s = self._clock.now_s()
            meta = ProbeChunk(nonce=nonce, echo=True)
            payload = self._vectors.payload_of(self._vectors.zeros(payload_bytes // 4))
            await self._endpoint.send(peer, meta, payload, priority=Priority.BULK)
            async with asyncio.timeout(_ECHO_TIMEOUT_S):
                await event.wait()
        except TimeoutError as error:
            raise Unreachable(peer, "a probe was not echoed") from error
        finally:
            del self._echoes[peer, nonce]
        elapsed_s = self._clock.now_s() - sent_s
        rate = payload_bytes / max(elapsed_s - round_trip_s, 1e-6)
        return LinkReport(peer=peer, round_trip_s=round_trip_s, bytes_per_s=rate)

    async def measure_some(
        self, audience: Sequence[PeerID], *, turn: int, known: MutableMapping[PeerID, LinkReport]
    ) -> AsyncIterator[LinkReport]:
        """Of those in `audience` that are not `known`, and note them there.

        Args: turn: each peer has another one, so that those of a large stage look at different ones.
        """
        begin = turn * PROBES_MAX % max(1, len(audience))
        chosen = [*audience[begin:], *audience[:begin]][:PROBES_MAX]
        for peer in [p for p in chosen if p not in known]:
            report = await self.measure_if_possible(peer)
            if report:
                known[peer] = report
                yield report

    async def measure_if_possible(self, peer: PeerID) -> LinkReport | None:
        try:
            return await self.measure(peer)
        except (Unreachable, Refused, RemoteError):
            return None

    async def _on_ping(self, source: PeerID, message: Ping) -> Ping:
        return message

    async def _on_chunk(self, source: PeerID, meta: ProbeChunk, payload: Payload) -> None:
        if meta.echo:
            answer = ProbeChunk(nonce=meta.nonce, echo=False)
            with contextlib.suppress(Unreachable):  # who asked has gone: nobody misses the answer
                await self._endpoint.send(source, answer, b"\0", priority=Priority.GRADIENT)
        elif (event := self._echoes.get((source, meta.nonce))) is not None:
            event.set()
