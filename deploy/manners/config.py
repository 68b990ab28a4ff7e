"""Reads and writes the settings of this user on this machine: `$XDG_CONFIG_HOME/shoal/config.toml`.

Without the file every setting has its default. Options of a command override the file. A peer reads the file when it
starts, and again after `shoal config set` or `unset`.
"""

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from shoal.deploy.base.disk_error import or_say
from shoal.deploy.manners import limits as limits_module
from shoal.deploy.manners.limits import Limits, parse_truth, parse_value, with_value
from shoal.deploy.state.places import own_folder
from shoal.protocol.complaint import complaint
from shoal.protocol.errors import LocalError


class RecordSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of records, for all runs on this machine."""

    keep_record: bool | None = None
    """Keep a record of each run: record.jsonl, and a file for TensorBoard. Not set: only a host keeps one."""

    wandb_project: str = ""
    """Send each record to this project at Weights & Biases, too. Empty: none."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of the file. Raises: ValueError: a value is invalid."""

    limits: Limits = Limits()
    record: RecordSettings = RecordSettings()


def config_path() -> Path:
    return own_folder("XDG_CONFIG_HOME", ".config") / "config.toml"


def load_settings() -> Settings:
    """Read the settings. Raises: LocalError: the file is invalid; the text says why."""
    text = _read()
    return _decode(text) if text is not None else Settings()


def as_toml(settings: Settings) -> str:
    """Return all settings as a valid TOML file, in which a comment explains each setting."""
    lines: list[str] = []
    for table, unset in (("limits", "0"), ("record", "true")):
        lines += [*([""] if lines else []), f"[{table}]"]
        values = getattr(settings, table)
        for name in values.__struct_fields__:
            lines += [f"# {line}" for line in meanings()[name].splitlines()]
            value = getattr(values, name)
            lines.append(f"{name} = {_toml(value)}" if value is not None else f"# {name} = {unset}")
    return "\n".join(lines) + "\n"


@cache
def meanings() -> dict[str, str]:
    """Return {name of a setting: its docstring}, for `shoal config show` and the comments in the file."""
    found = {}
    for module, owner in ((limits_module, Limits), (sys.modules[__name__], RecordSettings)):
        tree = ast.parse(inspect.getsource(module))
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__)
        for field, doc in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
                found[field.target.id] = inspect.cleandoc(ast.literal_eval(doc.value))
    return found


def set_one(name: str, text: str) -> Settings:
    """Set the setting `name` to `text` in the file; leave the rest unchanged.

    Returns: the settings from now on. Raises: LocalError: no such setting, or an invalid value.
    """
    table = _table_of(name)
    if table == "record":
        value: Any = text.strip() if name == "wandb_project" else parse_truth(name, text)
    else:
        value = parse_value(name, text)
        with_value(Limits(), name, value)  # an error then names the typed value, not the file
    return _write(_with_line(_read() or "", f"{name} = {_toml(value)}", name, table=table))


def unset_one(name: str) -> Settings:
    """Remove setting `name` from the file. Returns: the settings from now on. Raises: LocalError: no such setting."""
    table, text = _table_of(name), _read()
    return _write(_with_line(text, None, name, table=table)) if text is not None else Settings()


def _table_of(name: str) -> str:
    """Return the name of the TOML table that has the setting. Raises: LocalError: there is no such setting."""
    tables = dict.fromkeys(Limits.__struct_fields__, "limits")
    tables |= dict.fromkeys(RecordSettings.__struct_fields__, "record")
    if name not in tables:
        raise LocalError(f"there is no setting {name!r}: there are {', '.join(tables)}")
    return tables[name]


def in_toml(settings: Settings, name: str) -> str:
    """Return one setting's value in TOML. Raises: LocalError: there is no such setting."""
    value = getattr(getattr(settings, _table_of(name)), name)
    return "not set" if value is None else _toml(value)


def write_limits(limits: Mapping[str, Any]) -> Settings:
    """Create the file with these limits. Returns: the new settings. Raises: LocalError: it cannot be written."""
    begin = (
        "# What the first `shoal join` asked. `shoal config show` has all settings, and what each means;\n"
        "# `shoal config set NAME VALUE` changes one.\n[limits]\n"
    )
    return _write(begin + "".join(f"{name} = {_toml(value)}\n" for name, value in limits.items()))


def _write(changed: str) -> Settings:
    settings = _decode(changed)
    path = config_path()
    with or_say(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(changed)
        new.replace(path)
    return settings


def _read() -> str | None:
    try:
        return config_path().read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError(f"cannot read {config_path()}: {error}") from error


def _decode(text: str) -> Settings:
    try:
        return msgspec.toml.decode(text, type=Settings)
    except (msgspec.DecodeError, ValueError) as error:
        raise LocalError(f"{config_path()}: {complaint(error, Settings)}") from error


def _with_line(text: str, line: str | None, name: str, *, table: str) -> str:
    """Return the file's text with `line` in place of the line that sets `name`; None: without that line."""
    lines, new = text.splitlines(), [] if line is None else [line]
    begin = next((i for i, old in enumerate(lines) if re.match(rf"\s*\[\s*{table}\s*\]", old)), None)
    if begin is None and line is None:
        return text
    if begin is None:
        return "\n".join([*lines, *([""] if lines else []), f"[{table}]", *new]) + "\n"
    end = next((i for i in range(begin + 1, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
    for i in range(begin + 1, end):
        if re.match(rf"\s*{name}\s*=", lines[i]):
            return "\n".join([*lines[:i], *new, *lines[i + 1 :]]) + "\n"
    return "\n".join([*lines[: begin + 1], *new, *lines[begin + 1 :]]) + "\n"


def _toml(value: Any) -> str:
    """Return a number, truth value or text in TOML. JSON writes these three types in the same way."""
    return msgspec.json.encode(value).decode()
