"""A swarm is one model: with `s_max = 0` it follows the plain single-process loop, whatever the cut and the rest."""

import math

import msgspec
import pytest
import torch
from single_process import train

from shoal.deploy.ship.hf_config import config_of
from shoal.peer.data.corpus import load_corpus
from shoal.peer.data.microbatch import microbatch
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.peer.model.schedule import rate_of
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STEPS = 20


def spec_with(spec, **tables):
    builtins = msgspec.to_builtins(spec)
    for table, values in tables.items():
        builtins[table] |= values
    return msgspec.convert(builtins, type(spec))


def losses_of(make_swarm, spec, stages, *, seed=0, steps=STEPS):
    async def main():
        swarm = make_swarm(spec, seed=seed, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        for names in stages:
            for name in names:
                await swarm.add(name, device_flop_per_s=2e8)
        swarm.obey(stages, not_started=True)
        await swarm.until_step(steps)
        await swarm.close()
        assert swarm.world.failures == []
        return swarm

    return run(main())


@pytest.mark.sim
@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "sgd", "muon"])
def test_three_stages_of_two_replicas_equal_one_process(make_swarm, tiny_spec, optimizer):
    rate = 0.05 if optimizer == "sgd" else 3e-3
    spec = spec_with(tiny_spec, optimizer={"name": optimizer, "learning_rate": rate})
    swarm = losses_of(make_swarm, spec, [["0.0", "0.1"], ["1.0", "1.1"], ["2.0", "2.1"]])
    trained = list(train(spec, load_corpus(spec.data, context=spec.model.context), steps=STEPS))
    single = [step.loss for step in trained]
    assert single[-1] < single[0] - 0.3, "the yardstick itself does not learn"
    tolerance = 2e-2 if optimizer == "muon" else 1e-4  # torch's Muon rounds to bfloat16
    assert max(abs(a - b) for a, b in zip(swarm.losses, single, strict=True)) < tolerance
    norms = [math.hypot(*(swarm.commits[stage][step].gradient_norm for stage in range(3))) for step in range(STEPS)]
    assert norms == pytest.approx([step.grad_norm for step in trained], rel=0.05 if optimizer == "muon" else 2e-3)


QWEN3 = {"head_size": 24, "decoder": {"qk_norm": "head", "attention_bias": "all", "window": 9, "full_layers": [1]}}
OLMO2 = {
    "decoder": {
        "qk_norm": "projection",
        "norms": "post",
        "rope": {"kind": "llama3", "factor": 4.0, "original_context": 16},
    }
}

LLAMA_TIED = {"tied": True}
GEMMA2_TIED = {
    "tied": True,
    "decoder": {
        "norms": "both",
        "norm_plus_one": True,
        "scale_embedding": True,
        "activation": "gelu_tanh",
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "window": 9,
        "full_layers": [1],
    },
}


def losses_of_transformers(transformers, spec, steps):
    """A plain loop with their model and torch's AdamW, from the run's initial weights."""
    config = config_of(spec.model, dtype="float32", begin_of_text=None, end_of_text=None)
    config = transformers.AutoConfig.for_model(**config)
    layouts = [layer_layout(spec.model, key) for key in all_layer_keys(spec.model)]
    weights = [layout.views(init_layer(spec.model, layout.key, spec.seed)) for layout in layouts]
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict({name: tensor for views in weights for name, tensor in views.items()})
    named, optimizer = dict(model.named_parameters()), spec.optimizer
    groups = [
        {"params": [param for param in named.values() if param.ndim == 2], "weight_decay": optimizer.weight_decay},
        {"params": [param for param in named.values() if param.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.epsilon)
    corpus, number = load_corpus(spec.data, context=spec.model.context), spec.training.microbatches_per_step
    for step in range(steps):
        adamw.zero_grad()
        total = 0.0
        for index in range(number):
            tokens_BT, labels = microbatch(corpus, spec, step, index)
            logits_BTV = model(tokens_BT).logits
            loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels.targets_BT.flatten())
            torch.autograd.backward(loss / number)
            total += loss.item()
        for layout in layouts:
            params = [named[name] for name in layout.names if name in named]  # a tied head is the embedding there
            torch.nn.utils.clip_grad_norm_(params, optimizer.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = rate_of(spec, step)
        adamw.step()
        yield total / number


@pytest.mark.sim
@pytest.mark.parametrize(
    "model", [QWEN3, OLMO2, LLAMA_TIED, GEMMA2_TIED], ids=["qwen3", "olmo2", "llama tied", "gemma2 tied"]
)
def test_three_stages_of_two_replicas_train_a_family_as_transformers_does_in_one_process(make_swarm, tiny_spec, model):
    transformers = pytest.importorskip("transformers")
    spec = spec_with(tiny_spec, model=model)
    single = list(losses_of_transformers(transformers, spec, STEPS))
    assert single[-1] < single[0] - 0.3, "the yardstick itself does not learn"
    swarm = losses_of(make_swarm, spec, [["0.0", "0.1"], ["1.0", "1.1"], ["2.0", "2.1"]])
    assert max(abs(a - b) for a, b in zip(swarm.losses, single, strict=True)) < 1e-4


@pytest.mark.sim
def test_a_swarm_with_experts_equals_one_process(make_swarm, tiny_spec):
    spec = spec_with(tiny_spec, model={"num_experts": 4, "router_aux_loss": 0.1}, training={"steps": 12})
    swarm = losses_of(make_swarm, spec, [["0.0", "0.1"], ["1.0", "1.1", "1.2"]], steps=12)
    single = [step.loss for step in train(spec, load_corpus(spec.data, context=spec.model.context), steps=12)]
    assert single[-1] < single[0] - 0.3, "the yardstick itself does not learn"
    assert max(abs(a - b) for a, b in zip(swarm.losses, single, strict=True)) < 1e-4
    for names in (["0.0", "0.1"], ["1.0", "1.1", "1.2"]):
        runtimes = [swarm.drivers[name].replica.runtime for name in names]
        assert len({runtime.state.digest() for runtime in runtimes}) == 1
        assert sum(sum(counts) for r in runtimes for counts in r.expert_loads.totals().values()) > 0


SUBSPACES = {
    "fp32": ({"subspace": 5}, {}, 1e-4),
    "bf16 on the wire": ({"subspace": 5}, {"activations": "bf16"}, 2e-3),
    "experts": ({"subspace": 5, "num_experts": 4}, {}, 1e-4),
}


@pytest.mark.sim
@pytest.mark.parametrize(("model", "wire", "tolerance"), SUBSPACES.values(), ids=SUBSPACES)
@pytest.mark.parametrize("keep", ["stash", "layers"])
def test_a_swarm_with_a_subspace_equals_one_process(make_swarm, tiny_spec, model, wire, tolerance, keep):
    """In one process nothing is ever taken apart into a token's fixed vector and its coordinates."""
    spec = spec_with(tiny_spec, model=model, wire=wire, training={"keep": keep})
    swarm = losses_of(make_swarm, spec, [["0.0", "0.1"], ["1.0", "1.1"], ["2.0"]])
    single = [step.loss for step in train(spec, load_corpus(spec.data, context=spec.model.context), steps=STEPS)]
    assert single[-1] < single[0] - 0.3, "the yardstick itself does not learn"
    assert max(abs(a - b) for a, b in zip(swarm.losses, single, strict=True)) < tolerance


@pytest.mark.sim
def test_recompute_unequal_groups_and_one_stage_equal_one_process(make_swarm, tiny_spec):
    spec = spec_with(tiny_spec, training={"keep": "recompute", "steps": 8})
    single = [step.loss for step in train(spec, load_corpus(spec.data, context=spec.model.context), steps=8)]
    for stages in ([["a"]], [["a", "b", "c"]], [["a"], ["b", "c", "d"], ["e", "f"]]):
        swarm = losses_of(make_swarm, spec, stages, steps=8)
        assert max(abs(a - b) for a, b in zip(swarm.losses, single, strict=True)) < 1e-4, stages


@pytest.mark.sim
def test_every_commit_holds_each_microbatch_once_and_members_agree(make_swarm, tiny_spec):
    swarm = losses_of(make_swarm, spec_with(tiny_spec, training={"s_max": 1}), [["a", "b"], ["c", "d"], ["e", "f"]])
    for stage in range(3):
        for step in range(STEPS):
            commit = swarm.commits[stage][step]
            assert (commit.microbatches, commit.duplicates, commit.given_up, commit.members) == (6, 0, 0, 2)
    states = [swarm.drivers[name].replica.runtime.state for name in ("c", "d")]
    assert states[0].version == states[1].version == STEPS
    assert states[0].digest() == states[1].digest()


@pytest.mark.sim
def test_gradients_in_bf16_leave_members_equal_and_cost_next_to_nothing(make_swarm, tiny_spec):
    stages = [["a", "b"], ["c", "d", "e"], ["f", "g"]]
    exact = losses_of(make_swarm, spec_with(tiny_spec, training={"steps": 10}), stages, steps=10)
    spec = spec_with(tiny_spec, training={"steps": 10}, wire={"activations": "fp32", "gradients": "bf16"})
    narrow = losses_of(make_swarm, spec, stages, steps=10)
    for names in stages:
        states = [narrow.drivers[name].replica.runtime.state for name in names]
        assert {state.version for state in states} == {10}
        assert len({state.digest() for state in states}) == 1
    assert narrow.losses != exact.losses
    assert max(abs(a - b) for a, b in zip(narrow.losses, exact.losses, strict=True)) < 0.02


@pytest.mark.sim
def test_staleness_costs_little_and_never_passes_s_max(make_swarm, tiny_spec):
    synchronous = losses_of(make_swarm, tiny_spec, [["a", "b"], ["c", "d"], ["e", "f"]])
    stale = losses_of(make_swarm, spec_with(tiny_spec, training={"s_max": 1}), [["a", "b"], ["c", "d"], ["e", "f"]])
    staleness = [stale.commits[stage][step].staleness_steps_mean for stage in range(3) for step in range(STEPS)]
    assert 0.0 < sum(staleness) / len(staleness) <= 1.0
    assert max(staleness) <= 1.0
    assert stale.losses != synchronous.losses
    learnt, learnt_stale = (s.losses[0] - s.losses[-1] for s in (synchronous, stale))
    assert learnt_stale > 0.8 * learnt
