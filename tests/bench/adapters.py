"""What a narrow base costs adapters in learning, and what it and they take in memory and on the wire.

    adapters.py                   # learning: a byte model is trained, then adapters beside it in each format
    adapters.py --memory bf16     # memory: a stage of 129 M parameters beside such a base; "all": it trains whole

Learning: 1.2 M parameters are trained on the sources of Python's library, and adapters of rank 8 then tuned on the
Markdown of this repository: one process, one thread, seed 0. A line of JSON a run. Memory: what the process
has resident after two steps, and the most that it had meanwhile, beyond what it had before there was a model.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from single_process import StepLoss, train
from tiny_run import tiny_corpus
from validating import validate

from shoal.deploy.session.heap import trim_heap
from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.model.frozen import seed_base, stored_base
from shoal.peer.model.layout import all_layer_keys, layer_layout, num_parameters
from shoal.peer.model.llama import Params
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.stage import StageRuntime
from shoal.protocol.spec import AdapterSpec, BaseFormat, RunSpec
from shoal.protocol.tensors import model_bytes, state_elements

FORMATS: tuple[BaseFormat, ...] = ("fp32", "bf16", "int8", "nf4")
MODEL = {"dim": 128, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 352, "context": 128}
LARGE = {"dim": 1024, "num_layers": 10, "num_heads": 16, "num_kv_heads": 16, "ffn_dim": 2816, "context": 128}
TRAINING = {"microbatches_per_step": 1, "microbatch_size": 4, "validation_microbatches": 64, "compute": "fp32"}
RANK = 8


def spec_of(steps: int, source: str, *, rate: float, base: BaseFormat | None = None) -> RunSpec:
    tables: dict[str, Any] = {
        "model": MODEL,
        "data": {"source": source},
        "optimizer": {"name": "adamw", "learning_rate": rate, "warmup_steps": 20, "weight_decay": 0.0},
        "training": TRAINING | {"steps": steps},
        "swarm": {"stages": 1},
    }
    if base is not None:
        tables["adapter"] = {"kind": "lora", "rank": RANK, "alpha": 2.0 * RANK, "base": base}
    return msgspec.convert(tables, RunSpec)


def trained(spec: RunSpec, corpus: Corpus, base: Mapping[str, Tensor] | None = None) -> tuple[float, float, Any]:
    """Returns: (validation loss after the first step, after the last, the parameters then)."""
    found: dict[int, float] = {}
    last, params_then = spec.training.steps - 1, {}

    def look(step: StepLoss, params_by_key: Mapping[str, Params]) -> None:
        if step.step in (0, last):
            found[step.step] = validate(spec, corpus, params_by_key)
        if step.step == last and spec.adapter is None:
            for key, params in params_by_key.items():
                params_then[key] = layer_layout(spec.model, key).flatten({n: p.detach() for n, p in params.items()})

    for _ in train(spec, corpus, steps=spec.training.steps, on_step=look, base=base):
        pass
    return found[0], found[last], params_then


def learn(steps: int, before_steps: int) -> None:
    spec = spec_of(before_steps, "python-library", rate=3e-3)
    _, loss, model = trained(spec, load_corpus(spec.data, context=128))
    print(json.dumps({"base": "trained", "parameters": num_parameters(spec.model), "loss": round(loss, 4)}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(Path(__file__).resolve().parents[2].rglob("*.md")):
            if not any(part.startswith(".") for part in path.parts):
                shutil.copy(path, Path(folder, "-".join(path.parts[-3:])))
        corpus = load_corpus(spec_of(steps, folder, rate=3e-3).data, context=128)
        for base in FORMATS:
            spec = spec_of(steps, folder, rate=3e-3, base=base)
            stored = {key: stored_base(spec, key, model[key]) for key in all_layer_keys(spec.model)}
            before, after, _ = trained(spec, corpus, stored)
            numbers = sum(state_elements(spec, key) for key in all_layer_keys(spec.model))
            line = {
                "base": base,
                "base_bytes": model_bytes(spec.model, base),
                "commit_bytes": 4 * numbers,
                "loss_before": round(before, 4),
                "loss_after": round(after, 4),
            }
            print(json.dumps(line), flush=True)


def _status_kb(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def remember(base: str) -> None:
    adapter = None if base == "all" else AdapterSpec(kind="lora", rank=16, base=base)  # type: ignore[arg-type]
    tables = {"model": LARGE, "training": TRAINING | {"microbatch_size": 1, "s_max": 0}, "swarm": {"stages": 1}}
    spec = msgspec.structs.replace(msgspec.convert(tables, RunSpec), adapter=adapter)
    runtime = StageRuntime(spec, 0, spec.model.num_layers, corpus=tiny_corpus(), device=torch.device("cpu"))
    empty_kb = _status_kb("VmRSS")
    if adapter is not None:
        runtime.load_base({key: seed_base(spec, key) for key in runtime.keys})
    runtime.load(runtime.initial_state())
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")  # forget the most that was resident so far
    for step in range(2):
        microbatch = Microbatch(step, 0)
        runtime.loss(microbatch, None)
        runtime.contribute(microbatch)
        runtime.step(runtime.gradient_sum(step)())
    trim_heap()
    held_kb = _status_kb("VmRSS")
    line = {
        "base": base,
        "parameters": num_parameters(spec.model),
        "trained": runtime.num_parameters,
        "held_mb": round((held_kb - empty_kb) / 1024),
        "most_mb": round((_status_kb("VmHWM") - empty_kb) / 1024),
        "commit_mb": round(4 * runtime.num_parameters / 1e6, 2),
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--before-steps", type=int, default=600)
    parser.add_argument("--memory", choices=["all", *FORMATS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        remember(arguments.memory)
    else:
        learn(arguments.steps, arguments.before_steps)


if __name__ == "__main__":
    main()
