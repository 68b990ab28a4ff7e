"""Adapters in a swarm: they train as PEFT's do in one process, and the base comes to each peer once."""

import asyncio
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from single_process import train
from torch import Tensor

from shoal.deploy.ship.hf_config import config_of
from shoal.peer.data.corpus import load_corpus
from shoal.peer.data.microbatch import microbatch
from shoal.peer.handoff.base_layers import FOLDER, BaseLayers
from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.handoff.initial import weights_digest
from shoal.peer.model.frozen import base_numel, stored_base
from shoal.peer.model.layout import all_layer_keys, init_layer, initial_parameters, layer_layout, state_layout
from shoal.peer.model.schedule import rate_of
from shoal.protocol.layers import EMBED, HEAD, stage_layer_keys
from shoal.protocol.messages import FetchStatus
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import InitialSpec, RunSpec
from shoal.protocol.tensors import EMBEDDING_MATRIX, HEAD_MATRIX

STEPS = 20
THREE_OF_TWO = [["0.0", "0.1"], ["1.0", "1.1"], ["2.0", "2.1"]]
NETWORK = uniform(latency_s=0.05, rate_bytes_per_s=1e7)
BASE_SEED = 77


class Model:
    """Implements `InitialWeights`: a machine's copy of the model; counts how often a layer was read."""

    def __init__(self, spec: RunSpec, *, seed: int = BASE_SEED, tied: bool | None = None) -> None:
        self._spec, self._seed = spec, seed
        self._tied = spec.model.tied if tied is None else tied
        self.asked: list[str] = []

    def layer(self, key: str) -> Tensor:
        return stored_base(self._spec, key, bare(self._spec, key, seed=self._seed, tied=self._tied))

    async def read(self, keys: Sequence[str]) -> Mapping[str, Tensor]:
        self.asked += keys
        return {key: self.layer(key) for key in keys}


def bare(spec: RunSpec, key: str, *, seed: int, tied: bool) -> Tensor:
    """The model's weights, before they are stored: where it is tied its head is its embedding."""
    return init_layer(msgspec.structs.replace(spec.model, tied=tied), key, seed)


def spec_with(
    spec: RunSpec,
    *,
    base: str = "fp32",
    targets: Sequence[str] = (),
    tied: bool = False,
    kind: str = "lora",
    **tables: dict[str, Any],
) -> RunSpec:
    """With adapters beside a base that only some peers have."""
    builtins = msgspec.to_builtins(spec)
    builtins["adapter"] = {"kind": kind, "rank": 4, "alpha": 8.0, "base": base}
    if targets:
        builtins["adapter"]["targets"] = targets
    builtins["optimizer"] |= {"learning_rate": 2e-2, "weight_decay": 0.0}
    for table, values in tables.items():
        builtins[table] |= values
    builtins["model"]["tied"] = tied
    spec = msgspec.convert(builtins, RunSpec)
    digests = tuple(weights_digest(Model(spec, tied=tied).layer(key)) for key in all_layer_keys(spec.model))
    return msgspec.structs.replace(spec, initial=InitialSpec(source="/host/only", digests=digests))


def swarm_of(
    make_swarm: Callable[..., Any],
    spec: RunSpec,
    stages: list[list[str]],
    *,
    models: Mapping[str, Model],
    steps: int = STEPS,
    keeps: bool = False,
) -> Any:
    """A swarm in which `models` says who has the model on its machine."""

    async def main() -> Any:
        swarm = make_swarm(spec, network=NETWORK)
        for name in [name for names in stages for name in names]:
            driver = await swarm.add(name, device_flop_per_s=2e8, keeps=keeps)
            driver.begin_with(models.get(name))
        swarm.obey(stages, not_started=True)
        await swarm.until_step(steps)
        await swarm.close()
        assert swarm.world.failures == []
        return swarm

    return run(main())


def base_of(spec: RunSpec) -> dict[str, Tensor]:
    return {key: Model(spec).layer(key) for key in all_layer_keys(spec.model)}


def losses_of_peft(spec: RunSpec, steps: int) -> Iterator[float]:
    """A plain loop with their model, PEFT's adapters and torch's AdamW."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    assert spec.adapter is not None
    tied = spec.model.tied
    config = config_of(spec.model, dtype="float32", begin_of_text=None, end_of_text=None)
    layouts = [layer_layout(spec.model, key) for key in all_layer_keys(spec.model)]
    views = [layout.views(bare(spec, layout.key, seed=BASE_SEED, tied=tied)) for layout in layouts]
    tensors = {name: tensor for of_layer in views for name, tensor in of_layer.items()}
    if spec.model.num_experts:  # which it holds together, and reads from a folder one by one
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    else:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
        model.load_state_dict(tensors)
    adapter = spec.adapter
    targets = list(adapter.targets_in(spec.model))
    lengthens = adapter.kind == "dora"
    config = peft.LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=targets, use_dora=lengthens)
    adapted = peft.get_peft_model(model, config)
    named = {
        name.removeprefix("base_model.model.").replace("_vector.default.weight", "_vector").replace(".default.", "."): (
            parameter
        )
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }
    keys = [key for key in all_layer_keys(spec.model) if state_layout(spec, key).numel]
    with torch.no_grad():
        for key in keys:
            for name, view in state_layout(spec, key).views(initial_parameters(spec, key)).items():
                if named[name].ndim > 1:  # theirs are whole lengths, ours begin at nothing
                    named[name].copy_(view)
    assert sum(state_layout(spec, key).numel for key in keys) == sum(each.numel() for each in named.values())
    optimizer = spec.optimizer
    adamw = torch.optim.AdamW(
        named.values(), betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.epsilon, weight_decay=0.0
    )
    corpus, number = load_corpus(spec.data, context=spec.model.context), spec.training.microbatches_per_step
    for step in range(steps):
        adamw.zero_grad()
        total = 0.0
        for index in range(number):
            tokens_BT, labels = microbatch(corpus, spec, step, index)
            logits_BTV = adapted(tokens_BT).logits
            loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels.targets_BT.flatten())
            torch.autograd.backward(loss / number)
            total += loss.item()
        for key in keys:
            torch.nn.utils.clip_grad_norm_([named[name] for name in state_layout(spec, key).names], optimizer.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = rate_of(spec, step)
        adamw.step()
        yield total / number


@pytest.mark.sim
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"targets": ("q_proj", "v_proj")},
        {"tied": True},
        {"model": {"num_experts": 4, "experts_per_token": 2}},
        {"model": {"num_experts": 6, "experts_per_token": 3, "decoder": {"qk_norm": "head"}}},
        {"kind": "dora"},
    ],
    ids=["all", "q and v", "tied", "mixtral", "qwen3-moe", "dora"],
)
def test_three_stages_of_two_replicas_train_adapters_as_peft_does_in_one_process(
    make_swarm: Callable[..., Any], tiny_spec: RunSpec, changes: dict[str, Any]
) -> None:
    spec = spec_with(tiny_spec, **changes)
    single = list(losses_of_peft(spec, STEPS))
    assert single[-1] < single[0] - 0.3, "the yardstick itself does not learn"
    alone = [step.loss for step in train(spec, load_corpus(spec.data, context=32), steps=STEPS, base=base_of(spec))]
    assert max(abs(a - b) for a, b in zip(alone, single, strict=True)) < 1e-4
    swarm = swarm_of(make_swarm, spec, THREE_OF_TWO, models={"1.1": Model(spec)})
    assert max(abs(a - b) for a, b in zip(swarm.losses, single, strict=True)) < 1e-4


@pytest.mark.sim
@pytest.mark.parametrize("base", ["bf16", "int8", "nf4"])
def test_a_swarm_beside_a_narrow_base_equals_one_process(
    make_swarm: Callable[..., Any], tiny_spec: RunSpec, base: str
) -> None:
    spec = spec_with(tiny_spec, base=base, training={"steps": 8})
    swarm = swarm_of(make_swarm, spec, [["a"], ["b", "c"]], models={"a": Model(spec)}, steps=8)
    alone = [step.loss for step in train(spec, swarm.corpus, steps=8, base=base_of(spec))]
    assert max(abs(a - b) for a, b in zip(swarm.losses, alone, strict=True)) < 1e-4


@pytest.mark.sim
def test_the_base_comes_to_each_peer_once_and_stays_on_its_disk(
    make_swarm: Callable[..., Any], tiny_spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_with(tiny_spec, base="bf16", training={"steps": 4})
    model = Model(spec)
    fetch, told = BaseLayers._fetch, defaultdict[int, list[FetchStatus]](list)

    async def noted(self: BaseLayers, *what: Any) -> Any:
        stored = await fetch(self, *what)
        assert self.progress is not None
        told[id(self)].append(self.progress.status(0.0))
        return stored

    monkeypatch.setattr(BaseLayers, "_fetch", noted)
    swarm = swarm_of(make_swarm, spec, THREE_OF_TWO, models={"0.0": model}, steps=4, keeps=True)
    assert len(model.asked) <= 2 * len(all_layer_keys(spec.model)), "mates give each other what has come"
    for fetches in told.values():
        left = [status.left_bytes for status in fetches]
        assert left == sorted(left, reverse=True)
        assert left[-1] == 0 < fetches[-1].total_bytes
        assert {status.what for status in fetches} == {"the frozen base"}
    for stage, names in enumerate(THREE_OF_TWO):
        for name in names:
            driver = swarm.drivers[name]
            folder = PurePosixPath(driver.replica._endpoint.run) / FOLDER
            disk = swarm.peer(name).disk
            kept = {file.removesuffix(".bin") for file in disk.list(folder)}
            keys = set(stage_layer_keys(spec.model, stage, stage + 1))
            assert (kept >= keys) if name != "0.0" else not (kept & keys)
            assert all(len(disk.read(folder / f"{key}.bin")) == 4 * base_numel(spec, key) for key in kept)


WIDE: dict[str, Any] = {"vocab_size": 4096, "dim": 256, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
"""Its embedding has 4 MiB, which are one range."""


@pytest.mark.sim
@pytest.mark.parametrize("really", [True, False], ids=["tied", "said to be"])
def test_the_one_matrix_of_a_tied_model_comes_once_to_a_peer_that_needs_both_ends(
    make_swarm: Callable[..., Any], tiny_spec: RunSpec, monkeypatch: pytest.MonkeyPatch, really: bool
) -> None:
    """And where the digests say that the head is another matrix, it comes too."""
    spec = spec_with(tiny_spec, tied=really, model=WIDE, training={"steps": 2}, swarm={"stages": 1})
    spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, tied=True))
    came: dict[str, int] = {}

    fetch = ChunkInbox.fetch

    async def counted(inbox: ChunkInbox, peer: Any, request: Any, *args: Any, **options: Any) -> None:
        await fetch(inbox, peer, request, *args, **options)
        came[request.layer] = came.get(request.layer, 0) + request.stop - request.start

    monkeypatch.setattr(ChunkInbox, "fetch", counted)
    model = Model(spec, tied=really)
    swarm = swarm_of(make_swarm, spec, [["a", "b"]], models={"a": model}, steps=2)
    base = {key: model.layer(key) for key in all_layer_keys(spec.model)}
    assert came[EMBED] == base[EMBED].numel()
    assert came[HEAD] == spec.model.dim + (0 if really else base[HEAD].numel())
    frozen = swarm.drivers["b"].replica.runtime._base
    places = [frozen[EMBED].matrices[EMBEDDING_MATRIX], frozen[HEAD].matrices[HEAD_MATRIX]]
    assert len({place.dense(torch.float32).data_ptr() for place in places}) == (1 if really else 2)
    alone = [step.loss for step in train(spec, swarm.corpus, steps=2, base=base)]
    assert swarm.losses == pytest.approx(alone, abs=1e-4)


@pytest.mark.sim
def test_a_peer_that_had_the_head_of_a_tied_model_fetches_no_embedding(
    make_swarm: Callable[..., Any], tiny_spec: RunSpec
) -> None:
    spec = spec_with(tiny_spec, base="int8", tied=True, training={"steps": 4})

    async def main() -> list[float]:
        swarm, host = make_swarm(spec, network=NETWORK), Model(spec)
        for name in ("a", "b"):
            (await swarm.add(name, keeps=True)).begin_with(host if name == "a" else None)
        swarm.obey([["a"], ["b"]], not_started=True)
        await swarm.until_step(2)
        assert EMBED not in host.asked or host.asked.count(EMBED) == 1, "only a has computed with it"
        swarm.obey([["b"], ["a"]], not_started=True, era=1)
        await swarm.until_step(4)
        disk, folder = swarm.peer("b").disk, PurePosixPath(swarm.drivers["b"].replica._endpoint.run) / FOLDER
        assert disk.read(folder / f"{EMBED}.bin") == host.layer(EMBED).numpy().tobytes()
        assert host.asked.count(EMBED) == 1, "b has made it of the head"
        await swarm.close()
        assert swarm.world.failures == []
        return swarm.losses

    alone = [step.loss for step in train(spec, load_corpus(spec.data, context=32), steps=4, base=base_of(spec))]
    assert run(main())[-4:] == pytest.approx(alone, abs=1e-4)


@pytest.mark.sim
def test_who_has_another_model_is_not_believed(
    make_swarm: Callable[..., Any], tiny_spec: RunSpec, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_with(tiny_spec, training={"steps": 2})
    models = {"a": Model(spec, seed=5), "b": Model(spec)}
    swarm = swarm_of(make_swarm, spec, [["a"], ["b"]], models=models, steps=2)
    alone = [step.loss for step in train(spec, swarm.corpus, steps=2, base=base_of(spec))]
    assert swarm.losses == pytest.approx(alone, abs=1e-5)
    assert "differs between this machine's copy of the model and the run's" in caplog.text


@pytest.mark.sim
def test_without_weights_to_begin_with_the_seed_makes_the_base(
    make_swarm: Callable[..., Any], tiny_spec: RunSpec
) -> None:
    spec = msgspec.structs.replace(spec_with(tiny_spec, training={"steps": 2}), initial=InitialSpec())
    swarm = swarm_of(make_swarm, spec, [["a"], ["b"]], models={}, steps=2)
    alone = [step.loss for step in train(spec, swarm.corpus, steps=2)]
    assert swarm.losses == pytest.approx(alone, abs=1e-5)


@pytest.mark.sim
def test_a_base_on_disk_that_is_damaged_comes_again(make_swarm: Callable[..., Any], tiny_spec: RunSpec) -> None:
    spec = spec_with(tiny_spec, training={"steps": 4})

    async def main() -> list[float]:
        swarm = make_swarm(spec, network=NETWORK)
        for name in ("a", "b"):
            (await swarm.add(name, keeps=True)).begin_with(Model(spec) if name == "a" else None)
        swarm.obey([["a"], ["b"]], not_started=True)
        await swarm.until_step(2)
        disk, folder = swarm.peer("b").disk, PurePosixPath(swarm.drivers["b"].replica._endpoint.run) / FOLDER
        assert disk.list(folder)
        for file in disk.list(folder):
            disk.write(folder / file, bytes(len(disk.read(folder / file))))
        swarm.world.crash(swarm.peer("b"))
        await swarm.add("b", keeps=True)
        swarm.obey([["a"], ["b"]], not_started=True, era=1)
        await swarm.until_step(4)
        await swarm.close()
        assert swarm.world.failures == []
        return swarm.losses

    alone = [step.loss for step in train(spec, load_corpus(spec.data, context=32), steps=4, base=base_of(spec))]
    assert run(main())[-4:] == pytest.approx(alone, abs=1e-5)


@pytest.mark.sim
@pytest.mark.parametrize("optimizer", ["nadam", "muon"])
def test_adapters_are_trained_one_step_stale_and_members_agree(
    make_swarm: Callable[..., Any], tiny_spec: RunSpec, optimizer: str
) -> None:
    """Layers without an element are predicted, stepped and compared as the others are."""
    steps = 10 if optimizer == "muon" else STEPS  # whose steps take ten times as long
    keep = "recompute" if optimizer == "muon" else "stash"
    training = {"steps": steps, "s_max": 1, "compensation": "eager", "keep": keep}
    spec = spec_with(tiny_spec, base="bf16", training=training, optimizer={"name": optimizer})
    swarm = swarm_of(make_swarm, spec, THREE_OF_TWO, models={"0.0": Model(spec)}, steps=steps)
    assert swarm.losses[-1] < swarm.losses[0] - 0.2
    for names in THREE_OF_TWO:
        runtimes = [swarm.drivers[name].replica.runtime for name in names]
        assert {runtime.state.version for runtime in runtimes} == {steps}
        assert len({runtime.state.digest() for runtime in runtimes}) == 1
        assert max(runtime._weights.copies(runtime.state) for runtime in runtimes) <= 3


@pytest.mark.sim
def test_members_may_multiply_in_bfloat16(make_swarm: Callable[..., Any], tiny_spec: RunSpec) -> None:
    spec = spec_with(tiny_spec, base="bf16", training={"steps": 6, "compute": "bf16"})

    async def main() -> Any:
        swarm = make_swarm(spec, network=NETWORK)
        for name in ("a", "b", "c"):
            (await swarm.add(name, dtype=torch.bfloat16)).begin_with(Model(spec) if name == "b" else None)
        swarm.obey([["a"], ["b"], ["c"]], not_started=True)
        await swarm.until_step(6)
        await swarm.close()
        return swarm

    alone = [step.loss for step in train(spec, load_corpus(spec.data, context=32), steps=6, base=base_of(spec))]
    assert run(main()).losses == pytest.approx(alone, abs=0.02)


@pytest.mark.sim
def test_when_the_only_copy_of_the_model_is_gone_its_layers_are_still_there(
    make_swarm: Callable[..., Any], tiny_spec: RunSpec
) -> None:
    """Whoever keeps a snapshot of a stage keeps its base."""
    spec = spec_with(tiny_spec, base="int8", training={"steps": 14}, swarm={"snapshot_interval_steps": 4})

    async def main() -> list[float]:
        swarm = make_swarm(spec, network=NETWORK)
        for name in ("host", "b", "c", "spare"):
            driver = await swarm.add(name, device_flop_per_s=1e8, keeps=True)
            driver.begin_with(Model(spec) if name == "host" else None)
        swarm.obey([["host"], ["b"], ["c"]], not_started=True, spares=("spare",))
        disk, folder = swarm.peer("spare").disk, PurePosixPath(swarm.drivers["spare"].services.endpoint.run) / FOLDER
        await swarm.until_step(5)
        await swarm.until(lambda: {"embed.bin", "layers.0.bin", "layers.1.bin"} <= set(disk.list(folder)))
        for name in ("host", "b"):
            swarm.world.crash(swarm.peer(name))
            del swarm.drivers[name]
        await asyncio.sleep(5.0)
        held = [h for driver in swarm.drivers.values() for h in driver.heartbeat().holdings]
        of_layer = {key: {h.version for h in held if key in h.layers} for h in held for key in h.layers}
        version = max(set.intersection(*of_layer.values()))
        for reports in swarm.commits.values():
            for step in [step for step in reports if step >= version]:
                del reports[step]
        swarm.obey([["c"], ["spare"]], not_started=True, era=1, restore=version)
        await swarm.until_step(14)
        await swarm.close()
        assert swarm.world.failures == []
        return [swarm.commits[1][step].loss for step in range(version, 14)]

    alone = [step.loss for step in train(spec, load_corpus(spec.data, context=32), steps=14, base=base_of(spec))]
    found = run(main())
    assert len(found) >= 4
    assert found == pytest.approx(alone[-len(found) :], abs=1e-4)
