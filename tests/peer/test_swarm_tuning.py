"""A swarm that learns the answers of chats is one model: it follows the plain single-process loop, whatever the cut."""

import json
from itertools import pairwise

import msgspec
import pytest
import torch
from single_process import train
from validating import validate

from shoal.deploy.ship.hf_config import config_of
from shoal.peer.data.corpus import load_corpus
from shoal.peer.data.labels import IGNORED
from shoal.peer.data.microbatch import microbatch
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import DataSpec, SourceSpec

STEPS = 12


@pytest.fixture
def data(tmp_path):
    """Chats of very different lengths and a text, three samples of one for one of the other."""
    answers = ["ab" * (1 + i % 17 // 8 * 9) for i in range(120)]
    chats = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}] for answer in answers]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"fish {i} swims"}) + "\n" for i in range(150)))
    return DataSpec(
        sources=(
            SourceSpec(source=str(tmp_path / "chat.jsonl"), format="chat", weight=3.0),
            SourceSpec(source=str(tmp_path / "text.jsonl")),
        ),
        validation_fraction=0.2,
    )


def swarm_of(make_swarm, spec, stages):
    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        for names in stages:
            for name in names:
                await swarm.add(name, device_flop_per_s=2e9)
        swarm.obey(stages, not_started=True)
        await swarm.until_step(STEPS)
        await swarm.close()
        assert swarm.world.failures == []
        return swarm

    return run(main())


@pytest.mark.sim
@pytest.mark.parametrize("keep", ["stash", "recompute"])
@pytest.mark.parametrize(("experts", "subspace"), [(0, 0), (4, 0), (0, 7)])
def test_a_swarm_that_learns_answers_equals_one_process(make_swarm, tiny_spec, data, keep, experts, subspace):
    spec = msgspec.structs.replace(
        tiny_spec,
        data=data,
        model=msgspec.structs.replace(tiny_spec.model, context=96, num_experts=experts, subspace=subspace),
        training=msgspec.structs.replace(tiny_spec.training, keep=keep, validation_interval_steps=4),
    )
    corpus = load_corpus(spec.data, context=96)
    labels = [microbatch(corpus, spec, 0, index)[1] for index in range(spec.training.microbatches_per_step)]
    assert len({one.counted for one in labels}) > 1, "all microbatches weigh the same"
    swarm = swarm_of(make_swarm, spec, [["0.0", "0.1"], ["1.0", "1.1"], ["2.0", "2.1"]])
    validated = {}

    def on_step(record, params):
        if (record.step + 1) % 4 == 0:
            validated[record.step + 1] = validate(spec, corpus, params)

    single = [step.loss for step in train(spec, corpus, steps=STEPS, on_step=on_step)]
    assert single[-1] < single[0] - 0.3, "the yardstick itself does not learn"
    assert max(abs(a - b) for a, b in zip(swarm.losses, single, strict=True)) < 1e-4
    found = {report.step: report.loss for report in swarm.validations}
    assert set(found) & set(validated)
    assert all(found[step] == pytest.approx(validated[step], abs=1e-4) for step in set(found) & set(validated))


def test_a_step_learns_what_transformers_would_of_each_conversation_alone(tiny_spec, data):
    """Its loss with labels of -100 before each answer, the mean over all tokens of all answers in the step."""
    transformers = pytest.importorskip("transformers")
    model = msgspec.structs.replace(tiny_spec.model, context=256)
    chats = DataSpec(source=data.sources[0].source, format="chat", validation_fraction=0.2)
    spec = msgspec.structs.replace(tiny_spec, data=chats, model=model)
    config = config_of(model, dtype="float32", begin_of_text=None, end_of_text=None)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    layouts = [layer_layout(model, key) for key in all_layer_keys(model)]
    views = [layout.views(init_layer(model, layout.key, spec.seed)) for layout in layouts]
    theirs.load_state_dict({name: tensor for of_layer in views for name, tensor in of_layer.items()})
    corpus = load_corpus(chats, context=256)
    total, count, packed = 0.0, 0, 0
    for index in range(spec.training.microbatches_per_step):
        tokens_BT, labels = microbatch(corpus, spec, 0, index)
        for tokens_T, targets_T, begins_T in zip(tokens_BT, labels.targets_BT, labels.begins_BT, strict=True):
            for begin, end in pairwise([*begins_T.nonzero().flatten().tolist(), 256]):
                learnt = targets_T[begin:end]
                if not (learnt >= 0).any():
                    continue
                # What they call labels are the tokens themselves, which they shift by one.
                last = int((learnt >= 0).nonzero().max()) + 1
                conversation = torch.cat((tokens_T[begin : begin + last], learnt[last - 1 :][:1]))
                wanted = torch.cat((torch.tensor([IGNORED]), learnt[:last]))
                with torch.no_grad():
                    loss = theirs(input_ids=conversation[None], labels=wanted[None]).loss
                num = int((learnt >= 0).sum())
                total, count, packed = total + num * float(loss), count + num, packed + 1
    assert packed > 2 * spec.training.microbatches_per_step * spec.training.microbatch_size, "nothing is packed"
    first = next(iter(train(spec, corpus, steps=1)))
    assert first.loss == pytest.approx(total / count, abs=1e-5)


def test_the_loss_of_a_step_is_the_mean_over_all_answers_in_it(tiny_spec, data):
    """As if the step's microbatches were one."""
    model = msgspec.structs.replace(tiny_spec.model, context=96)
    training = msgspec.structs.replace(tiny_spec.training, microbatches_per_step=4, microbatch_size=2)
    many = msgspec.structs.replace(tiny_spec, data=data, model=model, training=training)
    whole = msgspec.structs.replace(training, microbatches_per_step=1, microbatch_size=8)
    one = msgspec.structs.replace(many, training=whole)
    corpus = load_corpus(data, context=96)
    apart, together = ([step.loss for step in train(spec, corpus, steps=3)] for spec in (many, one))
    assert apart == pytest.approx(together, abs=2e-5)
