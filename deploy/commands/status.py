"""`shoal status`: shows a run as its peers report it."""

from typing import Annotated

import typer

from shoal.deploy.commands.options import RunsInvite, Verbose, examples, start_logging
from shoal.deploy.commands.running import given_invite, running_invite
from shoal.deploy.terminal.plain import say_json
from shoal.deploy.terminal.screen import open_console


@examples(
    "shoal status  # the run that is up on this machine",
    "shoal status --watch  # until Ctrl-C, with curves and what changed",
    "shoal status shoal1…  # any run, with its invite, without taking part",
    "shoal status --json  # everything, for a script",
)
def status(
    invite: RunsInvite = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep asking, and show each answer, until Ctrl-C.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON; with --watch, a line for each answer.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Show the peers, their layers, speed and loss."""
    found = given_invite(invite) if invite else running_invite("status")
    start_logging(verbose)
    from shoal.deploy.visitor import status as visitor
    from shoal.protocol.live.loop import run

    console = open_console()
    if watch:
        run(visitor.watch(found, console, as_json=json))
        return
    seen = run(visitor.ask_swarm(found))
    if json:
        say_json(seen)
        return
    visitor.show(seen, console)
