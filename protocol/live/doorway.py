"""Limits streams and lanes (TCP connections) while the other end has not proved its identity: streams per peer, lanes
per address, and both in total.

Each costs us a file and a task, and a peer can open thousands over one connection. Beyond a limit we close the oldest
waiting stream of the same source or, for the total, of all sources. An honest peer's proof (HELLO) arrives within a
round trip, so a flood mostly closes its own streams.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shoal.protocol.limits import WAITING_STREAMS_MAX, WAITING_STREAMS_OF_ONE_MAX


@dataclass(slots=True)
class Doorway:
    """The streams (or lanes) of one transport on which the other end has not proved its identity yet."""

    of_one_max: int = WAITING_STREAMS_OF_ONE_MAX
    _waiting: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    """(source, function that closes the stream), oldest first."""

    @contextlib.contextmanager
    def waits(self, source: str, end: Callable[[], None]) -> Iterator[None]:
        """Count a stream of `source` (a peer or an address) during this context. Args: end: closes the stream."""
        own = source, end
        self._waiting.append(own)
        of_source = [one for one in self._waiting if one[0] == source]
        if len(of_source) > self.of_one_max:
            self._end(of_source[0])
        elif len(self._waiting) > WAITING_STREAMS_MAX:
            self._end(self._waiting[0])
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # it was closed, and removed, as the oldest
                self._waiting.remove(own)

    def _end(self, one: tuple[str, Callable[[], None]]) -> None:
        self._waiting.remove(one)
        one[1]()
