"""Reads a record: its valid lines in order, despite lines torn by a crash.

If the run goes back to a snapshot, a new *era* begins and repeats steps; lines of their first execution are void.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.deploy.record.lines import (
    RECORD,
    EndLine,
    NoteLine,
    PeerLine,
    PlanLine,
    StartLine,
    StepLine,
    ValidationLine,
    decode_line,
)
from shoal.protocol.errors import LocalError


@dataclass(slots=True, kw_only=True)
class Record:
    """The content of a record file."""

    starts: list[StartLine] = field(default_factory=list)
    steps: list[StepLine] = field(default_factory=list)
    """Valid steps, ordered by `step`."""
    redone: list[StepLine] = field(default_factory=list)
    """The void lines: steps that do not count, because the run went back to a snapshot before them."""
    validations: list[ValidationLine] = field(default_factory=list)
    """Validations that are not void, ordered by `step`."""
    plans: list[PlanLine] = field(default_factory=list)
    peers: list[PeerLine] = field(default_factory=list)
    notes: list[NoteLine] = field(default_factory=list)
    ends: list[EndLine] = field(default_factory=list)
    torn: int = 0
    """The number of lines that do not decode."""

    @property
    def reached(self) -> tuple[int, int]:
        """(era, step) of the newest step, even one that the run has undone since by going back; (0, 0): no step."""
        newest = max((line for line in (*self.steps, *self.redone)), key=_order, default=None)
        return (newest.era, newest.step) if newest is not None else (0, 0)

    @property
    def validated(self) -> tuple[int, int]:
        """(training generation, model version) of the newest valid validation; (0, -1) if there is none."""
        return max(((line.era, line.step) for line in self.validations), default=(0, -1))


def _order(line: StepLine | ValidationLine) -> tuple[int, int]:
    return line.era, line.step


def read_record(path: Path) -> Record:
    """Read the record `path`, a file or its folder. Raises: LocalError: the file is missing or cannot be read."""
    path = path / RECORD if path.is_dir() else path
    try:
        with path.open("rb") as file:
            return record_of(file)
    except FileNotFoundError as error:
        raise LocalError(f"there is no record {path}") from error
    except OSError as error:
        raise LocalError(f"cannot read {path}: {error.strerror or error}") from error


def record_of(data: Iterable[bytes]) -> Record:
    """Build a record from `data`, the lines of its file."""
    record, lines = Record(), defaultdict[type, list[Any]](list)
    steps: dict[tuple[int, int], StepLine] = {}
    validations: dict[tuple[int, int], ValidationLine] = {}
    for text in filter(bytes.strip, data):
        line = decode_line(text)
        lines[type(line)].append(line)
    record.torn = len(lines[type(None)])
    record.starts, record.plans, record.peers = lines[StartLine], lines[PlanLine], lines[PeerLine]
    record.notes, record.ends = lines[NoteLine], lines[EndLine]
    for step in lines[StepLine]:
        steps.setdefault(_order(step), step)
    for validation in lines[ValidationLine]:
        validations.setdefault(_order(validation), validation)
    voids = _voids(steps.values(), record.plans)
    for key in sorted(steps):
        (record.redone if key[1] >= voids(key[0]) else record.steps).append(steps[key])
    # Step v makes version v, so a validation of it is void if the step is.
    record.validations = [validations[key] for key in sorted(validations) if key[1] < voids(key[0])]
    record.steps.sort(key=lambda line: line.step)
    record.validations.sort(key=lambda line: line.step)
    return record


def _voids(steps: Iterable[StepLine], plans: Sequence[PlanLine]) -> Callable[[int], float]:
    """Return a function that takes an era, and returns the step from which lines of this era are void. This is the
    lowest step with which any later era began, by its own step lines or by its plans; inf: no era followed."""
    firsts: dict[int, int] = {}
    for line in steps:
        first = line.step - line.steps + 1
        firsts[line.era] = min(first, firsts.get(line.era, first))
    for plan in plans:
        if plan.era in firsts:
            firsts[plan.era] = min(plan.restored + 1, firsts[plan.era])
    return lambda era: min((step for later, step in firsts.items() if later > era), default=math.inf)
