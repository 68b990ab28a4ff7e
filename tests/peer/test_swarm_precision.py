"""Members that multiply in bfloat16: a swarm of them is one process that does, and they may stand beside others."""

import asyncio

import msgspec
import pytest
import torch
from single_process import train

from shoal.peer.data.corpus import load_corpus
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STEPS = 12
NARROW, WIDE = torch.bfloat16, torch.float32


def spec_of(tiny_spec, wire, **model):
    """Activations travel as they are inside; eight microbatches, so that a gradient divided by their number has the
    same bits."""
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {
        "steps": STEPS,
        "microbatches_per_step": 8,
        "validation_interval_steps": 0,
        "s_max": 0,
        "compute": "bf16",
    }
    builtins["wire"] = {"activations": wire}
    builtins["model"] |= model
    return msgspec.convert(builtins, type(tiny_spec))


def played(make_swarm, spec, dtypes, *, experts=None):
    """Three stages of as many members each as there are dtypes."""

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.01, rate_bytes_per_s=1e8))
        stages = [[f"{k}.{r}" for r in range(len(dtypes))] for k in range(3)]
        for names in stages:
            for name, dtype in zip(names, dtypes, strict=True):
                await swarm.add(name, dtype=dtype)
        swarm.obey(stages, not_started=True, experts=experts and [[names] * spec.model.num_experts for names in stages])
        await asyncio.wait_for(swarm.until_step(STEPS), 600)
        await swarm.close()
        return swarm

    return run(main())


def ledger(swarm):
    commits = [commit for by_step in swarm.commits.values() for commit in by_step.values()]
    return {(c.microbatches, c.given_up, c.duplicates, c.dissenting) for c in commits}


@pytest.mark.sim
@pytest.mark.parametrize("subspace", [0, 5])
def test_a_swarm_in_bfloat16_is_one_process_in_bfloat16(make_swarm, tiny_spec, subspace):
    """What is left between them are float32's last bits, which now and then round to another bfloat16; in a subspace
    also what of an activation was rounded out of it."""
    spec = spec_of(tiny_spec, "bf16", subspace=subspace)
    corpus = load_corpus(spec.data, context=spec.model.context)
    swarm = played(make_swarm, spec, [NARROW, NARROW])
    narrow = [step.loss for step in train(spec, corpus, steps=STEPS)]
    wide_spec = msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, compute="fp32"))
    wide = [step.loss for step in train(wide_spec, corpus, steps=STEPS)]
    apart = max(abs(a - b) for a, b in zip(swarm.losses, narrow, strict=True))
    assert apart < 1e-3
    assert max(abs(a - b) for a, b in zip(wide, narrow, strict=True)) > 2 * apart
    assert ledger(swarm) == {(8, 0, 0, 0)}


@pytest.mark.sim
@pytest.mark.parametrize("dtypes", [[NARROW, WIDE], [WIDE, NARROW]])
def test_members_with_different_precisions_hold_equal_bits_at_each_commit(make_swarm, tiny_spec, dtypes):
    swarm = played(make_swarm, spec_of(tiny_spec, "fp32"), dtypes)
    assert ledger(swarm) == {(8, 0, 0, 0)}
    for k in range(3):
        digests = {swarm.drivers[f"{k}.{r}"].replica.runtime.state.digest() for r in (0, 1)}
        assert len(digests) == 1


@pytest.mark.sim
def test_experts_that_are_placed_compute_in_bfloat16_too(make_swarm, tiny_spec):
    spec = spec_of(tiny_spec, "bf16", num_experts=2, experts_per_token=1)
    swarm = played(make_swarm, spec, [NARROW, NARROW], experts=True)
    assert ledger(swarm) == {(8, 0, 0, 0)}
    assert swarm.losses[-1] < swarm.losses[0]
