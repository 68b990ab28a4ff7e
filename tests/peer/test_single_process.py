import math

import msgspec
import pytest
import torch
from single_process import StepLoss, train
from validating import validate

from shoal.kernels.optimizer import OPTIMIZERS, clip
from shoal.peer.data.corpus import Corpus
from shoal.peer.data.microbatch import microbatch
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout, unit_slices
from shoal.peer.model.llama import loss, rotary_tables, run_layers
from shoal.peer.model.schedule import learning_rate
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, SwarmSpec, TrainingSpec

TEXT = b"".join(b"def f%d(x):\n    return x + %d\n\n" % (i % 7, i % 5) for i in range(300))


def corpus() -> Corpus:
    return Corpus(
        text_N=torch.frombuffer(bytearray(TEXT), dtype=torch.uint8), num_training=8000, num_files=1, digest=""
    )


def spec(name: str = "nadam", *, clip_norm: float = 1.0, learning_rate: float = 4e-3) -> RunSpec:
    return RunSpec(
        model=ModelSpec(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, context=32),
        optimizer=OptimizerSpec(
            name=name,  # type: ignore[arg-type]
            clip_norm=clip_norm,
            learning_rate=learning_rate,
            warmup_steps=5,
        ),
        training=TrainingSpec(steps=40, microbatches_per_step=3, microbatch_size=2, validation_microbatches=2),
        swarm=SwarmSpec(stages=2),
    )


def train_flat(spec: RunSpec, corpus: Corpus, steps: int) -> list[tuple[float, float]]:
    """The same training with the swarm's arithmetic: flat state, our kernels. (loss, gradient norm) a step."""
    keys, rotary, M = all_layer_keys(spec.model), rotary_tables(spec.model), spec.training.microbatches_per_step
    optimizer, o = OPTIMIZERS[spec.optimizer.name], spec.optimizer
    matrices = {key: layer_layout(spec.model, key).matrices for key in keys}
    state = {key: (p := init_layer(spec.model, key, spec.seed), *optimizer.moments(p, matrices[key])) for key in keys}
    records = []
    for step in range(steps):
        gradients = {key: torch.zeros_like(state[key][0]) for key in keys}
        total = 0.0
        for index in range(M):
            leaves = {key: layer_layout(spec.model, key).leaves(state[key][0], gradients[key]) for key in keys}
            tokens_BT, labels = microbatch(corpus, spec, step, index)
            value = loss(run_layers(spec.model, keys, leaves, tokens_BT, rotary), labels.targets_BT)
            torch.autograd.backward(value)
            total += value.item()
        norms = []
        for key in keys:
            slices = unit_slices(spec.model, key).values()
            clipped = [clip(gradients[key][span] / M, clip_norm=o.clip_norm) for span in slices]
            grad_N = torch.cat([part_N for part_N, _ in clipped])
            norms += [norm for _, norm in clipped]
            param_N, moment1_N, moment2_N = state[key]
            state[key] = optimizer.step(
                param_N,
                grad_N,
                moment1_N,
                moment2_N,
                learning_rate=learning_rate(o, step, spec.training.steps),
                beta1=o.beta1,
                beta2=o.beta2,
                epsilon=o.epsilon,
                weight_decay=o.weight_decay,
                num_decayed=layer_layout(spec.model, key).num_decayed,
                step=step,
                matrices=matrices[key],
            )
        records.append((total / M, math.hypot(*norms)))
    return records


@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
@pytest.mark.parametrize(("name", "rate"), [("sgd", 0.05), ("adamw", 4e-3), ("nadam", 4e-3)])
def test_torchs_optimizers_and_ours_make_the_same_training(name: str, rate: float, clip_norm: float) -> None:
    run = spec(name, clip_norm=clip_norm, learning_rate=rate)
    plain = list(train(run, corpus(), steps=20))
    flat = train_flat(run, corpus(), 20)
    assert [record.loss for record in plain] == pytest.approx([value for value, _ in flat], abs=1e-4)
    assert [record.grad_norm for record in plain] == pytest.approx([norm for _, norm in flat], rel=1e-2)
    assert plain[-1].loss < plain[0].loss - 0.1


def test_torchs_muon_and_ours_make_nearly_the_same_training() -> None:
    """torch rounds its Newton-Schulz iterations to bfloat16: three digits."""
    run = spec("muon", learning_rate=4e-3)
    plain = [record.loss for record in train(run, corpus(), steps=20)]
    flat = [value for value, _ in train_flat(run, corpus(), 20)]
    assert plain == pytest.approx(flat, abs=0.02)
    assert plain[-1] < plain[0] - 1.0


def test_a_model_with_experts_trains_alike_with_the_balance_added_and_entered_in_each_layer() -> None:
    dense = spec("adamw", clip_norm=0.1)
    tables = msgspec.to_builtins(dense)
    tables["model"] |= {"num_experts": 4, "router_aux_loss": 0.5}
    run = msgspec.convert(tables, RunSpec)
    plain = list(train(run, corpus(), steps=12))
    flat = train_flat(run, corpus(), 12)
    assert [record.loss for record in plain] == pytest.approx([value for value, _ in flat], abs=1e-4)
    assert [record.grad_norm for record in plain] == pytest.approx([norm for _, norm in flat], rel=1e-2)
    assert plain[-1].loss < plain[0].loss - 0.5


def test_it_learns_and_validation_says_so() -> None:
    losses: list[float] = []
    records = list(
        train(spec(), corpus(), steps=40, on_step=lambda _, params: losses.append(validate(spec(), corpus(), params)))
    )
    assert [record.step for record in records] == list(range(40))
    assert losses[0] > 5
    assert losses[-1] < 2.6
    assert records[-1].loss < 2.6


def test_two_runs_are_equal_and_another_seed_is_not() -> None:
    def losses(run: RunSpec) -> list[float]:
        return [record.loss for record in train(run, corpus(), steps=3)]

    assert losses(spec()) == losses(spec())
    other = RunSpec(
        seed=1, model=spec().model, training=spec().training, swarm=spec().swarm, optimizer=spec().optimizer
    )
    assert losses(spec()) != losses(other)


def test_the_callback_sees_each_step() -> None:
    seen: list[StepLoss] = []
    records = list(train(spec(), corpus(), steps=2, on_step=lambda record, _: seen.append(record)))
    assert seen == records
