"""A step or a prediction in one pass over memory, in Triton: the twin of `reference.py`, without Muon.

Every element is read and written once: a step with AdamW reads 16 bytes an element (weight, gradient, two moments) and
writes 12. All arithmetic is in float32. Steps give the same bits as the reference: roots and quotients are rounded
(`sqrt_rn`, `div_rn`), and products are not contracted with sums (`enable_fp_fusion=False`). Predictions stay on this
peer, and may differ from the reference in their last bits.

If `TRITON_INTERPRET=1` is set when this file is first imported, the kernel runs on a CPU; for tests only.

N elements of one layer
"""

from collections.abc import Callable
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.optimizer.reference import adamw_gains, nadam_gains, nesterov_shares, sgd_gains, ways
from shoal.kernels.optimizer.rules import Hyperparameters, State

BLOCK: Final = 1024
"""The number of elements that a program computes: 8 a thread, which are two vectors of 16 bytes."""
GAINS: Final = {"sgd": sgd_gains, "adamw": adamw_gains, "nadam": nadam_gains}


@triton.jit
def advance_kernel(
    param_N, grad_N, moment1_N, moment2_N, new_param_N, new_moment1_N, new_moment2_N,
    numel, num_decayed, keep, beta1, beta1_rest, beta2, beta2_rest, correction, epsilon, fresh, past, rate,
    way_decayed, way_plain, STEPS: tl.constexpr, ADAPTS: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one block of elements with the arithmetic of `reference.py`, operation by operation.

    STEPS: make a step; otherwise predict the weights.   ADAPTS: there is a second moment.   keep: the fraction of a
    weight that weight decay leaves.   rate: factor on a step's direction.   fresh, past: NAdam's factors on gradient
    and first moment.   way_decayed, way_plain: how far a prediction moves a weight with / without weight decay.
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
    kept = param * tl.where(decays, keep, 1.0)
    if STEPS:
        change = direction
        if NESTEROV:
            change = tl.div_rn(grad * fresh + moment1 * past, root)
        tl.store(new_param_N + at, kept + change * rate, mask=inside)
    else:
        tl.store(new_param_N + at, kept - direction * tl.where(decays, way_decayed, way_plain), mask=inside)


def _launch(
    name: str,
    old: State,
    new: State,
    grad_N: Tensor | None,
    hyper: Hyperparameters,
    *,
    keep: float,
    version: int,
    change: tuple[float, float, float] = (0.0, 0.0, 0.0),
    way: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Run the kernel, which fills `new`. If `grad_N` is None, the kernel predicts: it writes only the weights of `new`.

    Args: old: the present state, contiguous. version: how many gradients the second moment contains when its root is
        taken (for bias correction). change: the arguments (fresh, past, rate). way: (way_decayed, way_plain).
    """
    numel = old[0].numel()
    if not numel:
        return
    # Triton launches on the current device, which may not be that of the tensors.
    with torch.cuda.device_of(old[0]):  # type: ignore[no-untyped-call]
        advance_kernel[(triton.cdiv(numel, BLOCK),)](
            old[0], old[0] if grad_N is None else grad_N.contiguous(), *old[1:], *new,
            numel, hyper.num_decayed, keep, hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2,
            (1 - hyper.beta2**version) ** -0.5, hyper.epsilon, *change, *way,
            STEPS=grad_N is not None, ADAPTS=name != "sgd", NESTEROV=name == "nadam", BLOCK=BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip


def _step(name: str) -> Callable[[Tensor, Tensor, Tensor, Tensor, Hyperparameters], State]:
    def step_rule(
        param_N: Tensor, grad_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters
    ) -> State:
        # These follow the order of operations of `reference.py`, so that both round the same numbers to float32.
        fresh, past, rate = 0.0, 0.0, -hyper.learning_rate
        if name == "adamw":
            rate = -hyper.learning_rate / (1 - hyper.beta1 ** (hyper.step + 1))
        elif name == "nadam":
            fresh, past = nesterov_shares(hyper)
        old = (param_N.contiguous(), moment1_N.contiguous(), moment2_N.contiguous())
        new = (torch.empty_like(old[0]), torch.empty_like(old[1]), torch.empty_like(old[2]))
        keep = 1 - hyper.learning_rate * hyper.weight_decay
        _launch(name, old, new, grad_N, hyper, keep=keep, version=hyper.step + 1, change=(fresh, past, rate))
        return new

    return step_rule


def _predict(name: str) -> Callable[[Tensor, Tensor, Tensor, Hyperparameters, int], Tensor]:
    def predict_rule(
        param_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters, staleness_steps: int
    ) -> Tensor:
        keep, decayed, plain = ways(hyper, GAINS[name](hyper, staleness_steps))
        old = (param_N.contiguous(), moment1_N.contiguous(), moment2_N.contiguous())
        ahead_N = torch.empty_like(old[0])
        new = (ahead_N, *old[1:])
        _launch(name, old, new, None, hyper, keep=keep, version=hyper.step, way=(decayed, plain))
        return ahead_N

    return predict_rule


sgd_step, sgd_predict = _step("sgd"), _predict("sgd")
adamw_step, adamw_predict = _step("adamw"), _predict("adamw")
nadam_step, nadam_predict = _step("nadam"), _predict("nadam")
