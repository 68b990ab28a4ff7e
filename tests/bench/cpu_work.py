"""Tokens a CPU second: real swarms, and plain torch doing the same work, one after the other in one run.

    cpu_work.py                                   # one peer, a host and a volunteer, the demo; each beside plain torch
    cpu_work.py --cases one --rounds 3
    cpu_work.py --against ../old/.venv/bin/python # and the version that this Python has, in turns with ours

Processor seconds are those of all processes of a swarm, network daemons included. `steady` counts from step `--skip` to
the last one, `whole` from the first line of the processes to the last step: imports, start-up and compilation too.
Plain torch is a module, autograd, `torch.optim` and the batches of the run, in one process with as many threads as the
swarm has in all (the demo's with one, which wastes least). It reads the same text and begins with the same weights, so
its losses can be compared with the swarm's. Ratios of processor seconds can be taken on a machine that others use, if
all sides have one thread a process (`--threads 1`): torch's threads burn time while they wait for one that was
interrupted. Wall seconds cannot.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

TEN_MILLION = """
name = "cpu-work"
[model]
dim = 320
num_layers = 8
num_heads = 5
num_kv_heads = 5
ffn_dim = 896
[optimizer]
learning_rate = 1e-3
warmup_steps = 4
[training]
steps = {steps}
s_max = {s_max}
synchronous_steps = 2
[swarm]
stages = {stages}
min_peers = {peers}
"""
BATCH = """
microbatches_per_step = 8
microbatch_size = 4
"""


@dataclass(frozen=True)
class Case:
    """One swarm: so many peers of so many threads each."""

    peers: int
    stages: int
    threads: int
    steps: int
    plain_threads: int
    """Of plain torch."""
    spec: str = ""
    """TOML; empty: the demo's own."""


CASES = {
    "one": Case(peers=1, stages=1, threads=2, steps=30, plain_threads=2, spec=TEN_MILLION),
    "two": Case(peers=2, stages=2, threads=1, steps=30, plain_threads=2, spec=TEN_MILLION),
    "demo": Case(peers=6, stages=3, threads=1, steps=400, plain_threads=1),
}


@dataclass
class Figures:
    """Of one run of one side."""

    side: str
    steady: float = 0.0
    """Tokens a CPU second, from step `--skip` on."""
    whole: float = 0.0
    """Tokens a CPU second, from the start of the processes."""
    wall: float = 0.0
    """Tokens a second of the clock, start included."""
    wall_steady: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    """Share of the steady processor seconds, by what spent them."""
    memory: dict[str, float] = field(default_factory=dict)
    """MB at the last step (PSS), by process."""
    losses: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    """Of stage 0 after each step."""


class Watch:
    """Samples what the processes below `root` have spent."""

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self._gone_s: dict[int, dict[str, float]] = {}

    def spent(self) -> dict[str, float]:
        """Processor seconds by what spent them, of all processes seen so far."""
        for process in self._processes():
            try:
                if "p2pd" in process.name():
                    times = process.cpu_times()
                    self._gone_s[process.pid] = {"network daemon": times.user + times.system}
                    continue
                times = process.cpu_times()
                total = times.user + times.system
                loop = sum(t.user_time + t.system_time for t in process.threads() if t.id == process.pid)
                self._gone_s[process.pid] = {"event loop": loop, "other threads": total - loop}
            except psutil.Error:
                continue
        parts: dict[str, float] = {}
        for ofs in self._gone_s.values():
            for name, seconds in ofs.items():
                parts[name] = parts.get(name, 0.0) + seconds
        return parts

    def memory_mb(self) -> dict[str, float]:
        """Proportional set size of each process, by what it is."""
        sizes: dict[str, float] = {}
        for process in self._processes():
            try:
                name = "daemon" if "p2pd" in process.name() else _role(process.cmdline())
                sizes[f"{name}-{process.pid}"] = round(_pss_mb(process.pid), 1)
            except (psutil.Error, OSError):
                continue
        return {
            f"{name} {n + 1}": size
            for name in ("host", "join", "demo", "daemon", "plain")
            for n, size in enumerate(size for key, size in sizes.items() if key.startswith(name))
        }

    def _processes(self) -> Iterator[psutil.Process]:
        try:
            yield from (self._root, *self._root.children(recursive=True))
        except psutil.Error:
            return


def _role(argv: list[str]) -> str:
    return next((word for word in argv if word in ("host", "join", "demo")), "plain")


def _pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


@contextmanager
def _running(argv: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure_demo(python: str, folder: Path, case: Case, *, skip: int) -> Figures:
    """`shoal demo` as a person starts it, until its run is done."""
    report = folder / "report.jsonl"
    argv = [python, "-m", "shoal.deploy.cli", "demo", "--peers", str(case.peers), "--stages", str(case.stages)]
    argv += ["--steps", str(case.steps), "--json", str(report)]
    if case.spec:
        (folder / "run.toml").write_text(_spec_text(case))
        argv += ["--spec", str(folder / "run.toml")]
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    samples: list[tuple[int, float, dict[str, float]]] = []
    memory: dict[str, float] = {}
    started_s = time.monotonic()
    with _running(argv, env=environment) as process:
        watch = Watch(process.pid)
        assert process.stdout is not None
        threading.Thread(target=process.stdout.read, daemon=True).start()
        while process.poll() is None:
            lines = report.read_text().splitlines() if report.exists() else []
            steps = max((line["step"] + 1 for line in map(_decoded, lines) if "step" in line), default=0)
            samples.append((steps, time.monotonic() - started_s, watch.spent()))
            if steps >= case.steps:
                break
            if steps >= case.steps - 5 or steps > skip:
                memory = watch.memory_mb()
            time.sleep(0.25)
    losses = [line.get("loss") for line in map(_decoded, report.read_text().splitlines()) if "step" in line]
    return _figures(samples, memory, case, skip=skip, losses=[loss for loss in losses if loss is not None])


def measure_swarm(python: str, folder: Path, case: Case, *, skip: int, s_max: int) -> Figures:
    """A host and its volunteers, each started as its owner would."""
    (folder / "run.toml").write_text(_spec_text(case, s_max=s_max))
    environment = os.environ | {"XDG_CONFIG_HOME": os.devnull, "XDG_STATE_HOME": str(folder / "state")}
    common = ["--listen", "127.0.0.1:0", "--threads", str(case.threads), "--device", "cpu", "--reports"]
    cli = [python, "-m", "shoal.deploy.cli"]
    runner = [sys.executable, __file__, "--run-all"]
    commands = [[*cli, "host", str(folder / "run.toml"), "--state-dir", str(folder / "peer-0"), *common]]
    for n in range(1, case.peers):
        commands.append([*cli, "join", "-", "--state-dir", str(folder / f"peer-{n}"), *common])
    samples: list[tuple[int, float, dict[str, float]]] = []
    memory: dict[str, float] = {}
    losses: dict[int, float] = {}
    digests: dict[int, str] = {}
    stages_done: dict[int, int] = {}
    started_s = time.monotonic()
    with _running([*runner, json.dumps(commands)], env=environment) as process:
        watch = Watch(process.pid)
        assert process.stdout is not None
        for text in process.stdout:
            line = _decoded(text)
            if line.get("event") != "Committed":
                continue
            report = line["report"]
            step = report["step"]
            if report["stage"] == 0:
                digests[step] = report["digest"]
            if report["loss"] is not None:
                losses[step] = report["loss"]
            stages_done[report["stage"]] = step + 1
            steps = min(stages_done.values()) if len(stages_done) == case.stages else 0
            samples.append((steps, time.monotonic() - started_s, watch.spent()))
            if steps == case.steps - 2:
                memory = watch.memory_mb()
    figures = _figures(samples, memory, case, skip=skip, losses=[losses[step] for step in sorted(losses)])
    figures.digests = [digests[step] for step in sorted(digests)]
    return figures


def run_all(commands: list[list[str]]) -> None:
    """Start a host and, once its invite is there, give it to the others; say what all say."""
    lock, invite = threading.Lock(), threading.Event()
    told: list[str] = []
    processes = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for argv in commands]

    def read(process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if _decoded(line).get("event") == "Ready":
                told.append(_decoded(line)["invite"])
                invite.set()
            with lock:
                sys.stdout.write(line)
                sys.stdout.flush()

    threads = [threading.Thread(target=read, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    while not invite.wait(1.0) and processes[0].poll() is None:
        pass
    for process in processes[1:]:
        assert process.stdin is not None
        process.stdin.write((told[0] if told else "") + "\n")
        process.stdin.close()
    for thread in threads:
        thread.join()


def measure_plain(folder: Path, case: Case, *, skip: int) -> Figures:
    (folder / "run.toml").write_text(_spec_text(case))
    argv = [sys.executable, __file__, "--plain", str(folder / "run.toml")]
    argv += ["--threads", str(case.plain_threads)]
    samples: list[tuple[int, float, dict[str, float]]] = []
    memory: dict[str, float] = {}
    losses = []
    started_s = time.monotonic()
    with _running(argv) as process:
        watch = Watch(process.pid)
        assert process.stdout is not None
        for text in process.stdout:
            line = _decoded(text)
            losses.append(line["loss"])
            samples.append((line["step"] + 1, time.monotonic() - started_s, {"plain torch": line["cpu_s"]}))
            if line["step"] == case.steps - 2:
                memory = watch.memory_mb()
    return _figures(samples, memory, case, skip=skip, losses=losses)


def train_plainly(spec_file: Path, *, threads: int) -> None:
    """The same model and batches as one would write them for one machine; a line of JSON a step."""
    import torch
    from torch.nn import functional

    from shoal.peer.data.corpus import load_corpus
    from shoal.peer.data.labels import Labels
    from shoal.peer.data.microbatch import microbatch, validation_microbatch
    from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
    from shoal.peer.model.schedule import learning_rate
    from shoal.protocol.toml.spec_file import load_spec

    torch.set_num_threads(threads)
    spec = load_spec(spec_file)
    model_spec, M = spec.model, spec.training.microbatches_per_step
    half = torch.arange(0, model_spec.head_dim, 2, dtype=torch.float64)
    angle = torch.outer(
        torch.arange(model_spec.context).double(), model_spec.rope_theta ** -(half / model_spec.head_dim)
    )
    cos = torch.cat((angle, angle), -1).cos().float()
    sin = torch.cat((angle, angle), -1).sin().float()

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kv_dim = model_spec.num_kv_heads * model_spec.head_dim
            self.q_proj = torch.nn.Linear(model_spec.dim, model_spec.dim, bias=False)
            self.k_proj = torch.nn.Linear(model_spec.dim, kv_dim, bias=False)
            self.v_proj = torch.nn.Linear(model_spec.dim, kv_dim, bias=False)
            self.o_proj = torch.nn.Linear(model_spec.dim, model_spec.dim, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            B, T, D = x.shape
            q, k, v = (
                projection(x).view(B, T, -1, model_spec.head_dim).transpose(1, 2)
                for projection in (self.q_proj, self.k_proj, self.v_proj)
            )
            out = functional.scaled_dot_product_attention(
                turned(q), turned(k), v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
            return self.o_proj(out.transpose(1, 2).reshape(B, T, D))

    class FeedForward(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = torch.nn.Linear(model_spec.dim, model_spec.ffn_dim, bias=False)
            self.up_proj = torch.nn.Linear(model_spec.dim, model_spec.ffn_dim, bias=False)
            self.down_proj = torch.nn.Linear(model_spec.ffn_dim, model_spec.dim, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm = torch.nn.RMSNorm(model_spec.dim, eps=model_spec.norm_eps)
            self.self_attn = Attention()
            self.post_attention_layernorm = torch.nn.RMSNorm(model_spec.dim, eps=model_spec.norm_eps)
            self.mlp = FeedForward()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.self_attn(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Module()
            self.model.embed_tokens = torch.nn.Embedding(model_spec.vocab_size, model_spec.dim)
            self.model.layers = torch.nn.ModuleList(Layer() for _ in range(model_spec.num_layers))
            self.model.norm = torch.nn.RMSNorm(model_spec.dim, eps=model_spec.norm_eps)
            self.lm_head = torch.nn.Linear(model_spec.dim, model_spec.vocab_size, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.model.embed_tokens(tokens)
            for layer in self.model.layers:
                x = layer(x)
            return self.lm_head(self.model.norm(x))

    model = Model()
    weights = {}
    for key in all_layer_keys(model_spec):
        weights |= layer_layout(model_spec, key).views(init_layer(model_spec, key, spec.seed))
    model.load_state_dict(weights)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": spec.optimizer.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    of = {"betas": (spec.optimizer.beta1, spec.optimizer.beta2), "eps": spec.optimizer.epsilon}
    if spec.optimizer.name == "nadam":
        optimizer = torch.optim.NAdam(groups, **of, decoupled_weight_decay=True, momentum_decay=float("inf"))
    else:
        optimizer = torch.optim.AdamW(groups, **of)
    by_layer = [list(model.model.embed_tokens.parameters()), *([*layer.parameters()] for layer in model.model.layers)]
    by_layer.append([*model.model.norm.parameters(), *model.lm_head.parameters()])
    corpus = load_corpus(spec.data, context=model_spec.context)

    def loss_of(tokens: torch.Tensor, labels: Labels) -> torch.Tensor:
        return functional.cross_entropy(model(tokens).flatten(0, 1), labels.targets_BT.flatten())

    for step in range(spec.training.steps):
        total = 0.0
        for index in range(M):
            loss = loss_of(*microbatch(corpus, spec, step, index))
            (loss / M).backward()
            total += loss.item()
        if spec.optimizer.clip_norm:
            for parameters in by_layer:
                torch.nn.utils.clip_grad_norm_(parameters, spec.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec.optimizer, step, spec.training.steps)
        optimizer.step()
        optimizer.zero_grad()
        every = spec.training.validation_interval_steps
        if every and (step + 1) % every == 0:
            with torch.no_grad():
                for index in range(spec.training.validation_microbatches):
                    loss_of(*validation_microbatch(corpus, spec, index)).item()
        print(json.dumps({"step": step, "loss": total / M, "cpu_s": time.process_time()}), flush=True)


def _decoded(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _spec_text(case: Case, *, s_max: int = 1) -> str:
    if case.spec:
        return case.spec.format(steps=case.steps, stages=case.stages, peers=case.peers, s_max=s_max)
    from shoal.deploy.run.run_file import DEMO_SPEC

    text = Path(DEMO_SPEC).read_text()
    return text.replace("steps = 400", f"steps = {case.steps}", 1)


def _figures(
    samples: list[tuple[int, float, dict[str, float]]],
    memory: dict[str, float],
    case: Case,
    *,
    skip: int,
    losses: list[float],
) -> Figures:
    from shoal.deploy.run.run_file import DEMO_SPEC
    from shoal.protocol.toml.spec_file import load_spec

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "run.toml"
        path.write_text(_spec_text(case)) if case.spec else None
        tokens = load_spec(path if case.spec else DEMO_SPEC).tokens_per_step
    reached = [sample for sample in samples if sample[0] >= skip]
    if len(reached) < 2 or reached[-1][0] <= reached[0][0]:
        raise SystemExit(f"the run ended after {samples[-1][0] if samples else 0} steps")
    (step0, time0_s, spent0), (step1, time1_s, spent1) = reached[0], reached[-1]
    parts = {name: spent1[name] - spent0.get(name, 0.0) for name in spent1}
    steady_s = sum(parts.values())
    return Figures(
        side="",
        steady=(step1 - step0) * tokens / steady_s,
        whole=step1 * tokens / sum(spent1.values()),
        wall=step1 * tokens / time1_s,
        wall_steady=(step1 - step0) * tokens / (time1_s - time0_s),
        parts={name: round(seconds / steady_s, 3) for name, seconds in parts.items()},
        memory=memory,
        losses=losses,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3, help="of all sides in turn; the table has medians")
    parser.add_argument("--steps", type=int, help="of each run, in place of the case's own")
    parser.add_argument("--skip", type=int, default=10, help="steps before the steady state")
    parser.add_argument("--s-max", type=int, default=1, help="0: synchronous, so that equal code gives equal digests")
    parser.add_argument("--against", help="the Python of another version's environment")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run-all", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help="of every process, in place of the case's own")
    arguments = parser.parse_args()
    if arguments.plain:
        return train_plainly(arguments.plain, threads=arguments.threads or 1)
    if arguments.run_all:
        return run_all(json.loads(arguments.run_all))
    pythons = {"shoal": sys.executable} | ({"against": arguments.against} if arguments.against else {})
    results: dict[str, list[Figures]] = {}
    for name in arguments.cases:
        case = CASES[name]
        if arguments.steps:
            case = replace(case, steps=arguments.steps)
        if arguments.threads:
            case = replace(case, threads=arguments.threads, plain_threads=arguments.threads)
        results[name] = []
        for _ in range(arguments.rounds):
            for side in ("plain", *pythons):
                with tempfile.TemporaryDirectory(prefix="shoal-cpu-") as folder:
                    if side == "plain":
                        figures = measure_plain(Path(folder), case, skip=arguments.skip)
                    elif case.spec:
                        figures = measure_swarm(
                            pythons[side], Path(folder), case, skip=arguments.skip, s_max=arguments.s_max
                        )
                    else:
                        figures = measure_demo(pythons[side], Path(folder), case, skip=arguments.skip)
                figures.side = side
                results[name].append(figures)
                print(f"  {name} {side}: {figures.steady:.0f} tokens a CPU second", file=sys.stderr, flush=True)
        print_table(name, case, results[name])
    if arguments.json:
        arguments.json.write_text(json.dumps({k: [asdict(f) for f in v] for k, v in results.items()}, indent=1) + "\n")
    return None


def print_table(name: str, case: Case, runs: list[Figures]) -> None:
    print(f"{name}: {case.peers} peers, {case.stages} stages, {case.steps} steps; medians of {len(runs)} runs")
    print(f"{'':<8} {'tokens/CPU s':>12} {'x plain':>8} {'with start':>11} {'tokens/s':>9} {'with start':>11}  where")
    plain = statistics.median(run.steady for run in runs if run.side == "plain")
    for side in dict.fromkeys(run.side for run in runs):
        of = [run for run in runs if run.side == side]

        def middle(what: str, of: list[Figures] = of) -> float:
            return float(statistics.median(getattr(run, what) for run in of))

        parts = ", ".join(f"{part} {100 * share:.0f}%" for part, share in of[-1].parts.items())
        print(
            f"{side:<8} {middle('steady'):12.0f} {middle('steady') / plain:8.2f} {middle('whole'):11.0f} "
            f"{middle('wall_steady'):9.0f} {middle('wall'):11.0f}  {parts}"
        )
        if of[-1].memory:
            print("         MB: " + ", ".join(f"{part} {size:.0f}" for part, size in of[-1].memory.items()))


if __name__ == "__main__":
    main()
