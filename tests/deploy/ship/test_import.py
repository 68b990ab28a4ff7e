"""A model of others becomes a run of ours, bit for bit, or it is said in one line why it cannot."""

import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from shoal.deploy import cli
from shoal.deploy.ship.export import export
from shoal.deploy.ship.found_snapshot import find_snapshots
from shoal.deploy.ship.import_model import FolderWeights, import_model, open_initial
from shoal.peer.data.tokenizer import BYTES, train_bpe
from shoal.peer.disk.snapshot import write_snapshot
from shoal.peer.handoff.initial import weights_digest
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.peer.model.llama import rotary_tables, run_layers
from shoal.peer.model.state import LayerState
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec
from shoal.protocol.toml.spec_file import load_spec

TEXTS = [f"the {i % 7}th fish of shoal {i % 13} schwimmt größer\n" for i in range(200)]
DENSE = ModelSpec(dim=24, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=40, context=16, rope_theta=5000.0)
EXPERTS = msgspec.structs.replace(DENSE, num_experts=4, experts_per_token=2)

transformers = pytest.importorskip("transformers")


def layer(model: ModelSpec, key: str) -> torch.Tensor:
    return init_layer(model, key, 1) + 0.05


def exported(folder: Path, model: ModelSpec = DENSE) -> Path:
    """What `shoal export` makes of a snapshot."""
    layers = {}
    for key in all_layer_keys(model):
        param_N = layer(model, key)
        layers[key] = LayerState(param_N=param_N, moment1_N=param_N / 2, moment2_N=param_N.square())
    spec = RunSpec(model=model, swarm=SwarmSpec(stages=2))
    write_snapshot(LiveDisk(folder / "peer"), PurePosixPath(), run="run", version=1, layers=layers, spec=spec)
    export(find_snapshots(folder / "peer"), folder / "model", shard_bytes=9000)
    return folder / "model"


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_what_was_exported_is_imported_as_it_was(tmp_path: Path, model: ModelSpec) -> None:
    folder = exported(tmp_path, model)
    spec = import_model(folder, source="python-library")
    assert spec.model == model
    assert spec.data.tokenizer == BYTES
    assert spec.initial.digests == tuple(weights_digest(layer(model, key)) for key in all_layer_keys(model))
    weights = open_initial(spec)
    assert weights is not None
    assert all(torch.equal(weights.layer(key), layer(model, key)) for key in all_layer_keys(model))


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_model_that_transformers_has_saved_computes_the_same_here(tmp_path: Path, kind: str) -> None:
    common = {
        "vocab_size": 300,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    torch.manual_seed(3)
    if kind == "llama":
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
    else:
        theirs = transformers.MixtralForCausalLM(transformers.MixtralConfig(**common, num_local_experts=4))
    theirs.eval().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes(train_bpe(TEXTS, 290))
    spec = import_model(tmp_path / "model", context=32)
    assert spec.data.tokenizer == str(tmp_path / "model" / "tokenizer.json")
    assert spec.model.num_experts == (4 if kind == "mixtral" else 0)
    weights = FolderWeights(tmp_path / "model", spec.model)
    keys = all_layer_keys(spec.model)
    params = {key: layer_layout(spec.model, key).views(weights.layer(key)) for key in keys}
    tokens_BT = torch.randint(300, (2, 32))
    with torch.inference_mode():
        ours = run_layers(spec.model, keys, params, tokens_BT, rotary_tables(spec.model))
        assert torch.allclose(theirs(tokens_BT).logits, ours, atol=1e-4, rtol=0)


def test_the_context_is_what_the_model_allows_and_at_most_1024_if_nothing_is_said(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    assert import_model(folder).model.context == 16
    assert import_model(folder, context=8).model.context == 8
    with pytest.raises(LocalError, match="made for 16 tokens, not for a context of 17"):
        import_model(folder, context=17)
    change(folder, max_position_embeddings=131072)
    assert import_model(folder).model.context == 1024


def test_the_rest_is_the_base_specs(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    base = RunSpec(name="mine", seed=9, swarm=SwarmSpec(stages=1, min_peers=1))
    made = import_model(folder, base=base, source="/texts", stages=2)
    assert (made.name, made.seed, made.optimizer, made.training) == ("mine", 9, base.optimizer, base.training)
    assert (made.data.source, made.swarm.stages, made.swarm.min_peers) == ("/texts", 2, 1)
    with pytest.raises(LocalError, match=r"stages 7 is more than model.num_layers 2"):
        import_model(folder, stages=7)


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2', only llama, mistral, .*qwen3_moe"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, r"scales its rotary positions \(dynamic\)"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, r"config.json cannot be read: .*factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "only a part of each head has rotary positions"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "longrope", "factor": 2.0}},
            r"scales its rotary positions \(longrope\)",
        ),
        ({"model_type": "mixtral", "attention_bias": True}, "its attention has biases"),
        ({"model_type": "qwen3", "mlp_bias": True}, "its feed-forward has biases"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"model_type": "qwen2", "head_dim": 8}, "its 4 heads of 8 are not its width of 24"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]},
            "layers of type linear_attent",
        ),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "its attention scores are capped"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "its attention is bidirectional"),
        ({"model_type": "qwen3_moe"}, "the weights of a token's experts need not add up to 1"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 2}, "only some of its layers"),
        ({"hidden_size": None}, "config.json cannot be read"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "config.json cannot be read: .*ZeroDivision"),
        ({"model_type": "gemma2", "num_hidden_layers": 10**15, "layer_types": None}, "num_layers is at most 1,024"),
        (
            {"num_hidden_layers": 3},
            r"not every weight of its config: model.layers.2.input_layernorm.weight, .* missing",
        ),
        ({"num_hidden_layers": 1}, r"has weights that shoal's model has not: model.layers.1"),
        ({"intermediate_size": 48}, r"cannot read layers.0 .*must have shape \(48, 24\), has \(40, 24\)"),
    ],
)
def test_what_our_model_cannot_be_is_said_in_one_line(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    folder = exported(tmp_path)
    change(folder, **changes)
    with pytest.raises(LocalError, match=sentence) as caught:
        import_model(folder)
    assert "\n" not in str(caught.value)


def no_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def pickle(folder: Path) -> None:
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    change(folder, vocab_size=300)
    for path in folder.glob("*.safetensors"):
        wide = {
            name: torch.zeros(300, 24) if tensor.shape[0] == 256 else tensor for name, tensor in load_file(path).items()
        }
        save_file(wide, path)


def large_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(train_bpe(TEXTS, 290))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"cannot read .*config\.json: No such file"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json is no model's config"),
        (no_weights, r"no \*\.safetensors in"),
        (pickle, "its weights are pickled, save them as safetensors"),
        (lambda folder: next(folder.glob("*-00002-*")).write_bytes(b"nothing"), "cannot read .*00002"),
        (no_tokenizer, r"has no tokenizer\.json"),
        (large_tokenizer, r"has 290 tokens, and the model's vocabulary 256"),
    ],
)
def test_a_folder_that_is_not_whole_is_said_in_one_line(
    tmp_path: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    folder = exported(tmp_path)
    damage(folder)
    with pytest.raises(ShoalError, match=sentence) as caught:
        import_model(folder)
    assert "\n" not in str(caught.value)


def test_weights_that_change_after_the_import_do_not_start_a_run(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    spec = import_model(folder)
    path = next(folder.glob("*-00003-*"))
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, path)
    with pytest.raises(LocalError, match="have changed since `shoal import`"):
        open_initial(spec)
    assert open_initial(RunSpec()) is None


def test_the_command_looks_at_the_text_and_writes_the_lines_that_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, out, text = exported(tmp_path), tmp_path / "run.toml", tmp_path / "text"
    text.write_text("words " * 2000)
    arguments = ["import", str(folder), str(out), "--data", str(text), "--stages", "2"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    spec = load_spec(out)
    of_text = spec.training.steps * spec.tokens_per_step / (0.95 * len("words " * 2000))
    assert 2.5 < of_text < 3.5, "passes over what is there"
    assert spec == import_model(folder, source=str(text), stages=2, steps_of=lambda _: spec.training.steps)
    assert f"data passes in {spec.training.steps:,} steps" in result.output
    assert f"are {spec.training.steps * spec.tokens_per_step:,} tokens" in result.output
    lines = out.read_text().splitlines()
    assert len(lines) < 40
    assert not any(line.startswith(("prediction", "digest =", "clip", "beta")) for line in lines)
    again = CliRunner().invoke(cli.app, arguments)
    assert again.exit_code == cli.EXIT_USER_ERROR
    assert "run.toml is there already" in again.stderr


def test_a_text_that_a_run_cannot_learn_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = tmp_path / "alpaca.jsonl"
    rows.write_text('{"instruction": "say hello", "output": "hello"}\n' * 50)
    arguments = ["import", str(exported(tmp_path)), str(tmp_path / "run.toml"), "--data", str(rows)]
    for form in ("chat", "text"):
        result = CliRunner().invoke(cli.app, [*arguments, "--format", form])
        assert result.exit_code == cli.EXIT_USER_ERROR, result.output
        assert "alpaca.jsonl" in result.stderr
        assert not (tmp_path / "run.toml").exists()
