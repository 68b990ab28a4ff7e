"""What a card reaches of what it can do, in one command: all that only a card can show. No card has run it yet.

    gpu.py                                # `make bench-gpu`: a table, and all figures in gpu.json
    gpu.py --only layers step             # these parts
    gpu.py --device cpu --tiny            # the same code on a CPU, for seconds: it says nothing about a card

    layers     a middle stage of four layers of Llama 3 8B, microbatches of 4,096 tokens in bfloat16: its jobs, with
               what comes and goes as bytes, beside the same layers of transformers, compiled, in the same run
    last       the last stage: two layers and the head of 128,256 words
    commit     the whole stage of `layers` makes a commit: clip, step, digest
    step       an optimizer's step with a prediction in one pass, beside what the card reaches when it copies
    muon       Muon's step of one of the layers, beside the time of a microbatch there
    experts    grouped products of 8 experts beside one dense product of equal FLOP
    wire       tensors written in few bits and read back, beside copying
    digests    a hundred steps of each optimizer on the card and on the CPU: the same bits or not

Every share is of something that was measured in the same run. `asked` is the goal of each, where there is one.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
import dispatch_kernel
import optimizer_kernel

from job_times import cpu_ms, cuda_ms
from shoal.coordinator.cost.memory import resident_terms
from shoal.kernels import nf4
from shoal.kernels.codec import FORMATS, decode, encode
from shoal.kernels.dispatch import group
from shoal.kernels.optimizer import OPTIMIZERS
from shoal.peer.data.labels import Labels
from shoal.peer.model.layout import state_layout
from shoal.peer.model.state import LayerState, StageState, initial_state, moment2_numel, step_layer
from shoal.peer.pipeline.boundary import Boundary
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.stage import StageRuntime
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, TrainingSpec

LLAMA_3_8B = ModelSpec(
    vocab_size=128_256, dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14_336, context=4096,
    rope_theta=500_000.0,
)  # fmt: skip
TINY = ModelSpec(
    vocab_size=512, dim=64, num_layers=8, num_heads=2, num_kv_heads=1, ffn_dim=96, context=32, rope_theta=500_000.0
)
LAYERS = (1, 5)
"""First layer of the middle stage, and the one behind its last."""
NUM_LAST = 2


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    part: str
    what: str
    value: float
    unit: str
    asked: float | None = None
    """The goal, if there is one."""

    is_most: bool = False
    """Whether `asked` is the most that it may be, and not the least."""

    @property
    def line(self) -> str:
        value = f"{self.value:,.3g}" if abs(self.value) < 1000 else f"{self.value:,.0f}"
        return f"{self.part:8} {self.what:58} {value:>9} {self.unit:18}{self._goal}"

    @property
    def _goal(self) -> str:
        if self.asked is None:
            return ""
        is_reached = self.value <= self.asked if self.is_most else self.value >= self.asked
        return f" at {'most' if self.is_most else 'least'} {self.asked:g}: {'reached' if is_reached else 'NOT REACHED'}"


@dataclass(frozen=True, slots=True)
class Bench:
    """Where it is measured, and how large."""

    device: torch.device
    is_tiny: bool
    repeats: int

    @property
    def spec(self) -> RunSpec:
        training = TrainingSpec(microbatch_size=1, microbatches_per_step=64, compute="bf16")
        model = TINY if self.is_tiny else LLAMA_3_8B
        return RunSpec(model=model, optimizer=OptimizerSpec(name="adamw"), training=training)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def held_bytes(self) -> int:
        """Count the bytes that tensors hold on the card; 0 on a CPU, for which torch does not count them."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def ms(self, work: Callable[[], object]) -> float:
        """Of kernels alone: the median by the card's clock, on a CPU the shortest in processor time."""
        return cuda_ms(work, self.repeats) if self.device.type == "cuda" else cpu_ms(work, self.repeats)

    def wall_s(self, work: Callable[[], object], repeats: int | None = None) -> float:
        """Of a job: the median from its call to the moment when everything is done."""
        times = []
        for repeat in range((repeats or self.repeats) + 2):
            self.wait()
            began_s = time.perf_counter()
            work()
            self.wait()
            if repeat >= 2:
                times.append(time.perf_counter() - began_s)
        return statistics.median(times)

    def dense_flops(self) -> float:
        """What a square product in bfloat16 reaches, FLOP/s."""
        size = 64 if self.is_tiny else 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2.0 * size**3 / (self.ms(lambda: a @ b) / 1e3)


def stage_of(bench: Bench, first: int, last: int) -> StageRuntime:
    """A stage with compiled layers and a state of random numbers, which are made where they are needed."""
    spec = bench.spec
    stage = StageRuntime(spec, first, last, corpus=None, device=bench.device, dtype=torch.bfloat16)
    layers = {}
    for key in stage.keys:
        numel = state_layout(spec, key).numel
        param_N = torch.empty(numel, device=bench.device).normal_(std=0.02)
        moment1_N, moment2_N = torch.zeros_like(param_N), torch.zeros(moment2_numel(spec, key), device=bench.device)
        layers[key] = LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)
    stage.load(StageState(version=0, layers=layers))
    if stage.compiled is not None:
        stage.compiled.wait()
    return stage


def payloads_of(bench: Bench, first_layer: int) -> tuple[bytearray, bytearray]:
    """(an activation, a gradient), as a neighbour would send them."""
    spec = bench.spec
    B, T, D = spec.training.microbatch_size, spec.model.context, spec.model.dim
    boundary = Boundary(spec, first_layer=first_layer, corpus=None, device=bench.device)
    targets_BT = torch.randint(spec.model.vocab_size, (B, T), device=bench.device)
    x_BTD = torch.randn(B, T, D, device=bench.device)
    activation = boundary.send(x_BTD, Labels(targets_BT=targets_BT))
    x_BTD.grad = torch.randn_like(x_BTD)
    gradient = boundary.send_gradient(x_BTD, Microbatch(0, 0), torch.tensor(True, device=bench.device))
    assert gradient is not None
    return activation, gradient


def layers(bench: Bench) -> Iterator[Figure]:
    began_s = time.perf_counter()
    stage, dense = stage_of(bench, *LAYERS), bench.dense_flops()
    activation, gradient = payloads_of(bench, LAYERS[0])
    yield Figure("layers", "dense product in bfloat16", dense / 1e12, "TFLOP/s")
    if stage.compiled is not None:
        yield Figure("layers", "until layers are compiled, which happens once", time.perf_counter() - began_s, "s")
        compiled, stage.compiled = stage.compiled, None
        as_they_are_s = sum(jobs_s(bench, stage, activation, gradient, contributes=False))
        yield Figure("layers", "both jobs, with layers that are not compiled", as_they_are_s * 1e3, "ms")
        stage.compiled = compiled
    timings = {contributes: jobs_s(bench, stage, activation, gradient, contributes) for contributes in (False, True)}
    forward_s, backward_s = timings[False]
    yield Figure("layers", "forward job", forward_s * 1e3, "ms")
    yield Figure("layers", "backward job", backward_s * 1e3, "ms")
    ours_s = forward_s + backward_s
    plain_s = plain_layers_s(bench, LAYERS[1] - LAYERS[0])
    yield Figure("layers", "transformers, compiled, forward and backward", plain_s * 1e3, "ms")
    yield Figure("layers", "speed of the jobs over that of transformers", plain_s / ours_s, "", asked=0.95)
    flop = stage.flop.forward + stage.flop.backward
    yield Figure("layers", "share of the dense product's FLOP/s", flop / ours_s / dense, "", asked=0.45)
    yield Figure("layers", "both jobs, and the gradient into the step's sum", sum(timings[True]) * 1e3, "ms")
    wire_s = bench.wall_s(lambda: payloads_of(bench, LAYERS[0]))
    yield Figure("layers", "bytes made of one activation and one gradient", wire_s * 1e3, "ms")
    if bench.device.type == "cuda":
        peak, parameters = torch.cuda.max_memory_allocated(), stage.num_parameters
        yield Figure("layers", "most memory on the card, with what jobs keep", peak / parameters, "bytes a parameter")
        foreseen = resident_terms(bench.spec).total
        yield Figure("layers", "foreseen for the optimizer's step, card and host", foreseen, "bytes a parameter")


def jobs_s(
    bench: Bench, stage: StageRuntime, activation: bytearray, gradient: bytearray, contributes: bool
) -> tuple[float, float]:
    """Median seconds of the (forward, backward) jobs of one microbatch after the other."""
    times: list[tuple[float, float]] = []
    for index in range(bench.repeats + 2):
        microbatch = Microbatch(0, index)
        bench.wait()
        began_s = time.perf_counter()
        stage.forward(microbatch, activation, contributes=contributes)
        bench.wait()
        between_s = time.perf_counter()
        stage.backward(microbatch, gradient)
        if contributes:
            stage.contribute(microbatch)  # the next job adds it
        bench.wait()
        times.append((between_s - began_s, time.perf_counter() - between_s))
    forward_s, backward_s = (statistics.median(part) for part in zip(*times[2:], strict=True))
    return forward_s, backward_s


def plain_layers_s(bench: Bench, num_layers: int) -> float:
    """Forward and backward of the same layers in transformers, in bfloat16; compiled, but for the tiny ones."""
    from transformers import LlamaConfig, LlamaModel

    model = bench.spec.model
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=model.dim,
        num_hidden_layers=num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        intermediate_size=model.ffn_dim,
        max_position_embeddings=model.context,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(bench.device):
        plain: Any = LlamaModel(config).to(torch.bfloat16)
    run = plain if bench.is_tiny else torch.compile(plain)
    shape = (1, model.context, model.dim)
    x_BTD, gradient_BTD = (torch.randn(shape, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    x_BTD.requires_grad_()

    def forward_and_backward() -> None:
        run(inputs_embeds=x_BTD).last_hidden_state.backward(gradient_BTD)
        plain.zero_grad()
        x_BTD.grad = None

    return bench.wall_s(forward_and_backward)


def last(bench: Bench) -> Iterator[Figure]:
    spec, dense = bench.spec, bench.dense_flops()
    first_layer = spec.model.num_layers - NUM_LAST
    stage = stage_of(bench, first_layer, spec.model.num_layers)
    activation, _ = payloads_of(bench, first_layer)
    indices = iter(range(bench.repeats + 2))
    took_s = bench.wall_s(lambda: stage.loss(Microbatch(0, next(indices)), activation, contributes=False))
    yield Figure("last", "loss job: forward, loss, backward", took_s * 1e3, "ms")
    yield Figure("last", "share of the dense product's FLOP/s", stage.flop.loss / took_s / dense, "", asked=0.4)


def commit(bench: Bench) -> Iterator[Figure]:
    stage = stage_of(bench, *LAYERS)
    mean_N = torch.randn(stage.num_parameters) * 1e-3
    whole_s = bench.wall_s(lambda: stage.step(mean_N), min(bench.repeats, 3))
    state = stage.state
    assert state is not None
    digest_s = bench.wall_s(state.digest, min(bench.repeats, 3))
    yield Figure("commit", f"{stage.num_parameters:,} parameters: clip, step, digest", whole_s * 1e3, "ms")
    yield Figure("commit", "of that, the digest", digest_s / whole_s, "", asked=0.1, is_most=True)
    held = bench.held_bytes() / stage.num_parameters
    stage.make_room()
    apart_s = bench.wall_s(lambda: stage.step(mean_N), min(bench.repeats, 3))
    yield Figure("commit", "with moments in the machine's memory", apart_s * 1e3, "ms")
    yield Figure("commit", "what that frees on the card", held - bench.held_bytes() / stage.num_parameters, "B/param")


def step(bench: Bench) -> Iterator[Figure]:
    numel = 1 << (12 if bench.is_tiny else 28)
    source_N = torch.zeros(numel, device=bench.device)
    target_N = torch.empty_like(source_N)
    copied = 8 * numel / bench.ms(lambda: target_N.copy_(source_N)) / 1e6
    yield Figure("step", f"copies {numel:,} numbers", copied, "GB/s")
    settings = {**optimizer_kernel.SETTINGS, "num_decayed": numel}
    for name, size in optimizer_kernel.BYTES.items():
        tensors = optimizer_kernel.state(name, numel, bench.device.type)
        took_ms = bench.ms(lambda name=name, tensors=tensors: OPTIMIZERS[name].step(*tensors, **settings))
        share = size * numel / took_ms / 1e6 / copied
        yield Figure("step", f"{name}, a step in one pass, over copying", share, "", asked=0.85)


def muon(bench: Bench) -> Iterator[Figure]:
    key, spec = f"layers.{LAYERS[0]}", bench.spec
    spec = msgspec.structs.replace(spec, optimizer=OptimizerSpec(name="muon"))
    layout = state_layout(spec, key)
    param_N = torch.empty(layout.numel, device=bench.device).normal_(std=0.02)
    moment1_N, moment2_N = OPTIMIZERS["muon"].moments(param_N, layout.matrices)
    layer = LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)
    gradient_N = torch.randn_like(param_N)
    took_s = bench.wall_s(lambda: step_layer(spec, key, layer, gradient_N, 1), 1)
    yield Figure("muon", f"step of one layer, {layout.numel:,} parameters", took_s * 1e3, "ms")
    stage = stage_of(bench, LAYERS[0], LAYERS[0] + 1)
    activation, gradient = payloads_of(bench, LAYERS[0])
    micro_s = sum(jobs_s(bench, stage, activation, gradient, contributes=False))
    share = took_s / (micro_s * spec.training.microbatches_per_step)
    yield Figure("muon", "over the 64 microbatches of a step", share, "", asked=0.05, is_most=True)


def experts(bench: Bench) -> Iterator[Figure]:
    N, D, F, E, K = (64, 32, 48, 8, 2) if bench.is_tiny else (8192, 4096, 14_336, 8, 2)
    for load in ("even", "zipf"):
        groups = group(dispatch_kernel.choices(load, N, K, E).to(bench.device), E)
        works = dispatch_kernel.products(groups, D, F, E, bench.device.type, torch.bfloat16)
        for what, grouped, dense in works:
            share = bench.ms(dense) / bench.ms(grouped)
            yield Figure("experts", f"{what}, {load} load, over a dense product", share, "", asked=0.8)


def wire(bench: Bench) -> Iterator[Figure]:
    numel = 1 << (12 if bench.is_tiny else 26)
    x_N = torch.randn(numel, device=bench.device)
    into_N = torch.empty_like(x_N)
    copy_ms = bench.ms(lambda: into_N.copy_(x_N))
    for name, form in FORMATS.items():
        payload_B = encode(x_N, form)
        share = copy_ms / bench.ms(lambda form=form: encode(x_N, form))
        yield Figure("wire", f"{name} written, over copying", share, "", asked=0.7)
        share = copy_ms / bench.ms(lambda form=form, payload_B=payload_B: decode(payload_B, numel, form))
        yield Figure("wire", f"{name} read, over copying", share, "", asked=0.7)
    stored_B, narrow_N = nf4.encode(x_N.cpu()).to(bench.device), torch.empty_like(x_N, dtype=torch.bfloat16)
    share = bench.ms(lambda: narrow_N.copy_(x_N)) / bench.ms(lambda: nf4.decode(stored_B, numel, torch.bfloat16))
    yield Figure("wire", "nf4 read as bfloat16, over copying float32 into that", share, "", asked=0.7)


def digests(bench: Bench) -> Iterator[Figure]:
    """Of a layer of `TINY`; Muon's steps on a card may be its CPU's business (`known_answers.py`)."""
    cpu, key, num_steps = torch.device("cpu"), "layers.0", 5 if bench.is_tiny else 100
    for name in OPTIMIZERS:
        spec = msgspec.structs.replace(bench.spec, model=TINY, optimizer=OptimizerSpec(name=name))
        numel, found = state_layout(spec, key).numel, []
        for device in (cpu, bench.device):
            generator = torch.Generator().manual_seed(0)
            layer = initial_state(spec, (key,), cpu).layers[key].to(device)
            for number in range(num_steps):
                gradient_N = torch.randn(numel, generator=generator).to(device)
                layer = step_layer(spec, key, layer, gradient_N, number) or layer
            found.append(layer.digest())
        is_same = float(found[0] == found[1])
        yield Figure("digests", f"{name}, {num_steps} steps: the bits of the CPU", is_same, "", asked=1.0)


PARTS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    part.__name__: part for part in (layers, last, commit, step, muon, experts, wire, digests)
}


def about(device: torch.device) -> dict[str, str]:
    """Which card, driver and commit the figures are of."""
    found = {"torch": torch.__version__, "system": platform.platform(), "commit": said("git", "rev-parse", "HEAD")}
    if device.type == "cuda":
        found["card"] = torch.cuda.get_device_name(device)
        found["driver"] = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def said(*argv: str) -> str:
    """What a program prints; nothing if it is not here."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small tensors: whether it runs, not how fast")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --device cpu --tiny runs the same code without one")
    bench = Bench(torch.device(arguments.device), arguments.tiny, 2 if arguments.tiny else arguments.repeats)
    found: dict[str, Any] = {"about": about(bench.device), "figures": []}
    print(", ".join(found["about"].values()))
    for name in arguments.only:
        for figure in PARTS[name](bench):
            if bench.is_tiny:
                figure = replace(figure, asked=None)  # the goals are a card's
            print(figure.line.rstrip(), flush=True)
            found["figures"].append(asdict(figure))
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")  # what is there, should the next part fail
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
