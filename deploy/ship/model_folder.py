"""Decides which files of an untrusted model folder are read, and how much of them. Nothing is unpickled or unpacked.

There are three dangers: an error message about a link out of the folder could reveal a local file; a device or pipe has
no end; a header may declare more than fits into memory.
"""

import os
import re
import stat
import struct
from pathlib import Path
from typing import Any, Final

import msgspec

from shoal.deploy.base.disk_error import or_say
from shoal.deploy.base.words import printable
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import BASE_CHARS_MAX

CONFIG_BYTES_MAX: Final = 4 * 1024 * 1024
"""The most bytes of a config.json, which usually has some kilobytes."""
HEADER_BYTES_MAX: Final = 32 * 1024 * 1024
"""The most bytes of a safetensors header: names, shapes and offsets of 300,000 tensors."""
FILES_MAX: Final = 4096
"""The most *.safetensors files in a folder. A model of 1,000 G parameters has about 200."""
_HEADER_LENGTH: Final = struct.Struct("<Q")
CARD: Final = "README.md"
_FRONT_MATTER: Final = re.compile(r"\A---\s*\n(.*?)\n---\s*\n", re.DOTALL)
_CACHED: Final = re.compile(r"models--(.+?)--(.+)")


def own_file(folder: Path, name: str) -> Path:
    """Return the path of a file in the folder, checked. In a Hugging Face cache it may be a link to the model's blobs.

    Raises: LocalError: the file is missing, leads out of the folder, or is not regular.
    """
    path = folder / name
    try:
        real, found = path.resolve(strict=True), path.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        why = getattr(error, "strerror", None) or "it is a link to itself"
        raise LocalError(f"cannot read {_shown(path)}: {why}") from error
    if not real.is_relative_to(_root(folder)):
        raise LocalError(
            f"{_shown(path)} is a link that leads out of the folder, so it is not read: copy what it leads to"
        )
    if not stat.S_ISREG(found.st_mode):
        raise LocalError(f"{_shown(path)} is no file")
    return path


def read_bytes(path: Path) -> bytes:
    """Read a small file. Raises: LocalError: it cannot be read, or has more than CONFIG_BYTES_MAX bytes."""
    with or_say(f"cannot read {_shown(path)}"), path.open("rb") as file:
        raw = file.read(CONFIG_BYTES_MAX + 1)
    if len(raw) > CONFIG_BYTES_MAX:
        raise LocalError(f"{_shown(path)} is too large to be a model's config")
    return raw


def read_json(path: Path) -> dict[str, Any]:
    """Read a small file with a JSON object. Raises: LocalError: it is unreadable, too large, or no JSON object."""
    raw = read_bytes(path)
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LocalError(f"{_shown(path)} is no model's config: {error}") from error


def name_and_licence(folder: Path) -> tuple[str, str]:
    """Return (name, licence) of a model from its folder and the card in the folder; "" for a missing value."""
    cached = next((found for part in folder.parts if (found := _CACHED.fullmatch(part))), None)
    name = f"{cached[1]}/{cached[2]}" if cached else folder.name
    try:
        text = read_bytes(own_file(folder, CARD)).decode(errors="replace")
    except LocalError:  # no card
        return _named(name), ""
    head = _FRONT_MATTER.match(text)
    fields = dict(re.findall(r"^(license|license_name):[ \t]*(.+?)[ \t]*$", head[1], re.MULTILINE)) if head else {}
    licence = fields.get("license", "").strip("\"'")
    if licence == "other":
        licence = fields.get("license_name", "other").strip("\"'")
    return _named(name), _named(licence)


def _named(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable())[:BASE_CHARS_MAX]


def cached_models() -> list[Path]:
    """Return the models in this machine's Hugging Face cache, last written first."""
    said = os.environ.get("HF_HUB_CACHE")
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    hub = Path(said) if said else Path(home) / "hub"
    try:
        found = [(path.stat().st_mtime, path) for path in hub.expanduser().glob("models--*/snapshots/*")]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)][:64]


def tensor_files(folder: Path) -> list[Path]:
    """Return the folder's *.safetensors files, sorted by name; their headers have been checked.

    Raises: LocalError: the folder has no such file, too many files, or a broken file.
    """
    with or_say(f"cannot read {_shown(folder)}"):
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith((".safetensors", ".bin")))
    files = [name for name in names if name.endswith(".safetensors")]
    if not files:
        advice = ": its weights are pickled, save them as safetensors" if names else ""
        raise LocalError(f"there are no *.safetensors in {_shown(folder)}{advice}")
    if len(files) > FILES_MAX:
        raise LocalError(f"{_shown(folder)} has {len(files)} *.safetensors, and shoal reads {FILES_MAX} at most")
    paths = [own_file(folder, name) for name in files]
    for path in paths:
        _check_header(path)
    return paths


def _check_header(path: Path) -> None:
    with or_say(f"cannot read {_shown(path)}"), path.open("rb") as file:
        begin = file.read(_HEADER_LENGTH.size + 1)
        size = os.fstat(file.fileno()).st_size
    length = _HEADER_LENGTH.unpack_from(begin)[0] if len(begin) > _HEADER_LENGTH.size else size
    if begin[_HEADER_LENGTH.size :] != b"{" or length > size - _HEADER_LENGTH.size:
        raise LocalError(f"cannot read {_shown(path)}: it is not in safetensors form")
    if length > HEADER_BYTES_MAX:
        raise LocalError(
            f"the header of {_shown(path)} has {length >> 20} MiB, and shoal reads {HEADER_BYTES_MAX >> 20} at most"
        )


def _shown(path: Path) -> str:
    """Return the path for a message, without control characters such as line breaks."""
    return printable(str(path))


def _root(folder: Path) -> Path:
    """Return the folder that links must not leave: in a Hugging Face cache the model's folder, else `folder`."""
    real = folder.resolve()
    cached = real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")
    return real.parent.parent if cached else real
