"""Serves the page, its data and `/metrics` from inside a peer's own event loop.

| path | what |
|---|---|
| `/` and its files | the page, as it lies in `static/` |
| `/live` | WebSocket: the view every second, and what the curves have grown by |
| `/state.json` | the view, once |
| `/metrics` | the same for Prometheus |
| `/pause`, `/resume` | POST, for who has the key (`steering.py`) |

Whoever looks costs the peer: a view is put together once a second for all of them, and for nobody not at all.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from shoal.deploy.dashboard.address import BACKLOG, Address
from shoal.deploy.dashboard.connections import CONNECTIONS_MAX, Connection, Connections
from shoal.deploy.dashboard.feed import Feed
from shoal.deploy.dashboard.guard import Guard
from shoal.deploy.dashboard.metrics import CONTENT_TYPE, render_metrics
from shoal.deploy.dashboard.steering import Steering
from shoal.deploy.dashboard.view import Point, ValidationPoint, View

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
PERIOD_S = 1.0
VIEWERS_MAX = 16
REQUEST_BYTES_MAX = 1024
"""The most bytes of a viewer's message: a viewer has nothing to say."""
_TOO_MANY_CLOSE = 4429
_GOING_AWAY = 1001
_END_S = 2.0


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """Points of the curves from number `first` on; a reader of another `generation` forgets what it has."""

    generation: int
    first: int
    points: Sequence[Point]
    validations: Sequence[ValidationPoint] | None = None
    """All validations; None: they are as before."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One message to a viewer."""

    view: View
    curves: Growth
    steers: bool
    """Whether a viewer with the key can do something here."""


class Dashboard:
    """The application, without a socket.

    Args:
        feed: told by its owner.
        now_s: the feed's clock.
        names: hosts under which it may be opened, besides addresses and `localhost`.
        steering: what whoever has its key can do; None: nothing.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        now_s: Callable[[], float],
        names: Sequence[str] = (),
        steering: Steering | None = None,
    ) -> None:
        self._feed, self._now_s = feed, now_s
        self._steering = steering or Steering()
        self._encoder = msgspec.json.Encoder()
        self._viewers = 0
        self._closing = asyncio.Event()
        self._asked_s = -float("inf")
        self._view: View | None = None
        self._view_at_s = -float("inf")
        self.app: ASGIApp = Guard(
            Starlette(
                routes=[
                    Route("/", self._page),
                    Route("/metrics", self._metrics),
                    Route("/state.json", self._state),
                    WebSocketRoute("/live", self._live),
                    *self._steering.routes,
                    Mount("/static", StaticFiles(directory=STATIC)),
                ]
            ),
            names=names,
        )

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks, or has asked within a minute, so that fresh figures are worth something."""
        return self._viewers > 0 or self._now_s() - self._asked_s < 60.0

    def close(self) -> None:
        """Send every viewer away."""
        self._closing.set()

    async def _page(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def _metrics(self, request: Request) -> Response:
        self._asked_s = self._now_s()
        return PlainTextResponse(render_metrics(self._current()), media_type=CONTENT_TYPE)

    async def _state(self, request: Request) -> Response:
        self._asked_s = self._now_s()
        return Response(self._encoder.encode(self._current()), media_type="application/json")

    async def _live(self, socket: WebSocket) -> None:
        if self._viewers >= VIEWERS_MAX:
            await socket.close(_TOO_MANY_CLOSE, "too many look already")
            return
        await socket.accept()
        self._viewers += 1
        try:
            await self._send(socket)
            await socket.close(_GOING_AWAY)
        except WebSocketDisconnect:
            pass  # which the next message to a viewer that has gone says
        finally:
            self._viewers -= 1

    async def _send(self, socket: WebSocket) -> None:
        """Send updates until the dashboard closes. Raises: WebSocketDisconnect: the viewer has gone."""
        generation, sent, told = -1, 0, None
        while not self._closing.is_set():
            curves = self._feed.curves
            if curves.generation != generation:
                generation, sent = curves.generation, 0
            news, told = curves.validations is not told, curves.validations
            growth = Growth(
                generation=generation,
                first=sent,
                points=curves.points[sent:],
                validations=curves.validations if news else None,
            )
            update = Update(view=self._current(), curves=growth, steers=self._steering.works)
            sent = len(curves.points)
            await socket.send_text(self._encoder.encode(update).decode())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._closing.wait()

    def _current(self) -> View:
        """The view of now, made once for all who look within half a period."""
        now_s = self._now_s()
        if self._view is None or now_s - self._view_at_s > PERIOD_S / 2:
            self._view, self._view_at_s = self._feed.view(now_s), now_s
        return self._view


class _Server(uvicorn.Server):
    """A server that leaves signals to the peer, so that it shows a drain to its end, and that looks at connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = self._connections = Connections()

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this ten times a second."""
        self._connections.look(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Say good-bye to viewers: uvicorn would wait for the rest, and stumble over a WebSocket with a broken head."""
        self._connections.end_all_but_viewers()
        await asyncio.sleep(0)  # which lets them go
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class DashboardServer:
    """`Dashboard` on a socket, from `start` to `close`."""

    def __init__(self, dashboard: Dashboard, address: Address) -> None:
        self._dashboard, self._address = dashboard, address
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that it has, which is another one than was asked for where that was taken."""
        assert self._socket is not None, "not started"
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        return self._address.url(port=self.port)

    async def start(self, *, first_port: int = 0) -> None:
        """Args: first_port: where the page was yesterday, if that is still free; 0: nowhere.

        Raises: LocalError: the address is not this machine's.
        """
        self._socket = self._address.bind(first=first_port)
        config = uvicorn.Config(
            self._dashboard.app,
            http=Connection,
            ws="websockets-sansio",
            ws_max_size=REQUEST_BYTES_MAX,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            log_level="error",  # a line for each broken request would let a stranger fill the peer's log
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=8 * CONNECTIONS_MAX,  # requests: of those that had to go some may still be under way
            backlog=BACKLOG,  # uvicorn's 2,048 would be as many files at once
            timeout_graceful_shutdown=int(_END_S),
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="serve the dashboard")
        self._serving.add_done_callback(_say_why)

    async def close(self) -> None:
        self._dashboard.close()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()


def _say_why(task: asyncio.Task[None]) -> None:
    """Log why the dashboard is gone; the peer trains on without it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the dashboard has ended: %r", error)
