"""Reads a model's name and licence from its folder, to pass them on with everything made of it."""

import re
from pathlib import Path
from typing import Final

from shoal.deploy.ship.model_folder import own_file, read_bytes
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import BASE_CHARS_MAX

CARD: Final = "README.md"
_FRONT_MATTER: Final = re.compile(r"\A---\s*\n(.*?)\n---\s*\n", re.DOTALL)
_CACHED: Final = re.compile(r"models--(.+?)--(.+)")


def name_and_licence(folder: Path) -> tuple[str, str]:
    """Return (name, licence) of a model's folder according to its card; empty where missing."""
    cached = next((found for part in folder.parts if (found := _CACHED.fullmatch(part))), None)
    name = f"{cached[1]}/{cached[2]}" if cached else folder.name
    try:
        text = read_bytes(own_file(folder, CARD)).decode(errors="replace")
    except LocalError:  # no card
        return _said(name), ""
    head = _FRONT_MATTER.match(text)
    fields = dict(re.findall(r"^(license|license_name):[ \t]*(.+?)[ \t]*$", head[1], re.MULTILINE)) if head else {}
    licence = fields.get("license", "").strip("\"'")
    if licence == "other":
        licence = fields.get("license_name", "other").strip("\"'")
    return _said(name), _said(licence)


def _said(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable())[:BASE_CHARS_MAX]
