"""Step and prediction in one pass over memory, in Triton: twins of `reference.py` and `advance.py`, without Muon.

Every element is read and written once: with AdamW 16 bytes in (weight, gradient, two moments) and 12 out, and 2 or 4
more for each copy. All arithmetic is in float32 and narrowed last. Steps give the same bits as the reference: roots and
quotients are rounded (`sqrt_rn`, `div_rn`), and products are not contracted with sums (`enable_fp_fusion=False`).
Predictions stay on this peer, and may differ from the reference in their last bits.

`TRITON_INTERPRET=1`, set when this file is first imported, runs it on a CPU; for tests only.

N elements of one layer
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.optimizer.reference import adamw_gains, nadam_gains, sgd_gains, ways
from shoal.kernels.optimizer.rules import Advance, Ahead, Matrices, Predict, Step, check_compute_dtype

BLOCK: Final = 1024
"""Elements of a program: 8 a thread, two vectors of 16 bytes."""
GAINS: Final = {"sgd": sgd_gains, "adamw": adamw_gains, "nadam": nadam_gains}


@triton.jit
def advance_kernel(
    param_N, grad_N, moment1_N, moment2_N, new_param_N, new_moment1_N, new_moment2_N, copies, ways_of_copies,
    numel, num_decayed, keep, beta1, beta1_rest, beta2, beta2_rest, correction, epsilon, fresh, past, rate,
    STEPS: tl.constexpr, ADAPTS: tl.constexpr, NESTEROV: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process one block of elements with the arithmetic of `reference.py`, operation by operation.

    STEPS: make a step; otherwise only copies of the present weights.   ADAPTS: has a second moment.   NARROW: copies
    are bf16, given as int16.   ways_of_copies: (kept share of a decayed weight, its way, an undecayed one's) for each
    copy.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    decays = at < num_decayed
    param = tl.load(param_N + at, mask=inside)
    moment1 = tl.load(moment1_N + at, mask=inside)
    if ADAPTS:
        moment2 = tl.load(moment2_N + at, mask=inside)
    if STEPS:
        grad = tl.load(grad_N + at, mask=inside)
        if ADAPTS:
            moment1 = moment1 * beta1 + grad * beta1_rest
            moment2 = moment2 * beta2 + (grad * grad) * beta2_rest
            tl.store(new_moment2_N + at, moment2, mask=inside)
        else:
            moment1 = moment1 * beta1 + grad
        tl.store(new_moment1_N + at, moment1, mask=inside)
    direction = moment1
    if ADAPTS:
        root = tl.sqrt_rn(moment2) * correction + epsilon
        direction = tl.div_rn(moment1, root)
    if STEPS:
        change = direction
        if NESTEROV:
            change = tl.div_rn(grad * fresh + moment1 * past, root)
        param = param * tl.where(decays, keep, 1.0) + change * rate
        tl.store(new_param_N + at, param, mask=inside)
    for row in tl.static_range(len(copies)):
        kept = tl.where(decays, ways_of_copies[row][0], 1.0)
        way = tl.where(decays, ways_of_copies[row][1], ways_of_copies[row][2])
        ahead = param * kept - direction * way
        if NARROW:
            # To the nearest bf16, ties to even, by hand: Triton's interpreter truncates.
            bits = ahead.to(tl.int32, bitcast=True)
            bits = tl.where(ahead == ahead, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
            tl.store(copies[row] + at, (bits >> 16).to(tl.int16), mask=inside)
        else:
            tl.store(copies[row] + at, ahead, mask=inside)


@dataclass(frozen=True, slots=True)
class _Settings:
    """The keywords that steps, predictions and advances share."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    num_decayed: int
    step: int


def _run(
    name: str,
    old: tuple[Tensor, Tensor, Tensor],
    grad_N: Tensor | None,
    settings: _Settings,
    ahead: Sequence[Ahead] = (),
    ahead_learning_rate: float = 0.0,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor]]:
    """Return ((param_N, moment1_N, moment2_N), copies). Without a gradient there is no step before the copies."""
    check_compute_dtype(compute_dtype)
    s, steps, numel = settings, grad_N is not None, old[0].numel()
    param_N, moment1_N, moment2_N = (tensor.contiguous() for tensor in old)
    # In torch's order of operations, so that the same numbers are rounded to float32 on their way into the kernel.
    fresh, past, rate = 0.0, 0.0, -s.learning_rate
    if name == "adamw":
        rate = -s.learning_rate / (1 - s.beta1 ** (s.step + 1))
    elif name == "nadam":
        fresh = (1 - s.beta1) / (1 - s.beta1 ** (s.step + 1))
        past = s.beta1 / (1 - s.beta1 ** (s.step + 2))
    new = (param_N, moment1_N, moment2_N)
    if steps:
        new = (torch.empty_like(param_N), torch.empty_like(moment1_N), torch.empty_like(moment2_N))
    made = [i for i, (staleness_steps, _) in enumerate(ahead) if staleness_steps or compute_dtype != torch.float32]
    copies = [torch.empty_like(param_N, dtype=compute_dtype) if i in made else new[0] for i in range(len(ahead))]
    version = s.step + steps
    narrow = compute_dtype == torch.bfloat16
    if numel:
        # Triton launches on the current device, not on the tensors'.
        with torch.cuda.device_of(param_N):  # type: ignore[no-untyped-call]
            advance_kernel[(triton.cdiv(numel, BLOCK),)](
                param_N, param_N if grad_N is None else grad_N.contiguous(), moment1_N, moment2_N, *new,
                tuple(copies[i].view(torch.int16) if narrow else copies[i] for i in made),
                tuple(_ways(name, ahead[i], ahead_learning_rate, s.beta1, s.weight_decay, version) for i in made),
                numel, s.num_decayed, 1 - s.learning_rate * s.weight_decay, s.beta1, 1 - s.beta1, s.beta2, 1 - s.beta2,
                (1 - s.beta2**version) ** -0.5, s.epsilon, fresh, past, rate,
                STEPS=steps, ADAPTS=name != "sgd", NESTEROV=name == "nadam", NARROW=narrow, BLOCK=BLOCK,
                enable_fp_fusion=False,
            )  # fmt: skip
    return new, copies


def _ways(
    name: str, ahead: Ahead, learning_rate: float, beta1: float, weight_decay: float, version: int
) -> tuple[float, float, float]:
    """Return (kept share of a decayed weight, its distance, an undecayed weight's distance)."""
    staleness_steps, gain = ahead
    kept, decayed, plain = ways(learning_rate, weight_decay, GAINS[name](beta1, version, staleness_steps))
    return 1 + gain * (kept - 1), gain * decayed, gain * plain


def _step(name: str) -> Step:
    def step_rule(
        param_N: Tensor,
        grad_N: Tensor,
        moment1_N: Tensor,
        moment2_N: Tensor,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        num_decayed: int,
        step: int,
        matrices: Matrices = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        settings = _Settings(learning_rate, beta1, beta2, epsilon, weight_decay, num_decayed, step)
        return _run(name, (param_N, moment1_N, moment2_N), grad_N, settings)[0]

    return step_rule


def _predict(name: str) -> Predict:
    def predict_rule(
        param_N: Tensor,
        moment1_N: Tensor,
        moment2_N: Tensor,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        num_decayed: int,
        step: int,
        staleness_steps: int,
        matrices: Matrices = (),
    ) -> Tensor:
        if staleness_steps == 0 or step == 0:
            return param_N
        settings = _Settings(learning_rate, beta1, beta2, epsilon, weight_decay, num_decayed, step)
        state = (param_N, moment1_N, moment2_N)
        return _run(name, state, None, settings, [(staleness_steps, 1.0)], learning_rate)[1][0]

    return predict_rule


def _advance(name: str) -> Advance:
    def advance(
        param_N: Tensor,
        grad_N: Tensor,
        moment1_N: Tensor,
        moment2_N: Tensor,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        num_decayed: int,
        step: int,
        matrices: Matrices = (),
        ahead: Sequence[Ahead],
        ahead_learning_rate: float,
        compute_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        settings = _Settings(learning_rate, beta1, beta2, epsilon, weight_decay, num_decayed, step)
        state = (param_N, moment1_N, moment2_N)
        new, copies = _run(name, state, grad_N, settings, ahead, ahead_learning_rate, compute_dtype)
        return (*new, tuple(copies))

    return advance


sgd_step, sgd_predict, sgd_advance = _step("sgd"), _predict("sgd"), _advance("sgd")
adamw_step, adamw_predict, adamw_advance = _step("adamw"), _predict("adamw"), _advance("adamw")
nadam_step, nadam_predict, nadam_advance = _step("nadam"), _predict("nadam"), _advance("nadam")
