"""No job looks at a number of its device before all of its work is given.

On torch's `meta` device, whose tensors have no numbers: a look raises.
"""

import msgspec
import pytest
import torch
from tiny_run import tiny_spec

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.stage import StageRuntime

META = torch.device("meta")
SPEC = tiny_spec(steps=4, peers=2)
AT = Microbatch(0, 0)
LOOK = "meta tensors"


@pytest.fixture
def made(monkeypatch):
    """Makes a stage of one layer that writes down what it has sent, in place of its bytes."""

    def make(first, last, dtype, subspace):
        spec = msgspec.structs.replace(SPEC, model=msgspec.structs.replace(SPEC.model, subspace=subspace))
        runtime, sent = StageRuntime(spec, first, last, corpus=None, device=META, dtype=dtype), []
        runtime.load(runtime.initial_state())
        wire = runtime._boundary.wire
        monkeypatch.setattr(wire, "encode_activation", lambda x_BTD, _: sent.append(x_BTD.shape) or bytearray())
        monkeypatch.setattr(wire, "encode_gradient", lambda x_BTD, *_: sent.append(x_BTD.shape) or bytearray())
        received = bytearray(wire.activation_bytes + wire.targets_bytes), bytearray(wire.gradient_bytes)
        return runtime, received, sent

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("subspace", [0, 8])
def test_a_forward_never_looks_and_a_backward_when_its_gradient_has_been_sent(made, dtype, subspace):
    runtime, (activation, gradient), sent = made(1, 2, dtype, subspace)
    runtime.forward(AT, activation)
    assert len(sent) == 1
    with pytest.raises(RuntimeError, match=LOOK):
        runtime.backward(AT, gradient)
    assert len(sent) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("subspace", [0, 8])
def test_nor_does_the_last_stage(made, dtype, subspace):
    last = SPEC.model.num_layers
    runtime, (activation, _), sent = made(last - 1, last, dtype, subspace)
    with pytest.raises(RuntimeError, match=LOOK):
        runtime.loss(AT, activation)
    assert len(sent) == 1
