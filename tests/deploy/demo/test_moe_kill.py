"""What the kill of `shoal demo --moe` costs in time, on devices that nobody else uses: in virtual time, modelled."""

from itertools import pairwise
from statistics import median

import numpy as np
import pytest

from shoal.deploy.run.run_file import MOE_SPEC
from shoal.deploy.simulate.modelled import Churn, ModelledRun, RunLimits, run_modelled
from shoal.protocol.toml.spec_file import load_spec
from shoal.protocol.topology import make_topology

PEERS = 6
LOADS = [5, 9, 4, 1, 10, 0.5, 22, 48.5]
"""As the demo's router has sent them, after some forty steps."""
KILL_S, END_S = 14.0, 24.0


def seconds_lost(victim: int) -> float:
    """Return by how much the longest step after the kill of a device exceeds the usual one."""
    apart = 1.0 - np.eye(PEERS)
    topology = make_topology(
        5e-4 * apart,
        5e8 * apart,
        flop_per_s=[4e9] * PEERS,
        memory_bytes=[4e9] * PEERS,
        names=tuple(f"peer-{number + 1}" for number in range(PEERS)),
        may_feed=[1.0] * PEERS,
    )
    result = run_modelled(
        ModelledRun(
            topology=topology,
            spec=load_spec(MOE_SPEC),
            seed=3,
            churn=[Churn(KILL_S, "remove", victim)],
            limits=RunLimits(seconds=END_S, steps=1000),
            expert_loads=LOADS,
            chunk_bytes=1 << 20,
        )
    )
    assert (result.failures, result.duplicates, result.given_up) == ((), 0, 0)
    at_s = [step.committed_at_s for step in result.steps]
    assert [step.step for step in result.steps] == list(range(len(at_s)))
    usual_s = median(after - before for before, after in pairwise(at_s) if after < KILL_S)
    waits_s = [after - before for before, after in pairwise(at_s) if after >= KILL_S]
    assert len(waits_s) >= 4, "it goes on"
    return max(waits_s) - usual_s


@pytest.mark.sim
def test_a_power_cut_costs_no_step_and_in_the_median_less_than_four_seconds_of_throughput() -> None:
    """Nobody says that the connection has ended: frames are on their way to the dead for ten seconds. How long it takes
    depends on which device dies, and with how many microbatches."""
    lost_s = [seconds_lost(victim) for victim in range(1, PEERS)]
    assert median(lost_s) < 4.0, lost_s
    assert max(lost_s) < 6.0, lost_s
