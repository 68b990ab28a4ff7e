"""Limits the number and the age of the server's connections: uvicorn limits requests, but waits for ever for a
connection that sends none.

| state of a connection | time limit |
|---|---|
| has not sent the complete head of its first or next request | `REQUEST_S` |
| is being answered, until the last byte has left | `ANSWER_S` |
| is a viewer that does not receive what was sent | `ANSWER_S` |
| is any other viewer | none |

A viewer is a connection that requests `/live`. Above `CONNECTIONS_MAX` connections, the server closes one that has a
time limit. It takes the host with the most of these, and closes that host's oldest one that waits for a request or, if
none waits, its oldest one. So a host that floods the server loses its own connections first.
"""

import asyncio
import math
from collections import Counter
from typing import NamedTuple

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

CONNECTIONS_MAX = 64
"""Enough for ten browsers: each loads the page over six connections, and then keeps one. Many systems allow a process
only 1,024 open files."""
REQUEST_S = 10.0
"""Time limit of a request of a hundred bytes. Five resends by TCP take 0.2 + 0.4 + 0.8 + 1.6 + 3.2 = 6.2 s."""
ANSWER_S = 60.0
"""Time limit of an answer: enough for 100 KB at 14 kbit/s."""

LIVE = "/live"
"""The path that viewers request. The answer is a stream of updates, which ends when the dashboard closes."""


class _Errand(NamedTuple):
    """The present activity of a connection (waiting for a request, or being answered), with its time limit."""

    connection: H11Protocol
    request: object
    bound_s: float
    """The time limit; infinite for a viewer that has received everything sent so far."""

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.bound_s)

    @property
    def host(self) -> str:
        return self.connection.client[0] if self.connection.client else ""


class Connections(ServerState):
    """All connections of one server. This is uvicorn's server state, so every connection refers to it."""

    def __init__(self) -> None:
        super().__init__()
        self._since_s: dict[_Errand, float] = {}
        self._ended: set[H11Protocol] = set()
        """Aborted connections that uvicorn still lists."""

    def look(self, now_s: float) -> None:
        """Close connections past their time limit and, above `CONNECTIONS_MAX` connections, one more. Called at each
        tick of the server and at each new connection."""
        errands = self._errands()
        self._since_s = {errand: self._since_s.get(errand, now_s) for errand in errands}
        for errand, since_s in self._since_s.items():
            if now_s - since_s > errand.bound_s:
                self._end(errand)
        if len(self.connections) - len(self._ended) > CONNECTIONS_MAX:
            # This list is never empty: there are far fewer viewers than connections.
            guests = [one for one in errands if one.is_bounded and one.connection not in self._ended]
            from_host = Counter(one.host for one in guests)
            self._end(min(guests, key=lambda one: (-from_host[one.host], one.bound_s, self._since_s[one])))

    def end_all_but_viewers(self) -> None:
        for errand in self._errands():
            if errand.is_bounded:
                self._end(errand)

    def _errands(self) -> list[_Errand]:
        here = {one for one in self.connections if isinstance(one, H11Protocol)}
        self._ended &= here
        return [_errand(connection) for connection in here - self._ended]

    def _end(self, errand: _Errand) -> None:
        """Abort the connection: `close` would wait until the other side has received all data."""
        self._ended.add(errand.connection)
        errand.connection.transport.abort()


class Connection(H11Protocol):
    """uvicorn's h11 connection; each new one makes the server check all connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        assert isinstance(self.server_state, Connections)
        self.server_state.look(self.loop.time())


def _errand(connection: H11Protocol) -> _Errand:
    request = connection.cycle  # None before the first request
    is_sent = connection.transport.get_write_buffer_size() == 0
    if request is None or request.response_complete:
        return _Errand(connection, request, REQUEST_S if is_sent else ANSWER_S)
    is_viewer = request.scope["path"] == LIVE
    return _Errand(connection, request, math.inf if is_viewer and is_sent else ANSWER_S)
