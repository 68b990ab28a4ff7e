"""What experts' grouped products cost, against one dense product of equal FLOP.

On a CUDA device: forward, gradient of the tokens and gradient of the matrices of `grouped_matmul`, in TFLOP/s and as a
share of what torch's own matmul reaches with as many rows and one matrix; for even, skewed and one-sided loads. Then
permute and combine, as a share of the rate at which the card copies. Without a device: the same products on the CPU, in
plain torch, and nothing about a card.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from job_times import cpu_ms, cuda_ms
from shoal.kernels.dispatch import Groups, differentiable, group

LOADS = ("even", "zipf", "one")


def choices(load: str, num_tokens: int, experts_per_token: int, num_experts: int) -> Tensor:
    """int64 [N, K], drawn by the experts' popularity; "one": half of all rows are one expert's."""
    rank_E = torch.arange(1, num_experts + 1, dtype=torch.float64)
    match load:
        case "even":
            weight_E = torch.ones(num_experts, dtype=torch.float64)
        case "zipf":
            weight_E = 1 / rank_E
        case _:
            weight_E = torch.where(rank_E == 1, 1e6, 1.0)
    generator = torch.Generator().manual_seed(0)
    return torch.multinomial(weight_E.expand(num_tokens, -1), experts_per_token, generator=generator)


def products(
    groups: Groups, D: int, F: int, num_experts: int, device: str, dtype: torch.dtype
) -> list[tuple[str, Callable[[], object], Callable[[], object]]]:
    """(name, grouped, dense with as many rows and one matrix)."""
    P = len(groups.choice_P)
    flat = torch.randn(num_experts, F, D, device=device, dtype=dtype) * D**-0.5
    weights, x_PD = list(flat.unbind()), torch.randn(P, D, device=device, dtype=dtype)
    grad_PF, offset_E = torch.randn(P, F, device=device, dtype=dtype), groups.offset_E
    twins = differentiable._twins(x_PD)
    return [
        ("forward", lambda: twins.grouped_matmul(x_PD, weights, offset_E), lambda: functional.linear(x_PD, weights[0])),
        (
            "gradient of tokens",
            lambda: twins.grouped_matmul(grad_PF, weights, offset_E, transposed=True),
            lambda: grad_PF @ weights[0],
        ),
        ("gradient of matrices", lambda: twins.grouped_outer(grad_PF, x_PD, offset_E), lambda: grad_PF.T @ x_PD),
    ]


def compare(
    N: int, D: int, F: int, E: int, K: int, device: str, dtype: torch.dtype, milliseconds: Callable[..., float],
    repeats: int,
) -> None:  # fmt: skip
    flop = 2.0 * N * K * D * F
    print(
        f"{N} tokens, {K} of {E} experts, {D} x {F}, {str(dtype).removeprefix('torch.')}: {flop / 1e9:.3g} GFLOP each"
    )
    for load in LOADS:
        groups = group(choices(load, N, K, E).to(device), E)
        busiest = int(groups.offset_E.diff().max())
        for name, grouped, dense in products(groups, D, F, E, device, dtype):
            grouped_ms, dense_ms = milliseconds(grouped, repeats), milliseconds(dense, repeats)
            print(
                f"  {load:5} busiest {busiest:6}  {name:22} {grouped_ms:9.3f} ms {flop / grouped_ms / 1e9:8.2f} TFLOP/s"
                f"  dense {dense_ms:9.3f} ms  share {dense_ms / grouped_ms:6.1%}"
            )


def moving(N: int, D: int, E: int, K: int, repeats: int) -> None:
    groups = group(choices("even", N, K, E).cuda(), E)
    x_ND, weight_NK = torch.randn(N, D, device="cuda", dtype=torch.bfloat16), torch.rand(N, K, device="cuda")
    twins = differentiable._twins(x_ND)
    y_PD = twins.permute(x_ND, groups)
    target_PD = torch.empty_like(y_PD)
    copied = 4 * y_PD.numel() / cuda_ms(lambda: target_PD.copy_(y_PD), repeats)
    works: list[tuple[str, Callable[[], object], float]] = [
        ("permute", lambda: twins.permute(x_ND, groups), 2.0 * (N + N * K) * D),
        ("combine", lambda: twins.combine(y_PD, weight_NK, groups), 2.0 * (N + N * K) * D),
        (
            "combine's backward",
            lambda: twins.combine_backward(x_ND, y_PD, weight_NK, groups),
            2.0 * (N + 2 * N * K) * D,
        ),
    ]
    for name, work, size in works:
        took_ms = cuda_ms(work, repeats)
        print(
            f"  {name:22} {took_ms:9.3f} ms {size / took_ms / 1e6:8.0f} GB/s, of copying {size / took_ms / copied:6.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="on a card")
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--ffn-dim", type=int, default=14336)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
        sizes = (arguments.tokens, arguments.dim, arguments.ffn_dim, arguments.experts, arguments.experts_per_token)
        for dtype in (torch.bfloat16, torch.float32):
            compare(*sizes, "cuda", dtype, cuda_ms, arguments.repeats)
        moving(arguments.tokens, arguments.dim, arguments.experts, arguments.experts_per_token, arguments.repeats)
        return
    print("no CUDA device: nothing is measured about a card; plain torch on one thread of this CPU instead")
    torch.set_num_threads(1)
    for N, D, F, E in ((256, 128, 176, 8), (1024, 256, 704, 8), (1024, 128, 176, 64)):
        compare(N, D, F, E, arguments.experts_per_token, "cpu", torch.float32, cpu_ms, arguments.repeats)


if __name__ == "__main__":
    main()
