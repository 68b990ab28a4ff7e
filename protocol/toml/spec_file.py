"""A run file on disk: TOML that a person wrote, read into a `RunSpec`.

The rules of `defaults.py` fill in the open fields, so every reader gets the same `RunSpec`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.protocol.errors import SpecError
from shoal.protocol.spec import RunSpec, spec_complaint
from shoal.protocol.toml.defaults import FilledField, fill_in
from shoal.protocol.toml_file import read_toml


def load_spec(path: Path) -> RunSpec:
    """Read a run spec; `shoal.protocol.toml.defaults` fills in fields that are left out or "auto".

    Raises: SpecError: one line with the file, the field and the error.
    """
    return convert_spec(read_tables(path), name=str(path))[0]


def read_tables(path: Path) -> dict[str, Any]:
    """Read a run file as its author wrote it. Raises: SpecError: the file cannot be read, or is not TOML."""
    try:
        return read_toml(path)
    except OSError as error:
        raise SpecError(f"cannot read the run spec {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise SpecError(f"{path}: {spec_complaint(error)}") from error


def convert_spec(tables: Mapping[str, Any], *, name: str) -> tuple[RunSpec, tuple[FilledField, ...]]:
    """Turn the tables of a run file into a `RunSpec`.

    Args: name: the file's name, for error messages.
    Returns: the spec, and the fields that a rule filled in.
    Raises: SpecError: a field is unknown or has an invalid value.
    """
    filled, choices = fill_in(tables, RunSpec())
    try:
        return msgspec.convert(filled, RunSpec), choices
    except msgspec.ValidationError as error:
        raise SpecError(f"{name}: {spec_complaint(error)}") from error
