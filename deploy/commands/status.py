"""`shoal status`: the swarm as its peers report it."""

from typing import Annotated

import typer
from rich.console import Console

from shoal.deploy.commands.options import Verbose, examples, running_invite, start_logging
from shoal.protocol.invite import parse_invite


@examples(
    "shoal status  # the run that is up on this machine",
    "shoal status shoal1…  # any run, with its invite, without taking part",
    "shoal status --json  # everything, for a script",
)
def status(
    invite: Annotated[str | None, typer.Argument(help="Default: the run that was last started here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Show who holds what, how fast, and with what loss."""
    found = parse_invite(invite) if invite else running_invite()
    start_logging(verbose)
    from shoal.deploy.live_view import stage_table, status_lines
    from shoal.deploy.status_client import ask_swarm
    from shoal.protocol.live.run import run

    seen = run(ask_swarm(found))
    if json:
        import msgspec

        typer.echo(msgspec.json.encode(seen).decode())
        return
    console = Console(highlight=False)
    for line in status_lines(seen):
        console.print(line, markup=False)
    console.print(stage_table(seen))
