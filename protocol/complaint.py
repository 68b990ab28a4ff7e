"""Turns decoding errors into messages for a file's author, with the file's field names. Pure."""

import difflib
import re
from itertools import islice
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import msgspec

_READ_MAX: Final = 256
"""The search for misspellings reads at most this many names of a table, and no name that has more letters than this."""
_SLIP: Final = 0.9
"""Least similarity (`difflib`) at which an unknown field counts as a misspelling of a known field, in files that may
have extra fields: `num_layer` for `num_layers` (0.95) counts, `num_devices` for `devices` (0.78) does not."""
_WHERE: Final = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`")
_KIND: Final = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_BOUND: Final = re.compile(r"Expected `[^`]*` (>=|<=|>|<) (\S+)")
_NO_CHOICE: Final = re.compile(r"Invalid enum value (.*)")
_MISSING: Final = re.compile(r"Object missing required field `(.*)`")

_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
_BOUNDS: Final = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


def complaint(error: Exception, kind: type) -> str:
    """Return one line about a decoding error: the field's name in the file, and what is wrong with its value.

    Args: error: a msgspec error from decoding a `kind` (a msgspec struct), or a ValueError of one of its checks.
    """
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    path = ""
    if where := _WHERE.search(line):
        line, path = line[: where.start()], where[1]
    if isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError):
        return f"not well formed: {line}"
    if unknown := _UNKNOWN.fullmatch(line):
        return _no_such(unknown[1], path, _field_names(_type_at(kind, path)))
    if missing := _MISSING.fullmatch(line):
        return f"{_table(path)}{missing[1]} is missing"
    if wrong := _KIND.fullmatch(line):
        kinds, choices = wrong[1].split(" | "), _choices(_type_at(kind, path))
        words = _KINDS | ({"str": " or ".join(f'"{choice}"' for choice in choices)} if choices else {})
        wanted = " or ".join(words.get(name, name) for name in kinds if name != "null")
        is_fraction = wrong[2] == "float" and "int" in kinds and "float" not in kinds
        found = "a fraction" if is_fraction else _KINDS.get(wrong[2], wrong[2])
        return f"{path or 'the whole'} must be {wanted}, not {found}"
    if bound := _BOUND.fullmatch(line):
        return f"{path} must be {_BOUNDS[bound[1]]} {bound[2].removesuffix('.0')}"
    if choice := _NO_CHOICE.fullmatch(line):
        type_there = _type_at(kind, path)
        names = ", ".join(map(str, _choices(type_there)))
        named = f"a whole number or {names}" if int in get_args(type_there) else f"one of {names}"
        return f"{path} cannot be {choice[1]}" + (f": it is {named}" if names else "")
    return _table(path) + line


def misspelt(found: object, kind: type) -> str:
    """Return one line about the first field in `found` that looks like a misspelt field of `kind`; "" if there is none.
    Meant for files that may also have fields that we do not read (`unread`).

    Args:
        found: the file's content, decoded to plain dicts and lists.
        kind: the msgspec struct that describes the fields that we read.
    """
    names = _field_names(kind)
    for name in islice(found, _READ_MAX) if isinstance(found, dict) else ():
        if name not in names and _nearest(name, names, cutoff=_SLIP):
            return _no_such(name, "", names)
    return ""


def unread(found: object, kind: type) -> tuple[str, ...]:
    """Return the names of the fields in `found`, a file's content as dicts and lists, that the struct `kind` lacks."""
    names = _field_names(kind)
    return tuple(name for name in found if name not in names) if isinstance(found, dict) else ()


def _nearest(name: str, names: tuple[str, ...], *, cutoff: float = 0.6) -> list[str]:
    return difflib.get_close_matches(name, names, n=1, cutoff=cutoff) if len(name) <= _READ_MAX else []


def _no_such(name: str, path: str, names: tuple[str, ...]) -> str:
    said = f"[{path}] has no {name!r}" if path else f"there is no {name!r}"
    if near := _nearest(name, names):
        return f"{said}: did you mean {near[0]}?"
    return f"{said}: there are {', '.join(names)}" if names else said


def _table(path: str) -> str:
    """Return the TOML heading of the table with this path, such as `[model] `; empty for the top level."""
    return f"[{path}] " if path else ""


def _type_at(kind: Any, path: str) -> Any:
    """Return the type of the field at `path` (such as `a.b` or `a[0].b`) in the struct `kind`; None: no such field."""
    for part in filter(None, path.split(".")):
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            return None
        name, bracket, _ = part.partition("[")
        kind = next((field.type for field in msgspec.structs.fields(kind) if field.encode_name == name), None)
        kind = _inside(kind, is_element=bool(bracket))
    return kind


def _inside(kind: Any, *, is_element: bool) -> Any:
    """Return `kind`, a field's type, without the alternative `None`; if `is_element`, the type of its list elements."""
    if get_origin(kind) in (Union, UnionType):
        parts = [part for part in get_args(kind) if part is not type(None)]
        kind = parts[0] if len(parts) == 1 else kind
    if is_element and get_origin(kind) in (tuple, list):
        kind = get_args(kind)[0]
    return kind


def _field_names(kind: Any) -> tuple[str, ...]:
    return kind.__struct_encode_fields__ if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else ()


def _choices(kind: Any) -> tuple[object, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return tuple(choice for part in get_args(kind) for choice in _choices(part))
    return ()
