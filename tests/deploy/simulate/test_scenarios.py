"""Named disasters, each with its figure. Every invariant of a campaign holds in them, too."""

import asyncio
from collections.abc import Sequence

import pytest
from campaign_run import run_trial
from sightings import Injected
from sim_faults import Fault, FaultKind
from sim_swarm import SimSwarm
from tiny_run import tiny_spec
from trial import Trial
from witness import RunVerdict, RunWitness

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.peer.membership.replica_driver import Replica
from shoal.peer.pipeline.microbatch import indices_from
from shoal.protocol.sim.network import LinkSpec

pytestmark = pytest.mark.sim


def scenario(
    *,
    peers: int,
    stages: int,
    steps: int,
    schedule: Sequence[Fault] = (),
    microbatches: int = 6,
    device_flop_per_s: float = 5e6,
    seed: int = 1,
    term_s: float = 60.0,
) -> Trial:
    return Trial(
        seed=seed,
        spec=tiny_spec(steps=steps, peers=peers, stages=stages, microbatches=microbatches, term_s=term_s),
        link=LinkSpec(latency_s=0.03, rate_bytes_per_s=1e7, jitter_s=0.005),
        device_flop_per_s=device_flop_per_s,
        speeds={f"n{number}": 1.0 for number in range(peers)},
        schedule=tuple(schedule),
    )


def passed(witness: RunWitness) -> RunVerdict:
    verdict = witness.verdict
    assert verdict.broken is None, f"{verdict.broken}\n{verdict.detail}\n" + "\n".join(verdict.last_events)
    return verdict


@pytest.mark.parametrize(
    ("peers", "side", "kind", "steps"),
    [
        (6, ("n0", "n1", "n2"), FaultKind.CUT, 32),
        (5, ("n0", "n1", "n2"), FaultKind.CUT, 32),
        (6, ("n0", "n2", "n4"), FaultKind.ONE_WAY_CUT, 32),
    ],
    ids=["50/50", "60/40", "one-way"],
)
def test_a_cut_of_two_minutes_makes_no_second_history(
    peers: int, side: tuple[str, ...], kind: FaultKind, steps: int
) -> None:
    others = tuple(f"n{number}" for number in range(peers) if f"n{number}" not in side)
    cut = Fault(kind=kind, at_s=5.0, lasts_s=120.0, whom=side, others=others)
    verdict = passed(run_trial(scenario(peers=peers, stages=2, steps=steps, schedule=[cut])))
    assert verdict.again_s <= 30.0


def test_the_coordinator_dies_in_mid_run_and_others_go_on() -> None:
    replaced_s: list[float] = []

    async def script(swarm: SimSwarm, witness: RunWitness) -> None:
        for _ in range(2):
            await asyncio.sleep(10.0)
            old = next(name for name in swarm.running if name in swarm.nodes and swarm.nodes[name].is_coordinator)
            fault = Fault(kind=FaultKind.CRASH, at_s=0.0, lasts_s=None, whom=(old,))
            began_s = swarm.world.now_s()
            witness.see(Injected(at_s=began_s, fault=fault))
            swarm.world.crash(swarm.world.peers[old])
            alive = [name for name in swarm.running if name != old]
            await swarm.until(lambda names=alive: any(swarm.nodes[n].is_coordinator for n in names))
            replaced_s.append(swarm.world.now_s() - began_s)
            await asyncio.sleep(15.0)
            swarm.launch(old)
        await asyncio.sleep(10.0)

    verdict = passed(run_trial(scenario(peers=6, stages=2, steps=30), script))
    assert len(replaced_s) == 2
    assert max(replaced_s) <= 8.0
    assert max(verdict.recoveries_s) <= 20.0


def test_all_replicas_of_a_stage_die_and_it_comes_back_from_outside() -> None:
    lost_steps: list[int] = []

    async def script(swarm: SimSwarm, witness: RunWitness) -> None:
        interval = swarm.spec.swarm.snapshot_interval_steps
        await swarm.until(lambda: len(witness.steps_s) > interval + 5)
        before = max(step for _, stage, step in witness.commits if stage == 1) + 1
        for name in [name for name in sorted(swarm.nodes) if swarm.stage_of(name) == 1]:
            fault = Fault(kind=FaultKind.CRASH, at_s=0.0, lasts_s=None, whom=(name,))
            witness.see(Injected(at_s=swarm.world.now_s(), fault=fault))
            swarm.world.crash(swarm.world.peers[name])
        await swarm.until(lambda: any(era == 1 for era, _, _ in witness.commits))
        lost_steps.append(before - min(step for era, _, step in witness.commits if era == 1))

    trial = scenario(peers=7, stages=3, steps=20, device_flop_per_s=8e6)
    verdict = passed(run_trial(trial, script))
    assert lost_steps[0] <= 10 + 1
    assert max(verdict.recoveries_s) <= 60.0


def steps_per_s(witness: RunWitness, from_s: float, to_s: float) -> float:
    return sum(from_s < at_s <= to_s for at_s in witness.steps_s) / (to_s - from_s)


def brought(witness: RunWitness, swarm: SimSwarm, name: str, from_s: float, to_s: float) -> int:
    """Microbatches that `name` brought to the rounds of its stage."""
    peer, M = swarm.world.peers[name].peer_id, swarm.spec.training.microbatches_per_step
    newest = {(event.start.stage, event.start.step): event for event in witness.rounds if from_s < event.at_s <= to_s}
    members = (member for event in newest.values() for member in event.start.members if member.peer == peer)
    return sum(indices_from(member.indices, count=M).bit_count() for member in members)


WINDOW_S = 60.0
SETTLES_S = 30.0
LEADER_SETTLES_S = 70.0
"""A slow leader is noticed when its work does not come, and once more when it does not make its step."""


def leads(replica: Replica | None, stage: int) -> bool:
    return replica is not None and replica.stage == stage and replica.core.group.is_leader


def rate_with(stage: int, *, leading: bool, slowdown: float | None) -> tuple[float, int, bool]:
    """Play six peers on two stages, one of which is `slowdown` times slower, or (None) dead. Args: leading: that peer
    is the leader of `stage`; False: another member of it.

    Returns: (steps/s, microbatches that it brought, whether the plan has it still).
    """
    figures: list[tuple[float, int, bool]] = []

    async def script(swarm: SimSwarm, witness: RunWitness) -> None:
        members = [name for name in sorted(swarm.nodes, reverse=True) if swarm.stage_of(name) == stage]
        name = next(name for name in members if leads(swarm.nodes[name].peer.replica, stage) == leading)
        peer = swarm.world.peers[name]
        if slowdown is None:
            swarm.world.crash(peer)
        else:
            swarm.world.slow_device(peer, slowdown)
        await asyncio.sleep((LEADER_SETTLES_S if leading else SETTLES_S) + WINDOW_S)
        to_s = swarm.world.now_s()
        watcher = next(node for name, node in swarm.nodes.items() if swarm.world.peers[name].is_alive)
        plan = watcher.coordination.plan
        assert plan is not None
        rate = steps_per_s(witness, to_s - WINDOW_S, to_s)
        share = brought(witness, swarm, name, to_s - WINDOW_S, to_s)
        figures.append((rate, share, peer.peer_id in plan.plan.stages[stage].peers))
        if slowdown is not None:
            swarm.world.slow_device(peer, 1.0)

    # A step takes six seconds, so the window ends at about step 16 (20), and the run soon after.
    trial = scenario(peers=6, stages=2, steps=28 if leading else 24, microbatches=12, device_flop_per_s=8e6)
    passed(run_trial(trial, script))
    return figures[0]


@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_peer_a_hundred_times_slower_is_given_less_and_kept_and_holds_nobody_up(
    stage: int, leading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others make of it, in one layout: a search would move somebody to where one has died, and the yardstick
    would be another swarm. (It does not do so for one that is slow but alive: coordinator/README.md.)
    """
    monkeypatch.setattr("shoal.deploy.node.node.EvolutionaryAllocator", GreedyAllocator)
    slow, share, is_kept = rate_with(stage, leading=leading, slowdown=100.0)
    rest, _, _ = rate_with(stage, leading=leading, slowdown=None)
    assert is_kept
    assert slow >= 0.9 * rest, f"{slow:.3f} steps/s with it, {rest:.3f} without"
    assert share <= 0.05 * slow * WINDOW_S * 12
