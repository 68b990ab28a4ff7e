"""Adapters, in and out: a folder becomes the base of a run, and what is trained a folder for PEFT."""

import json
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from shoal.deploy import cli
from shoal.deploy.ship import generate as writing
from shoal.deploy.ship.base_model import base_of
from shoal.deploy.ship.export import export
from shoal.deploy.ship.found_snapshot import find_snapshots
from shoal.deploy.ship.import_model import import_model, open_copy, open_initial
from shoal.deploy.ship.loaded_model import load_model
from shoal.peer.disk.snapshot import write_snapshot
from shoal.peer.handoff.base_layers import FOLDER
from shoal.peer.model.frozen import AdaptedLayer, FrozenLayer
from shoal.peer.model.generate import Sampler
from shoal.peer.model.layout import all_layer_keys, initial_parameters, state_layout
from shoal.peer.model.llama import rotary_tables, run_layers
from shoal.peer.model.state import LayerState
from shoal.protocol.errors import LocalError
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.spec import AdapterSpec, BaseFormat, RunSpec
from shoal.protocol.toml.spec_file import load_spec

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
RUN = "0123456789abcdef"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes, with biases and grouped queries."""
    return saved(tmp_path_factory.mktemp("models") / "little", transformers.Qwen2Config, tied=False)


@pytest.fixture(scope="module", params=["Qwen2Config", "LlamaConfig", "Gemma3TextConfig"])
def tied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is its embedding."""
    more = {"head_dim": 8, "query_pre_attn_scalar": 8} if request.param.startswith("Gemma") else {}
    kind = getattr(transformers, request.param)
    return saved(tmp_path_factory.mktemp("models") / "tied", kind, tied=True, **more)


def saved(folder: Path, kind: Any, *, tied: bool, **more: Any) -> Path:
    torch.manual_seed(3)
    config = kind(
        vocab_size=256,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        **more,
    )
    made = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return folder


def imported(model: Path, *, base: BaseFormat = "fp32", kind: Literal["lora", "dora"] = "lora", **more: Any) -> RunSpec:
    return import_model(model, context=16, adapter=AdapterSpec(kind=kind, rank=4, alpha=6.0, base=base, **more))


def adapters(spec: RunSpec, key: str) -> torch.Tensor:
    """B is not zero, as after some steps."""
    flat_N = initial_parameters(spec, key)
    return flat_N + 0.05 * torch.randn(flat_N.shape, generator=torch.Generator().manual_seed(len(key)))


def write(spec: RunSpec, folder: Path, *, keeps_base: bool = False) -> Path:
    """A peer's folder with a snapshot, as `shoal join` leaves one."""
    disk, at = LiveDisk(folder), PurePosixPath(RUN)
    layers = {}
    for key in all_layer_keys(spec.model):
        param_N = adapters(spec, key)
        layers[key] = LayerState(param_N=param_N, moment1_N=param_N * 0, moment2_N=param_N * 0)
    disk.make_folder(at / "snapshots" / "embed-head")
    write_snapshot(disk, at / "snapshots" / "embed-head", run=RUN, version=9, layers=layers, spec=spec)
    if keeps_base:
        disk.make_folder(at / FOLDER)
        weights = open_initial(spec)
        assert weights is not None
        for key in all_layer_keys(spec.model):
            disk.write(at / FOLDER / f"{key}.bin", weights.layer(key).numpy().tobytes())
    return folder


def ours(spec: RunSpec, tokens_BT: torch.Tensor) -> torch.Tensor:
    weights, keys = open_initial(spec), all_layer_keys(spec.model)
    assert weights is not None
    assert spec.adapter is not None
    layers = {}
    for key in keys:
        frozen = FrozenLayer.of(spec, key, weights.layer(key), device=CPU, dtype=torch.float32)
        layers[key] = AdaptedLayer(frozen, state_layout(spec, key).views(adapters(spec, key)), scale=spec.adapter.scale)
    return run_layers(spec.model, keys, layers, tokens_BT, rotary_tables(spec.model))


TOKENS_BT = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))


def test_a_folder_becomes_the_base_of_a_run(model: Path, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    said = CliRunner().invoke(cli.app, ["import", str(model), str(toml), "--lora", "8", "--base", "nf4"])
    assert said.exit_code == 0, (said.output, said.exc_info)
    assert "adapters of rank 8" in said.output
    spec = load_spec(toml)
    assert spec.adapter == AdapterSpec(kind="lora", rank=8, alpha=16.0, base="nf4")
    weights = open_initial(spec)
    assert weights is not None
    assert len(weights.layer("layers.0")) < len(open_initial(imported(model)).layer("layers.0")) / 6  # type: ignore[union-attr]
    changed = msgspec.structs.replace(spec, adapter=msgspec.structs.replace(spec.adapter, base="int8"))
    with pytest.raises(LocalError, match=r"weights as int8, which .adapter. names"):
        open_initial(changed)


def test_the_import_says_what_goes_with_what(model: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(cli.app, ["import", str(model), str(tmp_path / "run.toml"), "--base", "nf4"])
    assert said.exit_code == 2
    assert "--lora RANK" in said.output


@pytest.mark.parametrize("adapter", [{}, {"targets": ("q_proj", "down_proj")}, {"kind": "dora"}], ids=str)
def test_peft_loads_the_export_with_equal_logits(model: Path, tmp_path: Path, adapter: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    spec = imported(model, **adapter)
    write(spec, tmp_path / "peer")
    done = export(find_snapshots(tmp_path / "peer"), tmp_path / "out")
    assert done.form == "peft"
    assert done.parameters == sum(state_layout(spec, key).numel for key in all_layer_keys(spec.model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    bare = theirs(TOKENS_BT).logits
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "out").eval()
    with torch.inference_mode():
        logits = loaded(TOKENS_BT).logits
        assert (logits - ours(spec, TOKENS_BT)).abs().max() < 1e-4
        assert (logits - bare).abs().max() > 0.01, "the adapters do nothing"
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'library_name: "peft"' in card
    assert f"Adapters for {model.name}" in card


@pytest.mark.parametrize("base", ["fp32", "bf16", "nf4"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_merged_export_is_the_model_that_was_trained(
    model: Path, tmp_path: Path, base: BaseFormat, kind: Literal["lora", "dora"]
) -> None:
    spec = imported(model, base=base, kind=kind)
    write(spec, tmp_path / "peer")
    done = export(find_snapshots(tmp_path / "peer"), tmp_path / "out", form="hf")
    assert done.form == "hf"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32").eval()
    with torch.inference_mode():
        assert (theirs(TOKENS_BT).logits - ours(spec, TOKENS_BT)).abs().max() < 1e-4


MIXTURES = {
    "MixtralConfig": {"num_local_experts": 4, "head_dim": 8},
    "Qwen3MoeConfig": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8},
}


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("base", ["fp32", "nf4"])
def test_beside_experts_the_attention_gets_adapters(tmp_path: Path, kind: str, base: BaseFormat) -> None:
    peft = pytest.importorskip("peft")
    more = MIXTURES[kind] | ({"norm_topk_prob": True} if kind.startswith("Qwen") else {})
    model, toml = saved(tmp_path / "model", getattr(transformers, kind), tied=False, **more), tmp_path / "run.toml"
    argv = ["import", str(model), str(toml), "--lora", "4", "--base", base, "--context", "16"]
    said = CliRunner().invoke(cli.app, argv)
    assert said.exit_code == 0, said.output
    assert "the attention's; experts and routers stay as they are" in " ".join(said.output.split())
    spec = load_spec(toml)
    write(spec, tmp_path / "peer")
    expected = ours(spec, TOKENS_BT)

    done = export(find_snapshots(tmp_path / "peer"), tmp_path / "adapters")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters").eval()
    assert done.parameters == sum(each.numel() for name, each in loaded.named_parameters() if "lora_" in name)
    with torch.inference_mode():
        if base == "fp32":
            assert (loaded(TOKENS_BT).logits - expected).abs().max() < 1e-4

    export(find_snapshots(tmp_path / "peer"), tmp_path / "merged", form="hf")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32").eval()
    with torch.inference_mode():
        assert (merged(TOKENS_BT).logits - expected).abs().max() < 1e-4


def test_adapters_leave_a_tied_model_tied(tied: Path, tmp_path: Path) -> None:
    """The PEFT folder loads on the model itself, and merged it is a model of the same kind, with the one matrix."""
    peft = pytest.importorskip("peft")
    toml = tmp_path / "run.toml"
    argv = ["import", str(tied), str(toml), "--lora", "4", "--base", "fp32", "--context", "16"]
    said = CliRunner().invoke(cli.app, argv)
    assert said.exit_code == 0, said.output
    assert "embedding and head are one matrix and stay so" in said.output
    spec = load_spec(toml)
    assert spec.model.tied
    weights = open_initial(spec)
    assert weights is not None
    embedding = weights.layer("embed")
    assert torch.equal(weights.layer("head")[: embedding.numel()], embedding)
    write(spec, tmp_path / "peer")
    expected = ours(spec, TOKENS_BT)

    export(find_snapshots(tmp_path / "peer"), tmp_path / "adapters")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tied, dtype="float32").eval()
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters").eval()
    with torch.inference_mode():
        assert (loaded(TOKENS_BT).logits - expected).abs().max() < 1e-4

    done = export(find_snapshots(tmp_path / "peer"), tmp_path / "merged", form="hf", shard_bytes=20_000)
    assert done.shards > 1
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is True
    names = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32").eval()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert done.parameters == merged.num_parameters()
    with torch.inference_mode():
        assert (merged(TOKENS_BT).logits - expected).abs().max() < 1e-4


def test_a_tied_model_is_untied_for_adapters_only_where_that_is_asked_for(tied: Path) -> None:
    adapter = AdapterSpec(kind="lora", rank=4, base="int8")
    kept, untied = (import_model(tied, context=16, untie=untie, adapter=adapter) for untie in (False, True))
    assert (kept.model.tied, untied.model.tied) == (True, False)
    assert kept.initial.digests == untied.initial.digests
    again = import_model(tied, context=16, base=kept)
    assert again.model.tied, "the adapter of a run spec counts too"
    copy = open_copy(kept, tied)
    assert copy is not None
    assert torch.equal(copy.layer("head").view(torch.uint8)[: copy.layer("embed").numel() * 4], _bytes(copy, "embed"))


def _bytes(copy: Any, key: str) -> torch.Tensor:
    found: torch.Tensor = copy.layer(key).view(torch.uint8)
    return found


def test_what_a_peer_keeps_of_the_base_is_enough(model: Path, tmp_path: Path) -> None:
    spec = imported(model, base="bf16")
    elsewhere = msgspec.structs.replace(spec.initial, source="/host/only")
    moved = msgspec.structs.replace(spec, initial=elsewhere)
    write(spec, tmp_path / "whole", keeps_base=True)
    (snapshot,) = find_snapshots(tmp_path / "whole")
    snapshot = _with(snapshot, moved)
    base = base_of(snapshot)
    assert base is not None
    weights = open_initial(spec)
    assert weights is not None
    assert torch.equal(base.layer("layers.1").view(torch.uint8), weights.layer("layers.1").view(torch.uint8))
    write(spec, tmp_path / "bare")
    (bare,) = find_snapshots(tmp_path / "bare")
    bare = _with(bare, moved)
    with pytest.raises(LocalError, match=r"does not have embed of the adapters' base model.*--base FOLDER"):
        export([bare], tmp_path / "out", form="hf")
    assert not (tmp_path / "out").exists()
    assert export([bare], tmp_path / "out", form="hf", base=model).form == "hf"


def test_adapters_are_evaluated_and_write_beside_the_model_that_is_named(model: Path, tmp_path: Path) -> None:
    """A machine that neither has the host's folder nor a peer's copy of the base."""
    spec = imported(model)
    moved = msgspec.structs.replace(spec, initial=msgspec.structs.replace(spec.initial, source="/host/only"))
    write(moved, tmp_path / "peer")
    text = tmp_path / "book.txt"
    text.write_bytes(bytes(TOKENS_BT[0] % 90 + 32))

    def shoal(*arguments: object) -> Any:
        return CliRunner().invoke(cli.app, [*map(str, arguments), "--device", "cpu"])

    for command in (("eval", tmp_path / "peer", "--text", text), ("generate", tmp_path / "peer", "-p", "f", "-n", 3)):
        missing = shoal(*command)
        assert missing.exit_code == 2
        assert "say --base FOLDER, with the model" in missing.stderr
        assert shoal(*command, "--base", model).exit_code == 0
    evaluated = shoal("eval", tmp_path / "peer", "--text", text, "--base", model, "--json")
    export(find_snapshots(tmp_path / "peer"), tmp_path / "merged", form="hf", base=model)
    merged = shoal("eval", tmp_path / "merged", "--text", text, "--json")
    losses = [json.loads(said.stdout)["scores"][0]["loss"] for said in (evaluated, merged)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    bare = shoal("eval", model, "--text", text, "--json")
    assert abs(losses[0] - json.loads(bare.stdout)["scores"][0]["loss"]) > 1e-3, "the adapters count"


def test_a_base_for_a_whole_model_is_a_mistake_of_who_names_it(model: Path) -> None:
    said = CliRunner().invoke(cli.app, ["eval", str(model), "--text", "x", "--base", str(model), "--device", "cpu"])
    assert said.exit_code == 2
    assert "is a whole model without adapters: leave --base out" in said.stderr


def _with(snapshot: Any, spec: RunSpec) -> Any:
    return type(snapshot)(run=snapshot.run, era=snapshot.era, version=snapshot.version, spec=spec, parts=snapshot.parts)


def test_a_snapshot_of_adapters_writes(model: Path, tmp_path: Path) -> None:
    write(imported(model), tmp_path / "peer")
    loaded = load_model(tmp_path / "peer", device=CPU)
    assert "".join(writing.write(loaded, "fish", 5, Sampler(temperature=0)))


def test_a_copy_in_the_cache_is_found_by_its_digest(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = imported(model, base="int8")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert open_copy(spec, None) is None
    for name, source in (("other", None), ("little", model)):
        folder = tmp_path / "hub" / f"models--fish--{name}" / "snapshots" / "abc"
        folder.mkdir(parents=True)
        if source is None:
            torch.manual_seed(4)
            config = transformers.AutoConfig.from_pretrained(model)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        else:
            assert open_copy(spec, None) is None, "a model of the same shape is not the same model"
            for file in source.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
    copy = open_copy(spec, None)
    weights = open_initial(spec)
    assert copy is not None
    assert weights is not None
    assert torch.equal(copy.layer("head").view(torch.uint8), weights.layer("head").view(torch.uint8))


def test_a_copy_for_a_run_without_a_base_is_a_mistake_of_who_names_it(model: Path) -> None:
    with pytest.raises(LocalError, match="leave --base out"):
        open_copy(RunSpec(), model)
