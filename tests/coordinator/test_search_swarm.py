"""Swarms whose coordinators search: what is planned at once, what comes behind it, and what never comes."""

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Layout, SwarmSnapshot
from shoal.coordinator.allocate.live_allocator import EvolutionaryAllocator
from shoal.coordinator.search_schedule import SETTLE_HEARTBEATS
from shoal.protocol.messages import LinkReport
from shoal.protocol.plan import Plan, Stage


@dataclass
class Mover(GreedyAllocator):
    """Finds that the last member of the largest stage should be in the smallest, as long as that evens them out."""

    previous: list[Plan | None] = field(default_factory=list)

    def prepare(self) -> None:
        pass

    def search(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        self.previous.append(previous)
        if previous is None:
            return None, "no first layout"
        stages = list(previous.stages)
        sizes = [len(stage.peers) for stage in stages]
        rich, poor = sizes.index(max(sizes)), sizes.index(min(sizes))
        if sizes[rich] < sizes[poor] + 2:
            return None, "stays"
        member = stages[rich].members[-1]
        stages[rich] = with_members(stages[rich], stages[rich].members[:-1])
        stages[poor] = with_members(stages[poor], (*stages[poor].members, member))
        return Layout(stages=tuple(stages), spares=previous.spares, reason="search: 1 move"), "search: 1 move"


def with_members(stage: Stage, members) -> Stage:
    return msgspec.structs.replace(stage, members=members)


async def commit(swarm) -> None:
    """Somebody commits a step, so that the era is under way and no plan is fresh."""
    for peer in swarm.alive():
        peer.version = 1
    await swarm.until(lambda: swarm.agreed() and not swarm.coordinator.plan.not_started, within_s=10.0)


def sizes(swarm) -> list[int]:
    return sorted(len(stage.peers) for stage in swarm.coordinator.plan.stages)


def test_a_loss_is_repaired_at_once_and_improved_behind(run_swarm):
    allocator = Mover()

    async def scenario(swarm):
        await swarm.begin(9)
        await commit(swarm)
        stage = next(stage for stage in swarm.coordinator.plan.stages if swarm.coordinator.peer_id not in stage.peers)
        for peer in [peer for peer in swarm.alive() if peer.peer_id in stage.peers][1:]:
            swarm.world.crash(peer.port)
        fallen_s = swarm.world.now_s()
        await swarm.until(lambda: sizes(swarm) == [1, 3, 3], within_s=5.0)
        repaired_s = swarm.world.now_s()
        await swarm.until(lambda: swarm.agreed() and sizes(swarm) == [2, 2, 3], within_s=30.0)
        assert swarm.world.now_s() - repaired_s < SETTLE_HEARTBEATS / 2
        assert repaired_s - fallen_s < 3.0
        assert swarm.coordinator.plan.reason == "search: 1 move"
        await asyncio.sleep(60.0)
        assert [plan.reason for plan in swarm.chain()].count("search: 1 move") == 1

    swarm = run_swarm(scenario, min_peers=9, allocator=allocator)
    assert allocator.previous[0] is None
    assert sum(peer.coordination.num_alarms for peer in swarm.peers.values()) == 0


def test_who_breaks_while_searching_breaks_nothing_else(run_swarm):
    class Broken(Mover):
        def search(self, snapshot, previous, *, seed):
            raise ZeroDivisionError

    async def scenario(swarm):
        await swarm.begin(6)
        await commit(swarm)
        await swarm.add("late")
        await swarm.until(lambda: swarm.agreed() and "late" in names(swarm), within_s=5.0)

    swarm = run_swarm(scenario, min_peers=6, allocator=Broken())
    assert swarm.peers["p0"].coordination.num_alarms >= 1, "the owner's log says so"


def names(swarm) -> set[str]:
    members = swarm.coordinator.plan.members
    return {peer.name for peer in swarm.alive() if peer.peer_id in members}


@pytest.mark.sim
def test_neighbours_measurements_move_a_swarm_once_and_noise_no_more(run_swarm):
    """Three cities, of which the first plan knows nothing; then every heartbeat tells of links with 10 % noise."""

    async def scenario(swarm):
        rng = swarm.world.rng("noise")

        def tell(peer):
            usual = peer.heartbeat
            told = iter(range(1 << 30))

            def heartbeat():
                others = [other for other in swarm.alive() if other is not peer]
                chosen = [others[(4 * next(told) + index) % len(others)] for index in range(4)]
                links = tuple(
                    LinkReport(
                        peer=other.peer_id,
                        round_trip_s=(0.01 if near(peer, other) else 0.1) * rng.uniform(0.9, 1.1),
                        bytes_per_s=(1e8 if near(peer, other) else 3e5) * rng.uniform(0.9, 1.1),
                        received_bytes_per_s=(1e8 if near(peer, other) else 3e5) * rng.uniform(0.9, 1.1),
                        num_probes=3,
                    )
                    for other in chosen
                )
                return msgspec.structs.replace(usual(), links=links)

            peer.coordination._heartbeat = heartbeat

        def near(a, b):
            return int(a.name[1:]) // 4 == int(b.name[1:]) // 4

        for number in range(12):
            await swarm.add(f"p{number}", flop_per_s=2e10)
        await swarm.until(lambda: all(peer.order >= (1, 1) for peer in swarm.alive()), within_s=10.0)
        await commit(swarm)
        for peer in swarm.alive():
            tell(peer)
        await asyncio.sleep(80.0)
        searched = [plan.reason for plan in swarm.chain() if plan.reason.startswith("search")]
        assert searched, "the cities were found"
        await asyncio.sleep(120.0)
        again = [plan.reason for plan in swarm.chain() if plan.reason.startswith("search")]
        assert again == searched

    swarm = run_swarm(scenario, min_peers=12, allocator=EvolutionaryAllocator(), steps=100_000)
    assert sum(peer.coordination.num_alarms for peer in swarm.peers.values()) == 0
