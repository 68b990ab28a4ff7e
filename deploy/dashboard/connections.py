"""Keeps the server's connections few and moving: uvicorn bounds who asks, and waits for ever for who only connects.

| a connection that | has |
|---|---|
| has not sent the head of a request, its first or its next, however it drips | `REQUEST_S` |
| asked to be a WebSocket and is neither let in nor sent away (uvicorn leaves a broken head lying) | `REQUEST_S` |
| is being answered, until its last byte has left | `ANSWER_S` |
| was a viewer, and does not take what was sent before the end | `ANSWER_S` |
| is a viewer | no bound but uvicorn's pings: after 40 s without an answer it is one that was |

Over `CONNECTIONS_MAX` one that is no viewer makes room, in this order: of the host that has most of them; one that
waits rather than one that is answered; the longest at it. So whoever floods from one host drives out only their own.
"""

import asyncio
import math
from collections import Counter
from typing import NamedTuple

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

CONNECTIONS_MAX = 64
"""A browser has six while it loads the page and one afterwards, and a process often no more than 1,024 files in all."""
REQUEST_S = 10.0
"""The time for some hundred bytes: one packet may be lost five times over, 0.2 + 0.4 + 0.8 + 1.6 + 3.2 = 6.2 s."""
ANSWER_S = 60.0
"""The time for 100 KB at most: a phone with 14 kbit/s has received them by then."""

_Protocol = H11Protocol | WebSocketsSansIOProtocol


class _Errand(NamedTuple):
    """What a connection does at the moment. Another request is another errand."""

    connection: _Protocol
    request: object
    bound_s: float
    """How long the errand may take. A viewer's is infinite."""

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.bound_s)

    @property
    def host(self) -> str:
        return self.connection.client[0] if self.connection.client else ""


class Connections(ServerState):
    """All connections of one server, as uvicorn's own state, which each of them has."""

    def __init__(self) -> None:
        super().__init__()
        self._since_s: dict[_Errand, float] = {}
        self._ended: set[_Protocol] = set()
        """Connections that are gone though uvicorn does not know it yet."""

    def look(self, now_s: float) -> None:
        """Close the connections whose time is over, and one more where there are too many. Called all the time."""
        errands = self._errands()
        self._since_s = {errand: self._since_s.get(errand, now_s) for errand in errands}
        for errand, since_s in self._since_s.items():
            if now_s - since_s > errand.bound_s:
                self._end(errand)
        if len(self.connections) - len(self._ended) > CONNECTIONS_MAX:
            # Never empty: viewers are far fewer.
            guests = [one for one in errands if one.is_bounded and one.connection not in self._ended]
            from_host = Counter(one.host for one in guests)
            self._end(min(guests, key=lambda one: (-from_host[one.host], one.bound_s, self._since_s[one])))

    def end_all_but_viewers(self) -> None:
        for errand in self._errands():
            if errand.is_bounded:
                self._end(errand)

    def _errands(self) -> list[_Errand]:
        here = {one for one in self.connections if isinstance(one, H11Protocol | WebSocketsSansIOProtocol)}
        self._ended &= here
        return [_errand(connection) for connection in here - self._ended]

    def _end(self, errand: _Errand) -> None:
        """Abort the connection: `close` would wait until the other side has taken what was written."""
        self._ended.add(errand.connection)
        errand.connection.transport.abort()


class Connection(H11Protocol):
    """uvicorn's own h11 connection. Each new one makes the server look at all of them."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        assert isinstance(self.server_state, Connections)
        self.server_state.look(self.loop.time())


def _errand(connection: _Protocol) -> _Errand:
    if isinstance(connection, H11Protocol):
        request = connection.cycle  # of the last request; None before the first
        is_answered = request is None or request.response_complete
        waits = is_answered and connection.transport.get_write_buffer_size() == 0
        return _Errand(connection, request, REQUEST_S if waits else ANSWER_S)
    if connection.transport.is_closing():
        return _Errand(connection, None, ANSWER_S)
    return _Errand(connection, None, math.inf if connection.handshake_complete else REQUEST_S)
