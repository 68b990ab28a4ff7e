"""A holder of experts whose device all but stands still, while its network is as before, is worked around."""

import itertools

import msgspec
import pytest
from single_process import train

from shoal.peer.data.corpus import load_corpus
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STAGES = [["a", "b", "c"], ["d", "e", "f"]]
EXPERTS = [[["a", "x"], ["b", "x"], ["x", "c"], ["b", "a"]], [["d", "e"], ["e", "f"], ["f", "d"], ["e", "d"]]]
"""x holds experts and nothing else."""
STEPS = 14


def mixture(tiny_spec):
    tables = msgspec.to_builtins(tiny_spec)
    tables["model"] |= {"dim": 16, "ffn_dim": 24, "num_layers": 2, "context": 16, "num_experts": 4}
    tables["training"] |= {"steps": STEPS, "microbatches_per_step": 4}
    tables["swarm"] |= {"stages": 2}
    return msgspec.convert(tables, type(tiny_spec))


@pytest.mark.sim
def test_a_holder_that_becomes_slow_costs_seconds(make_swarm, tiny_spec):
    """What took a millisecond takes it a second. Each step took eight before somebody lost patience."""
    spec = mixture(tiny_spec)
    times = []

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.02, rate_bytes_per_s=1e7))
        for name in "abcdefx":
            await swarm.add(name, device_flop_per_s=1e8)
        swarm.obey(STAGES, not_started=True, experts=EXPERTS, spares=("x",))
        for step in range(1, STEPS + 1):
            await swarm.until_step(step)
            times.append(swarm.world.now_s())
            if step == 5:
                swarm.world.slow_device(swarm.peer("x"), 1000.0)
        await swarm.until(lambda: all(len(swarm.commits.get(group, {})) == STEPS for group in range(10)))
        await swarm.close()
        assert swarm.world.failures == []
        return swarm

    swarm = run(main())
    took_s = [after - before for before, after in itertools.pairwise(times)]
    assert max(took_s) < 8.0
    assert sum(took_s[5:]) < 25.0, took_s
    assert max(took_s[-3:]) < 2.0, "it is given nothing any more"
    corpus = load_corpus(spec.data, context=spec.model.context)
    wanted = [step.loss for step in train(spec, corpus, steps=STEPS)]
    assert max(abs(a - b) for a, b in zip(swarm.losses, wanted, strict=True)) < 1e-4
    reports = [report for group in range(10) for report in swarm.commits[group].values()]
    assert {(r.microbatches, r.duplicates, r.given_up, r.dissenting) for r in reports} == {(4, 0, 0, 0)}
