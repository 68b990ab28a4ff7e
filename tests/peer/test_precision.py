"""What a peer's device multiplies in: the choice, and that nothing else is any narrower for it."""

import itertools

import msgspec
import pytest
import torch
from tiny_run import tiny_corpus

from shoal.peer.compute.precision import QUICKER, precision_of
from shoal.peer.model import llama
from shoal.peer.model.layout import stage_layer_keys
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.stage import StageRuntime

CPU = torch.device("cpu")


def clock(wide_s, narrow_s):
    """Of a device whose forwards take so long in float32 and in bfloat16, which are timed in turns; once they were
    held up."""
    ticks = itertools.chain.from_iterable((0.0, took_s) for took_s in [3 * wide_s, narrow_s] + [wide_s, narrow_s] * 2)
    return lambda: next(ticks)


def with_compute(spec, compute):
    return msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, compute=compute))


@pytest.mark.parametrize(
    ("narrow_s", "chosen"), [(1.0 / QUICKER - 0.01, torch.bfloat16), (1.0 / QUICKER + 0.01, torch.float32)]
)
def test_left_open_it_is_bfloat16_where_that_is_clearly_quicker(tiny_spec, narrow_s, chosen):
    assert precision_of(with_compute(tiny_spec, "auto"), CPU, clock=clock(1.0, narrow_s)) == chosen


def test_otherwise_it_is_what_the_run_says_and_nothing_is_timed(tiny_spec):
    def never():
        pytest.fail("nothing is to be timed")

    assert precision_of(with_compute(tiny_spec, "bf16"), CPU, clock=never) == torch.bfloat16
    assert precision_of(with_compute(tiny_spec, "fp32"), CPU, clock=never) == torch.float32


def stage(spec, dtype):
    runtime = StageRuntime(spec, 0, spec.model.num_layers, corpus=tiny_corpus(), device=CPU, dtype=dtype)
    runtime.load(runtime.initial_state())
    return runtime


def test_state_and_sums_stay_in_float32_and_gradients_are_near(tiny_spec):
    sums, losses = [], []
    for dtype in (torch.float32, torch.bfloat16):
        runtime = stage(tiny_spec, dtype)
        for index in range(3):
            loss, _ = runtime.loss(Microbatch(0, index), None)
            runtime.contribute(Microbatch(0, index))
            losses.append(loss)
        sums.append(runtime.gradient_sum(0)())
        assert sums[-1].dtype == torch.float32
        after, _, skipped = runtime.step(sums[-1] / 3)
        assert skipped == 0
        assert all(tensor.dtype == torch.float32 for layer in after.layers.values() for tensor in layer.tensors)
    assert losses[3:] == pytest.approx(losses[:3], rel=2e-3)
    assert losses[3:] != losses[:3]
    assert (sums[1] - sums[0]).norm() < 0.03 * sums[0].norm()


def test_the_copy_that_is_computed_with_is_made_once_a_version(tiny_spec):
    runtime = stage(tiny_spec, torch.bfloat16)
    kept = [runtime._weights_of(Microbatch(0, index))[1]["layers.0"] for index in (0, 1)]
    first, second = (next(iter(leaves.values())) for leaves in kept)
    assert first.dtype == torch.bfloat16
    assert first.data_ptr() == second.data_ptr()


def test_a_tokens_gradient_is_added_up_in_float32_however_often_it_comes(tiny_spec):
    """Two thousand ones: added up one by one in bfloat16 they are 256."""
    weight_VD = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
    tokens_BT = torch.zeros(1, 2000, dtype=torch.int64)
    llama.embed(tiny_spec.model, {"model.embed_tokens.weight": weight_VD}, tokens_BT).sum().backward()
    assert weight_VD.grad is not None
    assert weight_VD.grad[0, 0].item() == 2000.0


@pytest.mark.parametrize("keep", ["stash", "recompute"])
def test_two_stages_in_bfloat16_give_what_one_gives(tiny_spec, keep):
    """Between stages activations travel in bfloat16, as they are inside: the cut changes no bit."""
    training = msgspec.structs.replace(tiny_spec.training, keep=keep)
    wire = msgspec.structs.replace(tiny_spec.wire, activations="bf16")
    spec = msgspec.structs.replace(tiny_spec, training=training, wire=wire)
    whole, layers = stage(spec, torch.bfloat16), spec.model.num_layers
    parts = [
        StageRuntime(spec, *bounds, corpus=tiny_corpus() if bounds[0] == 0 else None, device=CPU, dtype=torch.bfloat16)
        for bounds in ((0, 1), (1, layers))
    ]
    for part in parts:
        part.load(part.initial_state())
    at = Microbatch(0, 0)
    loss, _ = whole.loss(at, None)
    payload = parts[0].forward(at, None)
    loss_of_parts, gradient = parts[1].loss(at, payload)
    assert loss_of_parts == loss
    parts[0].backward(at, gradient)
    for runtime in (whole, *parts):
        runtime.contribute(at)
    together = torch.cat([part.gradient_sum(0)() for part in parts])
    assert stage_layer_keys(spec.model, 0, layers) == tuple(key for part in parts for key in part.keys)
    assert torch.equal(together, whole.gradient_sum(0)())
