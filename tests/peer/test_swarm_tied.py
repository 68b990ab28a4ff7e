"""A tied model in a swarm: one matrix at both ends of the pipeline, whose gradients meet in the commit."""

import itertools

import msgspec
import pytest
import torch
from single_process import train

from shoal.peer.data.corpus import load_corpus
from shoal.peer.model.layout import EMBED, HEAD
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STEPS = 12
STAGES = [["0.0", "0.1"], ["1.0", "1.1"], ["2.0", "2.1"]]


def tied_spec(spec, **tables):
    builtins = msgspec.to_builtins(spec)
    builtins["model"]["tied"] = True
    for table, values in {"training": {"steps": STEPS}, **tables}.items():
        builtins[table] |= values
    return msgspec.convert(builtins, type(spec))


def swarm_of(make_swarm, spec, stages):
    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        for name in itertools.chain(*stages):
            await swarm.add(name, device_flop_per_s=2e8)
        swarm.obey(stages, not_started=True)
        await swarm.until_step(spec.training.steps)
        await swarm.close()
        assert swarm.world.failures == []
        return swarm

    return run(main())


def matrices_of(swarm, stages):
    """The matrix with its moments, as each member of both ends has it: as embedding, and as head."""
    for name in stages[0]:
        yield swarm.drivers[name].replica.runtime.state.layers[EMBED].tensors
    for name in stages[-1]:
        head = swarm.drivers[name].replica.runtime.state.layers[HEAD].tensors
        size = swarm.spec.model.vocab_size * swarm.spec.model.dim
        yield tuple(tensor[:size] for tensor in head)


def are_equal(swarm, stages):
    first, *others = matrices_of(swarm, stages)
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.sim
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stages", [STAGES, [["a", "b"], ["c"]], [["a"]], [["a", "b", "c"]]], ids=len)
def test_a_tied_model_is_that_of_one_process_whatever_the_cut(make_swarm, tiny_spec, stages, optimizer):
    spec = tied_spec(tiny_spec, optimizer={"name": optimizer, "learning_rate": 3e-3})
    swarm = swarm_of(make_swarm, spec, stages)
    single = [step.loss for step in train(spec, load_corpus(spec.data, context=spec.model.context), steps=STEPS)]
    assert single[-1] < single[0] - 0.2, "the yardstick itself does not learn"
    tolerance = 2e-2 if optimizer == "muon" else 1e-4  # torch's Muon rounds to bfloat16
    assert max(abs(a - b) for a, b in zip(swarm.losses, single, strict=True)) < tolerance
    assert are_equal(swarm, stages)


@pytest.mark.sim
@pytest.mark.parametrize("gradients", ["bf16", "hadamard4"])
def test_both_ends_stay_equal_with_narrow_reductions_and_a_step_of_staleness(make_swarm, tiny_spec, gradients):
    spec = tied_spec(tiny_spec, training={"steps": STEPS, "s_max": 1}, wire={"gradients": gradients})
    swarm = swarm_of(make_swarm, spec, STAGES)
    assert are_equal(swarm, STAGES)
    assert swarm.losses[-1] < swarm.losses[0] - 0.2


@pytest.mark.sim
def test_a_tied_model_with_experts_is_that_of_one_process(make_swarm, tiny_spec):
    spec = tied_spec(tiny_spec, model={"num_experts": 4, "tied": True})
    swarm = swarm_of(make_swarm, spec, STAGES)
    single = [step.loss for step in train(spec, load_corpus(spec.data, context=spec.model.context), steps=STEPS)]
    assert max(abs(a - b) for a, b in zip(swarm.losses, single, strict=True)) < 1e-4
    assert are_equal(swarm, STAGES)
