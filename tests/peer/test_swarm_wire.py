"""Activations in few bits: a swarm whose members die learns what one process with the same cuts learns."""

from collections import defaultdict

import msgspec
import pytest
from single_process import train

from cuts import cuts
from kills import killed
from shoal.peer.data.corpus import load_corpus
from shoal.peer.pipeline.stage import StageRuntime
from shoal.peer.replica.group_core import GroupCore
from shoal.protocol.wire_format import Formats, tensor_bytes

STEPS = 12
KILLS = {2: "1.0", 4: "0.1", 7: "2.2"}


@pytest.mark.sim
@pytest.mark.parametrize(
    ("wire", "apart_max", "times", "subspace"),
    [
        (("int8", None), 2e-3, 1.5, 0),
        (("hadamard4", None), 4e-3, 10.0, 0),
        (("hadamard3", "hadamard4"), 6e-3, 10.0, 0),
        (("hadamard4", None), 4e-3, 5.0, 5),
    ],
)
def test_in_few_bits_a_run_with_kills_is_that_of_one_process_with_the_same_cuts(
    make_swarm, tiny_spec, wire, apart_max, times, subspace
):
    """Eight microbatches a step: then a gradient that is divided by their number has the same codes. What is left is
    the order of sums, which now and then makes another code of a number. With six seeds on one machine the losses are
    at most 0.0004, 0.0022 and 0.0036 apart, and the cuts themselves change them by 0.0006, 0.043 and 0.15. In a
    subspace one code makes as much of a difference, 0.0013, and the cuts make less, 0.009 to 0.02."""
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": STEPS, "microbatches_per_step": 8, "validation_interval_steps": 0, "s_max": 0}
    builtins["wire"] = {"activations": wire[0], "activation_gradients": wire[1]}
    builtins["model"]["subspace"] = subspace
    spec = msgspec.convert(builtins, type(tiny_spec))
    swarm = killed(make_swarm, spec, KILLS, seed=1)
    corpus = load_corpus(spec.data, context=spec.model.context)
    single = [step.loss for step in train(spec, corpus, steps=STEPS, between=cuts(spec, corpus))]
    plain = [step.loss for step in train(spec, corpus, steps=STEPS)]
    apart = max(abs(a - b) for a, b in zip(swarm.losses, single, strict=True))
    assert apart < apart_max
    assert max(abs(a - b) for a, b in zip(plain, single, strict=True)) > times * apart, "the cuts make a difference"
    for stage in range(3):
        commits = [swarm.commits[stage][step] for step in range(STEPS)]
        assert {(c.microbatches, c.given_up, c.duplicates, c.dissenting) for c in commits} == {(8, 0, 0, 0)}


@pytest.mark.sim
@pytest.mark.parametrize(("gradients", "apart_max"), [("int8", 0.02), ("hadamard4", 0.1), ("auto", 0.1)])
def test_with_gradients_in_few_bits_mates_stay_equal_through_kills_and_learn_much_the_same(
    make_swarm, tiny_spec, gradients, apart_max
):
    """Where the run leaves it to its plans the format changes with each of them, in the middle of steps."""
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": STEPS, "microbatches_per_step": 8, "validation_interval_steps": 0, "s_max": 0}
    builtins["wire"] = {"activations": "fp32", "gradients": gradients}
    spec = msgspec.convert(builtins, type(tiny_spec))
    said = [sums and Formats.same("fp32", sums, 3) for sums in (None, "hadamard4", "int8", "hadamard4")]
    swarm = killed(make_swarm, spec, KILLS, seed=1, formats=said if gradients == "auto" else ())
    corpus = load_corpus(spec.data, context=spec.model.context)
    plain = [step.loss for step in train(spec, corpus, steps=STEPS)]
    apart = [abs(a - b) for a, b in zip(swarm.losses, plain, strict=True)]
    assert 1e-5 < max(apart) < apart_max, "the wire makes a difference, and a small one"
    for stage in range(3):
        commits = [swarm.commits[stage][step] for step in range(STEPS)]
        assert {(c.microbatches, c.given_up, c.duplicates, c.dissenting) for c in commits} == {(8, 0, 0, 0)}


@pytest.mark.sim
def test_where_plans_choose_how_activations_travel_it_changes_in_the_middle_of_steps_and_nothing_is_lost(
    make_swarm, tiny_spec
):
    """What was sent by the plan before goes again as it was, and is read."""
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": STEPS, "microbatches_per_step": 8, "validation_interval_steps": 0, "s_max": 0}
    builtins["wire"] = {"activations": "auto"}
    spec = msgspec.convert(builtins, type(tiny_spec))
    said = [activations and Formats.same(activations, "fp32", 3) for activations in (None, "int8", "bf16", "int8")]
    swarm = killed(make_swarm, spec, KILLS, seed=1, formats=said)
    corpus = load_corpus(spec.data, context=spec.model.context)
    plain = [step.loss for step in train(spec, corpus, steps=STEPS)]
    apart = [abs(a - b) for a, b in zip(swarm.losses, plain, strict=True)]
    assert 1e-6 < max(apart) < 2e-3
    for stage in range(3):
        commits = [swarm.commits[stage][step] for step in range(STEPS)]
        assert {(c.microbatches, c.given_up, c.duplicates, c.dissenting) for c in commits} == {(8, 0, 0, 0)}


@pytest.mark.sim
def test_each_cut_and_stage_has_the_format_that_the_plan_gives_it_and_one_changes_in_mid_training(
    make_swarm, tiny_spec, monkeypatch
):
    """Members are killed and plans change in the middle of steps: each stage's members reduce in one format a round and
    stay equal, and what crosses a cut is both ways in that cut's format, whatever the others have."""
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": STEPS, "microbatches_per_step": 8, "validation_interval_steps": 0, "s_max": 0}
    builtins["wire"] = {"activations": "auto", "gradients": "auto"}
    spec = msgspec.convert(builtins, type(tiny_spec))
    said = [
        Formats(("bf16", "int8"), ("int8", "hadamard4", "int8")),
        Formats(("bf16", "bf16"), ("int8", "hadamard4", "int8")),
        Formats(("int8", "bf16"), ("hadamard4", "hadamard4", "int8")),
        Formats(("int8", "bf16"), ("hadamard4", "hadamard4", "int8")),
    ]
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    forms: dict[tuple[int, int], list[str]] = defaultdict(list)

    def seen(name):
        whole = getattr(StageRuntime, name)

        def job(runtime, *args, **kwargs):
            result = whole(runtime, *args, **kwargs)
            payload = result[1] if name == "loss" else result
            if payload is not None:
                sizes[runtime.keys[0], name].append(len(payload))
            return result

        monkeypatch.setattr(StageRuntime, name, job)

    def reduces(commit, start):
        commands = hold_to(commit, start)
        if commands:
            forms[commit.stage, start.step].append(start.form)
        return commands

    for name in ("forward", "loss", "backward"):
        seen(name)
    hold_to = GroupCore._hold_to
    monkeypatch.setattr(GroupCore, "_hold_to", reduces)
    swarm = killed(make_swarm, spec, KILLS, seed=1, formats=said)

    numel = spec.training.microbatch_size * spec.model.context * spec.model.dim
    firsts = sorted({first for first, _ in sizes})
    assert len(firsts) == 3
    for cut, told in enumerate([("bf16", "int8"), ("int8", "bf16")]):
        back = "loss" if cut == 1 else "backward"
        for found, besides in (
            (sizes[firsts[cut], "forward"], spec.labels_bytes),
            (sizes[firsts[cut + 1], back], 0),
        ):
            changes = [size for index, size in enumerate(found) if index == 0 or size != found[index - 1]]
            assert changes == [tensor_bytes(form, numel) + besides for form in told]
    for stage, told in enumerate([{"int8", "hadamard4"}, {"hadamard4"}, {"int8"}]):
        in_steps = [set(forms[stage, step]) for step in range(STEPS)]
        assert set.union(*in_steps) == told
        commits = [swarm.commits[stage][step] for step in range(STEPS)]
        assert {(c.microbatches, c.given_up, c.duplicates, c.dissenting) for c in commits} == {(8, 0, 0, 0)}
    plain = [step.loss for step in train(spec, load_corpus(spec.data, context=spec.model.context), steps=STEPS)]
    apart = [abs(a - b) for a, b in zip(swarm.losses, plain, strict=True)]
    assert 1e-5 < max(apart) < 0.1
