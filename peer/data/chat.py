"""Conversations as text, rendered by the vocabulary's chat template, with the places of the answers.

The template is a Jinja program beside the tokenizer.json (`chat_template.jinja`, or in `tokenizer_config.json`). It
runs in Jinja's sandbox, sees no clock, and writes what transformers would write: the same text on every machine.

**Which text is an answer.** If the template marks its answers with `{% generation %}`, the marks decide. Otherwise the
conversation is rendered twice: before the answer (with the template's prompt for an answer), and including the answer.
The text that the second rendering adds is the answer; it includes the token that ends a turn. If a template renders an
earlier answer differently once more messages follow (without its thoughts, say), only the last answer counts in the
loss. An answer with a `weight` of 0 does not count.

**Skipped rows.** A row is skipped if it has tool calls or separate thoughts, which we would not render, or an empty
answer, which would teach the model to end a turn at once.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from shoal.peer.data.account import Unusable
from shoal.peer.data.rows import first_line
from shoal.protocol.errors import DataError

TEMPLATE_BYTES_MAX: Final = 4 << 20
"""The most bytes of a file with a chat template; a tokenizer_config.json also has a long list of added tokens."""
CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of runs with bytes as tokens."""
TEMPLATE_FILE: Final = "chat_template.jinja"
_CONFIG_FILE: Final = "tokenizer_config.json"
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
ASSISTANT: Final = "assistant"
_QUESTION: Final = "How do fish sleep?"
_ANSWER: Final = "With open eyes."

Spans = tuple[tuple[int, int], ...]
"""Ranges of a text: (begin, end) stands for the characters [begin, end)."""


class ContentPart(msgspec.Struct, frozen=True):
    """One element of a message's content, if that content is a list."""

    type: str = "text"
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    weight: float | None = None
    """0: the loss leaves the message out. 1 or None: it includes an assistant's message. Else: the row is skipped."""
    tool_calls: Any = None
    function_call: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None

    @property
    def is_learnt(self) -> bool:
        return self.role == ASSISTANT and self.weight != 0


_NOT_READ: Final = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of a message that templates render and we do not read yet: a conversation with such a field is skipped."""


class ChatRow(msgspec.Struct, frozen=True):
    """The fields that we read from a row of a data set of conversations."""

    messages: list[Message] | None = None
    prompt: str | list[Message] | None = None
    completion: str | list[Message] | None = None
    tools: Any = None


FIELDS: Final = ChatRow.__struct_fields__


class ChatTemplate:
    """A compiled chat template; error messages call it `name`.

    Args:
        source: the Jinja text.
        special: the vocabulary's special tokens, `bos_token`, `eos_token` ..., which the template may use.
    Raises: DataError: jinja2 is not installed, or cannot compile the template.
    """

    def __init__(self, source: str, special: Mapping[str, str], *, name: str) -> None:
        self.source = source
        self.digest = blake3(json.dumps([source, sorted(special.items())]).encode()).hexdigest()
        self._name = name
        self._special: dict[str, Any] = dict(special)
        self._answers: list[tuple[int, int]] = []
        self._written: list[str] = []
        try:
            self._template = _environment(self._mark).from_string(source)
        except Exception as error:  # jinja2's own errors, and any others on absurd programs
            raise DataError(f"{name} is not a chat template: {first_line(error)}") from error
        self._marks = "endgeneration" in source

    def conversation(self, messages: Sequence[Message], *, learn_from: int = 0) -> tuple[str, Spans]:
        """Render a conversation. Return its text, and the ranges of the answers from message number `learn_from` on.

        Raises: Unusable: a message has a field that we do not read, an answer is empty, or the template, after its own
            prompt for an answer, does not write the answer next.
        """
        is_learnt = [index >= learn_from and message.is_learnt for index, message in enumerate(messages)]
        for message, learn in zip(messages, is_learnt, strict=True):
            _check_is_read(message, is_learnt=learn)
        said = [{"role": message.role, "content": _text(message)} for message in messages]
        text, marked = self._render(said)
        if self._marks:
            answers = list(marked[sum(message.role == ASSISTANT for message in messages[:learn_from]) :])
            if any(message.weight == 0 for message in messages[learn_from:]):
                learns = [message.is_learnt for message in messages[learn_from:] if message.role == ASSISTANT]
                if len(answers) != len(learns):
                    raise Unusable("a `weight` of 0, with a template that does not mark each answer")
                answers = [span for span, learn in zip(answers, learns, strict=True) if learn]
            return text, tuple(answers)
        answers = []
        for index, learn in enumerate(is_learnt):
            if not learn:
                continue
            before, _ = self._render(said[:index], answers=True)
            after = text if index == len(said) - 1 else self._render(said[: index + 1])[0]
            if text.startswith(before) and text.startswith(after) and len(after) > len(before):
                answers.append((len(before), len(after)))
            elif index == len(said) - 1:
                raise Unusable(
                    f"{self._name} does not write an answer after its own prompt for one",
                    "mark answers in it with {% generation %} and {% endgeneration %}",
                )
        return text, tuple(answers)

    def _render(self, messages: list[dict[str, str]], *, answers: bool = False) -> tuple[str, Spans]:
        self._answers, self._written = [], []
        # transformers passes both as None, and templates test for them in different ways.
        given = self._special | {"tools": None, "documents": None, "add_generation_prompt": answers}
        try:
            for piece in self._template.generate(messages=messages, **given):
                self._written.append(piece)
        except Unusable:
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise Unusable(f"{self._name} cannot write this: {first_line(error)}") from error
        return "".join(self._written), tuple(self._answers)

    def question(self, asked: str) -> str:
        """Render a user's message, up to where the answer begins. Raises: DataError: the template refuses it."""
        return self._render([{"role": "user", "content": asked}], answers=True)[0]

    def end_of_turn(self) -> str:
        """Return the text that the template writes after an answer, such as "<|im_end|>", without white space.
        Raises: DataError: the template refuses a short conversation."""
        said = [{"role": "user", "content": _QUESTION}, {"role": ASSISTANT, "content": _ANSWER}]
        return self._render(said)[0].partition(_ANSWER)[2].strip()

    def _mark(self, answer: str) -> str:
        """Record the place of an answer that the template marks, just before the template writes that answer."""
        start = sum(map(len, self._written))
        self._answers.append((start, start + len(answer)))
        return answer


def load_template(tokenizer: Path | None) -> ChatTemplate:
    """Load the chat template in the folder of `tokenizer`; if None, ChatML. Raises: DataError: no template is there."""
    if tokenizer is None:
        return ChatTemplate(CHATML, {}, name="shoal's own chat template")
    folder = tokenizer.parent
    config = _config(folder / _CONFIG_FILE)
    special = {name: text for name in _SPECIAL if (text := _token(config.get(name))) is not None}
    own = folder / TEMPLATE_FILE
    if os.path.lexists(own):
        return ChatTemplate(_read(own).decode(errors="replace"), special, name=str(own))
    found = config.get("chat_template")
    if isinstance(found, list):  # several templates by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise DataError(
            f"there is no chat template beside {tokenizer}: put one there as {TEMPLATE_FILE}, "
            "from the vocabulary's own model or another with the same special tokens"
        )
    return ChatTemplate(found, special, name=f"the chat template in {folder / _CONFIG_FILE}")


def read_row(row: ChatRow, template: ChatTemplate) -> tuple[str, Spans, bool]:
    """Render a row of a chat set.

    Returns: (text; ranges of its answers; True if a template wrote the text, with its begin and end tokens).
    Raises: Unusable: the row has no answer or a field that we do not read, or the template refuses it.
    """
    prompt, completion = row.prompt, row.completion
    if row.tools:
        raise Unusable("`tools`, which are not read yet")
    if row.messages is not None:
        return *_answered(*template.conversation(row.messages)), True
    if prompt is None or completion is None:
        raise Unusable("no `messages`, nor `prompt` and `completion`")
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise Unusable("an empty answer")
        text = prompt + completion
        return text, ((len(prompt), len(text)),), False
    if isinstance(prompt, str):
        prompt = [Message(role="user", content=prompt)]
    if isinstance(completion, str):
        completion = [Message(role=ASSISTANT, content=completion)]
    return *_answered(*template.conversation([*prompt, *completion], learn_from=len(prompt))), True


def _answered(text: str, answers: Spans) -> tuple[str, Spans]:
    if not answers:
        raise Unusable("no answer to learn")
    return text, answers


def _check_is_read(message: Message, *, is_learnt: bool) -> None:
    for name in _NOT_READ:
        if getattr(message, name):
            raise Unusable(f"`{name}`, which {'are' if name.endswith('s') else 'is'} not read yet")
    if message.weight not in (None, 0, 1):
        raise Unusable("a `weight` that is neither 0 nor 1")
    if is_learnt and not _text(message).strip():
        raise Unusable("an empty answer")


def _environment(mark: Any) -> Any:
    """Build the Jinja environment of transformers, but without a clock, so that all machines get the same text."""
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise DataError("chats need the jinja2 library: pip install 'shoal[data]'") from error

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return str(mark(str(caller())))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(reason: object) -> None:
    raise Unusable(f"the chat template refuses it: {str(reason).splitlines()[0] if str(reason) else 'no reason given'}")


def _text(message: Message) -> str:
    """Return a message's content as text. Raises: Unusable: the content has a part that is not text."""
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise Unusable(f"a part of type {part.type[:40]!r}, and only text can be learnt")
        return "".join(part.text or "" for part in message.content)
    return message.content or ""


def _config(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    try:
        return msgspec.json.decode(_read(path), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not a tokenizer config: {first_line(error)}") from error


def _token(value: object) -> str | None:
    """Return a special token, which a config has as a string or as a table with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(TEMPLATE_BYTES_MAX + 1)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) > TEMPLATE_BYTES_MAX:
        raise DataError(f"{path} is too large for a file with a chat template")
    return data
