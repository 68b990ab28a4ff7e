"""Lets the owner of a peer do two things on the page: pause the peer, and resume it.

Who may is whoever has the key: it stands in the address that the peer prints, behind the `#`, which a browser sends to
nobody. The page keeps it for its tab and shows it in a header, which no page of another site can set here. So others
who reach the address, on this machine or elsewhere, read and no more.
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
_KEY_BYTES = 16

Act = Callable[[], Awaitable[Mapping[str, Any]]]
"""A function that pauses or resumes, and says how it is now."""


@dataclass(slots=True)
class Steering:
    """The steering of one peer. It declines until there is something to steer, and always in a demo."""

    key: str = field(default_factory=lambda: secrets.token_urlsafe(_KEY_BYTES))
    _acts: dict[str, Act] = field(default_factory=dict)

    def hand(self, *, pause: Act, resume: Act) -> None:
        """The page's two actions call these functions from now on."""
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
