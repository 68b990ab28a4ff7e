"""A run small enough to simulate by the hundred: real gradients of a tiny model on generated text."""

import functools
import math

import msgspec
import torch
from blake3 import blake3

from shoal.peer.data.corpus import Corpus
from shoal.protocol.spec import RunSpec


def tiny_spec(
    *,
    steps: int,
    peers: int,
    stages: int = 3,
    s_max: int = 0,
    microbatches: int = 6,
    term_s: float = 10.0,
    experts: int = 0,
    snapshot_interval_steps: int = 10,
) -> RunSpec:
    """Return the spec. A step is about 1 MFLOP a stage and microbatch. Activations travel in fp32, so that `s_max = 0`
    trains exactly as one process does.

    Args: experts: of each layer, placed; each member of a stage holds three quarters of them.
    """
    placed = {"model": {"num_experts": experts}, "swarm": {"expert_slots": math.ceil(0.75 * experts)}}
    spec = msgspec.convert(
        {
            "name": "simulated",
            "seed": 3,
            "model": {"dim": 32, "num_layers": stages, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64, "context": 32},
            "data": {"source": "made up"},
            "optimizer": {"name": "adamw", "learning_rate": 3e-3, "warmup_steps": min(2, steps)},
            "training": {
                "steps": steps,
                "microbatches_per_step": microbatches,
                "microbatch_size": 2,
                "s_max": s_max,
                "validation_interval_steps": 10,
            },
            "swarm": {
                "stages": stages,
                "min_peers": peers,
                "heartbeat_s": 1.0,
                "term_s": term_s,
                "snapshot_interval_steps": snapshot_interval_steps,
            },
            "wire": {"activations": "fp32"},
        },
        RunSpec,
    )
    if not experts:
        return spec
    tables = msgspec.to_builtins(spec)
    for name, fields in placed.items():
        tables[name] |= fields
    return msgspec.convert(tables, RunSpec)


@functools.cache
def tiny_corpus() -> Corpus:
    """Return 100 kB of lines from which a tiny model learns something: uint8 [N], the same in every process."""
    text = "".join(f"the {i % 7}th fish of shoal {i % 13} swims {i * i % 31} miles\n" for i in range(3000)).encode()
    return Corpus(
        text_N=torch.frombuffer(bytearray(text), dtype=torch.uint8),
        num_training=int(len(text) * 0.95),
        num_files=1,
        digest=blake3(text).hexdigest(),
    )
