"""Does the rule for the learning rate (`protocol/toml/defaults.py`) fit? Models of several sizes, at it, below, above.

Byte models on the sources of Python's library, one process, one thread, seed 0, with the rule's own shapes and warm-up.
A line of JSON a run. The default takes about a quarter of an hour of a core that does nothing else; `--only 4M` less.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from single_process import StepLoss, train
from validating import validate

from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.model.layout import num_parameters
from shoal.protocol.spec import RunSpec
from shoal.protocol.toml.defaults import batch_tokens_of, size_of
from shoal.protocol.toml.spec_file import convert_spec

CONTEXT = 256
SIZES = {"0.3M": (64, 6, 200, 4096), "1M": (96, 8, 300, 4096), "4M": (192, 8, 120, 2048), "10M": (320, 8, 100, 1024)}
"""Width, layers, steps, tokens a step."""
TIMES = (1 / 3, 1.0, 3.0)


def spec_of(dim: int, num_layers: int, steps: int, tokens: int) -> RunSpec:
    tables = {
        "name": "rates",
        "model": {"dim": dim, "num_layers": num_layers, "context": CONTEXT},
        "training": {
            "steps": steps,
            "microbatches_per_step": 1,
            "microbatch_size": tokens // CONTEXT,
            "validation_microbatches": 16384 // tokens,
        },
        "swarm": {"stages": 1, "min_peers": 1},
    }
    return convert_spec(tables, name="rates")[0]


def run(spec: RunSpec, corpus: Corpus) -> tuple[float, float]:
    """Returns: validation loss after the last step, in nats a byte; CPU seconds."""
    began_s, losses, last = time.process_time(), [], spec.training.steps - 1

    def at_the_end(step: StepLoss, params: object) -> None:
        if step.step == last:
            losses.append(validate(spec, corpus, params))  # type: ignore[arg-type]

    for _ in train(spec, corpus, steps=spec.training.steps, on_step=at_the_end):
        pass
    return losses[0], time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(SIZES), help="one size")
    parser.add_argument("--times", type=float, nargs="+", default=TIMES, help="multiples of the rule's rate")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus = load_corpus(RunSpec().data, context=CONTEXT)
    for name in [arguments.only] if arguments.only else SIZES:
        spec = spec_of(*SIZES[name])
        for times in arguments.times:
            rate = times * spec.optimizer.learning_rate
            changed = msgspec.structs.replace(spec.optimizer, learning_rate=rate)
            loss, cpu_s = run(msgspec.structs.replace(spec, optimizer=changed), corpus)
            figures = {
                "parameters": num_parameters(spec.model),
                "steps": spec.training.steps,
                "tokens_per_step": spec.tokens_per_step,
                "tokens_per_step_by_the_rule": round(batch_tokens_of(size_of(spec.model))),
                "times_the_rule": round(times, 3),
                "learning_rate": float(f"{rate:.2e}"),
                "validation": round(loss, 4),
                "cpu_s": round(cpu_s, 1),
            }
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
