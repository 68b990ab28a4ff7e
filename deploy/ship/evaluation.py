"""Evaluates a model on the validation set of its run and on texts; `lm_tasks.py` runs lm-eval's tasks.

B samples   T tokens
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from shoal.deploy.ship.predictor import Predictor, check_vocabulary
from shoal.deploy.ship.scores import Score
from shoal.peer.data.account import Unusable
from shoal.peer.data.corpus import Corpus
from shoal.peer.data.documents import printable
from shoal.peer.data.labels import IGNORED
from shoal.peer.data.packing import OnProgress
from shoal.peer.data.plain_text import read_text
from shoal.peer.data.samples import Samples
from shoal.protocol.errors import DataError, LocalError

BATCH_TOKENS: Final = 4096


def validation_scores(
    predictor: Predictor, corpus: Corpus, names: Sequence[str], *, samples_max: int = 0, on_progress: OnProgress
) -> list[Score]:
    """Return the mean loss of each source over its validation text, which training never sees.

    Args:
        names: the sources' names for people.
        samples_max: the most samples of each source, spread evenly; 0: all.
    """
    scores = []
    for number, (source, name) in enumerate(zip(corpus.sources, names, strict=True)):
        samples = source.samples(predictor.model.context, validates=True)
        count = min(samples.count, samples_max or samples.count)

        def tell(done: float, number: int = number) -> None:
            on_progress((number + done) / len(names))

        chosen = [place * samples.count // count for place in range(count)]
        total, tokens = _over_samples(predictor, samples, chosen, tell)
        scores.append(_score(f"validation ({name})" if len(names) > 1 else "validation", total, tokens))
    return scores


def text_score(predictor: Predictor, path: Path, *, on_progress: OnProgress) -> Score:
    """Return the perplexity of a text file as one document. Each token after the first half context is predicted from
    at least half a context of earlier tokens.

    Raises: LocalError: the file is not a text.
    """
    if not path.is_file():
        raise LocalError(f"there is no file {path} to evaluate on")
    try:
        text, bad = read_text(path)
    except Unusable as why:
        raise LocalError(f"cannot evaluate on {path}: it is {why}") from why
    except DataError as error:
        raise LocalError(str(error)) from error
    if bad:
        raise LocalError(f"cannot evaluate on {path}: line {bad[0]} is not UTF-8")
    if not text:
        raise LocalError(f"{path} is empty")
    tokenizer, T = predictor.tokenizer, predictor.model.context
    begin = list(tokenizer.beginning) or list(tokenizer.separator)
    tokens_N = torch.tensor([*begin[-1:], *tokenizer.encode([text.decode()])[0].tolist()], dtype=torch.int64)
    check_vocabulary(predictor, int(tokens_N.max()), str(path))
    stride, num = max(1, T // 2), tokens_N.numel() - 1
    starts = [0, *range(stride, max(stride, num - T + stride), stride)] if num > T else [0]
    total = 0.0
    batch = max(1, BATCH_TOKENS // T)
    for at in range(0, len(starts), batch):
        rows = [window(tokens_N, start, T, start + T - stride if start else 0) for start in starts[at : at + batch]]
        tokens_BT, targets_BT = (torch.stack(column) for column in zip(*rows, strict=True))
        total += predictor.loss_sum(tokens_BT, targets_BT)
        on_progress(min(1.0, (at + batch) / len(starts)))
    score = _score(printable(path.name), total, num)
    return msgspec.structs.replace(score, bits_per_byte=total / math.log(2) / len(text))


def window(tokens_N: Tensor, start: int, context: int, learn_from: int) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets), both int64 [T]: `context` tokens of the text from position `start`, and after each the
    token to predict. Targets of tokens before position `learn_from`, and beyond the text's end, are IGNORED."""
    tokens_T = torch.zeros(context, dtype=torch.int64)
    targets_T = torch.full((context,), IGNORED)
    size = min(context, tokens_N.numel() - 1 - start)
    tokens_T[:size] = tokens_N[start : start + size]
    targets_T[:size] = tokens_N[start + 1 : start + size + 1]
    targets_T[: max(0, learn_from - start)] = IGNORED
    return tokens_T, targets_T


def _over_samples(predictor: Predictor, samples: Samples, chosen: Sequence[int], tell: OnProgress) -> tuple[float, int]:
    """Return (sum of the losses of all predicted tokens in nats, number of these tokens) of the samples `chosen`."""
    batch = max(1, BATCH_TOKENS // predictor.model.context)
    total, tokens = 0.0, 0
    for at in range(0, len(chosen), batch):
        made = [samples.sample(number) for number in chosen[at : at + batch]]
        begins = [sample.begins_T for sample in made if sample.begins_T is not None]
        targets_BT = torch.stack([sample.targets_T for sample in made])
        total += predictor.loss_sum(
            torch.stack([sample.tokens_T for sample in made]), targets_BT, torch.stack(begins) if begins else None
        )
        tokens += int((targets_BT != IGNORED).sum())
        tell(min(1.0, (at + batch) / len(chosen)))
    return total, tokens


def _score(name: str, total: float, tokens: int) -> Score:
    loss = total / max(1, tokens)
    perplexity = math.exp(loss) if loss < 700 else math.inf  # e^710 is no float
    return Score(name=name, loss=loss, perplexity=perplexity, tokens=tokens)
