"""What an optimizer step costs, with the weights that the next microbatches want.

On a CUDA device: a step in milliseconds and as a share of the bandwidth that the card reaches when it copies, beside
`torch.optim.AdamW(fused=True)`; a prediction; and whether the bits of the card are the CPU's, which replicas rely on.
Then, and without a device only: the plain twin on the CPU.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from job_times import cpu_ms, cuda_ms
from shoal.kernels.optimizer import OPTIMIZERS

SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "step": 100,
}  # fmt: skip
BYTES = {"sgd": 3 * 4 + 2 * 4, "adamw": 4 * 4 + 3 * 4, "nadam": 4 * 4 + 3 * 4}
"""An element: weight, gradient and moments in; weight and moments out."""


def state(name: str, numel: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(weights, gradient, moments); the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    param_N, grad_N, moment1_N = (torch.randn(numel, generator=generator).to(device) for _ in range(3))
    moment2_N = moment1_N.square() + 1e-4 if OPTIMIZERS[name].moment2_of == "all" else moment1_N[:0]
    return param_N, grad_N, moment1_N, moment2_N


def copy_rate(numel: int, repeats: int) -> float:
    """GB/s, read and written, of a float32 tensor that is copied into another one."""
    source_N = torch.zeros(numel, device="cuda")
    target_N = torch.empty_like(source_N)
    return 8 * numel / cuda_ms(lambda: target_N.copy_(source_N), repeats) / 1e6


def on_card(numel: int, repeats: int) -> None:
    copied = copy_rate(numel, repeats)
    print(f"{torch.cuda.get_device_name()}, {numel:,} weights: copies at {copied:.0f} GB/s, median of {repeats}")
    print("                                              ms    GB/s   of copying  bits as on the CPU")
    for name, size in BYTES.items():
        tensors = state(name, numel, "cuda")
        took_ms = cuda_ms(lambda: OPTIMIZERS[name].step(*tensors, **SETTINGS, num_decayed=numel), repeats)  # noqa: B023
        rate = size * numel / took_ms / 1e6
        print(f"{name + ', a step':40} {took_ms:8.3f} {rate:7.0f} {rate / copied:11.1%}  {same_bits(name)}")
    param_N, grad_N, moment1_N, moment2_N = state("adamw", numel, "cuda")
    leaf_N = param_N.clone().requires_grad_()
    leaf_N.grad = grad_N
    fused = torch.optim.AdamW([leaf_N], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step_ms = cuda_ms(fused.step, repeats)

    def predict() -> Tensor:
        settings = {**SETTINGS, "num_decayed": numel}
        return OPTIMIZERS["adamw"].predict(param_N, moment1_N, moment2_N, **settings, staleness_steps=1)

    predict_ms = cuda_ms(predict, repeats)
    print(f"{'torch.optim.AdamW(fused=True)':40} {step_ms:8.3f}")
    print(f"{'adamw, a prediction':40} {predict_ms:8.3f}")


def same_bits(name: str, numel: int = 1_000_003) -> str:
    states = []
    for device in ("cpu", "cuda"):
        param_N, grad_N, moment1_N, moment2_N = state(name, numel, device)
        stepped = OPTIMIZERS[name].step(param_N, grad_N, moment1_N, moment2_N, **SETTINGS, num_decayed=numel // 2)
        states.append([tensor.cpu() for tensor in stepped])
    return "yes" if all(torch.equal(a, b) for a, b in zip(*states, strict=True)) else "NO"


def on_cpu(numel: int, repeats: int) -> None:
    torch.set_num_threads(1)
    print(f"plain torch on one thread, {numel:,} weights, the shortest of {repeats}, in ms of processor time")
    print("            step  predict")
    for name in BYTES:
        param_N, grad_N, moment1_N, moment2_N = state(name, numel, "cpu")
        settings = {**SETTINGS, "num_decayed": numel}
        moments = (moment1_N, moment2_N)
        optimizer = OPTIMIZERS[name]
        works: list[Callable[[], object]] = [
            lambda: optimizer.step(param_N, grad_N, *moments, **settings),  # noqa: B023
            lambda: optimizer.predict(param_N, *moments, **settings, staleness_steps=1),  # noqa: B023
        ]
        print(f"{name:8}" + "".join(f"{cpu_ms(work, repeats):9.2f}" for work in works))
    R, C = 256, 1024
    param_N, grad_N, moment1_N, moment2_N = state("sgd", R * C, "cpu")
    settings = {**SETTINGS, "num_decayed": R * C, "matrices": ((0, R, C),)}
    muon, nadam = OPTIMIZERS["muon"], OPTIMIZERS["nadam"]
    muon_ms = cpu_ms(lambda: muon.step(param_N, grad_N, moment1_N, moment2_N, **settings), repeats)
    muon_predict_ms = cpu_ms(
        lambda: muon.predict(param_N, moment1_N, moment2_N, **settings, staleness_steps=1), repeats
    )
    nadam_ms = cpu_ms(lambda: nadam.step(param_N, grad_N, moment1_N, moment1_N.square(), **settings), repeats)
    print(f"one {R} x {C} matrix: Muon's step {muon_ms:.1f}, its prediction {muon_predict_ms:.1f}, ", end="")
    print(f"NAdam's step {nadam_ms:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=1 << 26, help="on a card; AdamW holds 30 bytes of each")
    parser.add_argument("--cpu-weights", type=int, default=1_170_000)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        on_card(arguments.weights, arguments.repeats)
    else:
        print("no CUDA device: bandwidth and the fused kernel are not measured, only the plain twin on this CPU")
    on_cpu(arguments.cpu_weights, arguments.repeats)


if __name__ == "__main__":
    main()
