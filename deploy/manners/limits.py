"""Defines and parses a volunteer's limits: `[limits]` of the settings, overridden by `--limit NAME=VALUE`."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from shoal.protocol.complaint import complaint
from shoal.protocol.errors import LocalError
from shoal.protocol.token_bucket import RateLimits

MBIT = 1e6 / 8
"""Bytes per megabit."""
GB = 1e9
_DAY_MINUTES = 24 * 60


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The limits. `shoal config show` prints the fields' docstrings. Raises: ValueError."""

    compute_share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """Share of the device's time, above 0 and at most 1. On a CPU: of the computing threads' time; all CPU time of this
    peer counts."""
    memory_gb: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Memory of the device that the swarm may plan with, in GB; on a GPU torch takes no more. 0: what is free."""
    upload_mbit_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Mbit/s sent, of all traffic. 0: no limit."""
    download_mbit_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Mbit/s received, of all traffic. 0: no limit."""
    relay_mbit_s: Annotated[float, msgspec.Meta(ge=0.0)] = 20.0
    """Mbit/s of the upload lent to relay traffic between members that are both behind routers. It counts towards
    upload_mbit_s and yields to this peer's own traffic. The relayed data is encrypted. 0: relay nothing."""
    hours: str = ""
    """Hours to compute, in local time, such as "22:00-07:00" or "09:00-12:00, 13:00-17:00". Empty: always."""
    only_when_idle: bool = False
    """Compute only while nobody uses this machine: no keyboard, no mouse, no other work on the device."""
    idle_minutes: Annotated[float, msgspec.Meta(ge=0.0)] = 5.0
    """The minutes for which nobody must have used this machine before it computes (only_when_idle)."""
    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] | None = None
    """How far the computing (not the network) yields to other programs: 0 not at all, 19 completely. Left out: 19 for a
    peer that joins, 0 for the host of a run."""

    @property
    def of_a_volunteer(self) -> "Limits":
        """These limits for a peer that joins: `nice` is 19 (the lowest priority) if the owner has not set it."""
        return self if self.nice is not None else msgspec.structs.replace(self, nice=19)

    def __post_init__(self) -> None:
        parse_hours(self.hours)
        for name in ("memory_gb", "upload_mbit_s", "download_mbit_s", "relay_mbit_s", "idle_minutes"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a number")
        for name in ("upload_mbit_s", "download_mbit_s", "relay_mbit_s"):
            if 0.0 < getattr(self, name) < MBIT_S_MIN:
                raise ValueError(f"{name} must be 0 or at least {MBIT_S_MIN:g}: a peer's control messages need as much")

    @property
    def rates(self) -> RateLimits:
        return RateLimits(
            upload_bytes_per_s=self.upload_mbit_s * MBIT or math.inf,
            download_bytes_per_s=self.download_mbit_s * MBIT or math.inf,
            relay_bytes_per_s=self.relay_mbit_s * MBIT,
        )

    @property
    def memory_bytes(self) -> float:
        """The bytes of memory that the swarm may use; infinite without a limit."""
        return self.memory_gb * GB or math.inf

    @property
    def in_words(self) -> tuple[str, ...]:
        """The limits in force, each as words for people."""
        words = (
            (self.compute_share < 1.0, f"{self.compute_share:.0%} of the device's time"),
            (self.memory_gb > 0.0, f"{self.memory_gb:g} GB of its memory"),
            (self.upload_mbit_s > 0.0, f"upload at most {self.upload_mbit_s:g} Mbit/s"),
            (self.download_mbit_s > 0.0, f"download at most {self.download_mbit_s:g} Mbit/s"),
            (bool(self.hours), f"only {self.hours}"),
            (self.only_when_idle, f"only when unused for {self.idle_minutes:g} minutes"),
        )
        return tuple(text for holds, text in words if holds)


AT_ONCE = ("upload_mbit_s", "hours", "only_when_idle", "idle_minutes")
"""Limits that a running peer applies at once; the others apply at its next start."""
_UNITS = {
    "compute_share": "%",
    "memory_gb": "gb",
    "upload_mbit_s": "mbit/s",
    "download_mbit_s": "mbit/s",
    "relay_mbit_s": "mbit/s",
    "idle_minutes": "minutes",
}
"""Name of a limit -> the unit that a person may type after its number, in lower case."""
MBIT_S_MIN = 0.1
"""The lowest rate in Mbit/s that a limit may set: enough for a heartbeat and a few votes a second."""


def with_overrides(limits: Limits, overrides: list[str]) -> Limits:
    """Return `limits` with each `NAME=VALUE` applied.

    Raises: LocalError: there is no such limit, or the value is invalid.
    """
    for text in overrides:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or name not in Limits.__struct_fields__:
            names = ", ".join(Limits.__struct_fields__)
            raise LocalError(f"--limit {text}: write NAME=VALUE, where NAME is one of {names}")
        limits = with_value(limits, name, parse_value(name, value))
    return limits


def with_value(limits: Limits, name: str, value: Any) -> Limits:
    """Return `limits` with one value changed. Raises: LocalError: the value is invalid."""
    try:
        return msgspec.convert(msgspec.to_builtins(limits) | {name: value}, Limits)
    except (msgspec.ValidationError, ValueError) as error:
        raise LocalError(complaint(error, Limits)) from error


def parse_value(name: str, text: str) -> Any:
    """Parse a limit as typed by a person: `5`, `5 Mbit/s`, `50%`, `yes`, `always`. Raises: LocalError."""
    kind = int if name == "nice" else type(getattr(Limits(), name))
    typed = text.strip().lower()
    if kind is str:
        return "" if typed == "always" else typed
    if kind is bool:
        return parse_truth(name, text)
    number = typed.removesuffix(_UNITS.get(name, "")).strip()
    is_percent = name == "compute_share" and (typed.endswith("%") or (typed.isdecimal() and int(typed) > 1))
    try:
        value = msgspec.convert(number, kind, strict=False)
    except msgspec.ValidationError as error:
        wants = "a whole number" if kind is int else "a number"
        raise LocalError(f"{name} is {wants}, not {text.strip()!r}") from error
    return value / 100 if is_percent else value


def parse_truth(name: str, text: str) -> bool:
    """Parse `true` or `false`, `yes` or `no`, `y` or `n`. Raises: LocalError."""
    typed = text.strip().lower()
    try:
        return msgspec.convert(
            {"y": "true", "yes": "true", "n": "false", "no": "false"}.get(typed, typed), bool, strict=False
        )
    except msgspec.ValidationError as error:
        raise LocalError(f"{name} is true or false, not {text.strip()!r}") from error


# --- hours of the day ---


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the day, in local minutes since midnight; the part crosses midnight if `end` is not after `begin`."""

    begin: int
    end: int

    def contains(self, minute: int) -> bool:
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


def parse_hours(text: str) -> tuple[Span, ...]:
    """Parse `22:00-07:00, 12:00-13:00`. Returns: the spans; none for an empty text, which means always.

    Raises: ValueError.
    """
    return tuple(_span(part.strip()) for part in text.split(",")) if text.strip() else ()


def is_within(spans: tuple[Span, ...], minute: int) -> bool:
    return not spans or any(span.contains(minute) for span in spans)


def next_begin(spans: tuple[Span, ...], minute: int) -> int:
    """Return the minute of the day at which the next span begins; `spans` must not be empty."""
    return min((span.begin for span in spans), key=lambda begin: (begin - minute) % _DAY_MINUTES) % _DAY_MINUTES


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
