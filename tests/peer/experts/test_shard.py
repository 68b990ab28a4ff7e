"""One expert's weights: what comes back through it, and what of that is counted when.

N tokens   D width
"""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.peer.model.layout import expert_key, init_layer, layer_layout
from shoal.peer.pipeline.expert_runs import AT_ONCE_MAX, Run
from shoal.peer.pipeline.expert_shard import ExpertShard
from shoal.peer.pipeline.expert_wire import TokenWire
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ExpertTokens
from shoal.protocol.spec import RunSpec

CPU = torch.device("cpu")
EXPERT, LAYERS = 2, (1, 3)
PEER = PeerID("peer")


@pytest.fixture
def spec(tiny_spec: RunSpec) -> RunSpec:
    tables = msgspec.to_builtins(tiny_spec)
    tables["model"] |= {"dim": 16, "ffn_dim": 24, "num_experts": 4}
    return msgspec.convert(tables, RunSpec)


@pytest.fixture
def shard(spec: RunSpec) -> ExpertShard:
    made = ExpertShard(spec, *LAYERS, EXPERT, device=CPU)
    made.load(made.initial_state())
    return made


def run_of(passage: int, *, index: int = 0, step: int = 0) -> Run:
    return Run(Microbatch(step, index), PEER, 7, passage)


def rows(seed: int, count: int = 5) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def by_autograd(spec: RunSpec, layer: int, x_ND: Tensor, grad_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output, gradient of the tokens, flat gradient of the weights)."""
    layout = layer_layout(spec.model, expert_key(f"layers.{layer}", EXPERT))
    flat_N = init_layer(spec.model, layout.key, spec.seed).requires_grad_()
    w1, w2, w3 = layout.views(flat_N).values()
    x_ND = x_ND.clone().requires_grad_()
    y_ND = (torch.nn.functional.silu(x_ND @ w1.T) * (x_ND @ w3.T)) @ w2.T
    torch.autograd.backward(y_ND, grad_ND)
    assert x_ND.grad is not None
    assert flat_N.grad is not None
    return y_ND.detach(), x_ND.grad, flat_N.grad


def test_forward_and_backward_are_autograds_and_all_layers_are_one_contribution(spec, shard) -> None:
    wanted = []
    for layer in (2, 1):
        x_ND, grad_ND = rows(layer), rows(10 + layer)
        y_ND, grad_x_ND, grad_N = by_autograd(spec, layer, x_ND, grad_ND)
        wanted.insert(0, grad_N)
        torch.testing.assert_close(shard.forward(Microbatch(0, 0), layer, x_ND), y_ND, rtol=0, atol=1e-6)
        found = shard.backward(run_of(0), layer, x_ND, grad_ND, wanted=True)
        torch.testing.assert_close(found, grad_x_ND, rtol=0, atol=1e-6)
    assert shard.open_runs.layers_done(run_of(0)) == 2
    assert shard.close(run_of(0), wanted=True) == 0
    assert shard.contribute(Microbatch(0, 0)) is False
    torch.testing.assert_close(shard.gradient_sum(0)(), torch.cat(wanted), rtol=0, atol=1e-6)
    assert len(shard.open_runs) == 0


def test_a_layer_that_comes_twice_is_answered_twice_and_counted_once(shard) -> None:
    first = shard.backward(run_of(0), 1, rows(1), rows(2), wanted=True)
    again = shard.backward(run_of(0), 1, rows(1), rows(2), wanted=True)
    assert torch.equal(first, again)
    shard.close(run_of(0), wanted=True)
    shard.contribute(Microbatch(0, 0))
    once = shard.gradient_sum(0)()
    shard.backward(run_of(1, index=1), 1, rows(1), rows(2), wanted=True)
    shard.close(run_of(1, index=1), wanted=True)
    shard.contribute(Microbatch(0, 1))
    assert torch.equal(shard.gradient_sum(0)(), 2 * once)


def test_what_is_not_wanted_or_came_before_or_of_the_dead_adds_nothing(shard) -> None:
    shard.backward(run_of(0), 1, rows(1), rows(2), wanted=False)
    assert shard.open_runs.layers_done(run_of(0)) == 1
    assert shard.close(run_of(0), wanted=True) is None
    shard.backward(run_of(1), 1, rows(1), rows(2), wanted=True)
    shard.open_runs.drop(PEER, successor=7)
    assert shard.open_runs.layers_done(run_of(1)) == 1, "it is the successor's: its tokens came before word of it did"
    shard.open_runs.drop(PEER, successor=8)
    assert shard.open_runs.layers_done(run_of(1)) == 0
    shard.backward(run_of(1), 1, rows(1), rows(2), wanted=True)
    shard.open_runs.drop(PEER)
    assert shard.open_runs.layers_done(run_of(1)) == 0
    assert shard.close(run_of(2), wanted=True) == 0, "no token came, but it counts"
    shard.contribute(Microbatch(0, 0))
    assert shard.close(run_of(3), wanted=True) is None
    assert not shard.gradient_sum(0)().any()


def test_runs_begun_over_and_over_give_up_the_earliest(shard) -> None:
    for passage in range(10):
        shard.backward(run_of(passage), 1, rows(1), rows(2), wanted=True)
    shard.backward(run_of(10, index=1), 1, rows(1), rows(2), wanted=True)
    assert len(shard.open_runs) == AT_ONCE_MAX + 1
    assert [shard.open_runs.layers_done(run_of(passage)) for passage in range(10)] == [0] * 6 + [1] * 4
    assert shard.open_runs.layers_done(run_of(10, index=1)) == 1


def test_a_gradient_that_is_not_finite_is_done_and_adds_nothing(shard) -> None:
    grad_ND = rows(2)
    grad_ND[0, 0] = float("inf")
    assert not shard.backward(run_of(0), 1, rows(1), grad_ND, wanted=True).any()
    assert shard.open_runs.layers_done(run_of(0)) == 1
    shard.close(run_of(0), wanted=True)
    shard.contribute(Microbatch(0, 0))
    assert not shard.gradient_sum(0)().any()


def test_a_step_leaves_nothing_open_of_the_step_before(shard) -> None:
    shard.backward(run_of(0), 1, rows(1), rows(2), wanted=True)
    shard.step(torch.zeros(shard.num_parameters))
    assert len(shard.open_runs) == 0
    assert shard.close(run_of(0), wanted=True) is None


def tokens(**fields: Any) -> ExpertTokens:
    usual = {"stage": 0, "incarnation": 0, "passage": 0, "serial": 0, "step": 0, "index": 0, "layer": 0}
    return msgspec.convert(usual | {"backward": False, "counts": [[0, 2], [3, 1]]} | fields, ExpertTokens)


def test_tokens_are_checked_against_the_spec(spec) -> None:
    wire = TokenWire(spec)
    right = bytes(3 * wire.row_bytes)
    wire.check_tokens(tokens(), right, PEER)
    wire.check_tokens(tokens(backward=True), right * 2, PEER)
    wrong: list[tuple[ExpertTokens, bytes]] = [
        (tokens(), right + b"\0"),
        (tokens(backward=True), right),
        (tokens(counts=[]), b""),
        (tokens(counts=[[4, 3]]), right),
        (tokens(counts=[[1, 2], [1, 1]]), right),
        (tokens(counts=[[0, 0], [1, 3]]), right),
        (tokens(counts=[[0, wire.tokens + 1]]), bytes((wire.tokens + 1) * wire.row_bytes)),
        (tokens(step=10**6), right),
        (tokens(index=-1, backward=True), right * 2),
    ]
    for meta, payload in wrong:
        with pytest.raises(RemoteError):
            wire.check_tokens(meta, payload, PEER)
