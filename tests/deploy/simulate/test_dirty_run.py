"""A simulated run with dirt: a throttled device takes as much longer, and the draws are those of the seed."""

from pathlib import Path

import pytest
from test_slowing import SPEC, network

from shoal.coordinator.cost.placement import Placement
from shoal.deploy.simulate.modelled import ModelledRun, run_modelled
from shoal.deploy.simulate.result import SimResult
from shoal.deploy.simulate.scenario import load_scenario
from shoal.protocol.errors import LocalError
from shoal.protocol.sim.dirt import CLEAN, Dirt


def played(dirt: Dirt, seed: int = 0) -> SimResult:
    lone = Placement(stages=((0,),), bounds=(0, 4))
    return run_modelled(ModelledRun(topology=network(1), spec=SPEC, stages=lone, seed=seed, dirt=dirt))


def test_a_throttled_device_takes_as_much_longer() -> None:
    clean = played(CLEAN)
    assert played(Dirt(throttled=0.5)).step_s == pytest.approx(2 * clean.step_s, rel=1e-6)
    assert played(Dirt(throttled=0.5, burst_s=1e9)).step_s == pytest.approx(clean.step_s, rel=1e-6)


def test_jitter_is_drawn_from_the_seed() -> None:
    dirt = Dirt(compute_sd=0.3)
    first, again, other = played(dirt), played(dirt), played(dirt, seed=1)
    assert first.trace_hash == again.trace_hash != other.trace_hash
    assert first.step_s == pytest.approx(played(CLEAN).step_s, rel=0.25)


def test_a_scenario_file_says_it(tmp_path: Path) -> None:
    path = tmp_path / "dirty.toml"
    text = 'network = { region = [{ name = "a", count = 2 }] }\n[dirt]\nwander_sd = 0.3\nwander_s = 10\n'
    path.write_text(text)
    assert load_scenario(path).dirt == Dirt(wander_sd=0.3, wander_s=10.0)
    path.write_text(text + "wander = 1\n")
    with pytest.raises(LocalError, match="wander"):
        load_scenario(path)
