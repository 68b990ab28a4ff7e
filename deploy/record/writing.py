"""Appends to a record: a crash costs at most one line, and a full disk does not stop the run."""

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from shoal.deploy.record.lines import Line, NoteLine, PeerLine, PlanLine, StepLine, decode_line, encode_line, merged
from shoal.protocol.identity import PeerID

RECORD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Room for 190,000 step lines of about 350 bytes. The older half of a larger record is thinned (`thin`)."""
WAITING_MAX: Final = 100_000
"""The most lines that wait in memory while the disk fails; each further line displaces the oldest."""
AGAIN_S: Final = 10.0
"""Seconds after a disk error until the disk is tried again."""


class RecordFile:
    """A record file for appending, written by one process: the peer that owns the folder.

    Args:
        say: called once when the disk fails, and once when it works again.
        now_s: a clock for intervals.
        bytes_max: above this size the older half is thinned.
    """

    def __init__(
        self, path: Path, *, say: Callable[[str], None], now_s: Callable[[], float], bytes_max: int = RECORD_BYTES_MAX
    ) -> None:
        self.path = path
        self._say, self._now_s, self._bytes_max = say, now_s, bytes_max
        self._thin_at = bytes_max
        self._waiting: deque[bytes] = deque(maxlen=WAITING_MAX)
        self._file: int | None = None
        self._torn = False
        """True if the file does not end with a newline."""
        self._size = 0
        self._again_s = self._synced_s = -float("inf")
        self._failing = False
        self._num_lost = 0

    def append(self, lines: Sequence[Line]) -> None:
        """Write `lines`. While the disk fails, keep them in memory, at most `WAITING_MAX`, and write them later."""
        self._num_lost += max(0, len(self._waiting) + len(lines) - WAITING_MAX)
        self._waiting.extend(encode_line(line) for line in lines)
        if not self._waiting or self._now_s() < self._again_s:
            return
        try:
            self._write()
        except OSError as error:
            self._again_s = self._now_s() + AGAIN_S
            self._end_file()
            if not self._failing:
                self._failing = True
                self._say(f"the record cannot be written now ({error.strerror or error}): the run goes on without it")
            return
        if self._failing:
            self._failing = False
            self._say(
                "the record is written again" + (f", {self._num_lost} lines are missing" if self._num_lost else "")
            )
            self._num_lost = 0

    def close(self) -> None:
        """Try once more to write the lines that wait in memory, then close the file."""
        self._again_s = -float("inf")
        self.append(())
        self._end_file()

    def _write(self) -> None:
        file = self._file if self._file is not None else self._open()
        while self._waiting:
            data = b"\n" * self._torn + self._waiting[0]
            written = os.write(file, data)
            if written < len(data):
                os.ftruncate(file, self._size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += written
            self._torn = False
            self._waiting.popleft()
        if self._now_s() >= self._synced_s + 30.0:  # a power failure loses the lines of the last 30 s
            os.fsync(file)
            self._synced_s = self._now_s()
        if self._size > self._thin_at:
            self._end_file()
            self._size = thin(self.path)
            # If thinning saved little, do not repeat it at every line.
            self._thin_at = max(self._bytes_max, self._size + self._bytes_max // 8)

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.lseek(self._file, 0, os.SEEK_END)
        self._torn = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"
        return self._file

    def _end_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def thin(path: Path) -> int:
    """Rewrite the record with its older half thinned: each two step lines become one. Dropped are the notes, each plan
    with the era, peers and stages of the plan before it, and all lines about a peer except the first and the last.

    Returns: the record's size in bytes. Raises: OSError: the disk fails.
    """
    lines = [line for line in map(decode_line, path.read_bytes().splitlines()) if line is not None]
    data = b"".join(map(encode_line, [*thinned(lines[: len(lines) // 2]), *lines[len(lines) // 2 :]]))
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return len(data)


def thinned(lines: Sequence[Line]) -> list[Line]:
    """Return `lines` thinned: step lines are merged in pairs, and lines that tell little are dropped (see `thin`)."""
    last_words = {line.peer: line for line in lines if isinstance(line, PeerLine)}
    known: set[PeerID] = set()
    layout: tuple[int, int, int] | None = None
    kept: list[Line] = []
    waiting: StepLine | None = None
    for line in lines:
        match line:
            case StepLine() if waiting is not None and waiting.era == line.era:
                kept.append(merged((waiting, line)))
                waiting = None
            case StepLine():
                kept += [waiting] if waiting is not None else []
                waiting = line
            case NoteLine():
                pass
            case PlanLine() if (line.era, line.peers, line.stages) == layout:
                pass
            case PeerLine() if line.peer in known and line is not last_words[line.peer]:
                pass
            case _:
                layout = (line.era, line.peers, line.stages) if isinstance(line, PlanLine) else layout
                known |= {line.peer} if isinstance(line, PeerLine) else set()
                kept.append(line)
    return [*kept, waiting] if waiting is not None else kept
