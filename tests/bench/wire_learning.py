"""What a wire in few bits costs in learning: the byte GPT of the staleness study, in one process.

It is cut into stages, and each cut has what the swarm's wire makes of an activation and of its gradient
(`peer/pipeline/wire.py`); a step's gradient is added up by four members, as `peer/group/reduce.py` does it.
Validation loss after so many steps, beside that of fp32 with the same seed, for each wire and seed. A wire is named by
its bits: forth, back, and of the sums among members.
"""

import argparse
import statistics
import sys
from pathlib import Path

import msgspec
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).parent / "staleness"))
from layers import Layer
from settings import Method
from single_process import train
from tasks import GPT, ByteGPT
from tasks import validate as study_validate
from validating import validate

from cuts import Sums, cuts
from shoal.peer.data.corpus import load_corpus
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.spec import OptimizerSpec, RunSpec, TrainingSpec, WireSpec
from shoal.protocol.wire_format import WireFormat

FORMATS: dict[str, WireFormat] = {
    "32": "fp32",
    "16": "bf16",
    "8": "int8",
    "6": "hadamard6",
    "5": "hadamard5",
    "4": "hadamard4",
    "3": "hadamard3",
}
WIRES = (
    "16,16,16",
    "8,8,32",
    "6,6,32",
    "4,6,32",
    "4,8,32",
    "32,32,8",
    "32,32,6",
    "32,32,4",
    "32,32,3",
    "8,8,8",
    "8,8,4",
)
MEMBERS = 4


def wire_of(name: str) -> WireSpec:
    forth, back, sums = (FORMATS[bits] for bits in name.split(","))
    return WireSpec(activations=forth, activation_gradients=back, gradients=sums)


def training_of(*, steps: int, samples: int) -> TrainingSpec:
    """A synchronous run in which each member has one microbatch a step. Args: samples: of a microbatch."""
    return TrainingSpec(
        steps=steps,
        microbatches_per_step=MEMBERS,
        microbatch_size=samples,
        s_max=0,
        validation_microbatches=64,
    )


def learn(spec: RunSpec, *, stages: int) -> float:
    """Validation loss at the end."""
    corpus, params = load_corpus(spec.data, context=spec.model.context), {}
    wire, layers = spec.wire, spec.model.num_layers
    firsts, cut = {layers * stage // stages for stage in range(1, stages)}, cuts(spec, corpus)

    def between(x_BTD: Tensor, microbatch: Microbatch, layer: int) -> Tensor:
        return cut(x_BTD, microbatch, layer) if layer in firsts else x_BTD

    made = train(
        spec,
        corpus,
        steps=spec.training.steps,
        on_step=lambda _, now: params.update(now),
        between=None if (wire.activations, wire.backward_of(wire.activations)) == ("fp32", "fp32") else between,
        on_backward=None if wire.gradients == "fp32" else Sums(spec, MEMBERS),
    )
    for _ in made:
        pass
    return validate(spec, corpus, params)


def learn_stale(spec: RunSpec, *, stages: int) -> float:
    """As `learn`, with every gradient taken at weights that are one step old and moved on by the run's prediction: as a
    swarm does it with `s_max = 1`."""
    task, wire, training = ByteGPT(spec), spec.wire, spec.training
    firsts = {f"layers.{spec.model.num_layers * stage // stages}" for stage in range(1, stages)}
    cut = cuts(spec, task.corpus)
    is_cut = (wire.activations, wire.backward_of(wire.activations)) != ("fp32", "fp32")
    add_up = None if wire.gradients == "fp32" else Sums(spec, MEMBERS)
    method = Method(training.compensation)
    layers = {key: Layer(task, key, spec.optimizer, method, updates=training.steps) for key in task.keys}
    weights = {key: layer.weights(0) for key, layer in layers.items()}
    for step in range(training.steps):
        sums = {key: torch.zeros(layer.layout.numel) for key, layer in layers.items()}
        whole = {key: {"all": torch.nn.Parameter(torch.empty(0))} for key in layers}
        for index in range(training.microbatches_per_step):
            x, targets = task.microbatch(step, index)
            for number, (key, layer) in enumerate(layers.items()):
                if key in firsts and is_cut:
                    x = cut(x, Microbatch(step, index), number)
                x = task.run((key,), {key: layer.leaves(weights[key], sums[key])}, x)
            torch.autograd.backward(task.loss(x, targets) / training.microbatches_per_step)
            for key, tensors in whole.items():
                tensors["all"].data, tensors["all"].grad = sums[key], sums[key]
            if add_up is not None:
                add_up(Microbatch(step, index), whole)
        weights = {key: layer.weights(1) for key, layer in layers.items()}
        for key, layer in layers.items():
            layer.step(sums[key])
    leaves = {key: layer.leaves(layer.state.param_N, torch.zeros(layer.layout.numel)) for key, layer in layers.items()}
    return study_validate(task, leaves)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--wires", nargs="*", metavar="FORTH,BACK,SUMS", default=WIRES)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--optimizer", choices=["nadam", "adamw", "muon"], default="nadam")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--samples", type=int, default=4, help="a microbatch, of four a step")
    parser.add_argument("--stale", action="store_true", help="every gradient is of weights one step old, and predicted")
    options = parser.parse_args()
    learned = learn_stale if options.stale else learn
    torch.set_num_threads(1)
    apart: dict[str, list[float]] = {name: [] for name in options.wires}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        training = training_of(steps=options.steps, samples=options.samples)
        optimizer = OptimizerSpec(
            name=options.optimizer, learning_rate=options.rate, warmup_steps=min(40, options.steps // 4)
        )
        spec = RunSpec(seed=seed, model=GPT, training=training, optimizer=optimizer)
        plain = learned(msgspec.structs.replace(spec, wire=wire_of("32,32,32")), stages=options.stages)
        print(f"seed {seed}: fp32 {plain:.4f} nats", flush=True)
        for name in options.wires:
            found = learned(msgspec.structs.replace(spec, wire=wire_of(name)), stages=options.stages)
            apart[name].append(found - plain)
            print(f"seed {seed}: {name:8s} {found:.4f} nats, {found - plain:+.4f}", flush=True)
    for name, differences in apart.items():
        print(f"{name:8s} mean {statistics.fmean(differences):+.4f}, worst {max(differences):+.4f} nats")


if __name__ == "__main__":
    main()
