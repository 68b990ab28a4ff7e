"""Measures one peer's contribution: the work of its device, traffic with each other peer (link), memory.

`MeteredCompute` sits between a peer and its device. Nothing here asks another peer.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import psutil

from shoal.deploy.node.node import Node
from shoal.deploy.record.report import Contribution, LimitsNow
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Clock, Compute, JobKind, Timed

T = TypeVar("T")

WINDOW_S = 10.0
WORK_WINDOW_S = 60.0
"""Seconds over which microbatches/s is averaged, as is the run's tokens/s (`coordinator.token_rate`)."""
LINKS_MAX = 16


class MeteredCompute:
    """Passes jobs on to a `Compute`, and adds up device time, FLOP and forwards of microbatches, speed probes left out.

    Args: used_s: returns the seconds of device time that count against the owner's limit on the share of device time;
    None: there is no such limit, so count the time in which jobs ran.
    """

    def __init__(self, compute: Compute, *, used_s: Callable[[], float] | None = None) -> None:
        self._compute = compute
        self._used_s = used_s
        self._jobs_s = 0.0
        self.flop = 0.0
        self.microbatches = 0

    @property
    def busy_s(self) -> float:
        return self._jobs_s if self._used_s is None else self._used_s()

    async def run(self, kind: JobKind, work: Callable[[], T], *, flop: float) -> Timed[T]:
        """Run and count a job. Raises: whatever `work` or the device raises."""
        timed = await self._compute.run(kind, work, flop=flop)
        if kind != "probe":
            self._jobs_s += timed.ended_s - timed.started_s
            self.flop += flop
            self.microbatches += kind == "forward"
        return timed

    async def run_on_host(self, work: Callable[[], T]) -> T:
        return await self._compute.run_on_host(work)

    def close(self) -> None:
        self._compute.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    at_s: float
    busy_s: float
    sending_s: float
    flop: float
    microbatches: int
    traffic: dict[PeerID, tuple[float, float]]


class ContributionMeter:
    """Measures a peer's contribution at each call of `measure`.

    It adds up all traffic since it was made, because `LinkMeter` forgets idle links.

    Args: limits: returns the limits that the owner has set; None: there are none.
    """

    def __init__(
        self,
        node: Node,
        compute: MeteredCompute,
        clock: Clock,
        *,
        name: str,
        limits: Callable[[], LimitsNow] | None = None,
    ) -> None:
        self._node, self._compute, self._clock, self._name, self._limits = node, compute, clock, name, limits
        self._started_s = clock.now_s()
        self._samples: deque[_Sample] = deque([self._sample()])
        self._sent_total = self._received_total = 0.0
        self._process = psutil.Process()

    def measure(self) -> Contribution:
        now, last = self._sample(), self._samples[-1]
        for _, sent, received in _moved(last, now):
            self._sent_total += sent
            self._received_total += received
        self._samples.append(now)
        while len(self._samples) > 2 and self._samples[1].at_s <= now.at_s - WORK_WINDOW_S:
            self._samples.popleft()
        before = (sample for sample in reversed(self._samples) if sample.at_s <= now.at_s - WINDOW_S)
        first = next(before, self._samples[0])
        seconds = max(now.at_s - first.at_s, 1e-9)
        minute = self._samples[0]
        replica = self._node.peer.replica
        return Contribution(
            peer=self._node.peer_id,
            name=self._name,
            stage=replica.stage if replica else None,
            synced=replica.is_ready if replica else False,
            busy=min(1.0, (now.busy_s - first.busy_s) / seconds),
            sending=min(1.0, (now.sending_s - first.sending_s) / seconds),
            waiting=replica.core.pipeline.num_waiting if replica else 0,
            flop_per_s=(now.flop - first.flop) / seconds,
            microbatches_per_s=(now.microbatches - minute.microbatches) / max(now.at_s - minute.at_s, 1e-9),
            flop_total=now.flop,
            microbatches_total=now.microbatches,
            sent_bytes_total=self._sent_total,
            received_bytes_total=self._received_total,
            links=_busiest(_moved(first, now), seconds),
            memory_bytes=self._process.memory_info().rss,
            uptime_s=now.at_s - self._started_s,
            limits=self._what_limits(),
        )

    def _what_limits(self) -> LimitsNow | None:
        limits = self._limits() if self._limits else None
        if self._node.peer.pausing.is_paused and not (limits and limits.paused):
            return LimitsNow(paused=True, caps=limits.caps if limits else ())
        return limits

    def _sample(self) -> _Sample:
        compute, links = self._compute, self._node.links
        return _Sample(
            at_s=self._clock.now_s(),
            busy_s=compute.busy_s,
            sending_s=links.sending_s,
            flop=compute.flop,
            microbatches=compute.microbatches,
            traffic=links.traffic(),
        )


def _moved(before: _Sample, now: _Sample) -> Iterator[tuple[PeerID, float, float]]:
    """Yield (peer, bytes sent to it, bytes received from it) between two samples. A count that fell restarted at 0."""
    for peer, counts in now.traffic.items():
        earlier = before.traffic.get(peer, (0.0, 0.0))
        sent, received = (new - old if new >= old else new for old, new in zip(earlier, counts, strict=True))
        yield peer, sent, received


def _busiest(moved: Iterable[tuple[PeerID, float, float]], seconds: float) -> tuple[tuple[PeerID, float, float], ...]:
    rates = [(peer, sent / seconds, received / seconds) for peer, sent, received in moved if sent or received]
    return tuple(sorted(rates, key=lambda rate: (-rate[1] - rate[2], rate[0]))[:LINKS_MAX])
