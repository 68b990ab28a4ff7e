"""How long a peer's event loop stands still: a replica of 200 M parameters trains on a CPU beside one mate.

    python tests/bench/loop_gap.py [--million 200] [--steps 4] [--json FILE]

A task wakes up every two milliseconds and notes how late it was. Calls, heartbeats and frames of a peer are as late, so
the longest gap says whether a neighbour could take it for dead. Both ends of the group's traffic are in this process,
on uvloop, without a network in between: what one of them does on its loop holds up the other's, too. Only the replica
that is measured holds a state and computes; its mate is hollow: it speaks the same messages, its gradients are zero,
and it says of each version what the replica says. So the whole fits into 12 GB.

The clock of a machine that does other work shows that work, too: run it on two idle cores.
"""

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from open_gate import OpenGate
from tiny_run import tiny_corpus

from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.driver import PeerDriver
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.links.meter import LinkMeter
from shoal.peer.model.flop import JobFlop
from shoal.peer.model.layout import num_parameters
from shoal.peer.model.mixture import ExpertLoads
from shoal.peer.model.state import LayerState, StageState
from shoal.peer.pipeline.microbatch import Indices, Microbatch
from shoal.peer.pipeline.stage import StageRuntime
from shoal.peer.presence.own_word import Claims
from shoal.peer.presence.ports import Ports
from shoal.peer.presence.reports import Watcher
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.live.compute import ThreadCompute
from shoal.protocol.live.loop import LoopClock, run
from shoal.protocol.messages import CommitReport
from shoal.protocol.plan import Member, Plan, Stage, sign_plan
from shoal.protocol.ports import CallHandler, FrameHandler, Payload, Priority
from shoal.protocol.spec import RunSpec, run_id
from shoal.protocol.wire_format import WireFormat

TICK_S = 0.002
LAYER_MILLIONS = 51.4
WARM_UP_STEPS = 1
HOLLOW_S = 1.0
"""What the mate takes for a microbatch, about as long as the replica."""
CPU = torch.device("cpu")


def spec_of(millions: float, steps: int) -> RunSpec:
    return msgspec.convert(
        {
            "name": "loop-gap",
            "model": {
                "dim": 2048,
                "num_layers": max(1, round(millions / LAYER_MILLIONS)),
                "num_heads": 16,
                "num_kv_heads": 16,
                "ffn_dim": 5632,
                "context": 16,
            },
            "data": {"source": "made up"},
            "optimizer": {"name": "sgd", "learning_rate": 1e-4, "warmup_steps": 1},
            "training": {
                "steps": steps,
                "microbatches_per_step": 8,
                "microbatch_size": 1,
                "s_max": 0,
                "validation_interval_steps": 0,
            },
            "swarm": {"stages": 1, "min_peers": 2, "snapshot_interval_steps": 0},
        },
        RunSpec,
    )


class Loopback:
    """A transport between two peers of this process. A frame is copied once, as from a socket."""

    def __init__(self, peer_id: PeerID, others: "dict[PeerID, Loopback]") -> None:
        self.peer_id = peer_id
        self._others = others
        others[peer_id] = self
        self._on_call: CallHandler
        self._on_frame: FrameHandler
        self._queues: dict[PeerID, asyncio.Queue[tuple[bytes, Payload]]] = {}
        self._workers: list[asyncio.Task[None]] = []

    def addresses(self) -> tuple[str, ...]:
        return (f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer_id}",)

    def serve(self, *, on_call: CallHandler, on_frame: FrameHandler) -> None:
        self._on_call, self._on_frame = on_call, on_frame

    async def introduce(self, peer: PeerID, addresses: object) -> None:
        pass

    async def call(self, peer: PeerID, request: bytes, *, timeout_s: float) -> bytes:
        return await self._others[peer]._on_call(self.peer_id, request)

    async def send(
        self, peer: PeerID, meta: bytes, payload: Payload, *, priority: Priority, again: bytes | None = None
    ) -> None:
        await self._others[peer]._queue_of(self.peer_id).put((meta, bytearray(payload)))

    def _queue_of(self, source: PeerID) -> "asyncio.Queue[tuple[bytes, Payload]]":
        if source not in self._queues:
            self._queues[source] = asyncio.Queue(maxsize=4)
            self._workers.append(asyncio.create_task(self._handle(source), name="frames"))
        return self._queues[source]

    async def _handle(self, source: PeerID) -> None:
        while True:
            await self._on_frame(source, *await self._queues[source].get())

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()


class Digests:
    """What the replica has said of its versions, for the mate that only repeats it."""

    def __init__(self) -> None:
        self._said: dict[int, str] = {}
        self._changed = threading.Condition()

    def say(self, version: int, digest: str) -> None:
        with self._changed:
            self._said[version] = digest
            self._changed.notify_all()

    def of(self, version: int) -> str:
        with self._changed:
            self._changed.wait_for(lambda: version in self._said)
            return self._said[version]


class Replica(StageRuntime):
    """The one that is measured."""

    digests: Digests

    def load(self, state: StageState) -> None:
        super().load(state)
        self.digests.say(state.version, "")

    def step(self, mean_gradient_N: Tensor) -> tuple[StageState, str, int]:
        state, digest, skipped = super().step(mean_gradient_N)
        self.digests.say(state.version, digest)
        return state, digest, skipped


class Hollow:
    """A `StageShard` of a mate that holds nothing but a gradient of zeros."""

    def __init__(self, spec: RunSpec, digests: Digests) -> None:
        self.spec, self.device, self._digests = spec, CPU, digests
        self.vectors = Vectors(CPU)
        self.keys = stage_layer_keys(spec.model, 0, spec.model.num_layers)
        self.num_parameters = num_parameters(spec.model)
        self.step_flop, self.flop = 0.0, JobFlop(forward=0.0, backward=0.0, loss=0.0)
        self.expert_loads = ExpertLoads()
        self.state: StageState | None = None
        self.remembers, self.is_stepping = True, False
        self._sum_N = torch.zeros(self.num_parameters)

    @property
    def version(self) -> int:
        assert self.state is not None
        return self.state.version

    def initial_state(self) -> StageState:
        self._digests.of(0)  # or it would make the first step alone
        nothing = torch.zeros(0)
        layer = LayerState(param_N=nothing, moment1_N=nothing, moment2_N=nothing)
        return StageState(version=0, layers=dict.fromkeys(self.keys, layer))

    def travel_as(self, leaving: WireFormat, coming: WireFormat) -> None:
        pass

    def load(self, state: StageState) -> None:
        self.state = state

    def step(self, mean_gradient_N: Tensor) -> tuple[StageState, str, int]:
        assert self.state is not None
        self.state = StageState(version=self.version + 1, layers=self.state.layers)
        return self.state, self._digests.of(self.version), 0

    def contribute(self, microbatch: Microbatch, *, held_out: bool = False) -> bool:
        return False

    def gradient_sum(self, step: int, indices: Indices | None = None) -> Callable[[], Tensor]:
        return lambda: self._sum_N

    def forget(self, microbatch: Microbatch) -> None:
        pass

    def loss(self, microbatch: Microbatch, payload: object, *, contributes: bool = True) -> tuple[float, None]:
        time.sleep(HOLLOW_S)
        return 0.0, None


class IdleArithmetic(Arithmetic):
    def __init__(self, spec: RunSpec, digests: Digests, *, is_hollow: bool) -> None:
        super().__init__(spec, tiny_corpus(), CPU)
        self._digests, self._is_hollow = digests, is_hollow

    def probe_job(self) -> Callable[[], None]:
        return lambda: None

    def runtime(self, first_layer: int, last_layer: int) -> Any:
        if self._is_hollow:
            return Hollow(self._spec, self._digests)
        replica = Replica(self._spec, first_layer, last_layer, corpus=self._corpus, device=CPU)
        replica.digests = self._digests
        return replica


async def measure(spec: RunSpec) -> tuple[list[float], float]:
    """(gaps of the loop in seconds, longest first; seconds a step)."""
    digests, transports, clock = Digests(), dict[PeerID, Loopback](), LoopClock()
    identities = [Identity.generate() for _ in range(2)]
    name = run_id(spec, identities[0].peer_id)
    committed: list[tuple[int, float]] = []
    warm, over = asyncio.Event(), asyncio.Event()
    drivers, computes = [], []

    def on_commit(report: CommitReport) -> None:
        committed.append((report.step, clock.now_s()))
        if report.step >= WARM_UP_STEPS - 1:
            warm.set()
        if report.step == spec.training.steps - 1:
            over.set()

    for number, identity in enumerate(identities):
        transport = Loopback(identity.peer_id, transports)
        compute = ThreadCompute(initializer=lambda: torch.set_num_threads(1))
        computes.append(compute)
        drivers.append(
            PeerDriver(
                Ports(
                    endpoint=Endpoint(identity, transport, run=name, gate=OpenGate()),
                    compute=compute,
                    clock=clock,
                    meter=LinkMeter(clock),
                ),
                spec=spec,
                arithmetic=IdleArithmetic(spec, digests, is_hollow=number > 0),
                claims=Claims(memory_bytes=1 << 34),
                watcher=Watcher(on_commit=on_commit),
            )
        )
    for driver in drivers:
        await driver.start()
    members = tuple(Member(identity.peer_id, 1.0, 1.0, 1) for identity in identities)
    plan = Plan(
        run=name,
        term=1,
        sequence=1,
        previous="",
        coordinator=identities[0].peer_id,
        stages=(Stage(0, spec.model.num_layers, members),),
        spares=(),
        not_started=True,
    )
    signed = sign_plan(identities[0], plan)
    gaps: list[float] = []

    async def watch() -> None:
        await warm.wait()
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(TICK_S)
            gaps.append(time.monotonic() - before_s - TICK_S)

    watching = asyncio.create_task(watch())
    for driver in drivers:
        driver.obey(signed)
    failed = [driver.failure for driver in drivers]
    ended = asyncio.create_task(over.wait())
    await asyncio.wait([ended, *failed], return_when=asyncio.FIRST_COMPLETED)
    for failure in failed:
        if failure.done():
            failure.result()
    watching.cancel()
    for driver in drivers:
        await driver.close()
    for transport in transports.values():
        await transport.close()
    for compute in computes:
        compute.close()
    times_s = sorted(dict(committed).values())
    return sorted(gaps, reverse=True), (times_s[-1] - times_s[0]) / max(1, len(times_s) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=200.0, help="parameters of the stage")
    parser.add_argument("--steps", type=int, default=4, help=f"of which the first {WARM_UP_STEPS} are not looked at")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spec = spec_of(arguments.million, arguments.steps)
    gaps, step_s = run(measure(spec))
    figures = {
        "parameters": num_parameters(spec.model),
        "steps": arguments.steps - WARM_UP_STEPS,
        "step_s": round(step_s, 2),
        "longest_ms": round(1e3 * gaps[0], 1),
        "gaps_over_50_ms": sum(gap > 0.05 for gap in gaps),
        "ten_longest_ms": [round(1e3 * gap, 1) for gap in gaps[:10]],
        "median_ms": round(1e3 * statistics.median(gaps), 2),
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures) + "\n")
    print(f"{figures['parameters'] / 1e6:.0f} M parameters, {figures['steps']} commits, {step_s:.1f} s a step")
    print(f"the loop's longest gap {figures['longest_ms']} ms (goal 50), {figures['gaps_over_50_ms']} over 50 ms")
    print(f"the ten longest in ms: {', '.join(map(str, figures['ten_longest_ms']))}; median {figures['median_ms']}")


if __name__ == "__main__":
    main()
