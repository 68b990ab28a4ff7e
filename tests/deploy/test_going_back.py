"""Whole nodes in virtual time whose state is lost: they go back to their disks and end where one process would."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch
from open_gate import OpenGate
from sim_swarm import SimSwarm
from single_process import train

from shoal.deploy.visitor.recover import Recovery
from shoal.peer.data.corpus import load_corpus
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import RunSpec

pytestmark = pytest.mark.sim

torch.set_num_threads(1)  # the models are tiny

STEPS, INTERVAL, LOST_AT = 14, 4, 9


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
            "training": {"steps": STEPS, "microbatches_per_step": 6, "microbatch_size": 2, "s_max": 0},
            "swarm": {"stages": 3, "min_peers": 6, "snapshot_interval_steps": INTERVAL},
            "wire": {"activations": "fp32"},
        },
        RunSpec,
    )


def with_three_peers(spec: RunSpec) -> RunSpec:
    """One for each stage."""
    return msgspec.structs.replace(spec, swarm=msgspec.structs.replace(spec.swarm, min_peers=3))


class Run:
    """A swarm of six that has reached step `LOST_AT`, and the last word on each step."""

    def __init__(self, spec: RunSpec) -> None:
        self.corpus = load_corpus(spec.data, context=spec.model.context)
        self.swarm = SimSwarm(
            spec,
            self.corpus,
            seed=1,
            network=uniform(latency_s=0.02, rate_bytes_per_s=1e7),
            device_flop_per_s=2e7,
        )

    async def begin(self) -> None:
        for number in range(6):
            self.swarm.launch(f"n{number}")
        await self.swarm.until(lambda: max(self.swarm.steps, default=0) >= LOST_AT)

    async def begin_only(self, num_peers: int, version: int = 0) -> None:
        """Until all hold their stage's state, some of them at `version`, and no step is over."""
        for number in range(num_peers):
            self.swarm.launch(f"n{number}")
        async with asyncio.timeout(60.0):
            while len(self.ready()) < num_peers or max(self.ready()) < version:
                self.swarm.raise_failures()
                await asyncio.sleep(0.005)
        assert not self.swarm.steps

    def ready(self) -> list[int]:
        """The versions of those who hold a state."""
        replicas = [node.peer.replica for node in self.swarm.nodes.values()]
        return [replica.version for replica in replicas if replica is not None and replica.is_ready]

    def kill(self, names: list[str]) -> None:
        for name in names:
            self.swarm.world.crash(self.swarm.world.peers[name])
            self.swarm.nodes.pop(name)

    def eras(self) -> set[int]:
        plans = (node.coordination.plan for node in self.swarm.nodes.values())
        return {plan.plan.era for plan in plans if plan is not None}

    def losses(self) -> list[float | None]:
        return [self.swarm.steps[step].loss for step in range(STEPS)]


def check(run_: Run, spec: RunSpec) -> None:
    single = [step.loss for step in train(spec, run_.corpus, steps=STEPS)]
    assert max(abs((a or 0.0) - b) for a, b in zip(run_.losses(), single, strict=True)) < 1e-4
    assert run_.swarm.world.failures == []


def test_a_swarm_that_is_switched_off_goes_on_where_its_disks_are(spec: RunSpec) -> None:
    async def main() -> Run:
        all_ = Run(spec)
        await all_.begin()
        names = list(all_.swarm.nodes)
        all_.kill(names)
        await asyncio.sleep(60.0)
        begun_s = all_.swarm.world.now_s()
        for name in names:
            all_.swarm.launch(name)
        await all_.swarm.until(lambda: all_.eras() == {1})
        assert all_.swarm.world.now_s() - begun_s < 10.0
        for step in [step for step in all_.swarm.steps if step >= LOST_AT - 1]:
            del all_.swarm.steps[step]  # told again
        await all_.swarm.end()
        return all_

    check(run(main()), spec)


def test_a_swarm_that_is_switched_off_before_its_first_step_begins_again(spec: RunSpec) -> None:
    async def main() -> Run:
        all_ = Run(spec)
        await all_.begin_only(6)
        names = list(all_.swarm.nodes)
        all_.kill(names)
        await asyncio.sleep(10.0)
        for name in names:
            all_.swarm.launch(name)
        await all_.swarm.end(timeout_s=600.0)
        assert all_.eras() == {0}
        return all_

    check(run(main()), spec)


def test_a_stage_whose_holder_restarts_before_the_first_step_begins_again(spec: RunSpec) -> None:
    small = with_three_peers(spec)

    async def main() -> Run:
        three = Run(small)
        await three.begin_only(3)
        (name,) = [name for name in three.swarm.nodes if three.swarm.stage_of(name) == 1]
        three.kill([name])
        three.swarm.launch(name)
        await three.swarm.end(timeout_s=600.0)
        assert three.eras() == {0}
        return three

    check(run(main()), small)


def test_a_swarm_that_is_switched_off_in_the_middle_of_its_first_commit_begins_anew(spec: RunSpec) -> None:
    """One stage is past it and knows that the era is under way, the others are not; no coordinator has been told."""
    small = with_three_peers(spec)

    async def main() -> Run:
        three = Run(small)
        await three.begin_only(3, version=1)
        assert 0 in three.ready()
        names = list(three.swarm.nodes)
        three.kill(names)
        await asyncio.sleep(10.0)
        for name in names:
            three.swarm.launch(name)
        await three.swarm.until(lambda: three.eras() == {1})
        await three.swarm.end(timeout_s=600.0)
        return three

    check(run(main()), small)


def test_half_of_a_swarm_goes_on_when_its_owner_says_so_and_the_others_come_back(spec: RunSpec, tmp_path: Path) -> None:
    async def main() -> Run:
        half = Run(spec)
        await half.begin()
        swarm = half.swarm
        dead = [name for name in swarm.nodes if swarm.stage_of(name) == 1]
        dead.append(next(name for name in swarm.nodes if swarm.stage_of(name) == 2))
        half.kill(dead)
        await asyncio.sleep(20.0)
        assert half.eras() == {0}
        port = swarm.world.add_peer("visitor")
        owner = swarm.world.peers["n0"].identity
        recovery = Recovery(
            endpoint=Endpoint(port.identity, port.transport, run=next(iter(swarm.nodes.values())).run, gate=OpenGate()),
            directory=port.directory,
            clock=port.clock,
            owner=owner.peer_id,
            spec=spec,
        )
        begun_s = swarm.world.now_s()
        await port.spawn(recovery.reset(await port.spawn(recovery.look()), owner, tmp_path))
        await swarm.until(lambda: half.eras() == {1})
        assert swarm.world.now_s() - begun_s < 10.0
        for step in [step for step in swarm.steps if step >= LOST_AT - 1]:
            del swarm.steps[step]
        for name in dead:
            swarm.launch(name)
        swarm.world.crash(port)
        await swarm.end()
        return half

    check(run(main()), spec)
