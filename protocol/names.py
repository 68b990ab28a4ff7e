"""Which names runs and members may have. Pure."""

from typing import Final

_JOINERS: Final = "\u200c\u200d"
"""Persian, the scripts of India and pictures made of several need them, and a terminal does nothing with them."""


def is_name(text: str) -> bool:
    """Whether a text may be shown as it is: it has no line break, control character or mark that turns the direction of
    what follows."""
    return all(letter.isprintable() or letter in _JOINERS for letter in text)
