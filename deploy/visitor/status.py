"""Asks for a run's status without taking part, and shows the status, once or until Ctrl-C (`shoal status`).

Any peer answers a `StatusRequest`; it may have to ask the coordinator.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from rich.console import Console
from rich.text import Text

from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.record.report import Status
from shoal.deploy.terminal.presenter import Presenter
from shoal.deploy.visitor.entrance import connecting
from shoal.protocol.errors import LocalError, Refused, RemoteError, Unreachable
from shoal.protocol.invite import Invite
from shoal.protocol.messages import StatusRequest, SwarmStatus

PERIOD_S = 1.0
PEERS_PER_SECOND = 20
"""A swarm of N peers is asked every N / PEERS_PER_SECOND seconds or less often, since its answer grows with N."""

Ask = Callable[[], Awaitable[SwarmStatus]]
"""A function that asks the run for its status once. Raises: LocalError: no peer can answer."""


async def ask_swarm(invite: Invite) -> SwarmStatus:
    """Ask for the status: first the peers of the run that are connected, then others that the invite names or that this
    machine has met.

    Raises: LocalError: no peer can answer; the sentence has the last reason.
    """
    async with asking(invite) as ask:
        return await ask()


@contextlib.asynccontextmanager
async def asking(invite: Invite) -> AsyncIterator[Ask]:
    """Yield a function that asks for the status. Its calls share one connection to the run's network, and first ask the
    peer that answered last."""
    async with connecting(invite) as (endpoint, transport, peers):
        connected = await transport.connected()
        peers.sort(key=lambda peer: peer not in connected)

        async def ask() -> SwarmStatus:
            reason = refusal = ""
            for peer in tuple(peers):
                try:
                    status = await endpoint.ask(peer, StatusRequest(), SwarmStatus, timeout_s=10.0)
                except Refused as error:
                    refusal = error.reason
                except (Unreachable, RemoteError) as error:
                    reason = str(error)
                else:
                    peers.sort(key=lambda other: other != peer)
                    return status
            if refusal:
                raise LocalError(f"run {invite.run} is up and has no status yet: {refusal}")
            raise LocalError(
                f"no status of run {invite.run}: {reason or 'no address is known'}; "
                "`shoal doctor` with its invite says why"
            )

        yield ask


# --- for a person ---


def show(status: SwarmStatus, console: Console) -> None:
    """Print a status once."""
    presenter = Presenter(RunFacts.of_status(status), console=console)
    presenter.take(Status(status=status))
    presenter.show_once()


async def watch(invite: Invite, console: Console, *, as_json: bool) -> None:
    """Ask for the status and show it until Ctrl-C. Raises: LocalError: the first request gets no answer."""
    async with asking(invite) as ask:
        await Watch(await ask(), console, as_json=as_json).run(ask)


class Watch:
    """Shows each status: as a panel, as a line if the console cannot redraw, or as JSON for a script."""

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
        """Ask for the status until cancelled, even if the run does not answer."""
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
