"""Serves the page, its data and `/metrics` inside a peer's event loop.

| path | content |
|---|---|
| `/` and its files | the page, from `static/` |
| `/live` | server-sent events: the view every second, and new points of the curves |
| `/state.json` | the view, once |
| `/metrics` | the view for Prometheus |
| `/pause`, `/resume` | POST, for holders of the key (`guard.py`) |

To cost the peer little, one view serves all requests within half a second, and is built only on request.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.deploy.dashboard.address import BACKLOG, Address
from shoal.deploy.dashboard.connections import CONNECTIONS_MAX, LIVE, Connection, Connections
from shoal.deploy.dashboard.feed import Feed
from shoal.deploy.dashboard.guard import Guard, Steering
from shoal.deploy.dashboard.metrics import CONTENT_TYPE, render_metrics
from shoal.deploy.dashboard.view import View
from shoal.deploy.record.lines import point_of
from shoal.deploy.record.report import Report

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
PERIOD_S = 1.0
VIEWERS_MAX = 16


class Dashboard:
    """The dashboard's web application, without its socket.

    Args:
        feed: builds views from the reports that `take` receives.
        now_s: the feed's clock.
        names: host names to accept besides addresses and `localhost`.
        steering: the actions for holders of the page's key; None: there are none.
    """

    def __init__(
        self, feed: Feed, *, now_s: Callable[[], float], names: Sequence[str] = (), steering: Steering | None = None
    ) -> None:
        self.steering = steering or Steering()
        self.announcement = ""
        """A line for a person, with the address of the page."""
        self.feed, self._now_s = feed, now_s
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
                    Route(LIVE, self._live),
                    *self.steering.routes,
                    Mount("/static", StaticFiles(directory=STATIC)),
                ]
            ),
            names=names,
        )

    def take(self, report: Report) -> None:
        self.feed.take(report, self._now_s())

    @property
    def is_watched(self) -> bool:
        """True if there is a viewer, or a request within the last minute: then the status must be fresh."""
        return self._viewers > 0 or self._now_s() - self._asked_s < 60.0

    def close(self) -> None:
        """Disconnect every viewer."""
        self._closing.set()

    async def _page(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def _metrics(self, request: Request) -> Response:
        self._asked_s = self._now_s()
        return PlainTextResponse(render_metrics(self._current()), media_type=CONTENT_TYPE)

    async def _state(self, request: Request) -> Response:
        self._asked_s = self._now_s()
        return Response(self._encoder.encode(self._current()), media_type="application/json")

    async def _live(self, request: Request) -> ASGIApp:
        if self._viewers >= VIEWERS_MAX:
            return PlainTextResponse("too many look already\n", HTTPStatus.TOO_MANY_REQUESTS)
        stream = StreamingResponse(self._updates(), media_type="text/event-stream")

        async def show(scope: Scope, receive: Receive, send: Send) -> None:
            self._viewers += 1
            try:
                await stream(scope, receive, send)
            finally:
                self._viewers -= 1

        return show

    async def _updates(self) -> AsyncIterator[bytes]:
        """Yield updates until the dashboard closes.

        In each update, `curves` has the points of the plots from number `first` on, and all validations if they have
        changed. A reader must discard its points when `generation` changes. `steers` is true if a viewer with the
        page's key can pause the peer.
        """
        generation, sent, told = -1, 0, None
        while not self._closing.is_set():
            curves = self.feed.curves
            if curves.generation != generation:
                generation, sent = curves.generation, 0
            news, told = curves.validations is not told, curves.validations
            update = {
                "view": self._current(),
                "curves": {
                    "generation": generation,
                    "first": sent,
                    "points": [point_of(line) for line in curves.points[sent:]],
                    "validations": curves.validations if news else None,
                },
                "steers": self.steering.works,
            }
            sent = len(curves.points)
            yield b"data: " + self._encoder.encode(update) + b"\n\n"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._closing.wait()

    def _current(self) -> View:
        """Return the view, built once for all requests within half a period."""
        now_s = self._now_s()
        if self._view is None or now_s - self._view_at_s > PERIOD_S / 2:
            self._view, self._view_at_s = self.feed.view(now_s), now_s
        return self._view


class _Server(uvicorn.Server):
    """A uvicorn server that limits connections. It leaves signals alone: the page stays up in a drain."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = self._connections = Connections()

    async def on_tick(self, counter: int) -> bool:
        """Close overdue connections; uvicorn calls this ten times a second."""
        self._connections.look(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections except those of viewers, then shut down: uvicorn would wait until they close."""
        self._connections.end_all_but_viewers()
        await asyncio.sleep(0)  # lets the aborts take effect
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class DashboardServer:
    """Serves a `Dashboard` on a socket, from `start` to `close`."""

    def __init__(self, dashboard: Dashboard, address: Address) -> None:
        self._dashboard, self._address = dashboard, address
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port in use. It differs from the wanted port if another program had taken the wanted one."""
        assert self._socket is not None, "not started"
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        return self._address.url(port=self.port)

    async def start(self, *, first_port: int = 0) -> None:
        """Start serving. Args: first_port: the port of the last start, to try first; 0: none.

        Raises: LocalError: the address is not this machine's.
        """
        self._socket = self._address.bind(first=first_port)
        config = uvicorn.Config(
            self._dashboard.app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # otherwise strangers could fill the peer's log with broken requests
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=8 * CONNECTIONS_MAX,  # requests of closed connections may still be running
            backlog=BACKLOG,  # uvicorn's default of 2,048 could open as many files
            timeout_graceful_shutdown=2,
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
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the dashboard has ended: %r", error)
