"""A table of rows; a row is a run at several learning rates, then at its best one with more seeds.

Which there are is in `grids.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec
from settings import Finished, Run

Role = Literal["", "synchronous", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`run` is of seed 0; its learning rate is replaced by each of `rates`."""

    label: str
    run: Run
    rates: tuple[float, ...]
    seeds: int = 1
    """Of the best rate; the others have one."""
    role: Role = ""
    """What the gaps of the table's other rows are measured between."""

    def first(self) -> list[Run]:
        return [self.at(rate, 0) for rate in self.rates]

    def more(self, best_rate: float) -> list[Run]:
        return [self.at(best_rate, seed) for seed in range(1, self.seeds)]

    def at(self, rate: float, seed: int) -> Run:
        optimizer = msgspec.structs.replace(self.run.optimizer, learning_rate=rate)
        return msgspec.structs.replace(self.run, optimizer=optimizer, seed=seed)

    def best_rate(self, finished: dict[str, Finished], *, so_far: bool = False) -> float | None:
        """That of the smallest validation loss of seed 0; None where all diverge.

        Args: so_far: of those rates that there are; else None while one is missing.
        """
        outcomes = {rate: finished.get(self.at(rate, 0).key) for rate in self.rates}
        if not so_far and not all(outcomes.values()):
            return None
        losses = {
            rate: found.outcome.validation_loss
            for rate, found in outcomes.items()
            if found is not None and found.outcome.validation_loss is not None
        }
        return min(losses, key=lambda rate: losses[rate]) if losses else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    name: str
    title: str
    rows: tuple[Row, ...]

    def wanted(self, finished: dict[str, Finished]) -> list[Run]:
        """Runs that are missing and can be said by now, those of one seed first."""
        runs = [run for row in self.rows for run in row.first()]
        for row in self.rows:
            best_rate = row.best_rate(finished)
            runs += row.more(best_rate) if best_rate is not None else []
        return [run for run in runs if run.key not in finished]


def wanted(tables: Iterable[Table], finished: dict[str, Finished]) -> list[Run]:
    """Of all tables, each once."""
    by_key = {run.key: run for table in tables for run in table.wanted(finished)}
    return list(by_key.values())
