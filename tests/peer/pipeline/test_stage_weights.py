"""Which weights StageRuntime gives a microbatch at its forward and at its backward, and how many copies that takes.

A stage of one decoder layer, given activations and gradients made up: what is before and after it does not matter here.
This file is long because every strategy is played through on that one stage.

B samples   T tokens   D width   N parameters of the stage
"""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.kernels.optimizer import OPTIMIZERS
from shoal.peer.data.labels import Labels
from shoal.peer.model import llama
from shoal.peer.model.layout import layer_layout
from shoal.peer.model.state import LayerState, StageState, hyperparameters, step_layer
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.prediction import COMPENSATIONS, compensation
from shoal.peer.pipeline.prediction.eager import KEPT
from shoal.peer.pipeline.stage import StageRuntime
from shoal.peer.pipeline.wire import ActivationWire
from shoal.protocol.spec import RunSpec

CPU = torch.device("cpu")
KEY = "layers.1"
EVERY = pytest.mark.parametrize("name", COMPENSATIONS)
OTHERS = ["none", "spectrain"]
STASHES = [name for name in COMPENSATIONS if name not in OTHERS]

Make = Callable[..., StageRuntime]


@pytest.fixture
def make(tiny_spec: RunSpec) -> Make:
    """(compensation, **training) -> a stage at version 2, with moments that say where it goes."""

    def made(name: str, **training: Any) -> StageRuntime:
        training = {"s_max": 2, "compensation": name, **training}
        spec = msgspec.structs.replace(tiny_spec, training=msgspec.structs.replace(tiny_spec.training, **training))
        runtime = StageRuntime(spec, 1, 2, corpus=None, device=CPU)
        runtime.load(runtime.initial_state())
        for version in range(2):
            runtime.step(gradient(runtime, version))
        return runtime

    return made


def gradient(runtime: StageRuntime, seed: int) -> Tensor:
    """Made up, float32 [N]."""
    return torch.randn(runtime.num_parameters, generator=torch.Generator().manual_seed(seed))


def numbers(spec: RunSpec, seed: int) -> Tensor:
    """An activation or its gradient, float32 [B, T, D]."""
    shape = (spec.training.microbatch_size, spec.model.context, spec.model.dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def forward(runtime: StageRuntime, microbatch: Microbatch) -> bytearray:
    x_BTD = numbers(runtime.spec, microbatch.index)
    payload = ActivationWire(runtime.spec).encode_activation(
        x_BTD, Labels(targets_BT=torch.zeros(x_BTD.shape[:2], dtype=torch.int64))
    )
    return runtime.forward(microbatch, payload)


def gradient_payload(runtime: StageRuntime, microbatch: Microbatch, *, seed: int = 9) -> bytearray:
    return ActivationWire(runtime.spec).encode_gradient(numbers(runtime.spec, seed), microbatch, 1)


def backward(runtime: StageRuntime, microbatch: Microbatch) -> None:
    """And tell the others. The gradient and the weights that it was taken at are let go of as the next job begins."""
    runtime.backward(microbatch, gradient_payload(runtime, microbatch, seed=-1 - microbatch.index))
    runtime.contribute(microbatch)
    runtime._contributions.settle()


def layer_of(runtime: StageRuntime) -> LayerState:
    assert runtime.state is not None
    return runtime.state.layers[KEY]


def used(runtime: StageRuntime, step: int) -> Tensor:
    """The weights that a microbatch of `step` would get now."""
    assert runtime.state is not None
    return runtime._weights.of(runtime.state, step).params[KEY]


def wanted(runtime: StageRuntime, staleness_steps: int) -> Tensor:
    """By the strategy alone, one that has learnt nothing."""
    strategy = compensation(runtime.spec.training.compensation, runtime.spec.optimizer.name)
    settings = hyperparameters(runtime.spec, KEY, runtime.version)
    return strategy.weights(layer_of(runtime), settings, staleness_steps)


def taken_at(runtime: StageRuntime, param_N: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
    """(output, gradient [N]) of the layer with `param_N`, by torch's autograd."""
    spec = runtime.spec
    flat_N = param_N.clone().requires_grad_()
    params = {KEY: layer_layout(spec.model, KEY).views(flat_N)}
    x_BTD = numbers(spec, microbatch.index)
    y_BTD = llama.run_layers(spec.model, (KEY,), params, x_BTD, llama.rotary_tables(spec.model))
    (grad_N,) = torch.autograd.grad(y_BTD, flat_N, numbers(spec, -1 - microbatch.index))
    return y_BTD.detach(), grad_N


# --- at the forward ---


@EVERY
@pytest.mark.parametrize("step", [0, 1, 2])
def test_for_the_current_step_and_older_ones_the_weights_are_the_current_tensor(
    make: Make, name: str, step: int
) -> None:
    runtime = make(name)
    assert used(runtime, step) is layer_of(runtime).param_N
    assert runtime._weights.copies(runtime.state) == 1


@EVERY
@pytest.mark.parametrize("staleness_steps", [1, 2])
def test_for_a_later_step_they_are_the_strategys_over_exactly_its_staleness(
    make: Make, name: str, staleness_steps: int
) -> None:
    runtime, fresh = make(name), make(name)
    expected_N = wanted(fresh, staleness_steps)
    sent = forward(runtime, Microbatch(2 + staleness_steps, 0))
    y_BTD, _ = taken_at(runtime, expected_N, Microbatch(2 + staleness_steps, 0))
    torch.testing.assert_close(ActivationWire(runtime.spec).decode_activation(sent, CPU)[0], y_BTD, rtol=0, atol=1e-5)
    assert torch.equal(used(runtime, 2 + staleness_steps), expected_N)
    assert (used(runtime, 2 + staleness_steps) is layer_of(runtime).param_N) == (not COMPENSATIONS[name].predicts)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_pipeoptim_predicts_with_the_runs_own_optimizer(make: Make, tiny_spec: RunSpec, optimizer: str) -> None:
    spec = msgspec.structs.replace(
        tiny_spec,
        optimizer=msgspec.structs.replace(tiny_spec.optimizer, name=optimizer),
        training=msgspec.structs.replace(tiny_spec.training, s_max=1),
    )
    runtime = StageRuntime(spec, 1, 2, corpus=None, device=CPU)
    runtime.load(runtime.initial_state())
    runtime.step(gradient(runtime, 0))
    settings = hyperparameters(spec, KEY, 1)
    expected_N = OPTIMIZERS[optimizer].predict(*layer_of(runtime).tensors, staleness_steps=1, **settings)
    assert torch.equal(used(runtime, 2), expected_N)


def test_the_gain_follows_what_commits_do(make: Make) -> None:
    """Gradients that turn back: the layer goes less far than predicted, and the next prediction knows."""
    runtime = make("calibrated")
    for version in range(2, 12):
        used(runtime, version + 1)
        runtime.step(gradient(runtime, 0) * (-1) ** version)
    predicted_N = wanted(runtime, 1)
    way_N, full_N = used(runtime, 13) - layer_of(runtime).param_N, predicted_N - layer_of(runtime).param_N
    gain = float(way_N @ full_N / (full_N @ full_N))
    assert gain < 0.9
    torch.testing.assert_close(way_N, gain * full_N, rtol=1e-3, atol=1e-6)


def test_a_commit_that_leaves_a_layer_alone_is_no_way_that_it_took(make: Make) -> None:
    runtime = make("calibrated")
    used(runtime, 3)
    runtime.step(torch.full((runtime.num_parameters,), torch.nan))
    assert runtime._weights._compensations[KEY].gain(1) == 1.0  # type: ignore[attr-defined]


# --- at the backward ---


@pytest.mark.parametrize("name", STASHES)
def test_a_stash_takes_the_gradient_at_the_weights_of_the_forward_whatever_was_committed_since(
    make: Make, name: str
) -> None:
    runtime, ahead = make(name), Microbatch(4, 0)
    before_N = used(runtime, 4).clone()
    forward(runtime, ahead)
    runtime.step(gradient(runtime, 2))
    backward(runtime, ahead)
    _, grad_N = taken_at(runtime, before_N, ahead)
    torch.testing.assert_close(runtime.gradient_sum(4)(), grad_N, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "keep"), [*((name, "recompute") for name in COMPENSATIONS), *((name, "stash") for name in OTHERS)]
)
@pytest.mark.parametrize("commits", [0, 1, 2])
def test_the_others_and_whoever_recomputes_take_it_at_the_weights_of_the_backward(
    make: Make, name: str, keep: str, commits: int
) -> None:
    """Predicted again over what is then missing; the very w_t once it is there."""
    runtime, ahead = make(name, keep=keep), Microbatch(4, 0)
    forward(runtime, ahead)
    for version in range(2, 2 + commits):
        runtime.step(gradient(runtime, version))
    now_N = used(runtime, 4)
    backward(runtime, ahead)
    _, grad_N = taken_at(runtime, now_N, ahead)
    sum_N = runtime._contributions.total(4)().sum_N
    torch.testing.assert_close(sum_N, grad_N, rtol=0, atol=1e-4)
    assert (now_N is layer_of(runtime).param_N) == (commits == 2 or not COMPENSATIONS[name].predicts)


@pytest.mark.parametrize("name", OTHERS)
def test_at_one_version_a_backward_that_runs_the_forward_again_gives_the_bits_of_a_stash(make: Make, name: str) -> None:
    """Nobody's learning differs from his neighbour's because of memory alone, as long as nothing is stale."""
    made = []
    for strategy in (name, "stash"):
        runtime = make(strategy)
        forward(runtime, Microbatch(2, 0))
        backward(runtime, Microbatch(2, 0))
        made.append(runtime.gradient_sum(2)())
    assert torch.equal(*made)


# --- how many ---


def play(
    runtime: StageRuntime,
    choose: Callable[[list[Any]], Any],
    *,
    until: int,
    microbatches: int = 2,
    staggered: bool = False,
) -> int:
    """So many microbatches a step: forwards in order as they are admitted, backwards of any that is away, commits when
    they may come. `staggered`: the second one of the last step admitted waits for the next version.

    Returns: the most copies that were alive.
    """
    s_max = runtime.spec.training.s_max
    away: list[Microbatch] = []
    work = [Microbatch(step, index) for step in range(2, until) for index in range(microbatches)]
    done: dict[int, int] = {}
    most = 0
    while runtime.version < until:
        choices = []
        if work and work[0].step - runtime.version <= s_max - (staggered and work[0].index > 0 and s_max > 0):
            choices.append("forward")
        if done.get(runtime.version, 0) == microbatches:
            choices.append("commit")
        if away:
            choices.append("backward")
        match choose(choices):
            case "forward":
                away.append(work.pop(0))
                forward(runtime, away[-1])
            case "backward":
                microbatch = choose(away)
                away.remove(microbatch)
                backward(runtime, microbatch)
                done[microbatch.step] = done.get(microbatch.step, 0) + 1
            case "commit":
                runtime.step(runtime.gradient_sum(runtime.version)() + gradient(runtime, runtime.version))
        most = max(most, runtime._weights.copies(runtime.state))
        assert {leaf.untyped_storage().data_ptr() for leaf in held(runtime)} <= counted(runtime)
    return most


def held(runtime: StageRuntime) -> list[Tensor]:
    contexts = [context.kept for context in runtime._contexts.values()]
    return [leaf for kept in contexts if kept for leaf in kept[1][KEY].values()]


def counted(runtime: StageRuntime) -> set[int]:
    return {weights.params[KEY].untyped_storage().data_ptr() for weights in runtime._weights._alive}


@EVERY
@pytest.mark.parametrize("s_max", [0, 1, 2, 3])
def test_at_most_s_max_and_two_copies_of_the_weights_are_alive(make: Make, name: str, s_max: int) -> None:
    for seed in range(4):
        runtime = make(name, s_max=s_max)
        assert play(runtime, random.Random(seed).choice, until=7) <= s_max + 2
        assert runtime._weights.copies(runtime.state) == (2 if s_max == 0 else 1), (
            "what is left when nothing is in flight"
        )


@pytest.mark.parametrize("s_max", [1, 2, 3])
def test_nor_more_of_a_strategy_that_makes_them_anew_within_a_step(make: Make, s_max: int) -> None:
    most = []
    for seed in range(8):
        runtime = make("eager", s_max=s_max)
        most.append(play(runtime, random.Random(seed).choice, until=7, microbatches=6))
        assert runtime._weights.copies(runtime.state) == 1
    assert max(most) == s_max + 2


@pytest.mark.parametrize("name", ["pipeoptim", "lookahead", "calibrated"])
@pytest.mark.parametrize("s_max", [0, 1, 2, 3])
def test_as_many_as_that_there_can_be(make: Make, name: str, s_max: int) -> None:
    """The two microbatches of a step are always begun at different versions, and always stale."""
    assert play(make(name, s_max=s_max), lambda choices: choices[0], until=6 + s_max, staggered=True) == s_max + 2


@EVERY
@pytest.mark.parametrize("s_max", [0, 1, 2, 3])
def test_recomputing_needs_one(make: Make, name: str, s_max: int) -> None:
    """One more without staleness, for exact repairs."""
    runtime = make(name, s_max=s_max, keep="recompute")
    assert play(runtime, random.Random(1).choice, until=8) == (2 if s_max == 0 else 1)


def test_a_step_ahead_has_one_set_while_it_is_held_and_a_fresh_one_afterwards(make: Make) -> None:
    runtime = make("pipeoptim")
    forward(runtime, Microbatch(4, 0))
    held_N = used(runtime, 4)
    runtime.step(gradient(runtime, 2))
    assert used(runtime, 4) is held_N
    backward(runtime, Microbatch(4, 0))
    runtime.load(runtime.state or StageState(version=0, layers={}))  # the cache of this version forgets it, too
    del held_N
    assert torch.equal(used(runtime, 4), wanted(runtime, 1))


# --- what is seen ---


def stepped(runtime: StageRuntime, layer: LayerState, mean_N: Tensor, version: int) -> LayerState:
    """What the optimizer makes of it."""
    made = step_layer(runtime.spec, KEY, layer, mean_N, version)
    assert made is not None
    return made


def test_eager_weights_are_the_optimizers_step_with_what_was_contributed(make: Make) -> None:
    runtime = make("eager")
    assert torch.equal(used(runtime, 3), wanted(make("pipeoptim"), 1)), "nothing was seen"
    for index in range(2):
        forward(runtime, Microbatch(2, index))
        backward(runtime, Microbatch(2, index))
    mean_N = runtime.gradient_sum(2)() / 2
    expected = stepped(runtime, layer_of(runtime), mean_N, 2)
    assert (used(runtime, 3) - expected.param_N).abs().max() < 1e-6, "but for rounding"
    # Two steps ahead: of the second nothing is here, so it goes on as the first would.
    settings = hyperparameters(runtime.spec, KEY, 2)
    further_N = OPTIMIZERS["adamw"].predict(*expected.tensors, staleness_steps=1, **{**settings, "step": 3})
    assert torch.equal(used(runtime, 4), further_N)
    runtime.step(mean_N)
    assert torch.equal(layer_of(runtime).param_N, expected.param_N), "alone, a member had it all"


@pytest.mark.parametrize("keep", ["stash", "recompute"])
def test_a_part_of_the_way_back_to_the_last_weights_is_kept_in_the_next(make: Make, keep: str) -> None:
    """Of step 3 two gradients were taken at what was predicted for it, a third one told apart, a fourth at w_3."""
    runtime = make("eager", s_max=1, keep=keep)
    predicted_N = used(runtime, 3).clone()
    for index in (0, 1):
        forward(runtime, Microbatch(3, index))
        backward(runtime, Microbatch(3, index))
    forward(runtime, Microbatch(3, 2))
    runtime.backward(Microbatch(3, 2), gradient_payload(runtime, Microbatch(3, 2)))
    runtime.contribute(Microbatch(3, 2), held_out=True)
    runtime.step(gradient(runtime, 2))
    forward(runtime, Microbatch(3, 3))
    backward(runtime, Microbatch(3, 3))
    sum_N, layer = runtime._contributions.total(3, 0)().sum_N, layer_of(runtime)
    displacement_N = (layer.param_N - predicted_N) * 2 / 3
    expected_N = stepped(runtime, layer, sum_N / 3, 3).param_N - KEPT * displacement_N
    torch.testing.assert_close(used(runtime, 4), expected_N)


def test_what_is_finished_but_told_nobody_is_not_seen(make: Make) -> None:
    runtime = make("eager")
    forward(runtime, Microbatch(2, 0))
    runtime.backward(Microbatch(2, 0), gradient_payload(runtime, Microbatch(2, 0)))
    assert torch.equal(used(runtime, 3), wanted(make("pipeoptim"), 1))


def test_they_are_made_anew_for_half_as_many_gradients_again(make: Make) -> None:
    runtime, versions = make("eager"), []
    for index in range(8):
        versions.append(used(runtime, 3).clone())
        forward(runtime, Microbatch(2, index))
        backward(runtime, Microbatch(2, index))
    assert [i for i in range(1, 8) if not torch.equal(versions[i], versions[i - 1])] == [1, 2, 3, 5]


def test_where_there_is_no_room_a_step_keeps_what_it_has_or_takes_the_current_weights(make: Make) -> None:
    runtime = make("eager", s_max=1)
    forward(runtime, Microbatch(3, 0))  # holds a set that saw nothing
    for index in range(3):
        if index == 1:
            forward(runtime, Microbatch(3, 1))  # holds one that saw the first
        forward(runtime, Microbatch(2, index))
        backward(runtime, Microbatch(2, index))
    assert runtime._weights.copies(runtime.state) == 3
    fullest_N = used(runtime, 3)
    assert fullest_N.data_ptr() == held(runtime)[-1].untyped_storage().data_ptr(), (
        "that which saw more of those that are held"
    )
    runtime.step(gradient(runtime, 2))
    assert runtime._weights.copies(runtime.state) == 3
    assert used(runtime, 4) is layer_of(runtime).param_N, "the first of a step finds no room"
    backward(runtime, Microbatch(3, 0))
    assert used(runtime, 4) is not layer_of(runtime).param_N
    assert runtime._weights.copies(runtime.state) == 3


def test_a_gradient_that_no_step_would_take_is_not_seen(make: Make) -> None:
    runtime, broken = make("eager"), Microbatch(2, 0)
    gradients = torch.full((runtime.num_parameters,), torch.inf)
    runtime._contributions.finish(broken, gradients)
    runtime.contribute(broken)
    assert torch.equal(used(runtime, 3), wanted(make("pipeoptim"), 1))


# --- corrections ---


def test_a_sum_is_corrected_by_its_mean_displacement_once_the_weights_are_known(make: Make) -> None:
    """Three gradients of step 3: two taken at version 2, one of them told apart, and one at version 3."""
    runtime = make("dc")
    stale_N = layer_of(runtime).param_N
    for index in (0, 1):
        forward(runtime, Microbatch(3, index))
        runtime.backward(Microbatch(3, index), gradient_payload(runtime, Microbatch(3, index)))
        runtime.contribute(Microbatch(3, index), held_out=index == 1)
    plain_N = runtime._contributions.total(3)().sum_N
    assert torch.equal(runtime.gradient_sum(3)(), plain_N), "w_3 is not known yet"
    runtime.step(gradient(runtime, 2))
    forward(runtime, Microbatch(3, 2))
    backward(runtime, Microbatch(3, 2))
    sum_N, displacement_N = runtime._contributions.total(3)().sum_N, layer_of(runtime).param_N - stale_N
    strategy = compensation("dc", "adamw")
    settings = hyperparameters(runtime.spec, KEY, 3)
    expected_N = 3 * strategy.corrected(sum_N / 3, displacement_N * 2 / 3, layer_of(runtime), settings)
    torch.testing.assert_close(runtime.gradient_sum(3)(), expected_N)
    assert not torch.equal(runtime.gradient_sum(3)(), sum_N)
    assert torch.equal(runtime._contributions.total(3)().sum_N, sum_N), "the sum itself is needed for another attempt"


def test_gradients_of_the_current_weights_are_left_alone_bit_for_bit(make: Make) -> None:
    made = []
    for name in ("dc", "stash"):
        runtime = make(name)
        for index in range(3):
            forward(runtime, Microbatch(2, index))
            backward(runtime, Microbatch(2, index))
        made.append(runtime.gradient_sum(2)())
    assert torch.equal(*made)


# --- what others run again ---


@EVERY
def test_without_staleness_the_version_before_is_kept_for_a_repair(make: Make, name: str) -> None:
    runtime = make(name, s_max=0)
    before_N = layer_of(runtime).param_N
    assert runtime.remembers
    runtime.step(gradient(runtime, 2))
    assert used(runtime, 2) is before_N
    assert used(runtime, 3) is layer_of(runtime).param_N
    assert runtime.state is not None
    runtime.load(runtime.state)
    assert not runtime.remembers


@EVERY
def test_in_a_synchronous_step_too(make: Make, name: str) -> None:
    runtime = make(name, s_max=1, synchronous_steps=4)
    before_N = layer_of(runtime).param_N
    runtime.step(gradient(runtime, 2))
    assert used(runtime, 2) is before_N
    runtime.step(gradient(runtime, 3))
    assert used(runtime, 3) is layer_of(runtime).param_N, "what may be stale needs no exact repair"
