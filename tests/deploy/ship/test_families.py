"""Each family, as `transformers` initialises it at random: what it computes here, its gradients, and back to a folder.

B samples, T tokens, V vocabulary.
"""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from shoal.deploy import cli
from shoal.deploy.ship.export import export
from shoal.deploy.ship.found_snapshot import find_snapshots
from shoal.deploy.ship.import_model import FolderWeights, import_model
from shoal.peer.data.tokenizer import train_bpe
from shoal.peer.disk.snapshot import write_snapshot
from shoal.peer.model.generate import Sampler, stream
from shoal.peer.model.layout import HEAD, all_layer_keys, layer_layout, num_parameters
from shoal.peer.model.llama import loss, loss_of_head, rotary_tables, run_layers
from shoal.peer.model.state import LayerState
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.spec import ModelSpec, RunSpec, decode_spec, encode_spec
from shoal.protocol.toml.spec_file import load_spec

transformers = pytest.importorskip("transformers")

CONTEXT = 24
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 16}
DEEP_YARN = {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "attention_bias": True, "sliding_window": 6}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
NO_BALANCE = {"router_aux_loss_coef": 0.0}
QWEN3_MOE = {"moe_intermediate_size": 20, "num_experts": 8, "norm_topk_prob": True, "head_dim": 16}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama": ("Llama", {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 10}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2-windows": ("Qwen2", {**WINDOWS, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": DEEP_YARN}),
    "qwen3-windows": ("Qwen3", {"head_dim": 8, "attention_bias": True, **WINDOWS, "max_window_layers": 2}),
    "olmo2": ("Olmo2", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "rope_parameters": GEMMA3_ROPE, "sliding_window_pattern": 3}),
    "gemma3-cap": ("Gemma3Text", {**GEMMA, "final_logit_softcapping": 3.0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 6, "head_dim": 8}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN3_MOE, "num_experts_per_tok": 3, "rope_parameters": YARN}),
    "qwen3-moe-windows": (
        "Qwen3Moe",
        {**QWEN3_MOE, "num_experts_per_tok": 4, "attention_bias": True, **WINDOWS},
    ),
}
"""Name -> transformers' class, and the switches, so small that all of them matter within the context."""
SIZES: Mapping[str, Mapping[str, int]] = {
    "narrow": {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3},
    "deep": {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4},
}
EVERY = [(name, size) for name in CASES for size in SIZES]


def model_of_transformers(name: str, size: str = "narrow", **changes: Any) -> Any:
    """Every norm and bias is what training might have made of it."""
    kind, switches = CASES[name]
    config = getattr(transformers, kind + "Config")(
        intermediate_size=40,
        max_position_embeddings=64,
        pad_token_id=None,
        **{"vocab_size": 256, "tie_word_embeddings": False, **SIZES[size], **switches, **changes},
    )
    torch.manual_seed(5)
    model = getattr(transformers, kind.removesuffix("Text") + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.add_(0.3 * torch.randn_like(param))
            else:
                param.copy_(torch.randn_like(param) / param.shape[-1] ** 0.5)
    return model


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def ours(folder: Path, model: ModelSpec) -> dict[str, Tensor]:
    weights = FolderWeights(folder, model)
    return {key: weights.layer(key) for key in all_layer_keys(model)}


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(256, (2, CONTEXT), generator=torch.Generator().manual_seed(seed))


def exported(folder: Path, spec: RunSpec, flats: Mapping[str, Tensor]) -> Path:
    """What `shoal export` makes of a snapshot, in several files."""
    layers = {key: LayerState(param_N=flat, moment1_N=flat / 2, moment2_N=flat**2) for key, flat in flats.items()}
    write_snapshot(LiveDisk(folder / "peer"), PurePosixPath(), run="run", version=1, layers=layers, spec=spec)
    done = export(find_snapshots(folder / "peer"), folder / "out", shard_bytes=num_parameters(spec.model))
    assert done.shards > 2
    return folder / "out"


@pytest.mark.parametrize(("name", "size"), EVERY)
def test_logits_loss_and_every_gradient_are_those_of_transformers(tmp_path: Path, name: str, size: str) -> None:
    # Their loss is without the balance of the experts, which enters our backward by itself.
    theirs = model_of_transformers(name, size, **(NO_BALANCE if CASES[name][0] in ("Mixtral", "Qwen3Moe") else {}))
    spec = import_model(saved(tmp_path / "model", theirs), context=CONTEXT)
    model, keys = spec.model, all_layer_keys(spec.model)
    flats = ours(tmp_path / "model", model)
    gradients = {key: torch.zeros_like(flat) for key, flat in flats.items()}
    leaves = {key: layer_layout(model, key).leaves(flat, gradients[key]) for key, flat in flats.items()}
    tokens_BT, targets_BT = tokens(), tokens(1)
    rotary = rotary_tables(model)

    logits_BTV = theirs(tokens_BT).logits
    with torch.inference_mode():
        torch.testing.assert_close(run_layers(model, keys, leaves, tokens_BT, rotary), logits_BTV, atol=1e-4, rtol=0)
    their_loss = loss(logits_BTV, targets_BT)
    torch.autograd.backward(their_loss)
    x_BTD = run_layers(model, keys[:-1], leaves, tokens_BT, rotary)
    our_loss = loss_of_head(model, leaves[HEAD], x_BTD, targets_BT)
    torch.autograd.backward(our_loss)
    assert our_loss.item() == pytest.approx(their_loss.item(), abs=1e-4)
    theirs_by_name = gradients_of(theirs)
    for key in keys:
        for tensor, gradient in layer_layout(model, key).views(gradients[key]).items():
            torch.testing.assert_close(gradient, theirs_by_name.pop(tensor), atol=1e-4, rtol=1e-3, msg=tensor)
    assert not theirs_by_name


def gradients_of(model: Any) -> dict[str, Tensor]:
    """By the names that they are saved under, one by one: `transformers` holds a layer's experts together."""
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        mixture, experts, kind = name.partition(".experts.")
        if not experts:
            found[name] = param.grad
            continue
        halves = param.grad.chunk(2, dim=1) if kind == "gate_up_proj" else (param.grad,)
        for part, gradients in zip(kind.replace("gate_up", "gate_proj up").split(), halves, strict=True):
            for expert, gradient in enumerate(gradients):
                found[f"{mixture}.experts.{expert}.{part}.weight"] = gradient
    if model.config.model_type != "mixtral":
        return found
    names = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    return {_replaced(name, names): gradient for name, gradient in found.items()}


def _replaced(name: str, parts: Mapping[str, str]) -> str:
    for before, after in parts.items():
        name = name.replace(before, after)
    return name


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("name", "size"), EVERY)
def test_import_and_export_give_the_tensors_back_and_a_config_that_means_the_same(
    tmp_path: Path, name: str, size: str
) -> None:
    theirs = model_of_transformers(name, size)
    spec = import_model(saved(tmp_path / "model", theirs), context=CONTEXT)
    assert decode_spec(encode_spec(spec)) == spec
    out = exported(tmp_path, spec, ours(tmp_path / "model", spec.model))
    before, after = tensors_in(tmp_path / "model"), tensors_in(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    loaded, notes = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="float32", output_loading_info=True)
    assert type(loaded) is type(theirs)
    assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.inference_mode():
        torch.testing.assert_close(loaded.eval()(tokens()).logits, theirs(tokens()).logits, atol=1e-5, rtol=0)
    again = import_model(out, context=CONTEXT)
    assert (again.model, again.initial.digests) == (spec.model, spec.initial.digests)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_token_by_token_is_what_the_whole_text_gives(tmp_path: Path, name: str) -> None:
    theirs = model_of_transformers(name)
    spec = import_model(saved(tmp_path / "model", theirs), context=CONTEXT)
    params = {
        key: layer_layout(spec.model, key).views(flat) for key, flat in ours(tmp_path / "model", spec.model).items()
    }
    seen: list[Tensor] = []

    class Keeping(Sampler):
        def choose(self, logits_V: Tensor) -> int:
            seen.append(logits_V)
            return super().choose(logits_V)

    text = [3, 200, 17, 80, 5]
    written = stream(spec.model, params, list(text), Keeping(temperature=0))
    text += [next(written) for _ in range(CONTEXT - len(text))]
    with torch.inference_mode():
        logits_TV = theirs(torch.tensor([text])).logits[0]
    torch.testing.assert_close(torch.stack(seen), logits_TV[4:-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma2"])
def test_a_tied_model_stays_tied_there_and_back(tmp_path: Path, name: str) -> None:
    theirs = model_of_transformers(name, tie_word_embeddings=True)
    folder = saved(tmp_path / "model", theirs)
    result = CliRunner().invoke(cli.app, ["import", str(folder), str(tmp_path / "run.toml"), "--context", str(CONTEXT)])
    assert result.exit_code == 0, result.output
    assert "embedding and head are one matrix and stay so: both ends of the pipeline hold it" in result.output
    assert f"{theirs.num_parameters():,} parameters in" in result.output
    spec = load_spec(tmp_path / "run.toml")
    assert spec.trains_tied
    out = exported(tmp_path, spec, ours(folder, spec.model))
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    before, after = tensors_in(folder), tensors_in(out)
    assert json.loads((out / "shoal.json").read_text())["parameters"] == theirs.num_parameters()
    assert before.keys() == after.keys()
    assert "lm_head.weight" not in after
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="float32").eval()
    with torch.inference_mode():
        torch.testing.assert_close(loaded(tokens()).logits, theirs(tokens()).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama3", "gemma2"])
def test_a_tied_head_becomes_a_layer_of_its_own_only_when_asked(tmp_path: Path, name: str) -> None:
    theirs = model_of_transformers(name, tie_word_embeddings=True)
    folder = saved(tmp_path / "model", theirs)
    arguments = ["import", str(folder), str(tmp_path / "run.toml"), "--context", str(CONTEXT), "--untie"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "its embedding and head were one matrix and are two from now on" in result.output
    assert "tie_word_embeddings = false" in result.output
    spec = load_spec(tmp_path / "run.toml")
    flats = ours(folder, spec.model)
    assert torch.equal(flats["embed"], flats["head"][: flats["embed"].numel()])
    params = {key: layer_layout(spec.model, key).views(flat) for key, flat in flats.items()}
    out = exported(tmp_path, spec, flats)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="float32").eval()
    with torch.inference_mode():
        logits_BTV = theirs(tokens()).logits
        found_BTV = run_layers(spec.model, all_layer_keys(spec.model), params, tokens(), rotary_tables(spec.model))
        torch.testing.assert_close(found_BTV, logits_BTV, atol=1e-4, rtol=0)
        torch.testing.assert_close(loaded(tokens()).logits, logits_BTV, atol=1e-5, rtol=0)


def test_tokenizer_chat_template_and_ends_are_carried_along(tmp_path: Path) -> None:
    theirs = model_of_transformers("qwen3", bos_token_id=1, eos_token_id=[2, 3], vocab_size=300)
    folder = saved(tmp_path / "model", theirs)
    (folder / "tokenizer.json").write_bytes(train_bpe(["the fish of shoal schwimmt"] * 9, 280))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "top_k": 7}))
    spec = import_model(folder, context=CONTEXT)
    out = exported(tmp_path, spec, ours(folder, spec.model))
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, out))
    talk = [{"role": "user", "content": "the fish"}]
    assert after.apply_chat_template(talk, tokenize=False) == "<user>the fish"
    assert after("the shoal")["input_ids"] == before("the shoal")["input_ids"]
    assert after.eos_token == before.eos_token
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.top_k) == ([2, 3], 7)
    assert (loaded.config.eos_token_id, loaded.config.max_position_embeddings) == ([2, 3], 64)
