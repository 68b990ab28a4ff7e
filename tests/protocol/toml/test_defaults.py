"""What a run file leaves out follows the model's size, and what is unlikely to go well is said."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.peer.model.layout import EMBED, HEAD, all_layer_keys, layer_layout
from shoal.protocol.errors import SpecError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, TrainingSpec, run_id
from shoal.protocol.toml.advice import advice
from shoal.protocol.toml.defaults import (
    Size,
    batch_tokens_of,
    ffn_dim_of,
    fill_in,
    heads_of,
    in_words,
    kv_heads_of,
    learning_rate_of,
    microbatches_of,
    size_of,
    warmup_steps_of,
)
from shoal.protocol.toml.spec_file import convert_spec, load_spec

NOTES: dict[str, Any] = {
    "name": "notes",
    "model": {"dim": 128, "num_layers": 6, "context": 128},
    "training": {"steps": 1000},
    "swarm": {"stages": 2, "min_peers": 2},
}


def spec_of(tables: dict[str, Any]) -> RunSpec:
    return convert_spec(tables, name="run.toml")[0]


def of_width(dim: int, num_layers: int, context: int, steps: int = 400) -> RunSpec:
    model = {"dim": dim, "num_layers": num_layers, "context": context}
    return spec_of({"model": model, "training": {"steps": steps}})


def rate_of(size: Size, tokens_per_step: float, *, tunes: bool = False) -> float:
    """Of a run of 20 tokens a parameter."""
    steps = round(size.tokens / tokens_per_step)
    return learning_rate_of(size, tokens_per_step=tokens_per_step, steps=steps, tunes=tunes)


def test_a_small_byte_model_gets_about_the_rate_that_was_measured_for_it() -> None:
    """0.94 M parameters, steps of 4,096 tokens: 4e-3 and 8e-3 are the best two that were tried."""
    spec = spec_of(
        {
            "model": {"dim": 96, "num_layers": 8, "context": 256},
            "training": {"microbatches_per_step": 16, "microbatch_size": 1, "steps": 400},
        }
    )
    assert 4e-3 <= spec.optimizer.learning_rate <= 8e-3


@pytest.mark.parametrize(
    ("parameters", "rate", "tokens"),
    [
        # Others' choices for such models: within a factor of two. Pythia 160 M and 1 B (2304.01373), Llama 7 B.
        ((768, 12, 2048), 6e-4, 0.5e6),
        ((2048, 16, 2048), 3e-4, 1e6),
        ((4096, 32, 4096), 3e-4, 4e6),
    ],
)
def test_models_of_a_data_centre_get_what_others_gave_them_within_a_few_times(
    parameters: tuple[int, int, int], rate: float, tokens: float
) -> None:
    spec = of_width(*parameters, steps=50_000)
    assert rate / 1.5 < spec.optimizer.learning_rate < 4 * rate
    assert tokens / 6 < spec.tokens_per_step < 2 * tokens


def test_the_published_shapes_of_llama_come_out() -> None:
    assert [ffn_dim_of(dim) for dim in (4096, 5120, 8192)] == [11008, 13824, 22016]
    assert [heads_of(dim) for dim in (4096, 5120, 8192, 768)] == [32, 40, 64, 12]
    assert kv_heads_of(32) == 8


@pytest.mark.parametrize("dim", [*range(2, 300, 2), 1024, 2050, 4096])
def test_every_even_width_gets_a_model_that_can_be(dim: int) -> None:
    model = of_width(dim, 3, 8).model
    assert (model.head_dim % 2, model.dim % model.num_heads, model.num_heads % model.num_kv_heads) == (0, 0, 0)
    assert 8 / 3 * dim <= model.ffn_dim < 8 / 3 * dim + 256


@pytest.mark.parametrize("subspace", [0, 24])
def test_the_size_is_that_of_the_layers_without_norms(subspace: int) -> None:
    model = spec_of({"model": {"dim": 192, "num_layers": 4, "context": 64, "subspace": subspace}}).model
    layers = [key for key in all_layer_keys(model) if key not in (EMBED, HEAD)]
    norms = 2 * model.dim
    expected = sum(layer_layout(model, key).numel - norms for key in layers)
    assert size_of(model).parameters == expected


def test_with_few_numbers_a_token_a_wide_model_takes_larger_microbatches() -> None:
    """What bounds them is that an activation fits into what a stream takes at once."""
    model = {"dim": 4096, "num_layers": 32, "context": 4096}
    whole, reduced = (spec_of({"model": model | {"subspace": k}, "training": {}}).training for k in (0, 512))
    assert (whole.microbatch_size, reduced.microbatch_size) == (1, 8)
    assert whole.microbatches_per_step > 8 * reduced.microbatches_per_step


def test_of_experts_those_count_that_a_token_passes() -> None:
    dense = size_of(spec_of({"model": {"dim": 64, "ffn_dim": 128}}).model)
    mixed = size_of(spec_of({"model": {"dim": 64, "ffn_dim": 64, "num_experts": 8, "experts_per_token": 2}}).model)
    assert mixed == dense


def test_larger_models_take_smaller_rates_and_larger_steps() -> None:
    sizes = [size_of(of_width(dim, 8, 256).model) for dim in (64, 128, 256, 512, 1024)]
    batches = [batch_tokens_of(size) for size in sizes]
    rates = [rate_of(size, batch) for size, batch in zip(sizes, batches, strict=True)]
    assert batches == sorted(batches)
    assert rates == sorted(rates, reverse=True)


def test_smaller_steps_take_smaller_rates_by_the_square_root_and_larger_ones_no_larger() -> None:
    size = size_of(of_width(128, 6, 256).model)
    batch = batch_tokens_of(size)
    whole, quarter, four = (rate_of(size, batch * times) for times in (1, 0.25, 4))
    assert quarter == pytest.approx(whole / 2, rel=0.05)
    assert four == whole


def test_weights_that_are_good_already_take_a_fifteenth() -> None:
    """Llama 2 of 7 B is tuned at 2e-5 with steps of 64 samples of 4,096 tokens."""
    size = size_of(of_width(4096, 32, 4096).model)
    assert rate_of(size, 64 * 4096, tunes=True) == pytest.approx(2e-5, rel=0.1)


def test_a_shorter_run_takes_a_higher_rate_up_to_a_bound() -> None:
    size = size_of(of_width(256, 8, 256).model)
    rates = [learning_rate_of(size, tokens_per_step=1e4, steps=steps) for steps in (1, 10, 100, 1000, 10_000)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] <= 2.6 * rate_of(size, 1e4)


def test_the_warm_up_is_the_same_for_all_runs_of_usual_length() -> None:
    assert {warmup_steps_of(steps, beta2=0.95) for steps in (400, 1000, 4000)} == {40}
    assert [warmup_steps_of(steps, beta2=0.95) for steps in (1, 100, 20_000, 10**6)] == [0, 10, 200, 2000]
    assert warmup_steps_of(50_000, beta2=0.999) == 2000


@pytest.mark.parametrize("stages", [1, 3, 16, 100])
@pytest.mark.parametrize("tokens", [1.0, 8e3, 4e6])
def test_a_step_is_cut_so_that_the_stages_have_work_and_a_stream_takes_each_microbatch(
    tokens: float, stages: int
) -> None:
    number, samples = microbatches_of(tokens, ModelSpec(dim=512, context=256), stages)
    assert number >= 2 * stages
    assert 4 * 512 * 256 * samples <= STREAM_CREDIT_BYTES
    assert number * samples * 256 <= max(1.5 * tokens, 2 * stages * 256)


def test_half_a_cut_that_is_said_is_kept() -> None:
    spec = spec_of(NOTES | {"training": {"microbatch_size": 3}})
    other = spec_of(NOTES | {"training": {"microbatches_per_step": 30}})
    assert spec.training.microbatch_size == 3
    assert other.training.microbatches_per_step == 30
    whole = spec_of(NOTES).tokens_per_step
    assert spec.tokens_per_step == pytest.approx(whole, rel=0.1)
    assert other.tokens_per_step == pytest.approx(whole, rel=0.3)


def test_what_is_said_stays_and_what_is_chosen_is_told() -> None:
    spec, choices = convert_spec(NOTES | {"optimizer": {"learning_rate": 1e-3}}, name="x")
    assert spec.optimizer.learning_rate == 1e-3
    assert {choice.field for choice in choices} == {
        "model.num_heads",
        "model.num_kv_heads",
        "model.ffn_dim",
        "training.microbatches_per_step",
        "training.microbatch_size",
        "optimizer.warmup_steps",
    }
    text = "\n".join(in_words(choices, spec))
    assert "model.ffn_dim = 352" in text
    assert all(f"{choice.field} = {choice.value:g}" in text for choice in choices)
    assert in_words((), spec) == ()


def test_auto_is_not_to_say_it() -> None:
    said = {"model": NOTES["model"] | {"ffn_dim": "auto", "num_heads": "auto"}, "optimizer": {"learning_rate": "auto"}}
    assert spec_of(NOTES | said) == spec_of(NOTES)
    with pytest.raises(SpecError, match=r"optimizer\.beta1 must be a number"):
        spec_of({"optimizer": {"beta1": "auto"}})


def test_a_file_that_says_everything_means_what_it_meant(tmp_path: Path) -> None:
    spec = RunSpec(optimizer=OptimizerSpec(learning_rate=4e-3), training=TrainingSpec(steps=50))
    tables = msgspec.to_builtins(spec)
    del tables["training"]["synchronous_steps"]
    filled, choices = fill_in(tables, RunSpec())
    assert (filled, choices) == (tables, ())
    assert run_id(spec_of(tables), PeerID("owner")) == run_id(spec, PeerID("owner"))


def test_the_number_of_stages_is_left_to_the_swarm_and_a_step_is_cut_for_three() -> None:
    free, three = (spec_of(NOTES | {"swarm": said}) for said in ({}, {"stages": 3}))
    assert (free.swarm.stages, free.swarm.min_peers) == ("auto", 1)
    assert free.training == three.training
    assert spec_of(NOTES | {"swarm": {"stages": "auto"}}) == free
    assert spec_of({"model": {"dim": 64, "num_layers": 1}}).swarm.stages == "auto", "a model of one layer is a run too"


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"model": {"dim": "wide"}}, r"model\.dim must be a whole number, not a text"),
        ({"model": {"dim": -4}}, r"\[model\] dim must be positive, is -4"),
        ({"model": {"dim": 7}}, r"\[model\] head size 7 is odd"),
        ({"model": 3}, "model must be a table"),
        ({"swarm": [1]}, "swarm must be a table"),
        ({"optimizer": {"learning_rate": "fast"}}, r"optimizer\.learning_rate must be a number"),
        ({"optimizer": {"beta2": 1.0}}, r"\[optimizer\] beta1 and beta2 must be in"),
        ({"training": {"microbatch_size": True}}, r"training\.microbatch_size must be a whole number"),
        ({"model": {"num_layers": 2}, "swarm": {"stages": 3}}, r"swarm\.stages 3 is more than model\.num_layers 2"),
    ],
)
def test_what_cannot_be_is_told_as_ever(tables: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError, match=f"^run.toml: {complaint}"):
        spec_of(tables)


# --- advice ---


def test_what_shoal_chooses_and_ships_needs_no_advice() -> None:
    deploy = Path(__file__).parents[3] / "deploy"
    shipped = [load_spec(deploy / name) for name in ("demo/demo.toml", "demo/moe.toml", "compose/run.toml")]
    for spec in (*shipped, spec_of(NOTES), of_width(768, 12, 1024), spec_of({"training": {"steps": 3}})):
        assert advice(spec, training_tokens=10**9, text_vocab_size=256) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optimizer": {"learning_rate": 0.05}}, r"likely to diverge. Set optimizer.learning_rate = 0.00"),
        ({"optimizer": {"learning_rate": 1e-5}}, r"learn slowly. Set optimizer.learning_rate = 0.00"),
        ({"optimizer": {"warmup_steps": 0}}, r"warmup_steps 0 is short.*Set optimizer.warmup_steps = 40"),
        ({"optimizer": {"warmup_steps": 900}}, r"most of the run's 1000 steps. Set optimizer.warmup_steps = 40"),
        (
            {"training": {"microbatches_per_step": 2, "microbatch_size": 1, "steps": 1000}},
            r"256 tokens is 1/37 of .* Set training.microbatches_per_step = 8 and training.microbatch_size = 9",
        ),
        ({"training": {"microbatches_per_step": 400, "steps": 100, "microbatch_size": 9}}, "teaches nothing"),
        ({"training": {"microbatches_per_step": 1, "steps": 1000}}, r"2 stages busy. Set .*microbatches_per_step = 8"),
        ({"training": {"steps": 100_000}}, r"92 times over.*data.source\), or set training.steps = 4340 \(4 times"),
        ({"model": {"vocab_size": 50_000}}, r"12.7 M parameters learn nothing. Set model.vocab_size = 256"),
    ],
)
def test_what_is_likely_to_diverge_or_to_waste_is_told_with_what_to_set(changes: dict[str, Any], told: str) -> None:
    tables = NOTES | {name: NOTES.get(name, {}) | fields for name, fields in changes.items()}
    (sentence,) = advice(spec_of(tables), training_tokens=10_000_000, text_vocab_size=256)
    assert re.search(told, sentence), sentence


def test_a_text_of_few_samples_is_told() -> None:
    sentences = advice(spec_of(NOTES | {"training": {"steps": 1}}), training_tokens=1000, text_vocab_size=256)
    assert any("fewer than one step takes. Set model.context lower" in sentence for sentence in sentences)


def test_a_model_of_no_layers_to_speak_of_has_a_size() -> None:
    model = ModelSpec(dim=2, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=32, context=1)
    size = size_of(model)
    assert learning_rate_of(size, tokens_per_step=1.0, steps=1) > 0
