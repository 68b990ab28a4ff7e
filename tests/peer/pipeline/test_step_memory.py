"""How many tensors of a stage are alive at once, from gradients over the reduction to the optimizer's step, and what
becomes of a step that finds no memory half-way.

N parameters of the stage
"""

import gc
import itertools
from types import SimpleNamespace

import msgspec
import pytest
import torch
from tiny_run import tiny_corpus, tiny_spec

from shoal.coordinator.cost.memory import STEP_TEMPORARIES, resident_terms
from shoal.peer.group.reductions import Reductions
from shoal.peer.model.layout import state_layout
from shoal.peer.pipeline import shard
from shoal.peer.pipeline.microbatch import Microbatch, bitmap_of
from shoal.peer.pipeline.stage import StageRuntime
from shoal.protocol.messages import RoundMember, RoundStart
from shoal.protocol.spec import RunSpec

CPU = torch.device("cpu")
LAYERS, MICROBATCHES = 6, 4
ME = "me"


def spec_of(*, s_max: int, compensation: str, keep: str = "stash") -> RunSpec:
    """Layers of 50,000 parameters, beside which activations of 32 tokens are nothing."""
    builtins = msgspec.to_builtins(tiny_spec(steps=100, peers=1, stages=1, microbatches=MICROBATCHES))
    builtins["model"] |= {"dim": 64, "ffn_dim": 192, "num_layers": LAYERS, "context": 16}
    builtins["training"] |= {"s_max": s_max, "compensation": compensation, "microbatch_size": 1, "keep": keep}
    builtins["training"] |= {"synchronous_steps": 0, "compute": "fp32"}
    return msgspec.convert(builtins, RunSpec)


@pytest.fixture
def fresh():
    """Lists the objects that are alive and were not there at the beginning."""
    gc.collect()
    gc.freeze()
    yield gc.get_objects
    gc.unfreeze()


class Census:
    """The most bytes that all tensors had together, each memory counted once."""

    def __init__(self, alive):
        self._alive = alive
        self.most, self.when = 0, ""

    def take(self, when):
        storages = [thing.untyped_storage() for thing in self._alive() if type(thing) is torch.Tensor]
        num_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        if num_bytes > self.most:
            self.most, self.when = num_bytes, when


class Alone:
    """One replica that holds the whole model and reduces with nobody."""

    def __init__(self, spec, offload=None):
        self.runtime = StageRuntime(spec, 0, LAYERS, corpus=tiny_corpus(), device=CPU, offload=offload)
        self.runtime.load(self.runtime.initial_state())
        self.group = SimpleNamespace(me=ME, microbatches=MICROBATCHES, group_peers=(), draining=(), version=0)
        self.group.are_past = lambda step: True
        self.reductions = Reductions(self.group, self.runtime, retained_from=lambda: 2**62)

    def train(self, step, indices):
        for index in indices:
            self.runtime.loss(Microbatch(step, index), None)
            self.runtime.contribute(Microbatch(step, index))

    def reduce(self, step):
        members = (RoundMember(ME, 1.0, bitmap_of((1 << MICROBATCHES) - 1)),)
        start = RoundStart(
            stage=0, step=step, attempt=1, members=members, duplicates=0, given_up=0, loss_sum=0.0, staleness_sum=0
        )
        reduction, make_sum, _ = self.reductions.begin(start)
        chunks = reduction.begin(make_sum())
        reduction.adding(chunks)()
        reduction.added(chunks)
        assert self.reductions.has_ended(reduction)
        self.reductions.keep(reduction.start.step, reduction.mean_N, reduction.start)

    def commit(self):
        digest = self.runtime.step(self.reductions.next_mean())[1]
        self.reductions.reached(self.runtime.version)
        self.group.version = self.runtime.version
        return digest


def played(alone, steps):
    """Train with a part of each step ahead of its version, and a microbatch of the next one during each reduction."""
    digests = []
    s_max = alone.runtime.spec.training.s_max
    ahead = 3 if s_max else 0
    for step in range(steps):
        alone.train(step, range(ahead if step else 0, MICROBATCHES))
        for index in range(ahead):
            if index == ahead - 1:
                alone.reduce(step)
            alone.train(step + 1, [index])
        if not ahead:
            alone.reduce(step)
        digests.append(alone.commit())
    return digests


@pytest.mark.parametrize(("s_max", "compensation"), [(0, "none"), (1, "none"), (1, "eager"), (1, "pipeoptim")])
def test_a_peer_never_holds_more_than_is_foreseen(monkeypatch, fresh, s_max, compensation):
    spec = spec_of(s_max=s_max, compensation=compensation)
    census = Census(fresh)
    step_layer = shard.step_layer_clipped

    def stepped(spec, key, *rest):
        after = step_layer(spec, key, *rest)
        census.take(f"step of {key}")
        return after

    finish = shard.Contributions.finish

    def finished(*args):
        census.take("backward")
        finish(*args)

    monkeypatch.setattr(shard, "step_layer_clipped", stepped)
    monkeypatch.setattr(shard.Contributions, "finish", finished)
    alone = Alone(spec)
    played(alone, 4)
    parameters = alone.runtime.num_parameters
    layer = max(state_layout(spec, key).numel for key in alone.runtime.keys)
    foreseen = resident_terms(spec).total * parameters
    activations = 300_000
    assert census.most < foreseen + STEP_TEMPORARIES * layer + activations, census.when
    assert census.most > 0.8 * foreseen, "or the census misses something"


def test_two_states_are_never_there(monkeypatch, fresh):
    """While a layer steps there are the others once and itself twice."""
    alone = Alone(spec_of(s_max=0, compensation="none"))
    counts = []
    step_layer = shard.step_layer_clipped

    def stepped(spec, key, *rest):
        after = step_layer(spec, key, *rest)
        counts.append(sum(type(thing) is shard.LayerState for thing in fresh()))
        return after

    monkeypatch.setattr(shard, "step_layer_clipped", stepped)
    played(alone, 2)
    assert counts == [len(alone.runtime.keys) + 1] * 2 * len(alone.runtime.keys)


def test_whoever_holds_the_old_state_keeps_it_whole():
    alone = Alone(spec_of(s_max=0, compensation="none"))
    played(alone, 2)
    before = alone.runtime.state
    digest = before.digest()
    alone.train(2, range(MICROBATCHES))
    alone.reduce(2)
    alone.commit()
    assert before.digest() == digest
    assert alone.runtime.state.version == before.version + 1


@pytest.mark.parametrize("s_max", [0, 1])
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_step_without_memory_half_way_goes_on_from_there(monkeypatch, s_max, error):
    spec = spec_of(s_max=s_max, compensation="eager")
    undisturbed, alone = played(Alone(spec), 4), Alone(spec)
    assert played(alone, 2) == undisturbed[:2]
    alone.train(2, range(3 if s_max else 0, MICROBATCHES))
    alone.reduce(2)
    mean_N = alone.reductions.next_mean()
    step_layer, stepped = shard.step_layer_clipped, []
    fails = itertools.count()

    def failing(spec, key, *rest):
        if next(fails) in (3, 4):
            raise error
        stepped.append(key)
        return step_layer(spec, key, *rest)

    monkeypatch.setattr(shard, "step_layer_clipped", failing)
    runtime = alone.runtime
    for _ in range(2):
        with pytest.raises(type(error)):
            runtime.step(mean_N)
        assert runtime.is_stepping
        assert runtime.state is None
        assert runtime.version == 2
        with pytest.raises(MemoryError):
            runtime.loss(Microbatch(3, 0), None)
    assert runtime.step(mean_N)[0].version == 3
    assert not runtime.is_stepping
    assert stepped == list(runtime.keys), "each layer once"
    if not s_max:
        assert runtime.state.digest() == undisturbed[2]


def test_a_state_that_is_loaded_during_a_step_stays(monkeypatch):
    alone = Alone(spec_of(s_max=0, compensation="none"))
    played(alone, 2)
    other = alone.runtime.initial_state()
    alone.train(2, range(MICROBATCHES))
    alone.reduce(2)
    step_layer = shard.step_layer_clipped

    def loading(spec, key, *rest):
        if key == "layers.2":
            alone.runtime.load(other)
        return step_layer(spec, key, *rest)

    monkeypatch.setattr(shard, "step_layer_clipped", loading)
    alone.runtime.step(alone.reductions.next_mean())
    assert alone.runtime.state is other
    assert (alone.runtime.version, alone.runtime.is_stepping) == (0, False)


def test_there_is_no_sum_of_a_step_that_the_optimizer_has_begun(monkeypatch):
    """Another attempt at it may be asked for meanwhile. Zeros would be taken for a gradient."""
    alone = Alone(spec_of(s_max=0, compensation="none"))
    alone.train(0, range(MICROBATCHES))
    asked_before = alone.runtime.gradient_sum(0)
    alone.reduce(0)
    step_layer, made = shard.step_layer_clipped, []

    def asking(*args):
        made.append(alone.runtime.gradient_sum(0)())
        return step_layer(*args)

    monkeypatch.setattr(shard, "step_layer_clipped", asking)
    alone.commit()
    assert made == [None] * len(alone.runtime.keys)
    assert asked_before() is not None, "it was asked for before"
