"""Formats names, durations and quantities for people. Pure."""

import re
from collections.abc import Sequence

from shoal.protocol.identity import PeerID

ENDING = re.compile(r"\b[1-9A-HJ-NP-Za-km-z]{8}\b")
"""Matches what stands for a peer in the text of a plan's reason: the last eight characters of its identifier."""
NAMED_MAX = 3
"""A sentence names at most this many things of a list, and counts the rest (`a, b, c and 2 more`)."""
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def printable(text: str) -> str:
    """Return another peer's text with control characters replaced by `?`."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def short(peer: PeerID) -> str:
    """Return the last eight characters of a PeerID; all PeerIDs begin alike."""
    return peer[-8:]


def duration(seconds: float) -> str:
    """Format seconds: `40 s`, `12:05` (min:s), `3:12:05` (h:min:s), from 48 hours on `4 d 3 h`."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24:,} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes:02}:{left:02}"
    return f"{minutes}:{left:02}" if minutes else f"{left} s"


def counted(number: int, one: str, many: str = "") -> str:
    """Format a count with its noun: `1 step`, `1,200 steps`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def listed(names: Sequence[str], most: int = NAMED_MAX) -> str:
    """Join the first `most` names, and count the rest: `a, b, c and 2 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def file_name(text: str) -> str:
    """Return a name as one part of a path: each character except letters, digits, `-` and `_` becomes `-`."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in text)


def digits(value: float) -> str:
    """Format with three significant digits and no exponent; from 100 on without decimals: `0.000314`, `1,074`."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    said = f"{value:.3g}"
    return f"{value:.12f}".rstrip("0").rstrip(".") if "e" in said else said


def number_of_stages(stages: int | str) -> str:
    """Return the run spec's `swarm.stages` in words: `3 stages`, or a phrase for `auto`."""
    if isinstance(stages, str):
        return "as many stages as suit the peers"
    return counted(stages, "stage")


def quantity(value: float, unit: str) -> str:
    """Format with an SI prefix: `9.72 TFLOP/s`."""
    power = 0
    while value >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000.0, power + 1
    return f"{value:.3g} {_PREFIXES[power]}{unit}"


def span(seconds: float) -> str:
    """Format a duration: `45 s`, `12 min 5 s`, `3 h 10 min`, `2 d 4 h`."""
    for unit, name, smaller, less in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name} {int(seconds % unit // smaller)} {less}"
    return f"{seconds:.0f} s"


def amount(number: float) -> str:
    """Format a number, with an SI prefix from 10,000 on: `9,812`, `35.1 k`, `3.3 M`."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit and number >= 1e4:
            return f"{number / unit:.1f} {name}"
    return f"{number:,.0f}"


def said_loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
