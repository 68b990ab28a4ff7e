"""The switches of the decoder: a Llama is named as before there were any, and what no family has is refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.deploy.run.run_file import dump_spec
from shoal.protocol.decoder import DecoderSpec, RopeScaling
from shoal.protocol.errors import SpecError
from shoal.protocol.identity import PeerID
from shoal.protocol.spec import ModelSpec, RunSpec, decode_spec, encode_spec, run_id
from shoal.protocol.tensors import layer_tensors, tokens_seen
from shoal.protocol.toml.spec_file import load_spec

YARN = RopeScaling(kind="yarn", factor=4.0, original_context=64)
QWEN3 = ModelSpec(head_size=64, decoder=DecoderSpec(rope=YARN, qk_norm="head", window=32, full_layers=(1, 3)))


def test_a_run_of_a_llama_has_the_id_that_it_had_before_there_were_switches() -> None:
    assert run_id(RunSpec(), PeerID("owner")) == "336f5b74babb6335"
    assert run_id(RunSpec(model=ModelSpec(decoder=DecoderSpec())), PeerID("owner")) == run_id(
        RunSpec(), PeerID("owner")
    )
    assert run_id(RunSpec(model=QWEN3), PeerID("owner")) != run_id(RunSpec(), PeerID("owner"))


def test_switches_come_back_from_the_wire_and_from_a_run_file(tmp_path: Path) -> None:
    spec = RunSpec(model=QWEN3)
    assert decode_spec(encode_spec(spec)) == spec
    (tmp_path / "run.toml").write_text(dump_spec(spec))
    assert load_spec(tmp_path / "run.toml") == spec
    assert "decoder" not in dump_spec(RunSpec())


def test_a_slip_in_a_switch_is_named_with_its_table(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    for line, sentence in [
        ("qk_norms = 1", r"\[model.decoder\] has no 'qk_norms': did you mean qk_norm"),
        ('norms = "none"', r"model.decoder.norms cannot be 'none': it is one of pre, post, both"),
        ("full_layers = [9]\nwindow = 4", r"decoder.full_layers has \[9\], and there are 6 layers"),
    ]:
        path.write_text(f"[model.decoder]\n{line}\n")
        with pytest.raises(SpecError, match=sentence):
            load_spec(path)


@pytest.mark.parametrize(
    ("fields", "family"),
    [
        ({}, "llama"),
        ({"attention_bias": "all", "mlp_bias": True}, "llama"),
        ({"window": 8}, "mistral"),
        ({"attention_bias": "qkv"}, "qwen2"),
        ({"qk_norm": "head"}, "qwen3"),
        ({"qk_norm": "projection", "norms": "post"}, "olmo2"),
    ],
)
def test_switches_say_the_family(fields: dict[str, Any], family: str) -> None:
    assert ModelSpec(decoder=DecoderSpec(**fields)).family == family


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"decoder": DecoderSpec(norms="post")}, r"no model family \(llama, .* allows these values together: norms"),
        (
            {"decoder": DecoderSpec(norms="post"), "num_experts": 4},
            r"no model family with experts \(mixtral, qwen3_moe\)",
        ),
        ({"decoder": DecoderSpec(attention_bias="qkv"), "head_size": 8}, "attention_bias, head_size"),
        ({"head_size": 7}, "head size 7 is odd"),
        ({"head_size": 0}, "head_size must be positive"),
        ({"head_size": 1 << 20}, "num_heads x head_size is at most"),
    ],
)
def test_a_decoder_that_no_family_has_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ModelSpec(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"window": -1},
        {"full_layers": (1,)},
        {"window": 4, "full_layers": (2, 1)},
        {"window_rope_theta": 100.0},
        {"score_dim": 0},
        {"logit_softcap": float("inf")},
    ],
)
def test_impossible_switches_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(set(fields) - {"window"}), "window")):
        DecoderSpec(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "linear", "factor": 0.5},
        {"kind": "yarn", "factor": 2.0},
        {"kind": "llama3", "factor": 2.0, "original_context": 8, "low_freq_factor": 4.0},
        {"kind": "yarn", "factor": 2.0, "original_context": 8, "beta_fast": 1.0},
        {"kind": "yarn", "factor": 2.0, "original_context": 8, "attention_factor": 0.0},
        {"kind": "dynamic", "factor": 2.0},
    ],
)
def test_an_impossible_scaling_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, RopeScaling)


@pytest.mark.parametrize("window", [1, 3, 16, 40])
def test_tokens_seen_are_counted_one_by_one(window: int) -> None:
    model = ModelSpec(context=16, decoder=DecoderSpec(window=window))
    assert tokens_seen(model, 0) == sum(min(at + 1, window) for at in range(16)) / 16


def test_experts_have_the_names_of_their_family() -> None:
    mixtral = ModelSpec(num_experts=2)
    moe = ModelSpec(num_experts=2, decoder=DecoderSpec(qk_norm="head"))
    assert "model.layers.1.block_sparse_moe.experts.1.w3.weight" in layer_tensors(mixtral, "layers.1")[0]
    assert "model.layers.1.mlp.experts.1.up_proj.weight" in layer_tensors(moe, "layers.1.experts.1")[0]
    assert "model.layers.1.mlp.gate.weight" in layer_tensors(moe, "layers.1.trunk")[0]
