"""Devices and links that become slower in mid-run: what the network is then, and that a run feels it."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hindered_swarm import Slowing, after, hindered

from shoal.coordinator.cost.placement import Placement
from shoal.deploy.simulate.modelled import ModelledRun, RunLimits, run_modelled
from shoal.deploy.simulate.result import SimResult
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import Topology, make_topology

SPEC = msgspec.convert(
    {
        "model": {"dim": 512, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 1024, "context": 512},
        "training": {"steps": 12, "microbatches_per_step": 8, "microbatch_size": 1, "s_max": 0},
        "optimizer": {"warmup_steps": 0},
        "swarm": {"stages": 1, "min_peers": 1},
    },
    RunSpec,
)


def network(num_devices: int, **changes: object) -> Topology:
    n = num_devices
    return make_topology(np.full((n, n), 1e-3), np.full((n, n), 1e9), flop_per_s=1e12, **changes)


def played(topology: Topology, placement: Placement, *slowings: Slowing) -> SimResult:
    run = ModelledRun(
        topology=topology, spec=SPEC, stages=placement, make_swarm=hindered(*slowings), limits=RunLimits(seconds=600.0)
    )
    return run_modelled(run)


def step_seconds(result: SimResult) -> list[float]:
    return list(np.diff([step.committed_at_s for step in result.steps]))


def test_a_device_that_slows_down_takes_longer_until_it_is_quick_again() -> None:
    lone = Placement(stages=((0,),), bounds=(0, 4))
    usual = played(network(1), lone)
    usual_s, begins_s = usual.step_s, usual.steps[3].committed_at_s
    result = played(network(1), lone, Slowing(begins_s, 0, 4.0), Slowing(begins_s + 9 * usual_s, 0, 1.0))
    times_s = step_seconds(result)
    assert times_s[0] == pytest.approx(usual_s, rel=1e-6)
    assert max(times_s) == pytest.approx(4 * usual_s, rel=1e-6)
    assert times_s[-1] == pytest.approx(usual_s, rel=1e-6)


def test_a_link_that_slows_down_carries_less_than_its_cards_did() -> None:
    """The path lets through ten times as much as the cards: a tenth is a tenth of what had come through."""
    pair = Placement(stages=((0,), (1,)), bounds=(0, 2, 4))
    topology = network(2, up_bytes_per_s=1e8, down_bytes_per_s=1e8)
    usual_s = played(topology, pair).step_s
    slow = Slowing(0.5, 1, 100.0, others=(0,))
    result = played(topology, pair, slow)
    assert result.step_s > 2 * usual_s
    assert result.step_s == pytest.approx(played(after(topology, [slow]), pair).step_s, rel=0.05)


def test_the_network_afterwards_is_told() -> None:
    topology = network(3, up_bytes_per_s=np.array([1e8, 2e9, 2e9]))
    then = after(topology, [Slowing(9.0, 2, 2.0), Slowing(5.0, 2, 4.0), Slowing(1.0, 0, 10.0, others=(1,))])
    assert list(then.flop_per_s) == [1e12, 1e12, 5e11], "the last one counts"
    assert then.bytes_per_s[0, 1] == pytest.approx(1e7), "its card let through a tenth of the path"
    assert then.bytes_per_s[1, 0] == pytest.approx(1e8)
    assert then.bytes_per_s[0, 2] == topology.bytes_per_s[0, 2]
    assert topology.flop_per_s[2] == 1e12


@pytest.mark.parametrize(
    ("slowing", "why"),
    [
        (Slowing(1.0, 3, 2.0), "names device 3, the network has 2"),
        (Slowing(1.0, 0, 2.0, others=(-1,)), "names device -1"),
        (Slowing(1.0, 0, 2.0, others=(0,)), "no link to itself"),
        (Slowing(1.0, 0, 0.0), "cannot be 0.0 times slower"),
    ],
)
def test_what_cannot_slow_down_is_refused(slowing: Slowing, why: str) -> None:
    lone = Placement(stages=((0,),), bounds=(0, 4))
    with pytest.raises(LocalError, match=why):
        run_modelled(replace(ModelledRun(topology=network(2), spec=SPEC, stages=lone), make_swarm=hindered(slowing)))
