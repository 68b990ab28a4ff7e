"""A prediction is the optimizer's own next steps, if the gradient repeats. N elements of one layer."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.kernels.optimizer import OPTIMIZERS, Matrices

each_name = pytest.mark.parametrize("name", list(OPTIMIZERS))
State = tuple[Tensor, Tensor, Tensor]

MUON_ROUNDING = 5e-3
"""Of matrices up to 12 x 12; 2,000 cases: 1.1e-3 at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layer: hidden matrices, other elements that decay, elements that do not; and settings."""

    matrices: Matrices
    numel: int
    settings: dict[str, Any]
    seed: int
    steps: int
    """What it has seen already, of one and the same gradient."""
    staleness_steps: int

    def randn(self, add: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.numel, generator=torch.Generator().manual_seed(self.seed + add), dtype=dtype)

    def start(self, name: str, dtype: torch.dtype) -> State:
        param_N = self.randn(0, dtype)
        return (param_N, *OPTIMIZERS[name].moments(param_N, self.matrices))

    def steps_on(self, name: str, state: State, grad_N: Tensor, first: int, number: int) -> State:
        for step in range(first, first + number):
            state = OPTIMIZERS[name].step(
                state[0], grad_N, state[1], state[2], **self.settings, step=step, matrices=self.matrices
            )
        return state

    def predict(self, name: str, state: State, step: int, staleness_steps: int) -> Tensor:
        return OPTIMIZERS[name].predict(
            *state, **self.settings, step=step, staleness_steps=staleness_steps, matrices=self.matrices
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shapes = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=3))
    sizes = [R * C for R, C in shapes]
    decayed, plain = draw(st.integers(0, 20)), draw(st.integers(1, 20))
    return Case(
        matrices=tuple((sum(sizes[:i]), R, C) for i, (R, C) in enumerate(shapes)),
        numel=sum(sizes) + decayed + plain,
        settings={
            "learning_rate": draw(st.floats(1e-3, 1e-2)),
            "beta1": draw(st.floats(0.5, 0.99)),
            "beta2": draw(st.floats(0.9, 0.999)),
            "epsilon": 1e-8,
            "weight_decay": draw(st.floats(0, 0.5)),
            "num_decayed": sum(sizes) + decayed,
        },
        seed=draw(st.integers(0, 999)),
        steps=draw(st.integers(1, 12)),
        staleness_steps=draw(st.integers(1, 8)),
    )


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance", "most"),
    # In float32 each step rounds a weight twice, by up to 6e-8 of it: after more than four that shows.
    [(name, torch.float32, 1e-6, 4) for name in OPTIMIZERS]
    # Muon's directions are float32 numbers, whatever goes in.
    + [(name, torch.float64, 1e-11, 8) for name in OPTIMIZERS if name != "muon"],
    ids=str,
)
@given(case=cases())
def test_it_is_the_own_next_steps_when_the_gradient_repeats(
    name: str, dtype: torch.dtype, tolerance: float, most: int, case: Case
) -> None:
    """To `tolerance` of the largest weight; Muon, whose steps round what they multiply to 14 bits where its predictions
    do not, to `MUON_ROUNDING` of the way as well.

    AdamW and NAdam correct the bias of their moments and Muon does not care how long its is: exact from the first step
    on. SGD is where its momentum has settled, at g / (1 - beta1), which is where it begins here."""
    staleness_steps = min(case.staleness_steps, most)
    grad_N = case.randn(1, dtype)
    state = case.start(name, dtype)
    if name == "sgd":
        state = (state[0], grad_N / (1 - case.settings["beta1"]), state[2])
    state = case.steps_on(name, state, grad_N, 0, case.steps)
    predicted_N = case.predict(name, state, case.steps, staleness_steps)
    true_N = case.steps_on(name, state, grad_N, case.steps, staleness_steps)[0]
    scale = float(true_N.abs().max())
    way = float((state[0] - true_N).abs().max())
    assert float((predicted_N - true_N).abs().max()) <= tolerance * scale + MUON_ROUNDING * way * (name == "muon")
    assert way > 100 * tolerance * scale, "nothing was to be predicted"


@each_name
@given(case=cases())
def test_no_staleness_or_no_history_is_the_very_same_tensor(name: str, case: Case) -> None:
    """So not a bit can differ, whatever the moments say."""
    start = case.start(name, torch.float32)
    assert case.predict(name, start, 0, case.staleness_steps) is start[0]
    state = case.steps_on(name, start, case.randn(1, torch.float32), 0, case.steps)
    before_N = state[0].clone()
    assert case.predict(name, state, case.steps, 0) is state[0]
    assert torch.equal(state[0], before_N)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [(name, torch.float64, 1e-11) for name in OPTIMIZERS if name != "muon"] + [("muon", torch.float32, 1e-6)],
)
@given(case=cases())
def test_two_steps_ahead_is_one_step_ahead_of_where_one_step_leads(
    name: str, dtype: torch.dtype, tolerance: float, case: Case
) -> None:
    """Staleness is a number of steps and nothing else: predictions of s = 1, 2, ... lie on one path. In float64, as
    weights that nearly vanish on their way are those of float32 only up to what they were before."""
    grad_N = case.randn(1, dtype)
    state = case.start(name, dtype)
    if name == "sgd":
        state = (state[0], grad_N / (1 - case.settings["beta1"]), state[2])
    state = case.steps_on(name, state, grad_N, 0, case.steps)
    after = case.steps_on(name, state, grad_N, case.steps, 1)
    far_N = case.predict(name, state, case.steps, case.staleness_steps + 1)
    near_N = case.predict(name, after, case.steps + 1, case.staleness_steps)
    rounding = MUON_ROUNDING * float((state[0] - after[0]).abs().max()) * (name == "muon")
    assert float((far_N - near_N).abs().max()) <= tolerance * float(far_N.abs().max()) + rounding


@each_name
@given(case=cases())
def test_the_next_weights_alone_are_those_of_the_step_up_to_rounding(name: str, case: Case) -> None:
    grad_N = case.randn(1, torch.float32)
    before = case.steps_on(name, case.start(name, torch.float32), grad_N, 0, case.steps)
    settings = {**case.settings, "step": case.steps, "matrices": case.matrices}
    after_N = OPTIMIZERS[name].step(before[0], grad_N, before[1], before[2], **settings)[0]
    weights_N = OPTIMIZERS[name].weights(before[0], grad_N, before[1], before[2], **settings)
    assert (weights_N - after_N).abs().max() <= 2e-6 * after_N.abs().max()
    assert torch.equal(before[0], case.steps_on(name, case.start(name, torch.float32), grad_N, 0, case.steps)[0])
