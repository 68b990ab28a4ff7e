"""Writes log lines to standard error without repeats, such as those on a bad record that is read again and again."""

import copy
import logging
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from shoal.deploy.base.words import printable

REPEATS_S = 600.0
_CAUSES_MAX = 256


@dataclass(slots=True)
class _Cause:
    said_s: float
    repeats: int = 0


class LogLines(logging.Handler):
    """A log handler that suppresses repeats.

    It looks up `sys.stderr` at each line, because a live view replaces it. Lines with one message template count as
    one cause, whichever peer or step they name. A cause is written at most once in `REPEATS_S`, with the number of its
    lines suppressed since. Control characters become `?`: a line may contain other peers' text.

    Args: every: write each line (`--verbose`).
    """

    def __init__(self, *, every: bool, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every, self._now_s = every, now_s
        self._causes: OrderedDict[tuple[str, int, str], _Cause] = OrderedDict()

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(printable(line) for line in super().format(record).split("\n"))

    def emit(self, record: logging.LogRecord) -> None:
        repeats = 0 if self._every else self._repeats(record)
        if repeats is None:
            return
        if repeats:
            text = f"{record.getMessage()} ({repeats} more such lines since the last one; --verbose shows each)"
            record = copy.copy(record)
            record.msg, record.args = text, None
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _repeats(self, record: logging.LogRecord) -> int | None:
        """Return how many lines with the cause of `record` were suppressed before it; None: suppress `record`, too."""
        template = str(record.msg)
        words = re.sub(r"%\S*", "", template)
        text = template if re.search(r"\w", words) else record.getMessage()  # "%s" alone does not identify the cause
        now_s, key = self._now_s(), (record.name, record.levelno, text)
        cause = self._causes.get(key)
        if cause is not None and now_s - cause.said_s < REPEATS_S:
            cause.repeats += 1
            return None
        self._causes[key] = _Cause(now_s)
        self._causes.move_to_end(key)
        if len(self._causes) > _CAUSES_MAX:
            self._causes.popitem(last=False)
        return cause.repeats if cause is not None else 0
