"""Generates text with a model, a continuation or an answer, and yields it piece by piece (`shoal generate`)."""

import contextlib
import itertools
import os
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.deploy.ship.model_folder import own_file, read_json
from shoal.deploy.ship.predictor import Predictor, check_vocabulary
from shoal.peer.data.chat import ChatTemplate, load_template
from shoal.peer.data.tokenizer import BYTES, Detokenizer, Tokenizer
from shoal.peer.model.generate import Sampler
from shoal.protocol.errors import DataError, LocalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """Says how to prompt a model, and how to recognise the end of its text."""

    template: ChatTemplate | None = None
    """The chat template of a model that answers; None: the model continues the text."""
    end_tokens: frozenset[int] = frozenset()
    end_text: str = ""
    """The text that ends a turn, for a model that needs several tokens to write it (a model of bytes); empty: none."""


def manner_of(predictor: Predictor, *, chat: bool | None, tokenizer: Path | None = None) -> Manner:
    """Determine how to prompt the model.

    Args:
        chat: True: the model answers the prompt; False: continues it; None: as in training.
        tokenizer: path of the run's tokenizer.json; None: the path in the spec.
    Raises: DataError: there is no valid chat template. LocalError: a config cannot be read.
    """
    spec, vocabulary = predictor.spec, predictor.tokenizer
    if spec is None:
        path: Path | None = Path(predictor.name, "tokenizer.json")
    else:
        path = None if spec.data.tokenizer == BYTES else tokenizer or Path(spec.data.tokenizer).expanduser()
    asks = (spec is not None and spec.data.has_chats) if chat is None else chat
    ends = _ends_in_configs(path.parent, vocabulary) if path is not None else set()
    ends |= set() if vocabulary.end_of_text is None else {vocabulary.end_of_text}
    template, end_text = None, ""
    if asks:
        template = load_template(path)
        end_text = template.end_of_turn()
    elif path is not None:
        with contextlib.suppress(DataError):  # a text model needs no template
            end_text = load_template(path).end_of_turn()
    if (token := _token_of(end_text, vocabulary)) is not None:
        ends, end_text = ends | {token}, ""
    return Manner(template=template, end_tokens=frozenset(ends), end_text=end_text if asks else "")


def write(
    predictor: Predictor, prompt: str, num_tokens: int, sampler: Sampler, manner: Manner | None = None
) -> Iterator[str]:
    """Sample up to `num_tokens` tokens after `prompt`, until the model ends the text, and yield it piece by piece.

    The text may contain terminal control characters. An empty prompt begins a new document. Args: manner: None:
    prompt as in training. Raises: LocalError: the prompt has tokens unknown to the model, or is empty for a chat model.
    DataError: the chat template refuses the prompt, or there is no valid one.
    """
    manner = manner or manner_of(predictor, chat=None)
    tokenizer = predictor.tokenizer
    if manner.template is not None:
        if not prompt:
            raise LocalError(
                "this model answers: say what to ask it with --prompt, or --no-chat lets it write anything"
            )
        tokens = tokenizer.encode([manner.template.question(prompt)], special=True)[0].tolist()
    else:
        said = tokenizer.encode([prompt], special=True)[0].tolist()
        tokens = [*tokenizer.beginning, *said] or list(tokenizer.separator)
    check_vocabulary(predictor, max(tokens), "the prompt")
    return _until(manner.end_text, sampled(predictor, tokens, num_tokens, sampler, manner.end_tokens))


def sampled(
    predictor: Predictor, tokens: list[int], num_tokens: int, sampler: Sampler, ends: Container[int | None]
) -> Iterator[str]:
    """Yield a text of at most `num_tokens` tokens, piece by piece, up to a token in `ends`, which is left out."""
    detokenizer = Detokenizer(predictor.tokenizer)
    for token in itertools.islice(predictor.stream(tokens, sampler), num_tokens):
        if token in ends:
            return
        yield detokenizer.feed(token)


def _until(end: str, parts: Iterator[str]) -> Iterator[str]:
    """Yield the text of `parts` up to the text `end`. Hold back a tail that may be the beginning of `end`."""
    if not end:
        yield from parts
        return
    waiting = ""
    for part in parts:
        before, found, _ = (waiting + part).partition(end)
        if found:
            yield before
            return
        kept = next(size for size in range(min(len(before), len(end) - 1), -1, -1) if before.endswith(end[:size]))
        waiting = before[len(before) - kept :]
        yield before[: len(before) - kept]
    yield waiting


def _ends_in_configs(folder: Path, tokenizer: Tokenizer) -> set[int]:
    """Return the end tokens that are named in config files beside the tokenizer.json."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if os.path.lexists(folder / name):
            said = read_json(own_file(folder, name)).get("eos_token_id")
            found |= {token for token in (said if isinstance(said, list) else [said]) if isinstance(token, int)}
    if os.path.lexists(folder / "tokenizer_config.json"):
        end = read_json(own_file(folder, "tokenizer_config.json")).get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
        token = _token_of(end, tokenizer) if isinstance(end, str) else None
        found |= set() if token is None else {token}
    return found


def _token_of(text: str, tokenizer: Tokenizer) -> int | None:
    """Encode `text`, and return its token if there is exactly one, else None."""
    tokens = tokenizer.encode([text], special=True)[0].tolist()
    return tokens[0] if len(tokens) == 1 else None


def fit_for_terminal(text: str) -> str:
    """Replace control characters, except tab and line feed, by `?`: a model may write terminal commands."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
