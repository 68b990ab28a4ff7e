"""Finds the record of a run: by the run's name or id, as every command does, or by a path."""

import logging
from pathlib import Path

from shoal.deploy.record.lines import RECORD
from shoal.deploy.state.runs import all_runs, look_for
from shoal.protocol.errors import LocalError

logger = logging.getLogger(__name__)


def find_record(wanted: str) -> Path:
    """Find a record.

    Args: wanted: a run's name, id or first letters of its id; a record, or a folder with records; empty: the last run.
    Raises: LocalError: no record is found, or `wanted` is ambiguous.
    """
    found = [
        record for path in look_for("record", wanted, has=lambda path: bool(_below(path))) for record in _below(path)
    ]
    if not found:
        raise LocalError(f"there is no {RECORD} in {wanted}: `shoal host` keeps one, and `shoal join --record`")
    newest = max(found, key=lambda file: file.stat().st_mtime)  # several peers of one run: take the last written
    if others := sorted({file.parent.name for file in found} - {newest.parent.name}):
        logger.warning(
            "this is run %s, which was written to last; there is also %s", newest.parent.name, ", ".join(others)
        )
    return newest


def records_of(run: str) -> list[Path]:
    """Return the records of a run on this machine, one for each peer that keeps a record."""
    return [record for found in all_runs() if found.run == run for record in _below(found.path)]


def _below(path: Path) -> list[Path]:
    """Return `path` if it is a record, else the records up to three folders below it (a demo's: `peers/ana/RUN/`)."""
    if path.is_file():
        return [path]
    return [record for depth in range(4) for record in sorted(path.glob("*/" * depth + RECORD))]
