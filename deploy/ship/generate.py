"""`shoal generate` lets a model write, and shows the text as it comes: a text, or the answer to what a user asks."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.deploy.ship.model_folder import own_file, read_json
from shoal.deploy.ship.predictor import Predictor, check_vocabulary
from shoal.peer.data.chat import ChatTemplate, load_template
from shoal.peer.data.tokenizer import BYTES, Detokenizer, Tokenizer
from shoal.peer.model.generate import Sampler
from shoal.protocol.errors import DataError, LocalError

_CONFIGS: Final = ("config.json", "generation_config.json")
"""Files beside a tokenizer.json that name the tokens at which the model ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a model is asked, and where what it writes is at an end."""

    template: ChatTemplate | None = None
    """It writes what the user asks. None: the model goes on with the text as it is."""
    end_tokens: frozenset[int] = frozenset()
    end_text: str = ""
    """The end of a turn, where it is no token of its own: bytes write it letter by letter."""


def manner_of(predictor: Predictor, *, chat: bool | None, tokenizer: Path | None = None) -> Manner:
    """Find out how the model wants to be asked.

    Args:
        chat: None: as its run has trained it.
        tokenizer: where the run's tokenizer.json is, if not where its spec says.
    Raises: DataError: there is no chat template, or it is none. LocalError: a config cannot be read.
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
        with contextlib.suppress(DataError):  # a model of text needs no template
            end_text = load_template(path).end_of_turn()
    token = _token_of(end_text, vocabulary)
    if token is not None:
        return Manner(template=template, end_tokens=frozenset(ends | {token}))
    return Manner(template=template, end_tokens=frozenset(ends), end_text=end_text if asks else "")


def write(
    predictor: Predictor, prompt: str, num_tokens: int, sampler: Sampler, manner: Manner | None = None
) -> Iterator[str]:
    """Sample up to `num_tokens` tokens behind `prompt` and give their text in parts, as it comes; end early where the
    model ends the text or its turn.

    The text may have control characters that a terminal would obey. An empty prompt begins a new document.
    Args: manner: None: what `manner_of` finds.
    Raises: LocalError: the prompt has tokens that the model does not know, or nothing is asked. DataError: the chat
        template refuses the prompt, or `manner_of` does.
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
    return _until(manner.end_text, _write(predictor, tokens, num_tokens, sampler, manner.end_tokens))


def _write(
    predictor: Predictor, tokens: list[int], num_tokens: int, sampler: Sampler, ends: frozenset[int]
) -> Iterator[str]:
    detokenizer = Detokenizer(predictor.tokenizer)
    for token in itertools.islice(predictor.stream(tokens, sampler), num_tokens):
        if token in ends:
            return
        yield detokenizer.feed(token)


def _until(end: str, parts: Iterator[str]) -> Iterator[str]:
    """The parts up to where `end` stands in them; what may be its beginning waits for the next part."""
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
    found: set[int] = set()
    for name in _CONFIGS:
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
    """The one token that the text is; None: it is none, or several."""
    tokens = tokenizer.encode([text], special=True)[0].tolist()
    return tokens[0] if len(tokens) == 1 else None


def fit_for_terminal(text: str) -> str:
    """The text without control characters: an untrained model writes anything, the terminal's commands too."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
