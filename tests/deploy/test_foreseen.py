"""What a swarm foresees of its layout beside what comes of it, end to end: real peers in virtual time, one of which
becomes four times slower while it takes part."""

import asyncio
from dataclasses import dataclass, field

import pytest
import torch
from sim_swarm import SimSwarm
from tiny_run import tiny_corpus, tiny_spec

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Layout, SwarmSnapshot
from shoal.coordinator.calibration import SLOW
from shoal.protocol.messages import SwarmStatus
from shoal.protocol.plan import Plan
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

torch.set_num_threads(1)  # the models are tiny

TERM_S = 60.0
DEVICE_FLOP_PER_S = 2e7
SLOWER = 4.0


@dataclass
class Watching(GreedyAllocator):
    """Finds nothing better, and keeps what it was asked."""

    snapshots: list[tuple[float, SwarmSnapshot]] = field(default_factory=list)

    def prepare(self) -> None:
        """Nothing is compiled."""

    def search(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        self.snapshots.append((asyncio.get_running_loop().time(), snapshot))
        return None, "stays"


@dataclass
class Watched:
    slow: str = ""
    slow_s: float = 0.0
    before: SwarmStatus | None = None
    after: SwarmStatus | None = None
    allocator: Watching = field(default_factory=Watching)


@pytest.fixture(scope="module")
def watched() -> Watched:
    seen = Watched()

    async def main() -> None:
        swarm = SimSwarm(
            tiny_spec(steps=10_000, peers=4, stages=2, s_max=1, term_s=TERM_S),
            tiny_corpus(),
            seed=3,
            network=uniform(latency_s=0.005, rate_bytes_per_s=1e7),
            device_flop_per_s=DEVICE_FLOP_PER_S,
            allocator=seen.allocator,
        )
        for number in range(4):
            await swarm.add(f"n{number}")

        async def status() -> SwarmStatus:
            return await swarm.world.peers["n0"].spawn(swarm.nodes["n0"].status())

        await asyncio.sleep(2.0 * TERM_S)
        seen.before = await status()
        slow = next(name for name in swarm.running if swarm.stage_of(name) == 1)
        seen.slow = swarm.nodes[slow].endpoint.peer_id
        seen.slow_s = asyncio.get_running_loop().time()
        swarm.world.peers[slow].compute.device_flop_per_s /= SLOWER
        await asyncio.sleep(2.0 * TERM_S)
        seen.after = await status()

    run(main())
    return seen


def test_a_quiet_run_comes_as_foreseen(watched: Watched) -> None:
    assert watched.before is not None
    found = watched.before.comparison
    assert found is not None
    assert 0.8 < found.seen_tokens_per_s / found.foreseen_tokens_per_s < 1.2
    assert found.bound == "compute"
    assert found.sentence.startswith(f"foreseen {found.today_tokens_per_s:,.0f} tokens/s, seen ")
    assert found.sentence == watched.before.plans[-1].outcome


def test_a_device_that_slows_down_is_seen_within_two_terms(watched: Watched) -> None:
    assert watched.after is not None
    found = watched.after.comparison
    assert found is not None
    assert found.seen_tokens_per_s < SLOW * found.foreseen_tokens_per_s
    assert (found.bound, found.stage) == ("compute", 1), "the figures say which stage it is"
    assert found.today_tokens_per_s < SLOW * found.foreseen_tokens_per_s


def test_a_search_is_made_that_knows_it(watched: Watched) -> None:
    later = [snapshot for at_s, snapshot in watched.allocator.snapshots if at_s > watched.slow_s]
    speeds = {peer.peer: peer.flop_per_s for peer in later[-1].peers}
    usual = max(speeds.values())
    assert speeds[watched.slow] == pytest.approx(usual / SLOWER, rel=0.1)
    assert all(speed > 0.9 * usual for peer, speed in speeds.items() if peer != watched.slow)
