"""Compares two records of `record.py`, and says where they part. Pure."""

import json
from collections.abc import Iterable
from itertools import takewhile, zip_longest
from typing import NamedTuple

BEFORE, SHOWN = 80, 400
"""How many characters are shown of two items: before the first one that differs, and in all."""
NOTHING = "nothing more"


class Section(NamedTuple):
    """One section of two records, compared."""

    name: str
    num_cases: int
    differing: tuple[str, ...]
    """The cases that differ, or that only one record has, in order."""
    where: str
    """Where the first of them differs; empty: none does."""
    seconds: tuple[float, float]
    """What each record took, in seconds of one core."""

    def __str__(self) -> str:
        found = f"{len(self.differing)} of {self.num_cases} DIFFER" if self.differing else f"{self.num_cases} equal"
        text = f"{self.name:<13} {found}, in {self.seconds[0]:.0f} s and {self.seconds[1]:.0f} s of one core"
        return f"{text}\n  {self.name}/{self.differing[0]}: {self.where}" if self.differing else text


class Record:
    """The lines of one record."""

    def __init__(self, lines: Iterable[str | bytes]) -> None:
        self.cases: dict[str, dict[str, list[str]]] = {}
        """Section -> case -> items."""
        self.seconds: dict[str, float] = {}
        for line in lines:
            section, case, items, seconds = json.loads(line)
            self.cases.setdefault(section, {})[case] = items
            self.seconds[section] = self.seconds.get(section, 0.0) + seconds


def compare(base: Record, tree: Record) -> list[Section]:
    """Compare section by section. What only one record has is a difference."""
    found = []
    for name in dict.fromkeys((*base.cases, *tree.cases)):
        before, after = base.cases.get(name, {}), tree.cases.get(name, {})
        parts = {case: difference(before.get(case), after.get(case)) for case in (before | after)}
        differing = tuple(case for case, part in parts.items() if part)
        seconds = base.seconds.get(name, 0.0), tree.seconds.get(name, 0.0)
        found.append(Section(name, len(parts), differing, parts[differing[0]] if differing else "", seconds))
    return found


def difference(before: list[str] | None, after: list[str] | None) -> str:
    """Say where two cases part; empty: nowhere. None: the record does not have the case."""
    if before is None or after is None:
        return "" if before is after else f"only the {'working tree' if before is None else 'base'} has it"
    for number, (one, other) in enumerate(zip_longest(before, after, fillvalue=NOTHING)):
        if one.partition("\t")[0] != other.partition("\t")[0]:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
            return f"item {number} differs\n    base {_shown(one, same)}\n    tree {_shown(other, same)}"
    return ""


def _shown(item: str, same: int) -> str:
    """The part of an item that differs after `same` characters, with its name."""
    text, _, name = item.partition("\t")
    begin = max(0, same - BEFORE)
    return f"{name or 'value'}: {'…' if begin else ''}{text[begin : begin + SHOWN]}"
