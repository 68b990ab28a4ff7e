"""Microbatch i of step t as a pure function of the run's seed.

One pass over the data visits every sample (`samples.py`) once, in the order of a keyed permutation. The permutation is
computed for one sample at a time, so a microbatch can be made without earlier ones. If there are several sources, each
has its own passes, and each `ROUND` consecutive samples contain every source in proportion to its weight.

B samples   T tokens
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from blake3 import blake3
from torch import Tensor

from shoal.peer.data.corpus import Corpus
from shoal.peer.data.labels import Labels, weight_of
from shoal.peer.data.samples import Samples
from shoal.protocol.spec import RunSpec

ROUND = 1024
"""The number of samples in a round, in which every source has samples in proportion to its weight, at least one."""
_STEPS_KEPT = 16
"""The number of steps for which the counts of targets in the loss are cached: more steps than are ever in flight."""

_Chosen = tuple[Samples, int]
"""(all samples of a source, the index of the chosen one)."""


def microbatch(corpus: Corpus, spec: RunSpec, step: int, index: int) -> tuple[Tensor, Labels]:
    """Return microbatch (step, index): int64 tokens [B, T], and labels.

    The samples of the whole run are numbered from 0 on, in the order in which training visits them. With M microbatches
    a step, microbatch (t, i) has the samples [(t M + i) B, (t M + i + 1) B). Raises: DataError: a text is too short for
    one sample. ValueError: no such microbatch.
    """
    M = spec.training.microbatches_per_step
    if step < 0 or not 0 <= index < M:
        raise ValueError(f"there is no microbatch ({step}, {index}) with {M} a step")
    return _made(_of_training(corpus, spec, step, index), *_weighed(corpus, spec, step, index))


def validation_microbatch(corpus: Corpus, spec: RunSpec, index: int) -> tuple[Tensor, Labels]:
    """Return validation microbatch `index`, which is the same at every step: int64 tokens [B, T], and labels.

    The samples of all validation microbatches are spread evenly over the validation text, in proportion to the weights
    of the sources. Raises: DataError: a text is too short for one sample. ValueError: no such microbatch.
    """
    count = spec.training.validation_microbatches
    if not 0 <= index < count:
        raise ValueError(f"there is no validation microbatch {index} of {count}")
    return _made(_of_validation(corpus, spec, index), *_weighed(corpus, spec, None, index))


def passes(corpus: Corpus, spec: RunSpec) -> tuple[float, ...]:
    """Return how often the run goes through each source. Raises: DataError: a source is too short for one sample."""
    training, counts = spec.training, shares(corpus.weights, ROUND)
    total = training.steps * training.microbatches_per_step * training.microbatch_size
    return tuple(
        total * count / ROUND / source.samples(spec.model.context).count
        for source, count in zip(corpus.sources, counts, strict=True)
    )


def permuted(place: int, size: int, *, key: bytes) -> int:
    """Return the image of `place` under a keyed permutation of [0, size).

    A Feistel network permutes the numbers below the next power of four. While its result is not below `size`, it is
    applied to that result again (cycle walking), less than four times on average. Four rounds with a good round
    function are a strong pseudo-random permutation (Luby and Rackoff, 1988).
    """
    half_bits = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half_bits) - 1
    while True:
        left, right = place >> half_bits, place & mask
        for turn in range(4):
            digest = blake3(bytes((turn,)) + right.to_bytes(8), key=key).digest(length=8)
            left, right = right, left ^ (int.from_bytes(digest) & mask)
        place = left << half_bits | right
        if place < size:
            return place


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` into whole numbers in proportion to `weights`; each is at least 1 if `total` is enough for that."""
    exact = [weight / sum(weights) * total for weight in weights]
    least = int(total >= len(weights))
    found = [max(int(share), least) for share in exact]
    numbers = range(len(weights))
    while sum(found) < total:
        found[max(numbers, key=lambda k: (exact[k] - found[k], -k))] += 1
    while sum(found) > total:
        found[max((k for k in numbers if found[k] > least), key=lambda k: (found[k] - exact[k], -k))] -= 1
    return found


def _of_training(corpus: Corpus, spec: RunSpec, step: int, index: int) -> list[_Chosen]:
    M, B, T = spec.training.microbatches_per_step, spec.training.microbatch_size, spec.model.context
    chosen = []
    for position in range((step * M + index) * B, (step * M + index + 1) * B):
        source, place, words = _source_at(corpus, spec.seed, position)
        samples = source.samples(T)
        data_pass, place = divmod(place, samples.count)
        chosen.append((samples, permuted(place, samples.count, key=_key(f"{spec.seed} {data_pass}{words}"))))
    return chosen


def _source_at(corpus: Corpus, seed: int, position: int) -> tuple[Corpus, int, str]:
    """Return (source of the run's sample `position`, number of its earlier samples, a suffix for `_key`)."""
    if not corpus.others:
        return corpus, position, ""
    this_round, slot = divmod(position, ROUND)
    k, before = _round(corpus.weights, seed, this_round)[slot]
    return corpus.sources[k], this_round * shares(corpus.weights, ROUND)[k] + before, f" {k}"


@lru_cache(maxsize=_STEPS_KEPT)
def _round(weights: tuple[float, ...], seed: int, number: int) -> tuple[tuple[int, int], ...]:
    """Return for each of the `ROUND` samples of round `number`: (its source, the source's earlier samples)."""
    cards = [k for k, count in enumerate(shares(weights, ROUND)) for _ in range(count)]
    key = _key(f"{seed} sources {number}")
    had, drawn = [0] * len(weights), []
    for slot in range(ROUND):
        k = cards[permuted(slot, ROUND, key=key)]
        drawn.append((k, had[k]))
        had[k] += 1
    return tuple(drawn)


def _of_validation(corpus: Corpus, spec: RunSpec, index: int) -> list[_Chosen]:
    B, T = spec.training.microbatch_size, spec.model.context
    total = spec.training.validation_microbatches * B
    of_all: list[tuple[Corpus, int, int]] = [
        (source, place, count)
        for source, count in zip(corpus.sources, shares(corpus.weights, total), strict=True)
        for place in range(count)
    ]
    chosen = []
    for source, place, count in of_all[index * B : (index + 1) * B]:
        samples = source.samples(T, validates=True)
        chosen.append((samples, place * samples.count // count))
    return chosen


def _weighed(corpus: Corpus, spec: RunSpec, step: int | None, index: int) -> tuple[int | None, float]:
    """Return (number of targets that count in the loss, None: all; the weight). `step` None: validation microbatch."""
    if not spec.data.leaves_out_targets:
        return None, 1.0
    counts = _counts(corpus, spec, step)
    return counts[index], weight_of(counts[index], sum(counts), len(counts))


@lru_cache(maxsize=_STEPS_KEPT)
def _counts(corpus: Corpus, spec: RunSpec, step: int | None) -> tuple[int, ...]:
    training = spec.training
    if step is None:
        of_each = [_of_validation(corpus, spec, index) for index in range(training.validation_microbatches)]
    else:
        of_each = [_of_training(corpus, spec, step, index) for index in range(training.microbatches_per_step)]
    return tuple(sum(samples.counted(number) for samples, number in chosen) for chosen in of_each)


def _made(chosen: list[_Chosen], counted: int | None, weight: float) -> tuple[Tensor, Labels]:
    made = [samples.sample(number) for samples, number in chosen]
    begins = [sample.begins_T for sample in made if sample.begins_T is not None]
    labels = Labels(
        targets_BT=torch.stack([sample.targets_T for sample in made]),
        begins_BT=torch.stack(begins) if begins else None,
        counted=counted,
        weight=weight,
    )
    return torch.stack([sample.tokens_T for sample in made]), labels


def _key(words: str) -> bytes:
    """Return the 32-byte key for a permutation, such as the order of one pass."""
    return blake3(f"shoal data order {words}".encode()).digest()
