"""`shoal status --watch`: asks again and again, and shows what it hears until Ctrl-C."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from shoal.deploy.dashboard.feed import Feed, RunFacts
from shoal.deploy.dashboard.terminal import render_view
from shoal.deploy.live_view import step_line
from shoal.deploy.report import Status
from shoal.deploy.status_client import asking
from shoal.protocol.errors import LocalError
from shoal.protocol.invite import Invite
from shoal.protocol.messages import SwarmStatus

PERIOD_S = 1.0
PEERS_PER_SECOND = 20
"""In a larger swarm it asks more rarely: the answer is long."""
_FRAMES_PER_S = 2.0

Ask = Callable[[], Awaitable[SwarmStatus]]


class Watch:
    """What has been heard so far, and how it is shown: a view where the terminal can be redrawn, else lines."""

    def __init__(self, first: SwarmStatus, console: Console, *, as_json: bool) -> None:
        layers = max((last for _, last in first.stages), default=1)
        facts = RunFacts(name=first.name, steps=first.steps, num_layers=layers)
        self._feed = Feed(facts, title="", wall_minus_clock_s=time.time() - time.monotonic())
        self._console, self._as_json = console, as_json
        self._redraws = console.is_terminal and not as_json
        self._seen = first
        self._trouble = ""
        self.take(first)

    def take(self, status: SwarmStatus) -> None:
        self._seen, self._trouble = status, ""
        self._feed.take(Status(status=status), time.monotonic())
        if self._as_json:
            self._console.out(msgspec.json.encode(status).decode(), highlight=False)
        elif not self._redraws:
            self._console.print(step_line(status), markup=False, soft_wrap=True)

    async def run(self, ask: Ask) -> None:
        """Until it is cancelled; who does not answer now may answer later."""
        live = Live(get_renderable=self._draw, console=self._console, refresh_per_second=_FRAMES_PER_S)
        with live if self._redraws else contextlib.nullcontext():
            while True:
                await asyncio.sleep(max(PERIOD_S, len(self._seen.peers) / PEERS_PER_SECOND))
                try:
                    self.take(await ask())
                except LocalError as error:
                    self._trouble = str(error)

    def _draw(self) -> RenderableType:
        shown = render_view(self._feed.view(time.monotonic()), self._seen, self._feed.curves)
        return Group(shown, Text(f"no answer now: {self._trouble}", style="red")) if self._trouble else shown


async def watch(invite: Invite, console: Console, *, as_json: bool) -> None:
    """Raises: LocalError: nobody answers at first."""
    async with asking(invite) as ask:
        await Watch(await ask(), console, as_json=as_json).run(ask)
