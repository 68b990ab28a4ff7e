"""How other systems use the same devices and links: the real drivers, held to the habits of a collective library.

Three habits, each put around one of a node's ports or into its `Traffic`, and none of them in a driver:

- a device does one thing at a time, and sending is one: it computes nothing while a frame of its own goes out, and
  sends nothing else (`BlockingDevice`). That is what measured iterations of DT-FM's runtime show on links of 0.3 to
  5 Gbit/s: a microbatch costs a stage its compute **plus** the time of both its messages, never the larger of the two,
  and the reduction costs the sum over the mates. Megatron's exchange with a neighbour is synchronous on top of that:
  the sender goes on when the message has arrived, so the latency is paid, too;
- pipelines are fixed: what one replica computes goes to the same replica of the next stage, always (`PairedRouter`);
- so is what is in flight: as many microbatches as there are stages (1F1B), or all (GPipe), and each pipeline makes its
  equal part of the step, however slow it is (`FixedWindow`).
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from shoal.coordinator.cost.placement import Placement
from shoal.deploy.simulate.modelled_swarm import ModelledSwarm, Ports, peer_ids
from shoal.peer.replica.flow import Control, Traffic, Window
from shoal.peer.replica.router import Router
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import CallHandler, Clock, Compute, FrameHandler, JobKind, Payload, Priority, Timed, Transport
from shoal.protocol.sim.world import SimPeer
from shoal.protocol.spec import RunSpec

T = TypeVar("T")

Until = Literal["left", "arrived"]
"""How long a message keeps its sender: until its last byte has left, or has arrived. In a reduction always the former:
a ring has many messages under way."""
Blocking = Literal["sends", "exchanges"]
"""`sends` is a runtime like DT-FM's, `exchanges` one like Megatron's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lockstep:
    """The habits of one system."""

    until: Until = "left"
    pipelines: tuple[tuple[int, ...], ...] | None = None
    """Device indexes, each tuple one pipeline from first stage to last. None: everybody feeds everybody, as ours."""
    in_flight: int | None = None
    """Microbatches of one pipeline between stage 0's forward and its backward. None: all that it makes in a step."""

    @classmethod
    def of(cls, blocking: Blocking, placement: Placement | None) -> "Lockstep":
        """With the i-th member of each stage in one pipeline, if all stages have as many."""
        stages = placement.stages if placement is not None else ()
        even = len({len(stage) for stage in stages}) == 1
        return cls(
            until="left" if blocking == "sends" else "arrived",
            pipelines=tuple(zip(*stages, strict=True)) if even else None,
            in_flight=len(stages) if blocking == "exchanges" else None,
        )

    def next_of(self, device: int) -> int | None:
        """Whom `device` feeds; None: nobody, it ends a pipeline, or has no place in one."""
        for pipeline in self.pipelines or ():
            if device in pipeline[:-1]:
                return pipeline[pipeline.index(device) + 1]
        return None

    def swarm(self) -> Callable[..., ModelledSwarm]:
        """What `ModelledRun.make_swarm` takes."""
        lockstep = self

        class Blocked(ModelledSwarm):
            def ports_of(self, device: int, peer: SimPeer) -> Ports:
                t = self._topology
                peers = peer_ids(self._world, range(t.num_devices))
                devices = {each: number for number, each in peers.items()}
                held_up = BlockingDevice(
                    peer.transport,
                    peer.compute,
                    peer.clock,
                    until=lockstep.until,
                    latency_s=lambda other: float(t.latency_s[device, devices[other]]),
                )
                microbatches = self._spec.training.microbatches_per_step
                traffic = lockstep.traffic(device, peers, microbatches=microbatches)
                return held_up.transport, held_up.compute, traffic

        return Blocked

    def traffic(self, device: int, peers: Mapping[int, PeerID], *, microbatches: int) -> "LockstepTraffic | None":
        """Of one device; `peers` says who each is, `microbatches` are those of a step."""
        if not self.pipelines:
            return None
        partner = self.next_of(device)
        return LockstepTraffic(
            partner=None if partner is None else peers[partner],
            held=math.ceil(microbatches / len(self.pipelines)),
            in_flight=self.in_flight,
        )


class BlockingDevice:
    """One device's ports, of which one is in use at a time, first come first served.

    Args:
        latency_s: one way, from us to another peer.
        sent: told when a message began and ceased to keep the device.
    """

    def __init__(
        self,
        transport: Transport,
        compute: Compute,
        clock: Clock,
        *,
        until: Until,
        latency_s: Callable[[PeerID], float],
        sent: Callable[[float, float], None] = lambda began_s, ended_s: None,
    ) -> None:
        in_use = asyncio.Lock()
        self.compute: Compute = _Compute(compute, in_use)
        self.transport: Transport = _Transport(transport, in_use, clock, until, latency_s, sent)


class _Compute:
    def __init__(self, compute: Compute, in_use: asyncio.Lock) -> None:
        self._compute = compute
        self._in_use = in_use

    async def run(self, kind: JobKind, work: Callable[[], T], *, flop: float) -> Timed[T]:
        async with self._in_use:
            return await self._compute.run(kind, work, flop=flop)

    async def run_on_host(self, work: Callable[[], T]) -> T:
        return await self._compute.run_on_host(work)

    def close(self) -> None:
        self._compute.close()


class _Transport:
    """Calls pass: they are the control plane, which no collective library carries."""

    def __init__(
        self,
        transport: Transport,
        in_use: asyncio.Lock,
        clock: Clock,
        until: Until,
        latency_s: Callable[[PeerID], float],
        sent: Callable[[float, float], None],
    ) -> None:
        self._transport = transport
        self._in_use = in_use
        self._clock = clock
        self._until = until
        self._latency_s = latency_s
        self._sent = sent

    @property
    def peer_id(self) -> PeerID:
        return self._transport.peer_id

    def addresses(self) -> tuple[str, ...]:
        return self._transport.addresses()

    def serve(self, *, on_call: CallHandler, on_frame: FrameHandler) -> None:
        self._transport.serve(on_call=on_call, on_frame=on_frame)

    async def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        await self._transport.introduce(peer, addresses)

    async def call(self, peer: PeerID, request: bytes, *, timeout_s: float) -> bytes:
        return await self._transport.call(peer, request, timeout_s=timeout_s)

    async def send(
        self, peer: PeerID, meta: bytes, payload: Payload, *, priority: Priority, again: bytes | None = None
    ) -> None:
        async with self._in_use:
            began_s = self._clock.now_s()
            await self._transport.send(peer, meta, payload, priority=priority, again=again)
            if self._until == "arrived" and priority != Priority.BULK:
                await asyncio.sleep(self._latency_s(peer))
            self._sent(began_s, self._clock.now_s())

    async def close(self) -> None:
        await self._transport.close()


@dataclass(kw_only=True, slots=True)
class PairedRouter(Router):
    """Everything goes to `partner`, whatever the shares are; nowhere while the plan has not got it."""

    partner: PeerID

    def set_shares(self, shares: Mapping[PeerID, float]) -> None:
        Router.set_shares(self, {peer: share for peer, share in shares.items() if peer == self.partner})


@dataclass(kw_only=True, slots=True)
class FixedWindow(Window):
    """Nothing is measured.

    Args:
        in_flight_max: microbatches between forward and backward.
        held: how many of a step a replica asks for at once, whether it has begun them or not.
    """

    in_flight_max: int
    held: int

    def __post_init__(self) -> None:
        Window.__post_init__(self)  # `super()` does not find the class that `slots` made
        self.size = self.held - 1  # a claim is for one more than fits

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.in_flight_max

    def returned(self, key: object, *, now_s: float, waited_s: float) -> None:
        self.forget(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepTraffic(Traffic):
    """One device's `Traffic` (`peer/replica/flow.py`).

    Args:
        partner: whom it feeds; None: the plan's shares say.
        held: its part of a step's microbatches.
        in_flight: of these between forward and backward; None: all.
    """

    partner: PeerID | None
    held: int
    in_flight: int | None

    def router(self) -> Router:
        return Router() if self.partner is None else PairedRouter(partner=self.partner)

    def window(self, num_stages: int) -> Window:
        return FixedWindow(num_stages=num_stages, in_flight_max=self.in_flight or self.held, held=self.held)

    def control(self, spec: RunSpec) -> Control | None:
        return None
