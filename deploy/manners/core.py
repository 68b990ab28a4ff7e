"""Decides whether a peer may compute now, and why not. Pure.

A peer pauses while there is any reason: the owner's request, the time of day, somebody at the machine, other programs
on the device. Each reason ends separately. Use that the machine does not report is no reason; the owner is told once.
"""

from dataclasses import dataclass, field

from shoal.deploy.manners.limits import Limits, is_within, next_begin, parse_hours

QUIET_S = 60.0
"""Seconds after other programs used the device until it counts as free: programs pause between two jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One observation of the machine; a value of None is unknown."""

    minute: int
    """Minutes since midnight, local time."""
    input_idle_s: float | None = None
    """Seconds since the last use of keyboard or mouse."""
    others_share: float | None = None
    """The share of the device that other programs use, in [0, 1]."""


@dataclass(kw_only=True, slots=True)
class Manners:
    """Combines the reasons to pause. Uses only `hours`, `only_when_idle` and `idle_minutes` of `limits`."""

    limits: Limits
    asked: dict[str, str] = field(default_factory=dict)
    """Pauses by request: name of the requester -> the reason, in words."""
    _busy_until_s: float = 0.0
    _seen: Seen | None = None

    def ask(self, who: str, reason: str) -> None:
        self.asked[who] = reason

    def take_back(self, *who: str) -> None:
        for name in who:
            self.asked.pop(name, None)

    def look(self, seen: Seen, *, now_s: float) -> None:
        self._seen = seen
        if seen.others_share is not None and seen.others_share > 0.1:  # an idle desktop uses less than a tenth
            self._busy_until_s = now_s + QUIET_S

    def reasons(self, *, now_s: float) -> tuple[str, ...]:
        """Return the reasons not to compute now; empty: the peer may compute."""
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
        """Sentences for the owner about limits that we cannot keep, because the machine does not report its own use."""
        if not self.limits.only_when_idle or self._seen is None:
            return ()
        found = []
        if self._seen.input_idle_s is None:
            found.append("only_when_idle: this machine does not say when its keyboard and mouse were last used")
        if self._seen.others_share is None:
            found.append("only_when_idle: this machine does not say what other programs do with the device")
        return tuple(found)
