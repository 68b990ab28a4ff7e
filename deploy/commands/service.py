"""`shoal service`: a peer that starts with this user."""

from typing import Annotated

import typer

from shoal.deploy.commands.options import DEFAULT_LISTEN, Device, Limit, Listen, examples
from shoal.protocol.invite import parse_invite

_Invite = Annotated[str, typer.Argument(help="What the host printed.")]
_Name = Annotated[str, typer.Option(help="What others see.")]


@examples(
    "shoal service install shoal1…  # join now, and whenever this user's services start",
    "shoal service install shoal1… --limit only_when_idle=true --limit hours=22:00-07:00  # at night, if unused",
)
def install(
    invite: _Invite,
    name: _Name = "volunteer",
    listen: Listen = DEFAULT_LISTEN,
    device: Device = "auto",
    limit: Limit = None,
) -> None:
    """Join, now and whenever this user's services start."""
    from shoal.deploy import service

    path = service.install(_arguments(invite, name, listen, device, limit))
    typer.echo(f"{path}: installed and started; `shoal status` shows it, `shoal service uninstall` ends it")


@examples("shoal service uninstall  # stop it, which drains, and remove it")
def uninstall() -> None:
    """Stop it, which drains, and remove it."""
    from shoal.deploy import service

    typer.echo(f"{service.uninstall()}: stopped and removed")


@examples("shoal service show shoal1…  # what would be written, and where")
def show_(
    invite: _Invite,
    name: _Name = "volunteer",
    listen: Listen = DEFAULT_LISTEN,
    device: Device = "auto",
    limit: Limit = None,
) -> None:
    """Print what would be written, and where."""
    from shoal.deploy import service

    shown = service.service(_arguments(invite, name, listen, device, limit))
    typer.echo(f"# {shown.path}\n{shown.text}", nl=False)


def _arguments(invite: str, name: str, listen: str, device: str, limit: list[str] | None) -> list[str]:
    """The arguments of `shoal join`. The invite is written as shoal writes it: what was pasted may have more around it.

    Raises: LocalError: what would fail at every start fails here.
    """
    from shoal.deploy.commands.addresses import listen_addresses
    from shoal.deploy.manners.limits import Limits, with_overrides

    read = parse_invite(invite).encode()
    listen_addresses(listen)
    with_overrides(Limits(), limit or [])
    limits = [word for text in limit or [] for word in ("--limit", text)]
    return [read, "--name", name, "--listen", listen, "--device", device, *limits]
