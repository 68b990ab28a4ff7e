"""A record of the rows and files that were skipped: reasons, counts and first places. Pure."""

from typing import Final, Literal

import msgspec

from shoal.protocol.errors import DataError

_OTHER: Final = "for other reasons"

Unit = Literal["row", "line", "file"]


class Unusable(DataError):
    """A row or a file that is not usable. `reason` says what was found, such as "line 3: not JSON", `remedy` what the
    owner can do."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy


class SkippedInput(msgspec.Struct, kw_only=True):
    """The rows, lines or files skipped for one reason."""

    unit: Unit
    reason: str
    count: int = 0
    places: list[str] = []

    def __str__(self) -> str:
        named = ", ".join(self.places) + (", …" if self.count > len(self.places) else "")
        return f"{self.count:,} {self.unit}{'s' if self.count > 1 else ''}: {self.reason} ({named})"


class Account(msgspec.Struct):
    """All that is skipped of one source."""

    left_out: list[SkippedInput] = []

    def leave_out(self, unit: Unit, reason: str, place: str) -> None:
        entry = self._entry(unit, reason)
        entry.count += 1
        if len(entry.places) < 3:
            entry.places.append(place)

    def _entry(self, unit: Unit, reason: str) -> SkippedInput:
        # A chat template may word each of its refusals differently.
        if len(self.left_out) >= 16 and not self._has(unit, reason):
            reason = _OTHER
        for entry in self.left_out:
            if (entry.unit, entry.reason) == (unit, reason):
                return entry
        self.left_out.append(SkippedInput(unit=unit, reason=reason))
        return self.left_out[-1]

    def _has(self, unit: Unit, reason: str) -> bool:
        return any((entry.unit, entry.reason) == (unit, reason) for entry in self.left_out)

    def sentences(self, source: str) -> tuple[str, ...]:
        """Return one sentence a reason for people, the most frequent first."""
        return tuple(f"left out of {source}: {entry}" for entry in sorted(self.left_out, key=lambda e: -e.count))

    def behind(self, sentence: str) -> str:
        return "; ".join((sentence, *self.sentences("it")))
