"""A swarm that grows from one peer and shrinks back to one, and what is planned for each size of it.

The devices are those of `home-gpus`, the model half as deep, so that one of its larger cards holds all of it. Newcomers
come two seconds apart, and those who go say good-bye, two seconds apart.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from live.cases import case
from live.comparison import Live, figure, told

from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.planning.layouts import LayoutRequest, layout
from shoal.deploy.simulate.modelled import Churn, ModelledRun, RunLimits, run_modelled
from shoal.deploy.simulate.result import SimResult
from shoal.deploy.simulate.scenario import STEPS_MAX, Scenario
from shoal.protocol.errors import ShoalError
from shoal.protocol.spec import AUTO_STAGES

SIZES = (1, 2, 6, 24, 40, 12, 1)
EVERY_S = 600.0
SETTLES_S = 180.0
"""A size is measured from so long after its first change on."""
APART_S = 2.0
LAYERS, MICROBATCHES = 12, 128


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """One size of the swarm."""

    peers: int
    from_s: float
    planned: float
    """By arithmetic: the layout of `shoal plan` for just these devices."""
    stages: int
    tokens_per_s: float

    @property
    def share(self) -> float:
        return self.tokens_per_s / self.planned if self.planned else float("nan")


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    sizes: tuple[Size, ...]
    live: Live


def swarm(seed: int) -> tuple[Scenario, list[int]]:
    """The scenario, and its devices in the order in which they come: a card of 24 GB first."""
    scenario = case("home-gpus")
    spec = scenario.spec
    spec = msgspec.structs.replace(
        spec,
        model=msgspec.structs.replace(spec.model, num_layers=LAYERS),
        training=msgspec.structs.replace(spec.training, microbatches_per_step=MICROBATCHES, steps=STEPS_MAX),
        swarm=msgspec.structs.replace(spec.swarm, stages=AUTO_STAGES, min_peers=1),
    )
    devices = list(range(scenario.topology.num_devices))
    random.Random(f"growth/{seed}").shuffle(devices)
    devices.sort(key=lambda device: not scenario.topology.memory_bytes[device] >= 24e9)
    first, rest = devices[0], devices[1:]
    random.Random(f"growth of the rest/{seed}").shuffle(rest)
    return replace(scenario, spec=spec), [first, *rest]


def churn_of(devices: Sequence[int], sizes: Sequence[int], every_s: float) -> tuple[Churn, ...]:
    """Whoever came last leaves first."""
    churn = []
    for index, (before, after) in enumerate(zip((0, *sizes), sizes, strict=False)):
        for place, device in enumerate(devices[before:after]):
            churn.append(Churn(every_s * index + (APART_S * place if index else 0.0), "add", device))
        for place, device in enumerate(reversed(devices[after:before])):
            churn.append(Churn(every_s * index + APART_S * place, "leave", device))
    never = devices[max(sizes) :]
    late_s = every_s * (len(sizes) + 1)
    return tuple(churn) + tuple(Churn(late_s, "add", device) for device in never)


def planned_for(scenario: Scenario, devices: Sequence[int], seed: int) -> tuple[float, int]:
    """(tokens/s by arithmetic, stages); zeros where it cannot be."""
    topology, workload = scenario.topology.take(sorted(devices)), Workload.of(scenario.spec)
    try:
        found = layout("ours", LayoutRequest(topology=topology, workload=workload, seed=seed))
    except ShoalError:
        return 0.0, 0
    return ThroughputObjective(topology, workload).cost(found).parts["tokens_per_s"], len(found.stages)


def grow(seed: int, sizes: Sequence[int], every_s: float) -> Growth:
    scenario, devices = swarm(seed)
    seconds = every_s * len(sizes)
    result = run_modelled(
        ModelledRun(
            topology=scenario.topology,
            spec=scenario.spec,
            seed=seed,
            churn=churn_of(devices, sizes, every_s),
            limits=RunLimits(seconds=seconds),
        )
    )
    settles_s = min(SETTLES_S, every_s / 2)
    # A size is judged by what it did, also where a later one went back behind that.
    ever = sorted((*result.steps, *result.ending.undone), key=lambda step: step.committed_at_s)
    committed = replace(result, steps=tuple(ever))
    return Growth(
        seed=seed,
        sizes=tuple(
            _size(scenario, devices[:peers], seed, committed, every_s * index + settles_s, every_s * (index + 1))
            for index, peers in enumerate(sizes)
        ),
        live=told(result, seconds),
    )


def _size(
    scenario: Scenario, devices: Sequence[int], seed: int, result: SimResult, from_s: float, until_s: float
) -> Size:
    planned, stages = planned_for(scenario, devices, seed)
    rate = (result.tokens_by(until_s) - result.tokens_by(from_s)) / (until_s - from_s)
    return Size(peers=len(devices), from_s=from_s, planned=planned, stages=stages, tokens_per_s=rate)


def lines_of(growth: Growth) -> list[str]:
    lines = [f"{'peers':>6}{'from':>8}{'planned':>10}{'stages':>7}{'live':>10}{'live/planned':>13}"]
    lines += [
        f"{size.peers:>6}{size.from_s:>6.0f} s{figure(size.planned):>10}{size.stages:>7}"
        f"{figure(size.tokens_per_s):>10}{size.share:>13.2f}"
        for size in growth.sizes
    ]
    live = growth.live
    lines.append(
        f"{live.plans} plans, {live.divisions} divisions, {live.eras} roll-backs, {live.given_up} microbatches "
        f"given up, {live.duplicates} twice, failures {live.failures[:1]}, {live.wall_s:.0f} s of this machine"
    )
    return lines
