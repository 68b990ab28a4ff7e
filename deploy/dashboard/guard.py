"""Keeps pages of other sites from reading, framing or impersonating the dashboard, and lets the owner pause the peer.

A page's requests come from the user's browser, so listening on loopback alone does not protect. Three checks do:
- **Host** must be an address, `localhost`, or the name that the user has given. A site that points its own name at
127.0.0.1 (DNS rebinding) still sends its own name here.
- **Origin**, where there is one, must be the Host. No CORS header is ever sent.
- **Sec-Fetch-Site** of another site is allowed only for a link that the user follows.

The page is read-only except for two actions of the key's holder; any other method is refused. The key is in the address
that the peer prints, after the `#`, which browsers never send. The page keeps it for its tab and sends it in a header,
which a page of another site cannot set.
"""

import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.deploy.dashboard.address import is_ip

PATHS = frozenset({"/pause", "/resume"})
KEY_HEADER = "x-shoal-key"

Act = Callable[[], Awaitable[Mapping[str, Any]]]
"""A function that pauses or resumes, and returns the new state."""
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}


class Guard:
    """ASGI middleware for the checks of Host, Origin and Sec-Fetch-Site. Args: names: additional hosts to accept."""

    def __init__(self, app: ASGIApp, *, names: Sequence[str] = ()) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names) | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn is told to speak nothing else"
        complaint = self.complaint(Headers(scope=scope), scope["method"], scope["path"])

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if complaint:
            response = PlainTextResponse(complaint + "\n", status_code=HTTPStatus.FORBIDDEN)
            await response(scope, receive, send_guarded)
        else:
            await self._app(scope, receive, send_guarded)

    def complaint(self, headers: Headers, method: str, path: str) -> str:
        """Return why a request is refused; empty if it is allowed."""
        if method not in ("GET", "HEAD") and not (method == "POST" and path in PATHS):
            return "the dashboard only shows"
        host = headers.get("host", "")
        if not self._is_ours(host):
            return "this name is not the dashboard's: open it by its address"
        if any(_netloc(origin) != host.lower() for origin in headers.getlist("origin")):
            return "a page of another site may not read the dashboard"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return "a page of another site may not use the dashboard"
        return ""

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._names or is_ip(name)


def _netloc(origin: str) -> str:
    """Return the host and port in an `Origin` header. Empty, which equals no host: the header names none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


@dataclass(slots=True)
class Steering:
    """The page's actions on a peer, pause and resume: refused until `hand` is called, which a demo never does."""

    key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    _acts: dict[str, Act] = field(default_factory=dict)

    def hand(self, *, pause: Act, resume: Act) -> None:
        """Set the functions that the page's two actions call."""
        self._acts = {"/pause": pause, "/resume": resume}

    @property
    def works(self) -> bool:
        return bool(self._acts)

    @property
    def routes(self) -> list[Route]:
        return [Route(path, self._act, methods=["POST"]) for path in sorted(PATHS)]

    async def _act(self, request: Request) -> Response:
        given = request.headers.get(KEY_HEADER, "")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            return PlainTextResponse("open the address that the peer has printed, with its key\n", HTTPStatus.FORBIDDEN)
        act = self._acts.get(request.url.path)
        if act is None:
            return PlainTextResponse("there is no peer here to pause\n", HTTPStatus.CONFLICT)
        return JSONResponse(dict(await act()))
