"""A stage whose layers are compiled in the background computes what it did before, and is never compiled twice.

torch's compiler is left out here but for what reads the code: the same operations run, so bits are equal.
"""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.model import compiled
from shoal.peer.model.compiled import CompiledLayers
from shoal.peer.model.state import initial_state
from shoal.peer.pipeline import stage
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.stage import StageRuntime
from shoal.protocol.spec import RunSpec

CPU = torch.device("cpu")
LAYERS = 4
WINDOWS: dict[str, Any] = {"decoder": {"qk_norm": "head", "window": 5, "full_layers": [1]}}


class Backend:
    """Counts what it is asked to compile, and runs it as it is; `is_broken`: it refuses."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.num_asked = 0
        self._is_broken = is_broken

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        self.num_asked += 1
        if self._is_broken:
            raise ValueError("no compiler is here\nand a long story")
        return graph.forward


@pytest.fixture(scope="module")
def corpus(tiny_spec: RunSpec) -> Corpus:
    return load_corpus(tiny_spec.data, context=tiny_spec.model.context)


def spec_with(spec: RunSpec, keep: str, **tables: dict[str, Any]) -> RunSpec:
    builtins = msgspec.to_builtins(spec)
    builtins["training"] |= {"keep": keep, "s_max": 1, "compensation": "eager"}
    for table, values in {"model": {}, **tables}.items():
        builtins[table] |= values
    builtins["model"]["num_layers"] = LAYERS
    return msgspec.convert(builtins, RunSpec)


def pipeline(spec: RunSpec, corpus: Corpus) -> list[StageRuntime]:
    made = [
        StageRuntime(spec, 0, 2, corpus=corpus, device=CPU),
        StageRuntime(spec, 2, LAYERS, corpus=None, device=CPU),
    ]
    for runtime in made:
        runtime.load(initial_state(spec, runtime.keys, CPU))
    return made


def trained(stages: list[StageRuntime]) -> tuple[list[float], list[Tensor]]:
    """Two microbatches there and back, and a validation. Returns: (losses, the sum of each stage's gradients)."""
    first, last = stages
    losses = []
    for microbatch in (Microbatch(0, 0), Microbatch(0, 1)):
        value, gradient = last.loss(microbatch, first.forward(microbatch, None))
        assert gradient is not None
        first.backward(microbatch, gradient)
        for runtime in stages:
            runtime.contribute(microbatch)
        losses.append(value)
    validation = Microbatch(0, -1)
    activation = first.validate(validation, None)
    assert isinstance(activation, bytearray)
    value = last.validate(validation, activation)
    assert isinstance(value, float)
    return [*losses, value], [runtime.gradient_sum(0)() for runtime in stages]


def layers_of(spec: RunSpec, backend: Backend) -> CompiledLayers:
    torch.compiler.reset()  # what other tests have compiled
    return CompiledLayers(
        compiled.CompiledShapes(spec.model, spec.training.microbatch_size, CPU, torch.float32), backend=backend
    )


@pytest.mark.parametrize(
    ("keep", "model"),
    [("stash", {}), ("recompute", {}), ("layers", WINDOWS), ("stash", {"subspace": 5})],
    ids=["stash", "recompute", "layers and windows", "in a subspace"],
)
def test_losses_and_gradients_are_those_of_layers_that_are_not_compiled(
    keep: str, model: dict[str, Any], tiny_spec: RunSpec, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, backend = spec_with(tiny_spec, keep, model=model), Backend()
    losses, sums = trained(pipeline(spec, corpus))
    layers = layers_of(spec, backend)
    monkeypatch.setattr(stage, "compiled_layers", lambda *_: layers)
    stages = pipeline(spec, corpus)
    assert trained(stages)[0] == losses  # with the layers as they are
    assert backend.num_asked == 0
    layers.start()
    layers.wait()
    kinds = 2 if model == WINDOWS else 1
    assert backend.num_asked == 2 * kinds  # with gradients and without
    again, sums_again = trained(pipeline(spec, corpus))
    assert again == losses
    assert all(torch.equal(a_N, b_N) for a_N, b_N in zip(sums, sums_again, strict=True))
    assert backend.num_asked == 2 * kinds, "a job waited for the compiler"
    for key in ("layers.0", "layers.1"):
        assert layers.layer(key, {}, stages[0]._rotary) is not None


def test_where_compiling_fails_layers_run_as_they_are(
    tiny_spec: RunSpec, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_with(tiny_spec, "stash")
    losses, _ = trained(pipeline(spec, corpus))
    layers = layers_of(spec, Backend(is_broken=True))
    with caplog.at_level(logging.WARNING, "shoal"):
        layers.start()
        layers.wait()
    assert "layers stay uncompiled, which is slower" in caplog.text
    assert "and a long story" not in caplog.text
    monkeypatch.setattr(stage, "compiled_layers", lambda *_: layers)
    assert trained(pipeline(spec, corpus))[0] == losses


def test_documents_that_are_masked_run_as_they_are(
    tiny_spec: RunSpec, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, backend = spec_with(tiny_spec, "stash", data={"document_masks": True}), Backend()
    layers = layers_of(spec, backend)
    layers.start()
    layers.wait()
    asked = backend.num_asked
    monkeypatch.setattr(stage, "compiled_layers", lambda *_: layers)
    trained(pipeline(spec, corpus))
    assert backend.num_asked == asked


def test_what_is_compiled_and_where(tiny_spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[CompiledLayers] = []
    monkeypatch.setattr(CompiledLayers, "start", lambda layers: started.append(layers))
    card = torch.device("cuda", 0)
    spec = spec_with(tiny_spec, "stash")
    experts = spec_with(tiny_spec, "stash", model={"num_experts": 4, "experts_per_token": 2})
    adapters = msgspec.convert(
        msgspec.to_builtins(spec) | {"adapter": {"kind": "lora", "rank": 4, "base": "fp32"}}, RunSpec
    )
    for wanted, device in ((spec, CPU), (experts, card), (adapters, card)):
        assert compiled.compiled_layers(wanted, device, torch.float32) is None
    layers = compiled.compiled_layers(spec, card, torch.bfloat16)
    assert compiled.compiled_layers(spec, card, torch.bfloat16) is layers  # once a process
    assert started == [layers]
