"""What `transformers` makes of an export: the same logits, the same text."""

import json
import os
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from shoal.deploy import cli
from shoal.deploy.ship.export import export
from shoal.deploy.ship.found_snapshot import FoundSnapshot, find_snapshots
from shoal.deploy.ship.loaded_model import load_model
from shoal.deploy.ship.sample import write_sample
from shoal.peer.data.tokenizer import train_bpe
from shoal.peer.disk.snapshot import DamagedSnapshot, write_snapshot
from shoal.peer.model.generate import Sampler, stream
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout, num_parameters
from shoal.peer.model.llama import rotary_tables, run_layers
from shoal.peer.model.state import LayerState
from shoal.peer.model.subspace import constants_of
from shoal.protocol.errors import DataError, LocalError
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.spec import DataSpec, ModelSpec, RunSpec, SwarmSpec

TEXTS = [f"the {i % 7}th fish of shoal {i % 13} schwimmt größer\n" for i in range(200)]
DENSE = ModelSpec(dim=24, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=40, context=16, rope_theta=5000.0)
EXPERTS = msgspec.structs.replace(DENSE, num_experts=4, experts_per_token=2)
SUBSPACE = msgspec.structs.replace(DENSE, subspace=5)
EXPERTS_IN_SUBSPACE = msgspec.structs.replace(EXPERTS, subspace=5)
KEYS = all_layer_keys(DENSE)
ROOT = PurePosixPath()
CPU = torch.device("cpu")

transformers = pytest.importorskip("transformers")


def weights(model: ModelSpec, key: str, version: int = 1) -> torch.Tensor:
    """No norm is 1."""
    noise = torch.randn(layer_layout(model, key).numel, generator=torch.Generator().manual_seed(version))
    return init_layer(model, key, version) + 0.1 * noise


def state(model: ModelSpec, key: str, version: int) -> LayerState:
    param_N = weights(model, key, version)
    return LayerState(param_N=param_N, moment1_N=param_N / 2, moment2_N=param_N.square())


def write(
    folder: Path, model: ModelSpec, *, version: int = 1, keys: tuple[str, ...] = KEYS, data: DataSpec | None = None
) -> Path:
    spec = RunSpec(model=model, data=data or DataSpec(), swarm=SwarmSpec(stages=2))
    layers = {key: state(model, key, version) for key in keys}
    path = write_snapshot(LiveDisk(folder), ROOT, run="run", version=version, layers=layers, spec=spec)
    return folder / path


def ours(model: ModelSpec, tokens_BT: torch.Tensor, version: int = 1) -> torch.Tensor:
    params = {key: layer_layout(model, key).views(weights(model, key, version)) for key in KEYS}
    constants = {key: constants_of(RunSpec(model=model), key, device=CPU, dtype=torch.float32) for key in KEYS}
    return run_layers(model, KEYS, {key: params[key] | constants[key] for key in KEYS}, tokens_BT, rotary_tables(model))


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (DENSE, "LlamaForCausalLM"),
        (EXPERTS, "MixtralForCausalLM"),
        (SUBSPACE, "LlamaForCausalLM"),
        (EXPERTS_IN_SUBSPACE, "MixtralForCausalLM"),
    ],
    ids=["llama", "mixtral", "llama in a subspace", "mixtral in a subspace"],
)
def test_transformers_loads_it_and_computes_the_same_logits(tmp_path: Path, model: ModelSpec, name: str) -> None:
    write(tmp_path / "peer", model)
    shard = num_parameters(model) * 4 // 3
    done = export(find_snapshots(tmp_path / "peer"), tmp_path / "out", shard_bytes=shard)
    assert done.parameters == num_parameters(model.whole)
    assert done.shards >= 3
    loaded, notes = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="float32", output_loading_info=True
    )
    assert type(loaded).__name__ == name
    assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens_BT = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        assert torch.allclose(loaded.eval()(tokens_BT).logits, ours(model, tokens_BT), atol=1e-4, rtol=0)


def test_the_byte_tokenizer_is_loaded_and_every_byte_is_its_own_token(tmp_path: Path) -> None:
    write(tmp_path / "peer", DENSE)
    export(find_snapshots(tmp_path / "peer"), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == 256
    for text in ("def f(x):\n\treturn x  # größer €😀", " leading", "a\0b\x7f\x85", "e\u0301\u200b"):
        tokens = tokenizer(text)["input_ids"]
        assert tokens == list(text.encode())
        assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([0x61, 0xFF, 0xC3]) == "a\ufffd\ufffd"
    assert tokenizer.eos_token_id is None


def test_both_write_the_same_text(tmp_path: Path) -> None:
    write(tmp_path / "peer", DENSE)
    export(find_snapshots(tmp_path / "peer"), tmp_path / "out")
    prompt = torch.tensor([list(b"fish")])
    with torch.inference_mode():
        text = theirs(tmp_path / "out").generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()
    params = {key: layer_layout(DENSE, key).views(weights(DENSE, key)) for key in KEYS}
    tokens = stream(DENSE, params, list(b"fish"), Sampler(temperature=0))
    assert text == [*b"fish", *(next(tokens) for _ in range(12))]


def test_what_a_run_in_a_subspace_has_learnt_speaks_and_predicts_as_its_export_does(tmp_path: Path) -> None:
    snapshot = write(tmp_path / "peer", SUBSPACE)
    export(find_snapshots(tmp_path / "peer"), tmp_path / "out")
    tokens_BT = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(5))
    targets_BT = tokens_BT.roll(-1, dims=1)
    run, folder = (load_model(where, device=CPU) for where in (snapshot, tmp_path / "out"))
    assert (run.model.subspace, folder.model.subspace) == (0, 0)
    logits_BTV = ours(SUBSPACE, tokens_BT)
    wanted = float(torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())) * 48
    for model in (run, folder):
        assert model.loss_sum(tokens_BT, targets_BT) == pytest.approx(wanted, rel=1e-5)
    wrote = [[*islice(model.stream(list(b"fish"), Sampler(temperature=0)), 12)] for model in (run, folder)]
    assert wrote[0] == wrote[1]
    assert write_sample(snapshot, num_tokens=5).text.startswith("def ")


def test_a_run_with_a_tokenizer_is_exported_with_it_wherever_it_is_now(tmp_path: Path) -> None:
    vocabulary = train_bpe(TEXTS, 290)
    (tmp_path / "tokenizer.json").write_bytes(vocabulary)
    model = msgspec.structs.replace(DENSE, vocab_size=290)
    data = DataSpec(tokenizer="/on/the/host/tokenizer.json")
    write(tmp_path / "peer", model, data=data)
    with pytest.raises(DataError, match="no tokenizer /on/the/host"):
        export(find_snapshots(tmp_path / "peer"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(find_snapshots(tmp_path / "peer"), tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == vocabulary
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer(TEXTS[3])["input_ids"]) == TEXTS[3]
    assert tokenizer.eos_token == "<|endoftext|>"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id


def test_half_precision_is_half_the_size_and_nearly_the_same(tmp_path: Path) -> None:
    write(tmp_path / "peer", DENSE)
    done = export(find_snapshots(tmp_path / "peer"), tmp_path / "out", dtype="bfloat16")
    assert done.bytes == 2 * num_parameters(DENSE)
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "some files are readable for others and some are not"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    name = "model.layers.0.mlp.up_proj.weight"
    exact = layer_layout(DENSE, "layers.0").views(weights(DENSE, "layers.0"))[name]
    assert torch.equal(found[name], exact.bfloat16())


def test_progress_ends_with_all_of_it(tmp_path: Path) -> None:
    write(tmp_path / "peer", DENSE)
    told: list[float] = []
    export(find_snapshots(tmp_path / "peer"), tmp_path / "out", on_progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_nothing_is_overwritten_and_nothing_unfinished_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "peer", DENSE)
    (tmp_path / "out").mkdir()
    with pytest.raises(LocalError, match="is there already"):
        export(find_snapshots(tmp_path / "peer"), tmp_path / "out")
    os.truncate(path / "head.safetensors", 100)
    with pytest.raises(DamagedSnapshot, match="head"):
        export(find_snapshots(tmp_path / "peer"), tmp_path / "other")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "peer"]


def test_if_the_newest_is_damaged_the_one_before_is_taken(tmp_path: Path) -> None:
    write(tmp_path / "peer", DENSE, version=1)
    os.truncate(write(tmp_path / "peer", DENSE, version=2) / "layers.1.safetensors", 100)
    done = export(find_snapshots(tmp_path / "peer"), tmp_path / "out")
    assert done.version == 1
    tokens_BT = torch.tensor([list(b"0123456789")])
    with torch.inference_mode():
        logits_BTV = theirs(tmp_path / "out")(tokens_BT).logits
    assert torch.allclose(logits_BTV, ours(DENSE, tokens_BT, version=1), atol=1e-4, rtol=0)


def test_the_command_says_what_it_has_written(tmp_path: Path) -> None:
    write(tmp_path / "peer", DENSE)
    said = [
        CliRunner().invoke(cli.app, ["export", str(tmp_path / "peer"), str(tmp_path / name), *options])
        for name, options in (("one", ["--dtype", "bfloat16"]), ("two", ["--json"]))
    ]
    assert [result.exit_code for result in said] == [0, 0], said[0].output + said[1].output
    assert f"run run, version 1: {num_parameters(DENSE):,} parameters" in said[0].stdout
    assert "of bfloat16 in one file" in said[0].stdout
    assert said[0].stderr == said[1].stderr == ""
    assert json.loads(said[1].stdout)["bytes"] == 4 * num_parameters(DENSE)
    assert (tmp_path / "two" / "config.json").is_file()


# --- which snapshot ---


def newest(where: Path) -> FoundSnapshot:
    return find_snapshots(where)[0]


def test_stages_in_many_folders_are_put_together_and_a_damaged_part_comes_from_elsewhere(tmp_path: Path) -> None:
    os.truncate(write(tmp_path / "a" / "snapshots" / "front", DENSE, keys=KEYS[:2]) / "embed.safetensors", 10)
    write(tmp_path / "b" / "deep" / "down", DENSE, keys=KEYS[2:])
    write(tmp_path / "c", DENSE, keys=KEYS[:2])
    write(tmp_path / "c", DENSE, keys=KEYS[:2], version=2)
    found = newest(tmp_path)
    assert found.version == 1
    assert all(torch.equal(found.read(key), weights(DENSE, key)) for key in KEYS)


def test_a_snapshot_is_named_by_its_own_folder_too_also_when_a_person_has_renamed_it(tmp_path: Path) -> None:
    first = write(tmp_path / "peer", DENSE, version=1)
    write(tmp_path / "peer", DENSE, version=2)
    assert newest(tmp_path / "peer").version == 2
    assert newest(first).version == 1
    assert newest(first.rename(tmp_path / "peer" / "the good one")).version == 1


def test_of_several_runs_in_a_folder_it_is_the_one_that_was_written_to_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = RunSpec(model=DENSE, swarm=SwarmSpec(stages=2))
    layers = {key: state(DENSE, key, 1) for key in KEYS}
    for age, (name, version) in enumerate((("b", 3), ("a", 9))):
        path = write_snapshot(LiveDisk(tmp_path / name), ROOT, run=name, version=version, layers=layers, spec=spec)
        os.utime(tmp_path / name / path / "manifest.json", (1000 - age, 1000 - age))
    assert (newest(tmp_path).run, newest(tmp_path).version) == ("b", 3)
    assert f"this is run {spec.name} (b), which was written to last; {tmp_path} has also {spec.name} (a)" in caplog.text


def test_layers_that_are_nowhere_are_named(tmp_path: Path) -> None:
    write(tmp_path, DENSE, keys=KEYS[1:3])
    with pytest.raises(LocalError, match=r"run run it lacks embed, head; other peers hold those stages"):
        find_snapshots(tmp_path)
