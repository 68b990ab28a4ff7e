"""A device that is full: what goes to the machine's memory, and that nothing else changes.

There is no such device here. A stand-in copies within one memory and notes which tensors lie "in the machine's".

N parameters of the stage
"""

import pytest
import torch

from shoal.coordinator.cost.memory import STEP_TEMPORARIES, resident_terms
from shoal.peer.model.layout import state_layout
from shoal.peer.model.state import LayerState
from shoal.peer.pipeline import shard
from shoal.peer.pipeline.offload import Offload
from tests.peer.pipeline.test_step_memory import CPU, Alone, Census, fresh, played, spec_of

__all__ = ["fresh"]


class Machine(Offload):
    """Another memory than the device's, though it is not."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.held = {}

    @property
    def is_possible(self):
        return True

    def put(self, tensor):
        if not self.is_on or self.has(tensor):
            return tensor
        there = tensor.clone()
        self.held[there.untyped_storage().data_ptr()] = there.untyped_storage()
        return there

    def has(self, tensor):
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self.held


class Full(Alone):
    """Its stage's device is full from a step on, or its stage just makes room then."""

    def train(self, step, indices):
        super().train(step, indices)
        if step == 2 and not self.runtime._by_layer:
            self.runtime.make_room()


@pytest.mark.parametrize(
    ("s_max", "compensation"), [(0, "none"), (1, "none"), (1, "eager"), (1, "pipeoptim"), (1, "dc"), (2, "calibrated")]
)
def test_steps_have_the_same_bits(s_max, compensation):
    spec, machine = spec_of(s_max=s_max, compensation=compensation), Machine()
    full, roomy = Full(spec, machine), Full(spec, None)
    assert played(full, 5) == played(roomy, 5)
    assert machine.is_on
    for layer in full.runtime.state.layers.values():
        assert machine.has(layer.moment1_N)
        assert machine.has(layer.moment2_N)
        assert not machine.has(layer.param_N)


@pytest.mark.parametrize(
    ("compensation", "keep"),
    [("none", "stash"), ("eager", "stash"), ("dc", "stash"), ("none", "recompute"), ("dc", "recompute")],
)
def test_the_device_holds_no_more_than_is_foreseen(monkeypatch, fresh, compensation, keep):
    spec, machine = spec_of(s_max=1, compensation=compensation, keep=keep), Machine()
    machine.begin()

    class OnDevice(Census):
        def take(self, when):
            found = [thing for thing in fresh() if type(thing) is torch.Tensor and not machine.has(thing)]
            storages = {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes() for thing in found}
            if sum(storages.values()) > self.most:
                self.most, self.when = sum(storages.values()), when

    census = OnDevice(fresh)
    step_layer, finish = shard.step_layer_clipped, shard.Contributions.finish

    def stepped(spec, key, *rest):
        after = step_layer(spec, key, *rest)
        census.take(f"step of {key}")
        return after

    def finished(*args):
        census.take("backward")
        finish(*args)

    monkeypatch.setattr(shard, "step_layer_clipped", stepped)
    monkeypatch.setattr(shard.Contributions, "finish", finished)
    full = Full(spec, machine)
    played(full, 4)
    terms, parameters = resident_terms(spec), full.runtime.num_parameters
    layer = max(state_layout(spec, key).numel for key in full.runtime.keys)
    # The reduced gradient is in the machine's memory, too, which this stand-in does not see.
    foreseen = (terms.least_on_card + terms.mean) * parameters
    assert census.most < foreseen + STEP_TEMPORARIES * layer + 300_000, census.when
    assert foreseen <= 0.75 * terms.total * parameters or compensation == "none"


def test_what_has_begun_for_one_replica_goes_on_for_the_next():
    spec, machine = spec_of(s_max=0, compensation="none"), Machine()
    Full(spec, machine).runtime.make_room()
    following = Full(spec, machine).runtime
    assert all(machine.has(layer.moment1_N) for layer in following.state.layers.values())


def test_a_device_without_memory_of_its_own_keeps_all_where_it_is():
    offload = Offload(CPU)
    layer = LayerState(param_N=torch.zeros(2), moment1_N=torch.zeros(2), moment2_N=torch.zeros(0))
    assert not offload.begin()
    assert not offload.is_on
    assert offload.layer(layer) is layer
