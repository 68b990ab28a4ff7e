"""Reads hours of the day as a person writes them. Pure."""

from dataclasses import dataclass

_DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class Span:
    """Minutes since midnight, local time; over midnight where `end` is not after `begin`."""

    begin: int
    end: int

    def contains(self, minute: int) -> bool:
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


def parse_hours(text: str) -> tuple[Span, ...]:
    """`22:00-07:00, 12:00-13:00`; empty: none, which means always.

    Raises: ValueError.
    """
    return tuple(_span(part.strip()) for part in text.split(",")) if text.strip() else ()


def is_within(spans: tuple[Span, ...], minute: int) -> bool:
    return not spans or any(span.contains(minute) for span in spans)


def _span(text: str) -> Span:
    begin, dash, end = text.partition("-")
    try:
        if not dash:
            raise ValueError
        return Span(_minute(begin), _minute(end) % _DAY_MINUTES)
    except ValueError:
        raise ValueError(f"hours are written as 22:00-07:00, not {text!r}") from None


def _minute(text: str) -> int:
    hour, colon, minute = text.strip().partition(":")
    value = int(hour) * 60 + int(minute if colon else "0")
    if not (0 <= int(hour) <= 24 and 0 <= int(minute or "0") < 60 and value <= _DAY_MINUTES):
        raise ValueError
    return value
