"""How fast tensors are written in few bits and read back: GB/s of float32, on one core or on a card. On a core what is
compiled stands beside plain torch.

Beside it the rate at which the device copies, and the share of it that is reached. Then the error of each format, for
normal numbers of which one in a hundred is twenty times as large.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from job_times import cpu_ms, cuda_ms
from shoal.kernels.codec import FORMATS, decode, encode, numba_twin, reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=4 * 1024 * 1024)
    numel = parser.parse_args().numel
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    milliseconds = cuda_ms if device == "cuda" else cpu_ms
    rng = torch.Generator().manual_seed(0)
    x_N = torch.randn(numel, generator=rng)
    x_N = torch.where(torch.rand(numel, generator=rng) < 0.01, 20.0 * x_N, x_N).to(device)
    gigabytes, into_N = 4 * numel / 1e9, torch.empty_like(x_N)
    copied = gigabytes / milliseconds(lambda: into_N.copy_(x_N), 20) * 1e3
    if device == "cpu":
        numba_twin.wait()
    print(f"{device}: copies {copied:.1f} GB/s (read, and written)")
    for name, form in FORMATS.items():
        payload_B = encode(x_N, form)
        works = {
            "to the nearest": lambda form=form: encode(x_N, form),
            "by chance": lambda form=form: encode(x_N, form, key=(1, 2)),
            "read": lambda form=form, payload_B=payload_B: decode(payload_B, numel, form),
        }
        if device == "cpu":
            works |= {
                "in plain torch": lambda form=form: reference.encode(x_N, form),
                "by chance in plain torch": lambda form=form: reference.encode(x_N, form, key=(1, 2)),
                "read in plain torch": lambda form=form, payload_B=payload_B: reference.decode(payload_B, numel, form),
            }
        rates = {what: gigabytes / milliseconds(work, 10) * 1e3 for what, work in works.items()}
        error = float((decode(payload_B, numel, form) - x_N).square().mean().sqrt() / x_N.square().mean().sqrt())
        told = ", ".join(f"{what} {rate:.2f} ({rate / copied:.2f})" for what, rate in rates.items())
        print(f"{name:10s} {8 * payload_B.numel() / numel:.2f} bits: {told} GB/s; error {error:.4f} of the numbers")


if __name__ == "__main__":
    main()
