"""StageRuntime on a model with experts: cut anywhere it is the uncut model, balance included; loads.

N parameters of a stage or of the model
"""

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.data.microbatch import microbatch as training_microbatch
from shoal.peer.model import llama
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.peer.model.mixture import Mixture
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.stage import StageRuntime
from shoal.protocol.spec import RunSpec

CPU = torch.device("cpu")
STEP_0 = [Microbatch(0, 0), Microbatch(0, 1)]
CUTS = [(0, 3), (0, 1, 3), (0, 1, 2, 3)]


@pytest.fixture(scope="module")
def corpus(tiny_spec: RunSpec) -> Corpus:
    return load_corpus(tiny_spec.data, context=tiny_spec.model.context)


def spec_with(tiny_spec: RunSpec, **training: Any) -> RunSpec:
    """The balance weighs as much as the loss, so that nobody can forget it."""
    tables = msgspec.to_builtins(tiny_spec)
    tables["model"] |= {"num_experts": 4, "router_aux_loss": 1.0}
    tables["training"] |= training
    return msgspec.convert(tables, RunSpec)


def stages(spec: RunSpec, corpus: Corpus, cut: tuple[int, ...]) -> list[StageRuntime]:
    made = []
    for first, last in itertools.pairwise(cut):
        runtime = StageRuntime(spec, first, last, corpus=corpus if first == 0 else None, device=CPU)
        runtime.load(runtime.initial_state())
        made.append(runtime)
    return made


def run(pipeline: list[StageRuntime], microbatch: Microbatch) -> float:
    """Through all stages and back. Returns: the loss."""
    payload: Any = None
    for runtime in pipeline[:-1]:
        payload = runtime.forward(microbatch, payload)
    value, payload = pipeline[-1].loss(microbatch, payload)
    for runtime in reversed(pipeline[:-1]):
        payload = runtime.backward(microbatch, payload)
    for runtime in pipeline:
        runtime.contribute(microbatch)
    return value


def gradient(pipeline: list[StageRuntime]) -> Tensor:
    return torch.cat([runtime.gradient_sum(0)() for runtime in pipeline])


def uncut(spec: RunSpec, corpus: Corpus) -> tuple[list[float], Tensor]:
    """The losses and the summed gradient [N] by torch's autograd on the whole model, the balances added to the loss."""
    flats = {key: init_layer(spec.model, key, spec.seed).requires_grad_() for key in all_layer_keys(spec.model)}
    params = {key: layer_layout(spec.model, key).views(flat_N) for key, flat_N in flats.items()}
    losses = []
    for microbatch in STEP_0:
        tokens_BT, labels = training_microbatch(corpus, spec, microbatch.step, microbatch.index)
        balances: list[Tensor] = []
        rotary = llama.rotary_tables(spec.model)
        logits = llama.run_layers(
            spec.model, list(params), params, tokens_BT, rotary, mixture=Mixture(balances=balances)
        )
        loss = llama.loss(logits, labels.targets_BT)
        torch.autograd.backward(loss + spec.model.router_aux_loss * torch.stack(balances).sum())
        losses.append(float(loss.detach()))
    return losses, torch.cat([flat_N.grad for flat_N in flats.values() if flat_N.grad is not None])


@pytest.mark.parametrize("keep", ["stash", "recompute"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_cut_anywhere_losses_and_gradients_are_those_of_the_uncut_model(
    tiny_spec: RunSpec, corpus: Corpus, cut: tuple[int, ...], keep: str
) -> None:
    spec = spec_with(tiny_spec, keep=keep)
    losses, gradient_N = uncut(spec, corpus)
    pipeline = stages(spec, corpus, cut)
    assert [run(pipeline, m) for m in STEP_0] == pytest.approx(losses, abs=1e-6)
    torch.testing.assert_close(gradient(pipeline), gradient_N, rtol=0, atol=1e-6)


@pytest.mark.parametrize("keep", ["stash", "recompute"])
def test_loads_count_each_token_once_however_often_its_forward_runs(
    tiny_spec: RunSpec, corpus: Corpus, keep: str
) -> None:
    spec = spec_with(tiny_spec, keep=keep)
    pipeline = stages(spec, corpus, (0, 1, 3))
    for microbatch in STEP_0:
        run(pipeline, microbatch)
    payload: Any = None
    for runtime in pipeline:
        payload = runtime.validate(Microbatch(0, -1), payload)
    choices = 2 * 2 * 2 * spec.model.context  # microbatches, samples, experts a token
    loads = [runtime.expert_loads.totals() for runtime in pipeline]
    assert [list(of_stage) for of_stage in loads] == [["layers.0"], ["layers.1", "layers.2"]]
    assert all(sum(counts) == choices and len(counts) == 4 for of_stage in loads for counts in of_stage.values())


def test_replicas_that_step_from_the_same_sum_stay_equal(tiny_spec: RunSpec, corpus: Corpus) -> None:
    make: Callable[[], StageRuntime] = lambda: stages(spec_with(tiny_spec), corpus, (0, 3))[0]  # noqa: E731
    digests = []
    for runtime in (make(), make()):
        run([runtime], STEP_0[0])
        digests.append(runtime.step(runtime.gradient_sum(0)())[1:])
    assert digests[0] == digests[1]
    assert digests[0][1] == 0
