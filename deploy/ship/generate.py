"""`shoal generate` lets a model write, and shows the text as it comes."""

import itertools
from collections.abc import Iterator

from shoal.deploy.ship.predictor import Predictor, check_vocabulary
from shoal.peer.data.tokenizer import Detokenizer
from shoal.peer.model.generate import Sampler


def write(predictor: Predictor, prompt: str, num_tokens: int, sampler: Sampler) -> Iterator[str]:
    """Sample up to `num_tokens` tokens behind `prompt` and give their text in parts, as it comes; end early where the
    model ends the text.

    The text may have control characters that a terminal would obey. An empty prompt begins a new document.
    Raises: LocalError: the prompt has tokens that the model does not know.
    """
    tokenizer = predictor.tokenizer
    said = tokenizer.encode([prompt], special=True)[0].tolist()
    tokens = [*tokenizer.beginning, *said] or list(tokenizer.separator)
    check_vocabulary(predictor, max(tokens), "the prompt")
    return _write(predictor, tokens, num_tokens, sampler)


def _write(predictor: Predictor, tokens: list[int], num_tokens: int, sampler: Sampler) -> Iterator[str]:
    detokenizer = Detokenizer(predictor.tokenizer)
    for token in itertools.islice(predictor.stream(tokens, sampler), num_tokens):
        if token == predictor.tokenizer.end_of_text:
            return
        yield detokenizer.feed(token)


def fit_for_terminal(text: str) -> str:
    """The text without control characters: an untrained model writes anything, the terminal's commands too."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
