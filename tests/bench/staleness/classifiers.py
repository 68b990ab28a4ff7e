"""The other two kinds of task that the paper has, on data that packages ship: images and rated sentences.

Images: scikit-learn's digits, 1,797 of 8 x 8 (no package was found that ships MNIST or CIFAR). A convolutional network,
because the paper's are.

Sentences: the four corpora of VADER (Hutto and Gilbert, 2014), 23,703 sentences of film and product reviews, tweets and
newspaper opinion, each rated by twenty people from -4 to 4. They are in the source distribution of `vaderSentiment`,
not in its wheel; its rated lexicon is in both, but a list of words is no text. Sentences of no clear mind are left out.

Both are small enough to be learnt by heart, so training adds noise (shifted images, dropped words), the same to all.

B samples   C channels   T words   D width
"""

import functools
import io
import math
import re
import sys
import tarfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3
from tasks import Batch, BatchShape, Leaves, Task, byte_gpt, chunks
from torch import Tensor
from torch.nn import functional

from shoal.peer.data.microbatch import permuted
from shoal.peer.model import llama
from shoal.peer.model.layout import EMBED, HEAD, LayerLayout, layer_index, layer_layout
from shoal.protocol.errors import DataError
from shoal.protocol.spec import ModelSpec

BLOCKS: Final = 8
VALIDATION_EVERY: Final = 5
"""Every fifth sample, in the order of their hashes, is for validation."""
BRIEF: Final = 256
"""Validation samples of a point of the curve."""
EPSILON: Final = 1e-5

SENTENCES: Final = "vaderSentiment-3.3.2.tar.gz"
DATA: Final = Path(sys.prefix) / "share" / "staleness"
"""Where `make bench-staleness` puts it."""
_INNER: Final = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
CLEAR_RATING: Final = 0.5
WORDS: Final = 8192
TEXT: Final = ModelSpec(
    vocab_size=WORDS, dim=64, num_layers=BLOCKS, num_heads=4, num_kv_heads=4, ffn_dim=160, context=32
)
WORDS_DROPPED: Final = 0.15
_WORD: Final = re.compile(r"[a-z']+|[!?:;()]")
PADDING, UNKNOWN = 0, 1
CHANNELS: Final = 24


class Classifier(ABC):
    """Samples in memory, visited in a keyed order. Subclasses are the models: together they implement `Task`.

    Args:
        samples, labels: float32 or int64 [B, ...] and int64 [B].
    """

    unit = "samples"
    units_per_sample = 1
    chunk_samples = 64

    def __init__(self, samples: Tensor, labels: Tensor, shape: BatchShape, seed: int) -> None:
        self.keys = (EMBED, *(f"layers.{index}" for index in range(BLOCKS)), HEAD)
        self.shape = shape
        self.num_classes = int(labels.max()) + 1
        self._seed = seed
        held_out = torch.arange(len(labels)) % VALIDATION_EVERY == 0
        order = _shuffled(len(labels))
        samples, labels = samples[order], labels[order]
        self._samples, self._labels = samples[~held_out], labels[~held_out]
        self._validation = chunks([(samples[held_out], labels[held_out])], BRIEF)

    def microbatch(self, step: int, index: int) -> Batch:
        size, total = self.shape.microbatch_size, len(self._labels)
        first = (step * self.shape.microbatches_per_step + index) * size
        places = []
        for position in range(first, first + size):
            data_pass, place = divmod(position, total)
            key = blake3(f"study order {self._seed} {data_pass}".encode()).digest()
            places.append(permuted(place, total, key=key))
        drawn = blake3(f"study noise {self._seed} {first}".encode()).digest(length=7)
        noise = torch.Generator().manual_seed(int.from_bytes(drawn))
        return self._noisy(self._samples[places], noise), self._labels[places]

    def validation(self, *, brief: bool) -> Sequence[Batch]:
        return self._validation[:1] if brief else self._validation

    def loss(self, y: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(y, targets)

    def correct(self, y: Tensor, targets: Tensor) -> float:
        return float((y.argmax(dim=-1) == targets).float().mean())

    @abstractmethod
    def _noisy(self, samples: Tensor, noise: torch.Generator) -> Tensor: ...


class Images(Classifier):
    """Residual blocks x + W2 silu(conv3x3(norm(x))) on 8 x 8, then a linear layer on the mean over positions."""

    def __init__(self, shape: BatchShape, seed: int, data: tuple[Tensor, Tensor] | None = None) -> None:
        samples, labels = data or _digits()
        super().__init__(samples, labels, shape, seed)

    def layout(self, key: str) -> LayerLayout:
        if key == EMBED:
            return _layout(key, {"conv": (CHANNELS, 9)}, {})
        if key == HEAD:
            return _layout(key, {"linear": (self.num_classes, CHANNELS)}, {"norm": (CHANNELS,)})
        return _layout(key, {"conv": (CHANNELS, 9 * CHANNELS), "mix": (CHANNELS, CHANNELS)}, {"norm": (CHANNELS,)})

    def initial(self, key: str) -> Tensor:
        shrink = {"mix": 1 / math.sqrt(2 * BLOCKS)}
        return _initial(self.layout(key), self._seed, lambda name, fan_in: shrink.get(name, 1.0) / math.sqrt(fan_in))

    def run(self, keys: Sequence[str], leaves: Leaves, x: Tensor) -> Tensor:
        for key in keys:
            w = leaves[key]
            if key == EMBED:
                x = functional.conv2d(x, w["conv"].view(CHANNELS, 1, 3, 3), padding=1)
            elif key == HEAD:
                x = functional.linear(_norm(x, w["norm"]).mean(dim=(2, 3)), w["linear"])
            else:
                hidden = functional.conv2d(_norm(x, w["norm"]), w["conv"].view(CHANNELS, CHANNELS, 3, 3), padding=1)
                x = x + functional.conv2d(functional.silu(hidden), w["mix"].view(CHANNELS, CHANNELS, 1, 1))
        return x

    def _noisy(self, samples: Tensor, noise: torch.Generator) -> Tensor:
        """Each image moved by up to one pixel each way."""
        padded = functional.pad(samples, (1, 1, 1, 1))
        moves = torch.randint(0, 3, (len(samples), 2), generator=noise).tolist()
        return torch.stack([image[:, y : y + 8, x : x + 8] for image, (y, x) in zip(padded, moves, strict=True)])


class Sentences(Classifier):
    """The project's decoder layers on words, then a linear layer on the mean over positions."""

    def __init__(self, shape: BatchShape, seed: int, data: tuple[Tensor, Tensor] | None = None) -> None:
        samples, labels = data or _sentences()
        super().__init__(samples, labels, shape, seed)
        self._rotary = llama.rotary_tables(TEXT)

    def layout(self, key: str) -> LayerLayout:
        if key == HEAD:
            return _layout(key, {"linear": (self.num_classes, TEXT.dim)}, {"norm": (TEXT.dim,)})
        return layer_layout(TEXT, key)

    def initial(self, key: str) -> Tensor:
        def deviation(name: str, fan_in: int) -> float:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            return 0.02 / math.sqrt(2 * BLOCKS) if residual else 0.02

        return _initial(self.layout(key), self._seed, deviation)

    def run(self, keys: Sequence[str], leaves: Leaves, x: Tensor) -> Tensor:
        for key in keys:
            if key == EMBED:
                x = llama.embed(TEXT, leaves[key], x)
            elif key == HEAD:
                normed_BTD = functional.rms_norm(x, (TEXT.dim,), leaves[key]["norm"], EPSILON)
                x = functional.linear(normed_BTD.mean(dim=1), leaves[key]["linear"])
            else:
                x = llama.decoder_layer(TEXT, layer_index(key), leaves[key], x, self._rotary)
        return x

    def _noisy(self, samples: Tensor, noise: torch.Generator) -> Tensor:
        dropped = torch.rand(samples.shape, generator=noise) < WORDS_DROPPED
        return samples.masked_fill(dropped & (samples != PADDING), UNKNOWN)


TASKS: Final[Mapping[str, Callable[[BatchShape, int], Task]]] = {
    "bytes": byte_gpt,
    "digits": Images,
    "sentences": Sentences,
}
"""(how the data is cut, seed) -> task."""


# --- layers ---


def _layout(key: str, matrices: dict[str, tuple[int, ...]], vectors: dict[str, tuple[int, ...]]) -> LayerLayout:
    shapes = matrices | vectors
    num_decayed = sum(math.prod(shape) for shape in matrices.values())
    return LayerLayout(key=key, names=tuple(shapes), shapes=tuple(shapes.values()), num_decayed=num_decayed)


def _initial(layout: LayerLayout, seed: int, deviation: Callable[[str, int], float]) -> Tensor:
    """Matrices are normal with `deviation(name, columns)`, vectors are 1."""
    generator = torch.Generator().manual_seed(int.from_bytes(blake3(f"{seed} {layout.key}".encode()).digest(length=7)))
    flat_N = torch.ones(layout.numel)
    for name, view in layout.views(flat_N).items():
        if view.ndim == 2:
            view.copy_(torch.randn(view.shape, generator=generator) * deviation(name, view.shape[1]))
    return flat_N


def _norm(x_BCHW: Tensor, weight_C: Tensor) -> Tensor:
    """Root mean square over channels."""
    scale = x_BCHW.square().mean(dim=1, keepdim=True).add(EPSILON).rsqrt()
    return x_BCHW * scale * weight_C[:, None, None]


# --- data ---


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    """(float32 [B, 1, 8, 8] about in [-1, 1], int64 [B])."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # of the extra `study` only

    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(digits.target).long()


@functools.cache
def _sentences() -> tuple[Tensor, Tensor]:
    """(words, int64 [B, T]; 0 or 1, int64 [B]). Raises: DataError."""
    return sentences_of(rated_sentences(DATA / SENTENCES))


def rated_sentences(path: Path) -> list[tuple[float, str]]:
    """All that the source distribution has. Raises: DataError: it is not there."""
    try:
        with tarfile.open(path) as outer:
            member = outer.extractfile(_INNER)
            inner = member.read() if member is not None else b""
    except (OSError, KeyError) as error:
        raise DataError(f"the rated sentences cannot be read, `make bench-staleness` fetches them: {error}") from error
    rated = []
    with tarfile.open(fileobj=io.BytesIO(inner)) as corpora:
        for name in sorted(name for name in corpora.getnames() if name.endswith("_GroundTruth.txt")):
            file = corpora.extractfile(name)
            assert file is not None
            for line in file.read().decode(errors="replace").splitlines():
                _, rating, sentence = line.split("\t")
                rated.append((float(rating), sentence))
    return rated


def sentences_of(rated: Sequence[tuple[float, str]]) -> tuple[Tensor, Tensor]:
    """Words by how often they occur, 2 the commonest; at most `context` a sentence, padding behind them."""
    clear = [(rating, _WORD.findall(text.lower())) for rating, text in rated if abs(rating) > CLEAR_RATING]
    counts = Counter(word for _, words in clear for word in words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: WORDS - 2]
    numbers = {word: number for number, word in enumerate(ranked, start=2)}
    samples = torch.full((len(clear), TEXT.context), PADDING)
    for row, (_, words) in enumerate(clear):
        known = [numbers.get(word, UNKNOWN) for word in words[: TEXT.context]]
        samples[row, : len(known)] = torch.tensor(known, dtype=torch.int64)
    return samples, torch.tensor([int(rating > 0) for rating, _ in clear])


def _shuffled(count: int) -> Tensor:
    """The same order in every run: neighbours in a file are of one author."""
    key = blake3(b"study validation").digest()
    return torch.tensor([permuted(place, count, key=key) for place in range(count)])
