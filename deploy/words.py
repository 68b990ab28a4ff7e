"""Writes names, spans of time and quantities as people read them. Pure."""

import re

from shoal.protocol.identity import PeerID

ENDING = re.compile(r"\b[1-9A-HJ-NP-Za-km-z]{8}\b")
"""How the reason of a plan names a peer: by what `short` leaves of its identifier."""
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def printable(text: str) -> str:
    """What another peer said, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def short(peer: PeerID) -> str:
    """The end of a PeerID: the beginning is the same for everyone."""
    return peer[-8:]


def duration(seconds: float) -> str:
    """`40 s`, `12:05`, `3:12:05`, `4 d 3 h`."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24:,} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes:02}:{left:02}"
    return f"{minutes}:{left:02}" if minutes else f"{left} s"


def counted(number: int, one: str, many: str = "") -> str:
    """`1 step`, `1,200 steps`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def digits(value: float) -> str:
    """Three digits, and never an exponent: `0.000314`, `12.3`, `1,070`."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    said = f"{value:.3g}"
    return f"{value:.12f}".rstrip("0").rstrip(".") if "e" in said else said


def number_of_stages(stages: int | str) -> str:
    """`3 stages`; or that their number is free, where `swarm.stages` says so."""
    if isinstance(stages, str):
        return "as many stages as suit the peers"
    return counted(stages, "stage")


def quantity(value: float, unit: str) -> str:
    """`9.72 TFLOP/s`."""
    power = 0
    while value >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000.0, power + 1
    return f"{value:.3g} {_PREFIXES[power]}{unit}"
