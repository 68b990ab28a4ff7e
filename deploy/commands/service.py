"""`shoal service`: installs a peer that starts with this user's services."""

from typing import Annotated

import typer

from shoal.deploy.commands import service_unit as service
from shoal.deploy.commands.addresses import listen_addresses
from shoal.deploy.commands.options import DEFAULT_LISTEN, Device, Limit, Listen, PeerName, examples
from shoal.deploy.commands.running import given_invite
from shoal.deploy.manners.config import load_settings
from shoal.deploy.manners.limits import Limits, with_overrides
from shoal.deploy.terminal.plain import say


@examples(
    "shoal service install shoal1…  # join now, and whenever this user's services start",
    "shoal service install -  # paste the invite then: other users of this machine can read a command line",
    "shoal service install shoal1… --limit only_when_idle=true --limit hours=22:00-07:00  # at night, if unused",
)
def install(
    invite: Annotated[str, typer.Argument(help="The invite that the host printed; - reads it from standard input.")],
    name: PeerName = "volunteer",
    listen: Listen = DEFAULT_LISTEN,
    device: Device = "auto",
    limit: Limit = None,
) -> None:
    """Join now and whenever this user's services start."""
    read = given_invite(invite).encode()  # without any text pasted around it
    arguments = _arguments(name, listen, device, limit)
    path, has_own_view = service.install(read, arguments, watches=_watches(limit))
    say(f"{path}: installed and started; `shoal status` shows it, `shoal service uninstall` ends it")
    if not has_own_view:
        say("this system cannot isolate a user's service: it can read and write all files that you can")


@examples("shoal service uninstall  # stop it, which drains, and remove it")
def uninstall() -> None:
    """Stop the service, which drains the peer, and remove it."""
    say(f"{service.uninstall()}: stopped and removed")


@examples("shoal service show  # what `install` would write, and where")
def show_(
    name: PeerName = "volunteer", listen: Listen = DEFAULT_LISTEN, device: Device = "auto", limit: Limit = None
) -> None:
    """Print the files of `install`. The invite has its own."""
    shown = service.service(_arguments(name, listen, device, limit), watches=_watches(limit))
    say(f"# {shown.path}; the invite: {shown.invite}")
    say(shown.text.rstrip("\n"), whole=True)


def _watches(limit: list[str] | None) -> bool:
    """True if these limits make the peer watch keyboard and mouse."""
    return with_overrides(load_settings().limits, limit or []).only_when_idle


def _arguments(name: str, listen: str, device: str, limit: list[str] | None) -> list[str]:
    """Return the arguments of `shoal join`, without the invite.

    Raises: LocalError: an argument is invalid and would fail at every start.
    """
    listen_addresses(listen)
    with_overrides(Limits(), limit or [])
    limits = [word for text in limit or [] for word in ("--limit", text)]
    return ["--name", name, "--listen", listen, "--device", device, *limits]
