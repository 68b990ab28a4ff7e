"""Writes run specs as TOML files: a host's `RUN.toml`, and the run file of `shoal demo`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from shoal.protocol.complaint import complaint
from shoal.protocol.errors import LocalError, SpecError
from shoal.protocol.spec import RunSpec
from shoal.protocol.toml.spec_file import convert_spec, load_spec

DEMO_SPEC = Path(__file__).parent.parent / "demo" / "demo.toml"
MOE_SPEC = DEMO_SPEC.with_name("moe.toml")

_FIRST: Final = ("data", "training", "swarm", "optimizer", "adapter", "wire")
"""The TOML tables written first, in this order, because people change their fields most."""


def with_changes(spec: RunSpec, changes: Mapping[str, object]) -> RunSpec:
    """Return `spec` with changes like `{"training.steps": 10, "seed": 1}`, checked like a run file.

    Raises: SpecError: a change is invalid.
    """
    table: dict[str, Any] = msgspec.to_builtins(spec)
    for path, value in changes.items():
        section, _, field = path.rpartition(".")
        if section and table[section] is None:
            table[section] = {}
        (table[section] if section else table)[field] = value
    try:
        return msgspec.convert(table, RunSpec)
    except msgspec.ValidationError as error:
        raise SpecError(complaint(error, RunSpec)) from error


def dump_spec(spec: RunSpec) -> str:
    """Return TOML that `load_spec` reads back as an equal spec; fields that are None are left out.

    Raises: LocalError: the spec names a path that is not UTF-8, which TOML cannot hold.
    """
    return _dump(msgspec.to_builtins(spec), {})


def dump_brief(spec: RunSpec, comments: Mapping[str, str]) -> str:
    """Return TOML that `load_spec` reads back as an equal spec, without lines that state a default.

    Args: comments: field (`training.steps`) -> comment; such a field always has a line.
    """
    tables: dict[str, Any] = msgspec.to_builtins(spec)
    sections = sorted((name for name in tables if isinstance(tables[name], dict)), key=_place)
    tables = {name: tables[name] for name in (*(name for name in tables if name not in sections), *sections)}
    for path in [name for name in tables if name not in sections]:
        tables = _without(tables, "", path, spec)
    for section in sections:
        for name in list(tables[section]):
            if f"{section}.{name}" not in comments:
                tables = _without(tables, section, name, spec)
    return _dump({name: value for name, value in tables.items() if value != {}}, comments)


def write_spec(spec: RunSpec, path: Path, comments: Mapping[str, str] | None = None) -> None:
    """Write the spec as TOML, in full or, with `comments`, in brief. Raises: LocalError: a path in it is not UTF-8."""
    path.write_text(dump_spec(spec) if comments is None else dump_brief(spec, comments))
    assert load_spec(path) == spec


def _place(section: str) -> int:
    return _FIRST.index(section) if section in _FIRST else len(_FIRST)


def _without(tables: dict[str, Any], section: str, name: str, spec: RunSpec) -> dict[str, Any]:
    """Leave field `name` of `section` out of the TOML `tables`, unless the rest would no longer decode to `spec`."""
    inside = tables[section] if section else tables
    less = {field: value for field, value in inside.items() if field != name}
    changed = tables | {section: less} if section else less
    try:
        said = {field: value for field, value in changed.items() if value is not None}
        return changed if convert_spec(said, name="")[0] == spec else tables
    except SpecError:
        return tables


def _dump(tables: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    sections = {name: value for name, value in tables.items() if isinstance(value, dict)}
    lines = [
        f"{name} = {_value(value)}" for name, value in tables.items() if name not in sections and value is not None
    ]
    for name, section in sections.items():
        lines += ["", f"[{name}]"]
        for field, value in section.items():
            if value is not None and value != {}:
                comment = comments.get(f"{name}.{field}")
                lines.append(f"{field} = {_value(value)}" + (f"  # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, float):
        return repr(value)  # TOML wants the point that repr keeps
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(part)}" for name, part in value.items() if part is not None) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(part) for part in value) + "]"
    # A JSON string is a TOML basic string, except that TOML has no \/ (which msgspec does not write either).
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError as error:
        name = os.fsencode(str(value)).decode(errors="backslashreplace")
        raise LocalError(f"a run spec cannot name {name}, which is not UTF-8: rename it") from error
