"""Reads TOML from untrusted authors, with limits on size, nesting and numbers."""

import re
from pathlib import Path
from typing import Any, Final

import msgspec

from shoal.protocol.limits import TOML_BYTES_MAX

_PART: Final = rb"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+"""
_PARTS_MAX: Final = 16
"""Most parts of a key such as `a.b.c`; our longest has three. Python's parser takes 8 s for 20,000 parts (40 KB)."""
_DEEP_KEY: Final = re.compile(rb"(?<![A-Za-z0-9_-])" + _PART + rb"(?:\.[ \t]*+" + _PART + rb"){%d}" % _PARTS_MAX)
_WHOLE_NUMBER: Final = range(-(2**63), 2**63)


def read_at_most(path: Path, bytes_max: int) -> bytes:
    """Read a file. Raises: OSError. msgspec.DecodeError: the file exceeds `bytes_max` bytes (/dev/zero never ends)."""
    with path.open("rb") as file:
        raw = file.read(bytes_max + 1)
    if len(raw) > bytes_max:
        raise msgspec.DecodeError(f"it has more than {bytes_max >> 20} MiB")
    return raw


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises: OSError. msgspec.DecodeError: the file is not TOML, or exceeds one of our limits."""
    return decode_toml(read_at_most(path, TOML_BYTES_MAX))


def decode_toml(raw: bytes) -> dict[str, Any]:
    """Decode TOML. Whole numbers have at most 64 bits, as TOML itself requires. Raises: msgspec.DecodeError."""
    if _DEEP_KEY.search(raw):
        raise msgspec.DecodeError(f"a name in it has more than {_PARTS_MAX} dots")
    try:
        tables: dict[str, Any] = msgspec.toml.decode(raw, type=dict[str, Any])
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deep") from error
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError("it is not UTF-8") from error
    except msgspec.DecodeError:
        raise
    except ValueError as error:  # Python's int() raises it for thousands of digits
        raise msgspec.DecodeError("a number in it has thousands of digits") from error
    _check_numbers(tables)
    return tables


def _check_numbers(value: Any) -> None:
    if isinstance(value, dict):
        for part in value.values():
            _check_numbers(part)
    elif isinstance(value, list):
        for part in value:
            _check_numbers(part)
    elif isinstance(value, int) and value not in _WHOLE_NUMBER:
        raise msgspec.DecodeError("a whole number in it has more than 64 bits")
