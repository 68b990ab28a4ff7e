"""What a subspace costs in learning (`peer/model/subspace.py`): the byte GPT of the staleness study, in one process.

Each layer is a stage, and each cut has what the swarm's wire makes of an activation and of its gradient, as in
`wire_learning.py`. Each rank is compared with the dense model of the same seed twice: after as many steps, and after as
many bytes over a cut, for which the dense model gets a run of its own of fewer steps, with a schedule that ends there.
"""

import argparse
import statistics
import time

import msgspec
import torch
from wire_learning import GPT, learn, training_of, wire_of

from shoal.peer.model.layout import num_parameters
from shoal.peer.pipeline.wire import ActivationWire
from shoal.protocol.spec import OptimizerSpec, RunSpec
from shoal.protocol.toml.defaults import ffn_dim_of


def cut_bytes(spec: RunSpec) -> int:
    """Of a microbatch there and back between two stages, with its labels."""
    wire = ActivationWire(spec)
    return wire.activation_bytes + wire.targets_bytes + wire.gradient_bytes


def of_steps(spec: RunSpec, steps: int) -> RunSpec:
    """The same run with another end."""
    training = msgspec.structs.replace(spec.training, steps=steps)
    optimizer = msgspec.structs.replace(spec.optimizer, warmup_steps=min(40, steps // 4))
    return msgspec.structs.replace(spec, training=training, optimizer=optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ranks", nargs="*", type=int, metavar="K", help="default: an eighth and a 16th of the width")
    parser.add_argument("--dim", type=int, default=GPT.dim)
    parser.add_argument("--layers", type=int, default=GPT.num_layers, help="each is a stage")
    parser.add_argument("--wire", metavar="FORTH,BACK,SUMS", default="16,16,32")
    parser.add_argument("--optimizer", choices=["nadam", "adamw", "muon"], default="nadam")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--samples", type=int, default=4, help="a microbatch, of four a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ffn_dim = ffn_dim_of(options.dim)
    whole = msgspec.structs.replace(GPT, dim=options.dim, ffn_dim=ffn_dim, num_layers=options.layers)
    ranks = options.ranks or [options.dim // 8, options.dim // 16]
    apart: dict[int, list[tuple[float, float]]] = {rank: [] for rank in ranks}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        training = training_of(steps=options.steps, samples=options.samples)
        optimizer = OptimizerSpec(name=options.optimizer, learning_rate=options.rate, warmup_steps=0)  # `of_steps`
        spec = RunSpec(seed=seed, model=whole, training=training, optimizer=optimizer, wire=wire_of(options.wire))
        dense = trained(spec, options.steps)
        for rank in ranks:
            reduced = msgspec.structs.replace(spec, model=msgspec.structs.replace(whole, subspace=rank))
            found = trained(reduced, options.steps)
            equal_steps = max(4, round(options.steps * cut_bytes(reduced) / cut_bytes(spec)))
            short = trained(spec, equal_steps)
            apart[rank].append((found - dense, found - short))
            print(
                f"seed {seed}, rank {rank} of {whole.dim}: {found - dense:+.4f} nats at {options.steps} steps, "
                f"{found - short:+.4f} at equal bytes, which are {equal_steps} steps of the dense model",
                flush=True,
            )
    for rank, differences in apart.items():
        steps, volumes = zip(*differences, strict=True)
        print(
            f"rank {rank:3d}: mean {statistics.fmean(steps):+.4f} nats at equal steps, "
            f"{statistics.fmean(volumes):+.4f} at equal bytes, {len(steps)} seeds"
        )


def trained(spec: RunSpec, steps: int) -> float:
    """Validation loss after so many steps, which is printed."""
    began_s = time.monotonic()
    found = learn(of_steps(spec, steps), stages=spec.model.num_layers)
    print(
        f"seed {spec.seed}: rank {spec.model.written_width:3d}, {num_parameters(spec.model):,} parameters, "
        f"{cut_bytes(spec):,} bytes a microbatch, {steps} steps: {found:.4f} nats, {time.monotonic() - began_s:.0f} s",
        flush=True,
    )
    return found


if __name__ == "__main__":
    main()
