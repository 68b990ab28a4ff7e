"""Decides whether a peer may compute now, and says why not. Pure.

A peer pauses while there is any reason to, each with its own way out: its owner's word, the hours, somebody at the
machine. What cannot be known is no reason; the owner is told once that it cannot.
"""

from dataclasses import dataclass, field

from shoal.deploy.manners.limits import Limits, is_within, next_begin, parse_hours

BUSY_SHARE = 0.1
"""The share of device or processors from which on others use them: a desktop by itself takes less."""
QUIET_S = 60.0
"""How long the device must be quiet after others have used it: they come back between two of their jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One look at the machine; None: it cannot be known."""

    minute: int
    """Minutes since midnight, local time."""
    input_idle_s: float | None = None
    """Seconds since the last key or movement of the mouse."""
    others_share: float | None = None
    """The share of the computing device that other programs use, in [0, 1]."""


@dataclass(kw_only=True, slots=True)
class Manners:
    """Args: limits: hours and idleness of these count here."""

    limits: Limits
    asked: dict[str, str] = field(default_factory=dict)
    """The words in which each pause is told, by who has asked for it."""
    _busy_until_s: float = 0.0
    _seen: Seen | None = None

    def ask(self, who: str, reason: str) -> None:
        self.asked[who] = reason

    def take_back(self, *who: str) -> None:
        for name in who:
            self.asked.pop(name, None)

    def look(self, seen: Seen, *, now_s: float) -> None:
        self._seen = seen
        if seen.others_share is not None and seen.others_share > BUSY_SHARE:
            self._busy_until_s = now_s + QUIET_S

    def reasons(self, *, now_s: float) -> tuple[str, ...]:
        """The reasons not to compute now; empty: nothing speaks against it."""
        found = list(self.asked.values())
        limits, seen = self.limits, self._seen
        if seen is None:
            return tuple(found)
        if not is_within(hours := parse_hours(limits.hours), seen.minute):
            hour, minute = divmod(next_begin(hours, seen.minute), 60)
            found.append(f"outside the hours {limits.hours}, until {hour:02}:{minute:02}")
        if limits.only_when_idle:
            if seen.input_idle_s is not None and seen.input_idle_s < 60.0 * limits.idle_minutes:
                found.append("somebody uses this machine")
            if now_s < self._busy_until_s:
                found.append("other programs use the device")
        return tuple(found)

    @property
    def unknowable(self) -> tuple[str, ...]:
        """Limits that cannot be kept, since this machine does not say what they need, in words for a person."""
        if not self.limits.only_when_idle or self._seen is None:
            return ()
        found = []
        if self._seen.input_idle_s is None:
            found.append("only_when_idle: this machine does not say when its keyboard and mouse were last used")
        if self._seen.others_share is None:
            found.append("only_when_idle: this machine does not say what other programs do with the device")
        return tuple(found)
