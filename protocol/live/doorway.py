"""Bounds how many streams and lanes wait for their other end to prove who it is: streams by peer, lanes by address, and
both in all.

Each is a file and a task of ours, and whoever reaches the daemon can open thousands over one connection. One too many
sends the oldest away, of the peer itself or of all: an honest HELLO comes within a round trip, so who floods drives out
streams that wait for nothing.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shoal.protocol.limits import WAITING_STREAMS_MAX, WAITING_STREAMS_OF_ONE_MAX


@dataclass(eq=False, slots=True)
class _Waiting:
    source: str
    end: Callable[[], None]


@dataclass(slots=True)
class Doorway:
    """Holds the waiting streams of one transport."""

    of_one_max: int = WAITING_STREAMS_OF_ONE_MAX
    _waiting: list[_Waiting] = field(default_factory=list)
    """The oldest first."""

    def __len__(self) -> int:
        return len(self._waiting)

    @contextlib.contextmanager
    def waits(self, source: str, end: Callable[[], None]) -> Iterator[None]:
        """Count a stream of `source`, a peer or an address, that has not said hello, while this context lasts; `end`
        closes that stream at once."""
        own = _Waiting(source, end)
        self._waiting.append(own)
        of_source = [one for one in self._waiting if one.source == source]
        if len(of_source) > self.of_one_max:
            self._end(of_source[0])
        elif len(self._waiting) > WAITING_STREAMS_MAX:
            self._end(self._waiting[0])
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # it was sent away
                self._waiting.remove(own)

    def _end(self, one: _Waiting) -> None:
        self._waiting.remove(one)
        one.end()
