"""The study's modules are scripts and no package, so this folder goes on the path."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from settings import Method, Paper, Run
from tasks import BatchShape, ByteGPT

from shoal.peer.data.corpus import Corpus
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, SwarmSpec, TrainingSpec

torch.set_num_threads(1)  # the models here are tiny

TEXT = b"".join(b"def f%d(x):\n    return x + %d\n\n" % (i % 7, i % 5) for i in range(300))


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return Corpus(
        text_N=torch.frombuffer(bytearray(TEXT), dtype=torch.uint8), num_training=8000, num_files=1, digest=""
    )


@pytest.fixture(scope="session")
def tiny(corpus: Corpus):
    """(microbatches a step, updates) -> a byte GPT of four layers that learns something within twenty updates."""

    def make(microbatches: int = 4, updates: int = 12) -> ByteGPT:
        spec = RunSpec(
            seed=5,
            model=ModelSpec(dim=32, num_layers=4, num_heads=2, num_kv_heads=1, ffn_dim=64, context=32),
            optimizer=OptimizerSpec(name="adamw", learning_rate=4e-3, warmup_steps=2),
            training=TrainingSpec(
                steps=updates, microbatches_per_step=microbatches, microbatch_size=2, validation_microbatches=16
            ),
            swarm=SwarmSpec(stages=2, min_peers=2),
        )
        return ByteGPT(spec, corpus)

    return make


@pytest.fixture(scope="session")
def run_of():
    """A run of `task` as its spec has it."""

    def make(task: ByteGPT, regime=None, method: str = "none", *, stash: bool | None = None, seed: int = 5) -> Run:
        training = task.spec.training
        return Run(
            task="bytes",
            shape=BatchShape(microbatches_per_step=training.microbatches_per_step, microbatch_size=2),
            regime=regime or Paper(),
            method=Method(name=method, stash=stash),
            optimizer=task.spec.optimizer,
            updates=training.steps,
            seed=seed,
            validate_every=4,
        )

    return make
