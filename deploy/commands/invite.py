"""`shoal invite`: the invite of the run that is up here, with the addresses of now."""

import sys
from typing import Annotated

import typer

from shoal.deploy.commands.options import Running, examples, running_here
from shoal.protocol.limits import ADDRESSES_MAX

PEERS_NAMED = 3
"""Any of them lets a newcomer in, so that all three must be gone before an invite is worth nothing."""


@examples(
    "shoal invite  # to paste in a chat; any member's is as good as the host's",
    "shoal invite --qr  # to hold in front of a camera",
    "shoal invite --peers 1  # the shortest: only this machine's addresses",
)
def invite(
    peers: Annotated[
        int, typer.Option(min=1, max=ADDRESSES_MAX, help="How many peers to name, so that some may go.")
    ] = PEERS_NAMED,
    qr: Annotated[bool, typer.Option("--qr", help="As a QR code, too.")] = False,
    state_dir: Running = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, with the run and how many peers it names.")] = False,
) -> None:
    """Print an invite to the run that is up here."""
    from shoal.deploy.control_socket import ask

    answer = ask(running_here(state_dir), "invite", peers=peers)
    if json:
        import msgspec

        typer.echo(msgspec.json.encode(answer).decode())
    else:
        typer.echo(answer["invite"])
    if qr:
        stream = sys.stderr if json else sys.stdout
        typer.echo(qr_code(str(answer["invite"]), coloured=stream.isatty()), file=stream, color=True)


def qr_code(text: str, *, coloured: bool) -> str:
    """`text` in half blocks, the light ones drawn. `coloured`: light on dark whatever the terminal's own colours are,
    since a camera may not read the negative.
    """
    import io

    import segno

    drawn = io.StringIO()
    segno.make(text, error="l", micro=False).terminal(drawn, compact=True)
    lines = drawn.getvalue().splitlines()
    return "\n".join(f"\x1b[97;40m{line}\x1b[0m" if coloured else line for line in lines)
