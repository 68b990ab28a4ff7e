"""Values of any message type, mostly valid: made from the types themselves, so that a new field is fuzzed at once.

What a field means is known by its name: a `peer` is mostly somebody who exists, a `version` mostly one near the run's,
a `plan` mostly one that somebody has signed. The rest is what breaks programs: the largest integers, what is no number,
names with line breaks, and now and then a value of another type altogether.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

from fuzz_choices import Choices

Known = Mapping[str, Sequence[object]]
"""Field name -> values that stand there in life."""

_INTEGERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    63,
    64,
    255,
    256,
    2**15,
    2**31 - 1,
    2**31,
    -(2**31),
    2**53,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
)
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-9, 1e9, 1e15, 1e18, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "x" * 41, "\x00", "line\nbreak", "\x1b[2J", "\u202eabc", "é" * 100, "/ip4/1.2.3.4/tcp/1", "../../x")
_LENGTHS = (1, 0, 2, 3, 1, 2, 5, 17)
_LENGTH_MANY = 300
_DEPTH_MAX = 6
_ENCODER = msgspec.msgpack.Encoder()


@lru_cache(maxsize=256)
def _type_of(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def make(choices: Choices, kind: Any, known: Known) -> bytes:
    """The msgpack of a message, record or frame header of type `kind` (a struct)."""
    return _ENCODER.encode(_Making(choices, known).value("", _type_of(kind), 0))


class _Making:
    def __init__(self, choices: Choices, known: Known) -> None:
        self._choices = choices
        self._known = known

    def value(self, name: str, kind: inspect.Type, depth: int) -> Any:
        choices = self._choices
        if depth and choices.chance(100):
            return self._odd()
        known = self._known.get(name)
        if known and not choices.chance(6):
            return choices.pick(known)
        match kind:
            case inspect.StructType():
                return self._struct(kind, depth)
            case inspect.VarTupleType() | inspect.ListType():
                length = _LENGTH_MANY if choices.chance(200) else choices.pick(_LENGTHS)
                item = kind.item_type
                return [self.value(_single(name), item, depth + 1) for _ in range(length if depth < _DEPTH_MAX else 0)]
            case inspect.TupleType():
                return [self.value(_single(name), item, depth + 1) for item in kind.item_types]
            case inspect.NamedTupleType():
                return [self.value(_single(name), field.type, depth + 1) for field in kind.fields]
            case inspect.UnionType():
                return self.value(name, choices.pick(kind.types), depth)
            case inspect.DictType():
                keys = [choices.pick(_TEXTS) for _ in range(choices.pick(_LENGTHS))]
                return {key: self.value("", kind.value_type, depth + 1) for key in keys}
            case _:
                return self._scalar(kind)

    def _scalar(self, kind: inspect.Type) -> Any:
        choices = self._choices
        match kind:
            case inspect.IntType():
                return choices.pick(_INTEGERS) if choices.chance(4) else choices.below(16)
            case inspect.FloatType():
                return choices.pick(_FLOATS) if choices.chance(4) else choices.below(1 << 16) / 256
            case inspect.BoolType():
                return bool(choices.below(2))
            case inspect.StrType():
                return choices.pick(_TEXTS)
            case inspect.BytesType() | inspect.ByteArrayType():
                return choices.take(choices.below(40))
            case inspect.NoneType():
                return None
            case inspect.LiteralType():
                return choices.pick(kind.values)
            case _:
                raise TypeError(f"no message has had a {kind} so far: say how one is made")

    def _struct(self, kind: inspect.StructType, depth: int) -> Any:
        fields: list[tuple[str, Any]] = [(kind.tag_field, kind.tag)] if kind.tag_field else []
        for field in kind.fields:
            if not field.required and not kind.array_like and self._choices.chance(3):
                continue
            fields.append((field.encode_name, self.value(field.name, field.type, depth + 1)))
        if self._choices.chance(200):
            fields.append(("more", 1))
        return [value for _, value in fields] if kind.array_like else dict(fields)

    def _odd(self) -> Any:
        """Something that has no place anywhere."""
        return self._choices.pick(
            (None, True, 2**64 - 1, -1.5, "text", b"\xff\xfe", [], [[[[[[[[[1]]]]]]]]], {}, {"": ""})
        )


def _single(name: str) -> str:
    """What one of many is called: `peers` -> `peer`."""
    return name[:-1] if name.endswith("s") else name


def make_tables(choices: Choices, kind: Any, known: Known) -> dict[str, Any]:
    """What a file that is read as a `kind` may say, as nested dicts and lists."""
    made = _Making(choices, known).value("", _type_of(kind), 0)
    assert isinstance(made, dict)
    return made


def toml(choices: Choices, tables: Mapping[str, Any]) -> bytes:
    """`tables` as a TOML file, or nearly."""
    values = {name: value for name, value in tables.items() if not isinstance(value, dict)}
    lines = [f"{name} = {_toml_value(value)}" for name, value in values.items() if value is not None]
    for name, section in tables.items():
        if isinstance(section, dict):
            lines += [
                f"[{name}]",
                *(f"{key} = {_toml_value(value)}" for key, value in section.items() if value is not None),
            ]
    return choices.flip("\n".join(lines).encode("utf-8", "replace"))


def _toml_value(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{key or 'k'} = {_toml_value(part)}" for key, part in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(_toml_value(part) for part in value) + "]"
        case None:
            return '"auto"'
        case bytes():
            return msgspec.json.encode(value.hex()).decode()
        case float():
            return repr(value)
        case _:
            return msgspec.json.encode(value).decode()
