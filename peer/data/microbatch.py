"""Microbatch (t, i) as a pure function of the run's seed.

The training text is cut into blocks of `context` tokens plus the next one as the last target. One data pass visits
every block once, in an order that is a keyed permutation of the block numbers; it is computed block by block, so a
large corpus costs no memory and any microbatch can be made without the ones before it.

B samples   T tokens   N tokens of the text
"""

import torch
from blake3 import blake3
from torch import Tensor

from shoal.peer.data.corpus import Corpus
from shoal.protocol.errors import DataError
from shoal.protocol.spec import RunSpec

FEISTEL_ROUNDS = 4
"""Four rounds with a good round function are a strong pseudo-random permutation (Luby and Rackoff, 1988)."""


def microbatch(corpus: Corpus, spec: RunSpec, step: int, index: int) -> tuple[Tensor, Tensor]:
    """The samples of microbatch (step, index): int64 (tokens [B, T], targets [B, T]).

    Microbatches follow one another through the blocks: (t, i) has blocks [(t M + i) B, +B) of an endless sequence of
    passes, each in its own order.
    Raises: DataError: the text has not one block. ValueError: no such microbatch.
    """
    M, B, T = spec.training.microbatches_per_step, spec.training.microbatch_size, spec.model.context
    if step < 0 or not 0 <= index < M:
        raise ValueError(f"there is no microbatch ({step}, {index}) with {M} a step")
    num_blocks = _num_blocks(corpus.training, T)
    blocks = []
    for position in range((step * M + index) * B, (step * M + index + 1) * B):
        data_pass, place = divmod(position, num_blocks)
        blocks.append(permuted(place, num_blocks, key=_key(spec.seed, data_pass)))
    return _samples(corpus.training, [block * T for block in blocks], T)


def validation_microbatch(corpus: Corpus, spec: RunSpec, index: int) -> tuple[Tensor, Tensor]:
    """The samples of validation microbatch `index`, the same in every run: int64 (tokens [B, T], targets [B, T]).

    All `validation_microbatches` together are spread evenly over the validation text.
    Raises: as `microbatch`.
    """
    B, T, count = spec.training.microbatch_size, spec.model.context, spec.training.validation_microbatches
    if not 0 <= index < count:
        raise ValueError(f"there is no validation microbatch {index} of {count}")
    num_blocks = _num_blocks(corpus.validation, T)
    blocks = [place * num_blocks // (count * B) for place in range(index * B, (index + 1) * B)]
    return _samples(corpus.validation, [block * T for block in blocks], T)


def permuted(place: int, size: int, *, key: bytes) -> int:
    """Where a keyed permutation of [0, size) takes `place`.

    A Feistel network permutes the next power of four; a result outside [0, size) goes round again (cycle walking),
    which keeps it a permutation and takes less than four rounds on average.
    """
    half_bits = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half_bits) - 1
    while True:
        left, right = place >> half_bits, place & mask
        for turn in range(FEISTEL_ROUNDS):
            digest = blake3(bytes((turn,)) + right.to_bytes(8), key=key).digest(length=8)
            left, right = right, left ^ (int.from_bytes(digest) & mask)
        place = left << half_bits | right
        if place < size:
            return place


def _key(seed: int, data_pass: int) -> bytes:
    """32 bytes that decide the order of one data pass."""
    return blake3(f"shoal data order {seed} {data_pass}".encode()).digest()


def _num_blocks(text_N: Tensor, context: int) -> int:
    num_blocks = (text_N.numel() - 1) // context
    if num_blocks < 1:
        raise DataError(f"{text_N.numel()} tokens of text are too few for one sample of {context + 1}")
    return num_blocks


def _samples(text_N: Tensor, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    # To int64 before anything else: torch does little with uint16.
    sample_BT = torch.stack([text_N[start : start + context + 1].long() for start in starts])
    return sample_BT[:, :-1].contiguous(), sample_BT[:, 1:].contiguous()
