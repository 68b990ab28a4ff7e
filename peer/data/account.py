"""A record of a source's skipped rows and files: the reasons, how many, and where the first ones are. Pure."""

from typing import Literal

import msgspec

from shoal.protocol.errors import DataError

Unit = Literal["row", "line", "file"]


class Unusable(DataError):
    """A row or a file is not usable. `reason` says what was found, such as "not JSON"; `remedy` says what the owner of
    the data can do."""

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
    """The skipped rows, lines and files of one source."""

    left_out: list[SkippedInput] = []

    def leave_out(self, unit: Unit, reason: str, place: str) -> None:
        entry = self._entry(unit, reason)
        if entry is None and len(self.left_out) >= 16:  # a chat template may word each of its refusals differently
            reason = "for other reasons"
            entry = self._entry(unit, reason)
        if entry is None:
            entry = SkippedInput(unit=unit, reason=reason)
            self.left_out.append(entry)
        entry.count += 1
        if len(entry.places) < 3:
            entry.places.append(place)

    def _entry(self, unit: Unit, reason: str) -> SkippedInput | None:
        return next((entry for entry in self.left_out if (entry.unit, entry.reason) == (unit, reason)), None)

    def sentences(self, source: str) -> tuple[str, ...]:
        """Return one sentence for each reason, for people to read; the most frequent reason comes first."""
        return tuple(f"left out of {source}: {entry}" for entry in sorted(self.left_out, key=lambda e: -e.count))

    def behind(self, sentence: str) -> str:
        return "; ".join((sentence, *self.sentences("it")))
