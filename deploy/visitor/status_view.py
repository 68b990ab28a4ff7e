"""Shows a run to a person (`shoal status`), once or repeatedly until Ctrl-C."""

import asyncio

import msgspec
from rich.console import Console
from rich.text import Text

from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.record.report import Status
from shoal.deploy.terminal.presenter import Presenter
from shoal.deploy.visitor.status_client import Ask, asking
from shoal.protocol.errors import LocalError
from shoal.protocol.invite import Invite
from shoal.protocol.messages import SwarmStatus

PERIOD_S = 1.0
PEERS_PER_SECOND = 20
"""A larger swarm is asked more rarely, because its answer is longer."""


def show(status: SwarmStatus, console: Console) -> None:
    """Print a status once."""
    presenter = Presenter(RunFacts.of_status(status), console=console)
    presenter.take(Status(status=status))
    presenter.show_once()


async def watch(invite: Invite, console: Console, *, as_json: bool) -> None:
    """Ask and show until Ctrl-C. Raises: LocalError: the first request gets no answer."""
    async with asking(invite) as ask:
        await Watch(await ask(), console, as_json=as_json).run(ask)


class Watch:
    """Shows each answer: in the panel, as a line where no panel can be drawn, or as JSON for a script."""

    def __init__(self, first: SwarmStatus, console: Console, *, as_json: bool) -> None:
        self._console, self._as_json = console, as_json
        self._presenter = Presenter(RunFacts.of_status(first), console=console, counts_up=False)
        self._seen = first
        self.take(first)

    def take(self, status: SwarmStatus) -> None:
        self._seen = status
        if self._as_json:
            self._console.out(msgspec.json.encode(status).decode(), highlight=False)
            return
        self._presenter.footer = []
        self._presenter.take(Status(status=status))
        self._presenter.tell_status(again=True)

    async def run(self, ask: Ask) -> None:
        """Ask until cancelled, whether or not the run answers."""
        if not self._as_json:
            self._presenter.draw()
        try:
            while True:
                await asyncio.sleep(max(PERIOD_S, len(self._seen.peers) / PEERS_PER_SECOND))
                try:
                    self.take(await ask())
                except LocalError as error:
                    self._presenter.footer = [Text(f"no answer now: {error}", style="red")]
        finally:
            self._presenter.close()
