"""Reads and writes run specs as files: the `RUN.toml` of a host, and the one that `shoal demo` writes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.protocol.errors import LocalError, SpecError
from shoal.protocol.spec import RunSpec
from shoal.protocol.toml.complaint import complaint
from shoal.protocol.toml.spec_file import load_spec

DEMO_SPEC = Path(__file__).parent.parent / "demo" / "demo.toml"
LONG_SPEC = DEMO_SPEC.with_name("long.toml")
MOE_SPEC = DEMO_SPEC.with_name("moe.toml")


def with_changes(spec: RunSpec, changes: Mapping[str, object]) -> RunSpec:
    """`spec` with `{"training.steps": 10, "seed": 1}` and the like, checked like a file.

    Raises: SpecError: a change is impossible.
    """
    table: dict[str, Any] = msgspec.to_builtins(spec)
    for path, value in changes.items():
        section, _, field = path.rpartition(".")
        if section and table[section] is None:  # a table that was not there
            table[section] = {}
        (table[section] if section else table)[field] = value
    try:
        return msgspec.convert(table, RunSpec)
    except msgspec.ValidationError as error:
        raise SpecError(complaint(error, RunSpec)) from error


def dump_spec(spec: RunSpec) -> str:
    """TOML that `load_spec` reads back as an equal spec. Our values are strings, numbers, booleans, lists of them,
    or small tables; None is not to say anything.

    Raises: LocalError: it names a path that is not UTF-8, as TOML is.
    """
    table: dict[str, Any] = msgspec.to_builtins(spec)
    sections = {name: value for name, value in table.items() if isinstance(value, dict)}
    lines = [f"{name} = {_value(value)}" for name, value in table.items() if name not in sections and value is not None]
    for name, section in sections.items():
        said = ((field, value) for field, value in section.items() if value is not None and value != {})
        lines += ["", f"[{name}]", *(f"{field} = {_value(value)}" for field, value in said)]
    return "\n".join(lines) + "\n"


def write_spec(spec: RunSpec, path: Path) -> None:
    """Raises: as `dump_spec`."""
    path.write_text(dump_spec(spec))
    assert load_spec(path) == spec


def _value(value: object) -> str:
    if isinstance(value, float):
        return repr(value)  # JSON would write 1e-08 the same, but TOML wants the point that repr keeps
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
