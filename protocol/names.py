"""Rules for the names of runs and members. Pure."""

from typing import Final

_JOINERS: Final = "\u200c\u200d"
"""Invisible joining characters, which Persian, Indian scripts and composed emoji need; a terminal ignores them."""


def is_name(text: str) -> bool:
    """True if a text is safe to print: no line break, control character, or mark that changes the text direction."""
    return all(letter.isprintable() or letter in _JOINERS for letter in text)
