"""Whole nodes in virtual time that are told to stop: together, one after the other, for good or until tomorrow."""

import asyncio
import re
from pathlib import Path

import msgspec
import pytest
from sim_swarm import SimSwarm
from single_process import train

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Allocator, Layout, NoLayout, SwarmSnapshot
from shoal.coordinator.era import MISSING_HEARTBEATS
from shoal.deploy.node.node import LEAVE_S
from shoal.deploy.session.stop import LEAVE_SOON_S
from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.protocol.plan import Plan
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import RunSpec

pytestmark = pytest.mark.sim

STEPS = 14


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
            "swarm": {"stages": 3, "min_peers": 3, "snapshot_interval_steps": 0},
            "wire": {"activations": "fp32"},
        },
        RunSpec,
    )


def with_training(spec: RunSpec, **changes: object) -> RunSpec:
    return msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, **changes))


def with_swarm(spec: RunSpec, **changes: object) -> RunSpec:
    return msgspec.structs.replace(spec, swarm=msgspec.structs.replace(spec.swarm, **changes))


class Run:
    def __init__(
        self,
        spec: RunSpec,
        *,
        num_peers: int = 3,
        device_flop_per_s: float = 2e7,
        allocator: Allocator | None = None,
    ) -> None:
        self.corpus: Corpus = load_corpus(spec.data, context=spec.model.context)
        self.names = [f"n{number}" for number in range(num_peers)]
        network = uniform(latency_s=0.02, rate_bytes_per_s=1e7)
        self.swarm = SimSwarm(
            spec, self.corpus, seed=1, network=network, device_flop_per_s=device_flop_per_s, allocator=allocator
        )

    def launch(self) -> None:
        for name in self.names:
            self.swarm.launch(name)

    async def until_step(self, step: int) -> None:
        await self.swarm.until(lambda: max(self.swarm.steps, default=-1) + 1 >= step)

    def versions(self) -> dict[str, int]:
        replicas = {name: node.peer.replica for name, node in self.swarm.nodes.items()}
        return {name: replica.version for name, replica in replicas.items() if replica is not None and replica.is_ready}

    async def stop(self, names: list[str], *, apart_s: float = 0.0, within_s: float = LEAVE_S) -> int:
        """Tell them to leave, one `apart_s` after the other. Returns: the highest version that any of them had."""
        highest = max(self.versions().values())
        going: list[asyncio.Future[None]] = []
        for name in names:
            going.append(asyncio.ensure_future(self.swarm.leave(name, within_s=within_s)))
            await asyncio.sleep(apart_s)
        await asyncio.gather(*going)
        for name in names:
            self.swarm.world.crash(self.swarm.world.peers[name])  # the process has ended
        return highest

    async def begin_again(self) -> int:
        """Returns: the version at which the swarm goes on."""
        self.launch()
        await self.swarm.until(lambda: len(self.versions()) == len(self.names))
        return min(self.versions().values())


@pytest.mark.parametrize("s_max", [0, 1])
@pytest.mark.parametrize(
    ("order", "apart_s", "within_s"),
    [
        ("host first", 0.0, LEAVE_S),
        ("host first", 0.0, LEAVE_SOON_S),
        ("host first", 3.0, LEAVE_S),
        ("host last", 3.0, LEAVE_S),
        ("host first", 0.7, LEAVE_SOON_S),
        ("host last", 0.7, LEAVE_SOON_S),
        ("host first", 60.0, LEAVE_S),
        ("host last", 60.0, LEAVE_S),
    ],
)
def test_a_swarm_that_is_told_to_stop_goes_on_at_the_step_that_it_had(
    spec: RunSpec, s_max: int, order: str, apart_s: float, within_s: float
) -> None:
    """One replica a stage, and no snapshot by steps or by the clock before. Those who are left for a minute train on,
    and have not ended the run when the last of them goes."""
    is_slow = apart_s > LEAVE_S
    steps = 2 * STEPS if is_slow else STEPS
    spec = with_training(spec, s_max=s_max, synchronous_steps=0, steps=steps)

    async def main() -> tuple[Run, int, int, str, int]:
        all_ = Run(spec, device_flop_per_s=4e6 if is_slow else 2e7)
        all_.launch()
        await all_.until_step(5)
        names = all_.names if order == "host first" else all_.names[::-1]
        had = await all_.stop(names, apart_s=apart_s, within_s=within_s)
        await asyncio.sleep(100.0)
        went_on = await all_.begin_again()
        plans = [node.coordination.plan.plan for node in all_.swarm.nodes.values() if node.coordination.plan]
        first = max(plans, key=lambda plan: plan.order)
        await all_.swarm.end()
        return all_, had, went_on, first.reason, first.rollbacks

    all_, had, went_on, reason, rollbacks = run(main())
    assert steps > went_on >= had >= 5
    assert all_.swarm.world.failures == []
    assert rollbacks == 0, "nothing was lost"
    if not is_slow:
        assert reason == f"the run was stopped: goes on from version {went_on}"
    if s_max == 0:
        single = [step.loss for step in train(spec, all_.corpus, steps=steps)]
        told = all_.swarm.steps  # but for what was committed while the coordinator itself left
        assert {*range(had), *range(went_on, steps)} <= told.keys()
        assert max(abs((told[step].loss or 0.0) - single[step]) for step in told) < 1e-4


@pytest.mark.parametrize("later_s", [0.0, 0.4, 0.8, 1.2])
def test_replicas_that_stop_together_leave_a_whole_snapshot(spec: RunSpec, later_s: float) -> None:
    """A snapshot is certified if most members of each stage sign it, so both members of a stage must save it."""

    async def main() -> tuple[int, int]:
        all_ = Run(with_swarm(spec, min_peers=6), num_peers=6)
        all_.launch()
        await all_.until_step(5)
        await asyncio.sleep(later_s)
        had = await all_.stop(all_.names)
        await asyncio.sleep(30.0)
        return had, await all_.begin_again()

    had, went_on = run(main())
    assert went_on >= had


def test_a_stop_does_not_wait_for_a_step_that_takes_too_long(spec: RunSpec) -> None:
    """Steps of a minute and more: what is in flight ends, the step itself does not, and those before are not lost."""
    slow = with_training(spec, microbatches_per_step=64)

    async def main() -> tuple[int, int, float]:
        all_ = Run(slow, device_flop_per_s=2e6)
        all_.launch()
        await all_.until_step(1)
        await asyncio.sleep(10.0)
        begun_s = all_.swarm.world.now_s()
        had = await all_.stop(all_.names, within_s=LEAVE_S)
        took_s = all_.swarm.world.now_s() - begun_s
        await asyncio.sleep(30.0)
        return had, await all_.begin_again(), took_s

    had, went_on, took_s = run(main())
    assert went_on >= had >= 1
    assert took_s < LEAVE_S + 15.0


def test_the_last_holder_of_a_stage_hands_it_to_a_spare(spec: RunSpec) -> None:
    """Nobody stops for good, and no era ends."""

    async def main() -> Run:
        all_ = Run(spec, num_peers=4)
        all_.launch()
        await all_.until_step(3)
        alone = next(name for name in all_.names[1:] if _is_alone(all_, name))
        await all_.swarm.leave(alone)
        all_.swarm.world.crash(all_.swarm.world.peers[alone])
        all_.names.remove(alone)
        await all_.until_step(STEPS)
        return all_

    all_ = run(main())
    assert {node.coordination.plan.plan.era for node in all_.swarm.nodes.values() if node.coordination.plan} == {0}


def _is_alone(run_: Run, name: str) -> bool:
    stages = [run_.swarm.stage_of(other) for other in run_.names]
    return stages.count(run_.swarm.stage_of(name)) == 1


def test_the_clock_makes_snapshots_where_steps_do_not(spec: RunSpec) -> None:
    """All power is cut: what is lost is less than the interval and the steps that are on their way."""
    timed = with_swarm(with_training(spec, steps=60), snapshot_interval_s=15.0, term_s=8.0)

    async def main() -> tuple[float, float]:
        all_ = Run(timed, device_flop_per_s=1e7)
        all_.launch()
        reached: dict[int, float] = {}
        await all_.until_step(2)
        for _ in range(600):
            for version in all_.versions().values():
                reached.setdefault(version, all_.swarm.world.now_s())
            await asyncio.sleep(0.1)
        cut_s = all_.swarm.world.now_s()
        for name in all_.names:
            all_.swarm.world.crash(all_.swarm.world.peers[name])
        await asyncio.sleep(30.0)
        went_on = await all_.begin_again()
        step_s = (max(reached.values()) - min(reached.values())) / (len(reached) - 1)
        return cut_s - reached[went_on], step_s

    lost_s, step_s = run(main())
    assert lost_s < 15.0 + 3 * step_s + 5.0, "so much was trained and is lost"


def test_a_run_waits_for_the_disks_that_have_the_rest_of_what_was_learnt(spec: RunSpec) -> None:
    """One peer comes back some time after the others, with the only copy of its stage; a stranger could take that."""

    async def main() -> tuple[int, int]:
        all_ = Run(with_swarm(spec, min_peers=3), num_peers=3)
        all_.launch()
        await all_.until_step(5)
        had = await all_.stop(all_.names)
        late = all_.names[-1]
        for name in all_.names[:-1]:
            all_.swarm.launch(name)
        all_.swarm.launch("stranger")
        await asyncio.sleep(MISSING_HEARTBEATS * spec.swarm.heartbeat_s - 10.0)
        all_.swarm.launch(late)
        await all_.swarm.until(lambda: len(all_.versions()) >= 3)
        return had, min(all_.versions().values())

    had, went_on = run(main())
    assert went_on >= had


def test_who_leaves_with_a_full_disk_says_at_once_which_steps_are_not_saved(spec: RunSpec) -> None:
    """There is nobody else: what the disk does not take is gone."""

    async def main() -> tuple[str, float, int]:
        all_ = Run(with_swarm(with_training(spec, steps=60), stages=1, min_peers=1), num_peers=1)
        all_.launch()
        await all_.until_step(5)
        node, peer = all_.swarm.nodes["n0"], all_.swarm.world.peers["n0"]
        all_.swarm.world.limit_disk(peer, 100)
        began_s = all_.swarm.world.now_s()
        had = await all_.stop(["n0"])
        return node.peer.unsaved, all_.swarm.world.now_s() - began_s, had

    unsaved, took_s, had = run(main())
    last = re.fullmatch(
        r"steps 1 to (\d+) are not saved on this machine: .*No space left on device: make room.*", unsaved
    )
    assert last is not None, unsaved
    assert int(last[1]) >= had
    assert took_s < LEAVE_S / 2


class ThreeBegin(GreedyAllocator):
    """Three peers begin, in a stage each."""

    def __init__(self) -> None:
        self._has_begun = False

    def allocate(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> Layout:
        if not self._has_begun and len(snapshot.peers) < 3:
            raise NoLayout("three are to begin")
        self._has_begun = True
        return super().allocate(snapshot, previous, seed=seed)


@pytest.mark.parametrize("leaver", ["n1", "n2"])
def test_who_leaves_a_run_with_a_stage_for_each_peer_makes_the_others_divide_the_layers_anew(
    spec: RunSpec, leaver: str
) -> None:
    """The last holder of a stage goes; those that stay need nobody in its place, and no step is lost."""
    spec = with_swarm(with_training(spec, steps=24), min_peers=1)

    async def main() -> tuple[Run, int, Plan]:
        all_ = Run(spec, allocator=ThreeBegin())
        all_.launch()
        await all_.until_step(5)
        had = await all_.stop([leaver])
        await all_.until_step(spec.training.steps)
        plans = [node.coordination.plan.plan for node in all_.swarm.nodes.values() if node.coordination.plan]
        await all_.swarm.end()
        return all_, had, max(plans, key=lambda plan: plan.order)

    all_, had, last = run(main())
    assert had >= 5
    assert len(last.stages) < 3
    assert last.restore_version >= had, "they go on at the step that they had"
    assert all_.swarm.world.failures == []
    single = [step.loss for step in train(spec, all_.corpus, steps=spec.training.steps)]
    told = all_.swarm.steps
    assert told.keys() == set(range(spec.training.steps))
    assert max(abs((told[step].loss or 0.0) - single[step]) for step in told) < 1e-4
