"""`shoal pause` and `shoal resume`: have the device back for a while."""

from typing import Annotated, Any

import typer

from shoal.deploy.commands.options import Running, examples, running_here

Json = Annotated[bool, typer.Option("--json", help="Say how it is now as JSON.")]


@examples(
    "shoal pause  # the device is free within a second; the peer stays in the swarm",
    "shoal resume  # and works again",
)
def pause(state_dir: Running = None, json: Json = False) -> None:
    """Have the device back, until `shoal resume`."""
    from shoal.deploy.control_socket import ask

    _tell(ask(running_here(state_dir), "pause"), json)


@examples("shoal resume  # end a pause", "shoal resume --state-dir ~/second-peer  # of another peer of this machine")
def resume(state_dir: Running = None, json: Json = False) -> None:
    """End a pause; set hours still hold."""
    from shoal.deploy.control_socket import ask

    _tell(ask(running_here(state_dir), "resume"), json)


def _tell(answer: dict[str, Any], json: bool) -> None:
    if json:
        import msgspec

        typer.echo(msgspec.json.encode(answer).decode())
    elif answer["paused"]:
        typer.echo(f"paused: {'; '.join(answer['reasons'])}")
    else:
        typer.echo("computing")
