"""What bfloat16 costs in learning and gives in speed: a run that computes in it beside one in fp32, in one process.

The model is that of a run file which says nothing. Validation loss after so many steps, validated in fp32.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from single_process import train
from validating import validate

from shoal.peer.data.corpus import load_corpus
from shoal.protocol.spec import OptimizerSpec, RunSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    apart: list[float] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        found: dict[str, float] = {}
        for compute in ("fp32", "bf16"):
            spec = RunSpec(seed=seed, optimizer=OptimizerSpec(warmup_steps=min(40, options.steps // 4)))
            training = msgspec.structs.replace(
                spec.training, steps=options.steps, s_max=0, compute=compute, validation_microbatches=64
            )
            spec = msgspec.structs.replace(spec, training=training)
            corpus, params, began_s = load_corpus(spec.data, context=spec.model.context), {}, time.perf_counter()
            for _ in train(spec, corpus, steps=options.steps, on_step=lambda _, now, into=params: into.update(now)):
                pass
            took_s = time.perf_counter() - began_s
            found[compute] = validate(spec, corpus, params)
            print(
                f"seed {seed}: {compute} {found[compute]:.4f} nats, {took_s / options.steps:.3f} s a step", flush=True
            )
        apart.append(found["bf16"] - found["fp32"])
    print(f"bf16 - fp32: mean {statistics.fmean(apart):+.4f}, worst {max(apart):+.4f} nats")


if __name__ == "__main__":
    main()
