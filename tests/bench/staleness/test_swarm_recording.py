"""The light form of our regime is the real one: the drivers' run, recorded and played again, trains the same."""

import msgspec
import numpy as np
import places
import pytest
import swarm
from recorder import Recorder
from regimes import steps
from settings import Swarm, SwarmBegun

from shoal.protocol.topology import make_topology

NETWORK = make_topology(
    0.05 * (1 - np.eye(4)) + 1e-3, np.full((4, 4), 1e6), flop_per_s=2e7, regions=("north", "north", "south", "south")
)


@pytest.mark.sim
@pytest.mark.parametrize("method", ["stash", "pipeoptim"])
def test_the_swarms_recorded_staleness_played_lightly_gives_its_losses(tiny, run_of, method, monkeypatch):
    task = tiny(microbatches=6, updates=12)
    run = run_of(task, Swarm(stages=2, replicas=2, s_max=1), method)
    monkeypatch.setattr(swarm, "find_scenario", lambda name: Given(task))
    real = Recorder(task, run)
    recording = swarm.train_swarm(task, run, real)
    assert len(recording.staleness) == 12 * 6
    everything = [s for staleness in recording.staleness.values() for s in staleness]
    assert 0.05 < sum(everything) / len(everything) < 1.0
    assert max(everything) == 1
    light = Recorder(task, run)
    steps(task, run, recording, light)
    assert max(abs(a - b) for a, b in zip(real.losses, light.losses, strict=True)) < 2e-4
    ours, theirs = real.outcome(), light.outcome()
    assert ours.staleness_mean == pytest.approx(theirs.staleness_mean, abs=1e-3)
    assert ours.validation_loss == pytest.approx(theirs.validation_loss, abs=1e-3)
    assert ours.virtual_s == theirs.virtual_s > 0
    synchronous = Recorder(task, run)
    steps(task, run, Fresh(recording), synchronous)
    assert max(abs(a - b) for a, b in zip(real.losses, synchronous.losses, strict=True)) > 1e-3, "staleness shows"


@pytest.mark.sim
def test_a_swarm_that_begins_synchronously_is_stale_from_the_step_on_that_is_said(tiny, run_of, monkeypatch):
    task = tiny(microbatches=6, updates=12)
    run = run_of(task, SwarmBegun(stages=2, replicas=2, s_max=1, synchronous_steps=5), "pipeoptim")
    monkeypatch.setattr(swarm, "find_scenario", lambda name: Given(task))
    recording = swarm.train_swarm(task, run, Recorder(task, run))
    most = [max(max(s) for (t, _), s in recording.staleness.items() if t == step) for step in range(12)]
    assert most[:5] == [0] * 5
    assert most[5:7] == [1, 1], "until the control has measured what that saves, which is nothing here"


@pytest.mark.sim
def test_a_swarm_whose_replicas_die_makes_all_of_its_steps(tiny, run_of, monkeypatch):
    task = tiny(microbatches=6, updates=30)
    monkeypatch.setattr(swarm, "find_scenario", lambda name: Given(task))
    outcomes = []
    for kill_every_s in (0.0, 4.0):
        run = run_of(task, Swarm(stages=2, replicas=2, kill_every_s=kill_every_s, back_s=3.0), "pipeoptim")
        recorder = Recorder(task, run)
        swarm.train_swarm(task, run, recorder)
        assert len(recorder.losses) == 30
        outcomes.append(recorder.outcome())
    peace, churn = outcomes
    assert churn.virtual_s > peace.virtual_s
    assert churn.validation_loss == pytest.approx(peace.validation_loss, abs=0.3)


class Given:
    """A scenario whose workload is the task's own: nothing is slowed down."""

    def __init__(self, task):
        self.topology = NETWORK
        wire = msgspec.structs.replace(task.spec.wire, activations="fp32")
        self.spec = msgspec.structs.replace(task.spec, wire=wire)


class Fresh:
    """The same plan with nothing stale."""

    s_max = 0

    def __init__(self, recording):
        self.stages, self.ends_s, self._groups = recording.stages, recording.ends_s, recording.groups

    def groups(self, step):
        return [group._replace(staleness=(0,) * len(group.staleness)) for group in self._groups(step)]


def test_regions_become_stages_on_the_shortest_way_and_small_models_take_as_long_as_large_ones(tiny):
    latency_s = np.array([[0, 9, 1], [9, 0, 2], [1, 2, 0]]) * 1e-3 + 1e-4
    topology = make_topology(
        latency_s.repeat(2, 0).repeat(2, 1), np.full((6, 6), 1e8), regions=("a", "a", "b", "b", "c", "c")
    )
    assert places.devices_of(topology, 3, 2) in ([[0, 1], [4, 5], [2, 3]], [[2, 3], [4, 5], [0, 1]])
    assert len(places.devices_of(topology, 6, 1)) == 6
    with pytest.raises(ValueError, match="too few"):
        places.devices_of(topology, 3, 3)
    small = tiny().spec
    large = msgspec.structs.replace(small, model=msgspec.structs.replace(small.model, dim=64, ffn_dim=128))
    slow = places.slowed_down(topology, large, small)
    assert places._flop(small) / slow.flop_per_s[0] == pytest.approx(places._flop(large) / topology.flop_per_s[0])
    assert slow.bytes_per_s[0, 1] == pytest.approx(5e7)
    assert (slow.latency_s == topology.latency_s).all()
