"""A simulated run with dirt: a throttled device takes as much longer, and the draws are those of the seed."""

import msgspec
import numpy as np
import pytest

from shoal.coordinator.cost.placement import Placement
from shoal.deploy.simulate.modelled import ModelledRun, run_modelled
from shoal.deploy.simulate.result import SimResult
from shoal.deploy.simulate.strategies import parse_dirt
from shoal.protocol.errors import LocalError
from shoal.protocol.sim.dirt import CLEAN, Dirt
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import make_topology

SPEC = msgspec.convert(
    {
        "model": {"dim": 512, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 1024, "context": 512},
        "training": {"steps": 12, "microbatches_per_step": 8, "microbatch_size": 1, "s_max": 0},
        "optimizer": {"warmup_steps": 0},
        "swarm": {"stages": 1, "min_peers": 1},
    },
    RunSpec,
)
LONE = make_topology(np.full((1, 1), 1e-3), np.full((1, 1), 1e9), flop_per_s=1e12)


def played(dirt: Dirt, seed: int = 0) -> SimResult:
    lone = Placement(stages=((0,),), bounds=(0, 4))
    return run_modelled(ModelledRun(topology=LONE, spec=SPEC, stages=lone, seed=seed, dirt=dirt))


def test_a_throttled_device_takes_as_much_longer() -> None:
    clean = played(CLEAN)
    assert played(Dirt(throttled=0.5)).step_s == pytest.approx(2 * clean.step_s, rel=1e-6)
    assert played(Dirt(throttled=0.5, burst_s=1e9)).step_s == pytest.approx(clean.step_s, rel=1e-6)


def test_jitter_is_drawn_from_the_seed() -> None:
    dirt = Dirt(compute_sd=0.3)
    first, again, other = played(dirt), played(dirt), played(dirt, seed=1)
    assert first.trace_hash == again.trace_hash != other.trace_hash
    assert first.step_s == pytest.approx(played(CLEAN).step_s, rel=0.25)


def test_the_command_line_says_it() -> None:
    assert parse_dirt(None) == CLEAN
    assert parse_dirt("wander_sd=0.3, wander_s=10") == Dirt(wander_sd=0.3, wander_s=10.0)
    for text in ("wander=1", "wander_sd", "wander_sd=-1", "throttled=x"):
        with pytest.raises(LocalError, match="is no dirt"):
            parse_dirt(text)
