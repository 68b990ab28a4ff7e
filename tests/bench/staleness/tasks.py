"""What the study trains: a model in layers, its data by (step, index), its validation. The byte GPT is here.

A task knows nothing of staleness. `regimes.py` asks it for layouts, initial weights and microbatches, and runs ranges
of its layers with whatever weights it likes. The classifiers are in `classifiers.py`.

B samples   T tokens   N elements of one layer
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec
import torch
from torch import Tensor

from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.data.microbatch import microbatch, validation_microbatch
from shoal.peer.model import llama
from shoal.peer.model.layout import LayerLayout, all_layer_keys, init_layer, layer_layout
from shoal.protocol.spec import DataSpec, ModelSpec, RunSpec

Leaves = Mapping[str, Mapping[str, Tensor]]
"""Layer key -> tensor name -> tensor."""
Batch = tuple[Tensor, Tensor]
"""(input of the first layer, targets)."""


class BatchShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the data is cut. Samples of a byte GPT have `context` tokens each."""

    microbatches_per_step: int
    microbatch_size: int
    """Samples."""


class Task(Protocol):
    """A model and its data; everything is a pure function of its arguments and of the seed it was made with."""

    keys: tuple[str, ...]
    """Layers in order: "embed", "layers.0" ..., "head". A stage is a range of them."""
    shape: BatchShape
    unit: str
    """What `units_per_sample` counts, in the plural."""
    units_per_sample: int
    chunk_samples: int
    """Samples of one forward and backward at most: what is fastest on a core."""

    def layout(self, key: str) -> LayerLayout: ...

    def initial(self, key: str) -> Tensor:
        """Parameters of version 0: float32 [N]."""
        ...

    def microbatch(self, step: int, index: int) -> Batch:
        """`shape.microbatch_size` training samples."""
        ...

    def validation(self, *, brief: bool) -> Sequence[Batch]:
        """Always the same samples; a few of them if `brief`."""
        ...

    def run(self, keys: Sequence[str], leaves: Leaves, x: Tensor) -> Tensor:
        """Chain the layers `keys`; the result is what `loss` takes if the last one is the head."""
        ...

    def loss(self, y: Tensor, targets: Tensor) -> Tensor:
        """Mean over all targets in nats, a scalar."""
        ...

    def correct(self, y: Tensor, targets: Tensor) -> float:
        """Share of targets that `y` has right."""
        ...


def validate(task: Task, leaves: Leaves, *, brief: bool = False) -> tuple[float, float]:
    """(mean loss in nats, share that is right) over the validation samples."""
    losses, rights = [], []
    with torch.no_grad():
        for x, targets in task.validation(brief=brief):
            y = task.run(task.keys, leaves, x)
            losses.append(float(task.loss(y, targets)))
            rights.append(task.correct(y, targets))
    return sum(losses) / len(losses), sum(rights) / len(rights)


# --- the byte GPT ---

GPT: Final = ModelSpec(dim=96, num_layers=8, num_heads=4, num_kv_heads=4, ffn_dim=256, context=256)
"""935,520 parameters: eight layers, so that eight stages have one each."""
VALIDATION_SAMPLES: Final = 256
"""65,536 bytes: two runs' difference is known to 0.003 nats, because both are asked about the same text."""
BRIEF_EVERY: Final = 8
"""Curves are of every eighth validation batch: a twelfth of a step's time each."""


class ByteGPT:
    """The project's own model on a text: implements `Task`. The run spec says what and how much of it.

    Args:
        corpus: None: the text that the spec names, loaded once a process.
    """

    unit = "tokens"

    def __init__(self, spec: RunSpec, corpus: Corpus | None = None) -> None:
        self.spec = spec
        self.keys = all_layer_keys(spec.model)
        self.shape = BatchShape(
            microbatches_per_step=spec.training.microbatches_per_step,
            microbatch_size=spec.training.microbatch_size,
        )
        self.units_per_sample = spec.model.context
        self.chunk_samples = max(1, 1024 // spec.model.context)
        self.corpus = corpus or _corpus(spec.data, spec.model.context)
        self._rotary = llama.rotary_tables(spec.model)

    def layout(self, key: str) -> LayerLayout:
        return layer_layout(self.spec.model, key)

    def initial(self, key: str) -> Tensor:
        return init_layer(self.spec.model, key, self.spec.seed)

    def microbatch(self, step: int, index: int) -> Batch:
        tokens_BT, labels = microbatch(self.corpus, self.spec, step, index)
        return tokens_BT, labels.targets_BT

    def validation(self, *, brief: bool) -> Sequence[Batch]:
        whole = _validation(self)
        return whole[::BRIEF_EVERY] if brief else whole

    def run(self, keys: Sequence[str], leaves: Leaves, x: Tensor) -> Tensor:
        return llama.run_layers(self.spec.model, keys, leaves, x, self._rotary)

    def loss(self, y: Tensor, targets: Tensor) -> Tensor:
        return llama.loss(y, targets)

    def correct(self, y: Tensor, targets: Tensor) -> float:
        return float((y.argmax(dim=-1) == targets).float().mean())


def byte_gpt(shape: BatchShape, seed: int) -> ByteGPT:
    """The study's: 0.94 M parameters, the sources of Python's library."""
    spec = RunSpec(seed=seed, model=GPT)
    training = msgspec.structs.replace(
        spec.training,
        microbatches_per_step=shape.microbatches_per_step,
        microbatch_size=shape.microbatch_size,
        validation_microbatches=max(1, VALIDATION_SAMPLES // shape.microbatch_size),
    )
    return ByteGPT(msgspec.structs.replace(spec, training=training))


@functools.cache
def _corpus(data: DataSpec, context: int) -> Corpus:
    return load_corpus(data, context=context)


def _validation(task: ByteGPT) -> list[Batch]:
    """The run's validation microbatches, put together into batches that are fast."""
    count = task.spec.training.validation_microbatches
    made = [validation_microbatch(task.corpus, task.spec, index) for index in range(count)]
    parts = [(tokens_BT, labels.targets_BT) for tokens_BT, labels in made]
    return chunks(parts, task.chunk_samples)


def chunks(parts: Sequence[Batch], samples: int) -> list[Batch]:
    """The same samples in batches of `samples`; the last may have fewer."""
    x, targets = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return list(zip(torch.split(x, samples), torch.split(targets, samples), strict=True))
