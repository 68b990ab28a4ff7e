"""What a wire in few bits costs in learning: the byte GPT of the staleness study, one layer a stage, in one process.

Each of its seven cuts has what the swarm's wire makes of an activation and of its gradient (`peer/pipeline/wire.py`).
Validation loss after so many steps, beside that of fp32 with the same seed, for each format and seed.
"""

import argparse
import statistics
import sys
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).parent / "staleness"))
from tasks import GPT

from cuts import cuts
from shoal.peer.data.corpus import load_corpus
from shoal.peer.single_process import Between, train, validate
from shoal.protocol.spec import OptimizerSpec, RunSpec, TrainingSpec, WireSpec

WIRES = {
    "bf16": WireSpec(activations="bf16"),
    "int8": WireSpec(activations="int8"),
    "6, 6": WireSpec(activations="hadamard6"),
    "4, 6": WireSpec(activations="hadamard4"),
    "4, 8": WireSpec(activations="hadamard4", activation_gradients="int8"),
    "4, 4": WireSpec(activations="hadamard4", activation_gradients="hadamard4"),
    "3, 6": WireSpec(activations="hadamard3"),
}


def learn(spec: RunSpec, between: Between | None) -> float:
    """Validation loss at the end."""
    corpus, params = load_corpus(spec.data, context=spec.model.context), {}
    steps = spec.training.steps
    for _ in train(spec, corpus, steps=steps, on_step=lambda _, now: params.update(now), between=between):
        pass
    return validate(spec, corpus, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--wires", nargs="*", choices=list(WIRES), default=list(WIRES))
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--samples", type=int, default=4, help="a microbatch, of four a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    apart: dict[str, list[float]] = {name: [] for name in options.wires}
    for seed in range(options.seeds):
        training = TrainingSpec(
            steps=options.steps,
            microbatches_per_step=4,
            microbatch_size=options.samples,
            s_max=0,
            validation_microbatches=64,
        )
        optimizer = OptimizerSpec(learning_rate=options.rate, warmup_steps=min(40, options.steps // 4))
        spec = RunSpec(seed=seed, model=GPT, training=training, optimizer=optimizer)
        plain = learn(spec, None)
        print(f"seed {seed}: fp32 {plain:.4f} nats", flush=True)
        for name in options.wires:
            found = learn(spec, cuts(msgspec.structs.replace(spec, wire=WIRES[name])))
            apart[name].append(found - plain)
            print(f"seed {seed}: {name:5s} {found:.4f} nats, {found - plain:+.4f}", flush=True)
    for name, differences in apart.items():
        print(f"{name:5s} mean {statistics.fmean(differences):+.4f}, worst {max(differences):+.4f} nats")


if __name__ == "__main__":
    main()
