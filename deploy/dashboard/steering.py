"""Lets the owner pause and resume a peer from the page.

The right to do so is a key in the address that the peer prints, after the `#`, which browsers never send. The page
keeps it for its tab and sends it in a header, which a page of another site cannot set. Without the key the page is
read-only.
"""

import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

PATHS = frozenset({"/pause", "/resume"})
KEY_HEADER = "x-shoal-key"

Act = Callable[[], Awaitable[Mapping[str, Any]]]
"""A function that pauses or resumes, and returns the new state."""


@dataclass(slots=True)
class Steering:
    """The actions on one peer; refused until `hand` is called, and always in a demo."""

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
