"""A backward that runs one layer's forward at a time again: the bits of one that kept everything, and little memory."""

import weakref
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.model.frozen import seed_base
from shoal.peer.model.state import initial_state
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.stage import StageRuntime
from shoal.protocol.spec import RunSpec

CPU = torch.device("cpu")
LAYERS = 6
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "adapters": {},
    "nf4": {"adapter": {"base": "nf4"}},
    "dora": {"adapter": {"kind": "dora"}},
    "experts": {"model": {"num_experts": 4, "experts_per_token": 2}},
    "documents": {"data": {"document_masks": True}},
}


@pytest.fixture(scope="module")
def corpus(tiny_spec: RunSpec) -> Corpus:
    return load_corpus(tiny_spec.data, context=tiny_spec.model.context)


def spec_with(spec: RunSpec, *, keep: str, adapts: bool = True, **tables: dict[str, Any]) -> RunSpec:
    builtins = msgspec.to_builtins(spec)
    builtins["model"]["num_layers"] = LAYERS
    builtins["training"] |= {"keep": keep, "s_max": 1, "compensation": "eager"}
    if adapts:
        builtins["adapter"] = {"kind": "lora", "rank": 4, "base": "fp32"}
    for table, values in tables.items():
        builtins[table] |= values
    return msgspec.convert(builtins, RunSpec)


def stage(spec: RunSpec, first: int, last: int, corpus: Corpus, dtype: torch.dtype = torch.float32) -> StageRuntime:
    """At version 0, but for B of the adapters, which is not zero."""
    made = StageRuntime(spec, first, last, corpus=corpus if first == 0 else None, device=CPU, dtype=dtype)
    state = initial_state(spec, made.keys, CPU)
    for number, layer in enumerate(state.layers.values()):
        layer.param_N.add_(0.05 * torch.randn(layer.param_N.shape, generator=torch.Generator().manual_seed(number)))
    made.load(state)
    if spec.adapter is not None:
        made.load_base({key: seed_base(spec, key) for key in made.keys})
    return made


def trained(pipeline: list[StageRuntime], *, makes_room: bool = False) -> tuple[list[float], list[Tensor]]:
    """Two microbatches there and back. Returns: (losses, the sum of each stage's gradients)."""
    first, last = pipeline
    losses = []
    for microbatch in (Microbatch(0, 0), Microbatch(0, 1)):
        payload = first.forward(microbatch, None)
        if makes_room:
            for runtime in pipeline:
                runtime.make_room()
        value, gradient = last.loss(microbatch, payload)
        assert gradient is not None
        assert first.backward(microbatch, gradient) is None
        losses.append(value)
        for runtime in pipeline:
            runtime.contribute(microbatch)
    return losses, [runtime.gradient_sum(0)() for runtime in pipeline]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_a_backward_that_kept_everything(
    tiny_spec: RunSpec, corpus: Corpus, case: str, dtype: torch.dtype
) -> None:
    found = []
    for keep in ("stash", "layers"):
        spec = spec_with(tiny_spec, keep=keep, adapts=case != "whole", **CASES[case])
        assert spec.recomputes_by_layer == (keep == "layers")
        found.append(trained([stage(spec, 0, 3, corpus, dtype), stage(spec, 3, LAYERS, corpus, dtype)]))
    (losses, gradients), (again, same) = found
    assert losses == again
    assert all(gradient_N.any() for gradient_N in gradients)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("keep", ["stash", "layers", "recompute"])
def test_so_is_that_of_a_run_whose_job_has_found_no_memory(
    tiny_spec: RunSpec, corpus: Corpus, keep: str, adapts: bool
) -> None:
    spec = spec_with(tiny_spec, keep=keep, adapts=adapts)
    losses, gradients = trained([stage(spec, 0, 3, corpus), stage(spec, 3, LAYERS, corpus)])
    again, same = trained([stage(spec, 0, 3, corpus), stage(spec, 3, LAYERS, corpus)], makes_room=True)
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


class Held:
    """Counts the bytes that graphs hold, weights apart, and their maximum."""

    def __init__(self) -> None:
        self.now, self.most = 0, 0

    def keep(self, tensor: Tensor) -> Tensor:
        held = tensor.view_as(tensor)
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(held, self._let_go, tensor.nbytes)
        return held

    def _let_go(self, nbytes: int) -> None:
        self.now -= nbytes


def held_by_graphs(spec: RunSpec, corpus: Corpus) -> int:
    runtime, held = stage(spec, 0, LAYERS, corpus), Held()
    with torch.autograd.graph.saved_tensors_hooks(held.keep, lambda tensor: tensor):
        runtime.loss(Microbatch(0, 0), None)
    assert held.now == 0
    return held.most


def test_there_is_never_the_graph_of_more_than_a_layer(tiny_spec: RunSpec, corpus: Corpus) -> None:
    whole, one = (held_by_graphs(spec_with(tiny_spec, keep=keep), corpus) for keep in ("stash", "layers"))
    assert one < 1.5 * whole / LAYERS
