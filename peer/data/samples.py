"""Samples of a text: blocks cut at a fixed length, or packs of whole conversations.

T tokens of a sample   N tokens of a text   D documents   S samples
"""

import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.peer.data.labels import IGNORED
from shoal.protocol.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    tokens_T: Tensor
    """int64."""
    targets_T: Tensor
    """int64: the next token of each; IGNORED where it does not count in the loss."""
    begins_T: Tensor | None
    """bool, True where a document begins; None: attention crosses documents."""


class Blocks:
    """Blocks of T tokens; the token after a block is its last target.

    Args:
        start_D: int64 [D], rising: the first token of each document, if attention stays inside documents. These tokens
            are then no targets, since no token before them in their document predicts them. None: attention crosses
            documents.
    Raises: DataError: the text is too short for one sample.
    """

    def __init__(self, text_N: Tensor, context: int, start_D: NDArray[np.int64] | None = None) -> None:
        self._text_N = text_N
        self._context = context
        self._start_D = start_D
        self.count = (text_N.numel() - 1) // context
        if self.count < 1:
            raise DataError(f"{text_N.numel()} tokens of text are too few for one sample of {context + 1}")

    def sample(self, number: int) -> Sample:
        start, T = number * self._context, self._context
        # Convert to int64 first: torch supports few operations on uint16.
        text_T1 = self._text_N[start : start + T + 1].long()
        tokens_T, targets_T = text_T1[:-1], text_T1[1:]
        if self._start_D is None:
            return Sample(tokens_T=tokens_T, targets_T=targets_T, begins_T=None)
        first, last = np.searchsorted(self._start_D, (start, start + T + 1))
        begins_T1 = torch.zeros(T + 1, dtype=torch.bool)
        begins_T1[torch.from_numpy(self._start_D[first:last] - start)] = True
        targets_T = targets_T.masked_fill(begins_T1[1:], IGNORED)
        begins_T1[0] = True
        return Sample(tokens_T=tokens_T, targets_T=targets_T, begins_T=begins_T1[:-1])

    def counted(self, number: int) -> int:
        """Return how many targets of sample `number` count in the loss, without making the sample."""
        if self._start_D is None:
            return self._context
        start = number * self._context
        first, last = np.searchsorted(self._start_D, (start + 1, start + self._context + 1))
        return self._context - int(last - first)


class Packs:
    """Samples of whole conversations, as many in each as fit; the rest of a sample is padding, outside the loss.

    A conversation of n tokens takes n - 1 places: its last token predicts nothing. A conversation longer than a sample
    loses its end; it is dropped if no answer is left.

    Args:
        counted_N: uint8 [N], 1 if the token counts as a target in the loss.
        start_D: int64 [D], rising: the first token of each conversation.
    Raises: DataError: there is nothing to learn.
    Source: best-fit decreasing as in Ding et al., "Fewer Truncations Improve Language Modeling", 2024, arXiv
    2404.10830, section 3; but we never split a conversation, since a second half would stand without its question.
    """

    def __init__(self, text_N: Tensor, counted_N: Tensor, start_D: NDArray[np.int64], context: int) -> None:
        self.context = context
        self._text_N = text_N
        self._counted_N = counted_N
        end_D = np.append(start_D[1:], text_N.numel())
        kept_D = np.minimum(end_D - start_D, context + 1)
        # A conversation's first token is never a target.
        before_N1 = np.concatenate(([0], np.cumsum(counted_N.numpy(), dtype=np.int64)))
        learnt_D = before_N1[start_D + kept_D] - before_N1[np.minimum(start_D + 1, start_D + kept_D)]
        taken_D = np.flatnonzero(learnt_D > 0)
        self.num_shortened = int((end_D - start_D > context + 1)[taken_D].sum())
        """The number of conversations that lose their end, because they are longer than a sample."""
        self.num_left_out = len(start_D) - len(taken_D)
        """The number of conversations dropped because no answer is within the length of a sample."""
        self.num_learnt = int(learnt_D.sum())
        if not len(taken_D):
            raise DataError(f"no conversation has an answer within {context} tokens")
        self._start_D, self._kept_D = start_D, kept_D
        packs = _best_fit(kept_D[taken_D] - 1, capacity=context)
        self.count = len(packs)
        self._first_S1 = np.cumsum([0, *map(len, packs)])
        self._document_D = taken_D[np.fromiter(itertools.chain.from_iterable(packs), np.int64, len(taken_D))]
        """Numbers of the conversations, sorted by sample; those of sample s begin at index `_first_S1[s]`."""
        self._counted_S = np.add.reduceat(learnt_D[self._document_D], self._first_S1[:-1])

    def sample(self, number: int) -> Sample:
        T, at = self.context, 0
        tokens_T = torch.zeros(T, dtype=torch.int64)
        targets_T = torch.full((T,), IGNORED)
        begins_T = torch.zeros(T, dtype=torch.bool)
        for document in self._document_D[self._first_S1[number] : self._first_S1[number + 1]]:
            start, size = int(self._start_D[document]), int(self._kept_D[document]) - 1
            text = self._text_N[start : start + size + 1].long()
            learnt = self._counted_N[start + 1 : start + size + 1].bool()
            tokens_T[at : at + size] = text[:-1]
            targets_T[at : at + size] = text[1:].masked_fill(~learnt, IGNORED)
            begins_T[at] = True
            at += size
        if at < T:
            begins_T[at] = True  # the padding is a document of its own
        return Sample(tokens_T=tokens_T, targets_T=targets_T, begins_T=begins_T)

    def counted(self, number: int) -> int:
        return int(self._counted_S[number])


Samples = Blocks | Packs
"""The samples of a text; `sample(number)` returns one, for numbers in [0, count)."""


def _best_fit(size_D: NDArray[np.int64], *, capacity: int) -> list[list[int]]:
    """Pack items into bins of `capacity`: the largest item first, each into the fullest bin that has room for it.
    Return the indices of the items in each bin."""
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of `with_room`, rising
    for index in np.argsort(-size_D, kind="stable").tolist():
        size = int(size_D[index])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[at]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        bins[chosen].append(index)
        left = room - size
        if left > 0:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(chosen)
    return bins
