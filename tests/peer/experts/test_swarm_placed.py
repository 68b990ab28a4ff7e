"""A swarm whose experts are placed is one model: with `s_max = 0` it follows the plain single-process loop, whoever
holds what, and whoever dies."""

import asyncio
import json

import msgspec
import pytest
from single_process import train

from shoal.peer.data.corpus import load_corpus
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import DataSpec

STAGES = [["a", "b", "c"], ["d", "e", "f"]]
EXPERTS = [
    [["a", "b"], ["b", "c"], ["c", "a"], ["a", "b", "c"]],
    [["d", "e"], ["e", "f"], ["f", "d"], ["e"]],
]
STEPS = 6


def tiny(tiny_spec, **training):
    tables = msgspec.to_builtins(tiny_spec)
    tables["model"] |= {"dim": 16, "ffn_dim": 24, "num_layers": 2, "context": 16, "num_experts": 4}
    tables["model"] |= {"router_aux_loss": 0.1}
    tables["training"] |= {"steps": STEPS, "microbatches_per_step": 4} | training
    tables["optimizer"] |= {"learning_rate": 1e-2}
    tables["swarm"] |= {"stages": 2}
    return msgspec.convert(tables, type(tiny_spec))


def single(spec, steps):
    return [step.loss for step in train(spec, load_corpus(spec.data, context=spec.model.context), steps=steps)]


async def started(make_swarm, spec, stages=STAGES, experts=EXPERTS, *, spares=(), seed=0):
    swarm = make_swarm(spec, seed=seed, network=uniform(latency_s=0.02, rate_bytes_per_s=1e7))
    for name in sorted({name for names in stages for name in names}.union(spares)):
        await swarm.add(name, device_flop_per_s=1e8)
    swarm.obey(stages, not_started=True, experts=experts, spares=spares)
    return swarm


async def committed(swarm, steps):
    """Every group has, the experts' too."""
    plan = swarm.plan.plan
    groups = range(len(plan.stages) + len(plan.experts))
    await swarm.until(lambda: all(steps - 1 in swarm.commits.get(group, {}) for group in groups))


def check_groups(swarm, steps):
    """Each microbatch once a step in every group, and all members of a group equal at its end."""
    plan = swarm.plan.plan
    for group in range(len(plan.stages) + len(plan.experts)):
        for step in range(steps):
            commit = swarm.commits[group][step]
            assert (commit.microbatches, commit.duplicates, commit.given_up) == (4, 0, 0), (group, step)
            assert commit.dissenting == 0


@pytest.fixture
def answers(tmp_path):
    """Prompts and completions of very different lengths."""
    rows = [json.dumps({"prompt": "fish? ", "completion": "yes" * (1 + i % 4 // 3 * 4)}) + "\n" for i in range(90)]
    (tmp_path / "answers.jsonl").write_text("".join(rows))
    return DataSpec(source=str(tmp_path / "answers.jsonl"), format="chat", validation_fraction=0.2)


@pytest.mark.sim
@pytest.mark.parametrize("training", [{}, {"keep": "recompute"}], ids=["stash", "recompute"])
@pytest.mark.parametrize("learns", ["all", "answers"])
def test_two_stages_of_three_peers_equal_one_process(make_swarm, tiny_spec, answers, training, learns):
    spec = tiny(tiny_spec, **training)
    if learns == "answers":
        model = msgspec.structs.replace(spec.model, context=48)
        spec = msgspec.structs.replace(spec, data=answers, model=model)

    async def main():
        swarm = await started(make_swarm, spec)
        await committed(swarm, STEPS)
        await swarm.close()
        assert swarm.world.failures == []
        return swarm

    swarm, wanted = run(main()), single(spec, STEPS)
    assert wanted[-1] < wanted[0] - 0.1, "the yardstick itself does not learn"
    assert max(abs(a - b) for a, b in zip(swarm.losses, wanted, strict=True)) < 1e-4
    check_groups(swarm, STEPS)


def without(names, name):
    return [peer for peer in names if peer != name]


def killed(make_swarm, spec, kills, *, experts=EXPERTS, spares=(), seed=0, dropped_after_s=4.0, steps=STEPS):
    """`kills` is {step: name}; the plan drops a killed peer `dropped_after_s` later, and nobody takes its place."""

    async def main():
        stages, units, idle = STAGES, experts, spares
        swarm = await started(make_swarm, spec, stages, units, spares=idle, seed=seed)
        for step, name in sorted(kills.items()):
            await swarm.until_step(step)
            await asyncio.sleep(swarm.world.rng(f"moment {step}").random())
            swarm.world.crash(swarm.peer(name))
            del swarm.drivers[name]
            await asyncio.sleep(dropped_after_s)
            stages = [without(names, name) for names in stages]
            units = [[without(names, name) for names in of_stage] for of_stage in units]
            idle = without(idle, name)
            swarm.obey(stages, not_started=False, experts=units, spares=tuple(idle))
        await committed(swarm, steps)
        await swarm.close()
        return swarm

    return run(main())


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(2))
def test_holders_that_die_in_the_middle_change_no_step(make_swarm, tiny_spec, seed):
    """Members of a stage who hold its experts, and one who holds nothing else."""
    spec = tiny(tiny_spec)
    experts = [[["a", "x"], ["b", "c"], ["x", "a"], ["a", "b", "c"]], [["d", "e"], ["x", "f"], ["f", "d"], ["e", "d"]]]
    kills = {1: "b", 3: "x", 4: "e"}
    swarm = killed(make_swarm, spec, kills, experts=experts, spares=("x",), seed=seed)
    assert max(abs(a - b) for a, b in zip(swarm.losses, single(spec, STEPS), strict=True)) < 1e-4
    check_groups(swarm, STEPS)


@pytest.mark.sim
def test_a_run_with_staleness_counts_each_microbatch_once_whoever_dies(make_swarm, tiny_spec):
    spec = tiny(tiny_spec, s_max=1, steps=10)
    experts = [[["a", "c"], ["b", "x"], ["c", "a"], ["a", "b"]], [["d", "e"], ["x", "f"], ["f", "d"], ["e", "d"]]]
    swarm = killed(make_swarm, spec, {2: "a", 5: "x"}, experts=experts, spares=("x",), steps=10)
    check_groups(swarm, 10)
    assert swarm.losses[-1] < swarm.losses[0] - 0.3


MOVES = [
    [[["a", "b"], ["b", "c"], ["c", "a"], ["a"]], [["d", "e"], ["e", "f"], ["f", "d"], ["x"]]],
    [[["x"], ["b", "d"], ["c", "a", "b"], ["a"]], [["a", "e"], ["f"], ["f", "d"], ["d"]]],
    [[["c", "b"], ["x", "c"], ["b"], ["f"]], [["a", "x"], ["d"], ["f", "d"], ["e"]]],
    [[["a", "b"], ["b", "c"], ["c", "a"], ["a"]], [["d", "e"], ["e", "f"], ["f", "d"], ["x"]]],
]
"""Also all holders of an expert at once."""


@pytest.mark.sim
@pytest.mark.parametrize("seed", [1])
def test_experts_that_move_change_no_step(make_swarm, tiny_spec, seed):
    spec = tiny(tiny_spec, steps=8)

    async def main():
        swarm = await started(make_swarm, spec, STAGES, MOVES[0], spares=("x",), seed=seed)
        for step, experts in zip((1, 3, 5), MOVES[1:], strict=True):
            await swarm.until_step(step)
            await asyncio.sleep(swarm.world.rng(f"moment {step}").random())
            swarm.obey(STAGES, not_started=False, experts=experts, spares=("x",))
        await committed(swarm, 8)
        await swarm.close()
        assert swarm.world.failures == []
        return swarm

    swarm = run(main())
    assert max(abs(a - b) for a, b in zip(swarm.losses, single(spec, 8), strict=True)) < 1e-4
    check_groups(swarm, 8)


@pytest.mark.sim
def test_who_gives_its_place_to_another_stays_until_that_one_could_do_without_a_mate(make_swarm, tiny_spec):
    """e hands expert 0 over to f. As soon as e is gone d dies, whose expert it was as well."""
    spec = tiny(tiny_spec, steps=5)
    before = [EXPERTS[0], [["d", "e"], ["e", "f"], ["f", "d"], ["e", "f"]]]
    after = [EXPERTS[0], [["d", "f"], ["e", "f"], ["f", "d"], ["e", "f"]]]

    async def main():
        swarm = await started(make_swarm, spec, STAGES, before)
        await swarm.until_step(1)
        group = swarm.plan.plan.expert_group(1, 0)
        swarm.obey(STAGES, not_started=False, experts=after)
        e = swarm.drivers["e"]
        await swarm.until(lambda: all(membership.group_id != group for membership in e.experts.memberships))
        swarm.world.crash(swarm.peer("d"))
        del swarm.drivers["d"]
        await asyncio.sleep(4.0)
        units = [[without(names, "d") for names in of_stage] for of_stage in after]
        swarm.obey([without(names, "d") for names in STAGES], not_started=False, experts=units)
        await committed(swarm, 5)
        await swarm.close()
        return swarm

    swarm = run(main())
    assert max(abs(a - b) for a, b in zip(swarm.losses, single(spec, 5), strict=True)) < 1e-4
    check_groups(swarm, 5)
