"""Whole nodes, peer and coordination together, in virtual time: what `shoal demo` does, without processes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from shoal.coordinator.ledger import StepRecord
from shoal.deploy.node import Node
from shoal.deploy.run_record import fetch_spec, seal_spec
from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.single_process import train
from shoal.protocol.invite import Invite
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World
from shoal.protocol.spec import RunSpec, run_id

torch.set_num_threads(1)  # the models are tiny


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the {i % 7}th fish swims {i * i % 31} miles\n" for i in range(3000)))
    return msgspec.convert(
        {
            "seed": 3,
            "model": {"dim": 32, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64, "context": 32},
            "data": {"source": str(path)},
            "optimizer": {"name": "adamw", "learning_rate": 3e-3, "warmup_steps": 2},
            "training": {
                "steps": 30,
                "microbatches_per_step": 6,
                "microbatch_size": 2,
                "s_max": 0,
                "validation_interval_steps": 10,
            },
            "swarm": {"stages": 3, "min_peers": 6, "heartbeat_s": 1.0, "term_s": 5.0},
            "wire": {"activations": "fp32"},
        },
        RunSpec,
    )


@dataclass
class Swarm:
    """Nodes of one run; `n0` is the owner. `steps` is what the coordinators of the day told."""

    spec: RunSpec
    seed: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)
    steps: dict[int, StepRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = World(self.seed, uniform(latency_s=0.02, rate_bytes_per_s=1e7))
        self.corpus: Corpus = load_corpus(self.spec.data, context=self.spec.model.context)

    async def add(self, name: str, *, corpus: bool = True) -> Node:
        """The first is the host; the others find its spec on the directory, as `shoal join` does."""
        peer = self.world.add_peer(name, device_flop_per_s=2e8)
        is_host = not self.nodes
        owner = peer if is_host else self.world.peers["n0"]
        for other in self.world.peers.values():  # in life the invite's addresses and the directory do this
            await other.transport.introduce(peer.peer_id, peer.transport.addresses())
            await peer.transport.introduce(other.peer_id, other.transport.addresses())

        async def start() -> Node:
            if is_host:
                spec, record = self.spec, seal_spec(peer.identity, self.spec)
            else:
                invite = Invite(PROTOCOL_VERSION, run_id(self.spec, owner.peer_id), owner.peer_id, ())
                spec, record = await fetch_spec(peer.directory, invite, timeout_s=20.0)
            node = Node(
                identity=peer.identity,
                transport=peer.transport,
                directory=peer.directory,
                compute=peer.compute,
                clock=peer.clock,
                spec=spec,
                owner=owner.peer_id,
                name=name,
                memory_bytes=1 << 30,
                corpus=self.corpus if corpus else None,
                disk=None,
                rng=self.world.rng(name),
                spec_record=record,
                on_step=lambda step: self.steps.setdefault(step.step, step) and None,
            )
            await node.start()
            return node

        self.nodes[name] = await peer.spawn(start())
        return self.nodes[name]

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 600.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - virtual time: nothing is polled in earnest
                await asyncio.sleep(0.1)

    async def end(self) -> None:
        """Each does what its process does at the end of the run."""

        async def finish(node: Node) -> None:
            await node.wait_done()
            await node.close()

        async with asyncio.timeout(3600):
            await asyncio.gather(*(self.world.peers[name].spawn(finish(node)) for name, node in self.nodes.items()))
        assert self.world.failures == []

    async def leave(self, name: str) -> None:
        node = self.nodes.pop(name)

        async def go() -> None:
            await node.leave()
            await node.close()

        await self.world.peers[name].spawn(go())

    def stage_of(self, name: str) -> int | None:
        replica = self.nodes[name].peer.replica
        return replica.stage if replica and replica.is_ready else None


@pytest.mark.sim
def test_a_swarm_elects_hands_over_trains_like_one_process_and_ends(spec: RunSpec) -> None:
    async def main() -> Swarm:
        swarm = Swarm(spec)
        for number in range(6):
            await swarm.add(f"n{number}")
        await swarm.end()
        return swarm

    swarm = run(main())
    single = [step.loss for step in train(spec, swarm.corpus, steps=30)]
    assert sorted(swarm.steps) == list(range(30))
    losses = [swarm.steps[step].loss for step in range(30)]
    assert max(abs((a or 0.0) - b) for a, b in zip(losses, single, strict=True)) < 1e-4
    assert len({step.term for step in swarm.steps.values()}) > 1, "the role never moved"
    validated = {step.validation_step for step in swarm.steps.values()} - {None}
    assert validated >= {0, 10, 20}  # that of the last version may come after the last step was told
    assert sum(step.duplicates + step.given_up for step in swarm.steps.values()) == 0


@pytest.mark.sim
def test_the_host_leaves_a_newcomer_finds_the_run_and_works(spec: RunSpec) -> None:
    spec = msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, steps=150))

    async def main() -> None:
        swarm = Swarm(spec)
        for number in range(6):
            await swarm.add(f"n{number}")
        await swarm.until(lambda: len(swarm.steps) > 5)
        await swarm.leave("n0")
        await swarm.add("late")
        await swarm.until(lambda: swarm.stage_of("late") is not None)
        seen = len(swarm.steps)
        await swarm.until(lambda: len(swarm.steps) > seen + 5)
        status = await swarm.nodes["late"].status()
        assert {peer.name for peer in status.peers if peer.stage is not None} == {f"n{i}" for i in range(1, 6)} | {
            "late"
        }
        await swarm.end()
        assert max(swarm.steps) == 149

    run(main())


@pytest.mark.sim
def test_a_peer_without_the_text_is_not_at_the_first_stage(spec: RunSpec) -> None:
    async def main() -> None:
        swarm = Swarm(spec)
        for number in range(6):
            await swarm.add(f"n{number}", corpus=number == 0)
        await swarm.until(lambda: all(swarm.stage_of(name) is not None for name in swarm.nodes))
        assert {name: swarm.stage_of(name) for name in swarm.nodes if swarm.stage_of(name) == 0} == {"n0": 0}
        await swarm.end()

    run(main())


@pytest.mark.sim
def test_one_seed_is_one_history(spec: RunSpec) -> None:
    spec = msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, steps=4))

    def trace(seed: int) -> str:
        async def main() -> str:
            swarm = Swarm(spec, seed=seed)
            for number in range(6):
                await swarm.add(f"n{number}")
            await swarm.end()
            return swarm.world.trace_hash()

        return run(main())

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)
