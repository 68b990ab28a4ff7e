"""Keeps what a peer has promised and obeys on disk, so that a restart cannot make it vote twice."""

import os
from pathlib import Path

import msgspec

from shoal.coordinator.chain import ChainRecord
from shoal.protocol.errors import LocalError


class PlanStore:
    """One `ChainRecord` in one file.

    Args:
        path: the file; its folder must exist. None: in memory, for worlds whose peers do not come back.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._record: ChainRecord | None = None

    def load(self, run: str) -> ChainRecord | None:
        """What was saved for `run`, or None.

        Raises: LocalError: the file cannot be read, or belongs to another run.
        """
        if self._path is not None and self._path.exists():
            try:
                self._record = msgspec.msgpack.decode(self._path.read_bytes(), type=ChainRecord)
            except (OSError, msgspec.DecodeError) as error:
                raise LocalError(f"{self._path} is not a record of plans ({error}): restore or remove it") from error
        if self._record is not None and self._record.run != run:
            raise LocalError(f"{self._path} belongs to run {self._record.run}, not {run}: use another state folder")
        return self._record

    def save(self, record: ChainRecord) -> None:
        """Return only when `record` would survive a power cut.

        Raises: LocalError: it cannot be written; the vote must then not be cast.
        """
        if record == self._record:
            return
        if self._path is not None:
            try:
                _replace(self._path, msgspec.msgpack.encode(record))
            except OSError as error:
                raise LocalError(f"cannot write {self._path}: {error.strerror or error}") from error
        self._record = record


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the rename itself is only durable with its folder
    finally:
        os.close(folder)
