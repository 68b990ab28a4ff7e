"""`shoal config`: the user's settings on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.deploy.commands.options import examples
from shoal.deploy.commands.running import labelled_here
from shoal.deploy.terminal.plain import say, say_json
from shoal.protocol.errors import LocalError

if TYPE_CHECKING:
    from shoal.deploy.manners.config import Settings


@examples(
    "shoal config show  # all settings, and what each means",
    "shoal config show --json  # for a script",
)
def show(json: Annotated[bool, typer.Option("--json", help="Print the settings as JSON.")] = False) -> None:
    """Show all settings with their meaning."""
    from shoal.deploy.manners.config import as_toml, load_settings

    settings = load_settings()
    if json:
        say_json(settings)
    else:
        say(as_toml(settings).rstrip("\n"), whole=True)


@examples("shoal config path  # where the file is, or would be")
def path() -> None:
    """Print the path of the settings file."""
    from shoal.deploy.manners.config import config_path

    typer.echo(str(config_path()))


@examples(
    "shoal config check  # read the file, and say what is wrong with it",
    "shoal config check --json  # for a script; exit code 2 if something is",
)
def check(json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False) -> None:
    """Check the settings file."""
    from shoal.deploy.manners.config import config_path, load_settings

    load_settings()
    if json:
        said = {"path": str(config_path()), "exists": config_path().exists()}
        say_json(said)
        return
    say(f"{config_path()}: " + ("no fault in it" if config_path().exists() else "not there, so all defaults hold"))


@examples(
    "shoal config set upload_mbit_s 5  # send at most 5 Mbit/s",
    "shoal config set hours 22:00-07:00  # compute at night",
    "shoal config set only_when_idle true  # compute while nobody uses this machine",
    "shoal config set compute_share 50%  # half of the device's time",
    "shoal config set keep_record true  # a record of each run in which this machine takes part",
)
def set_(
    name: Annotated[str, typer.Argument(help="The setting's name, as `shoal config show` prints it.")],
    value: Annotated[str, typer.Argument(help="The new value.")],
) -> None:
    """Change a setting. A running peer applies it at once if possible."""
    from shoal.deploy.manners.config import set_one

    _tell(name, set_one(name, value))


@examples("shoal config unset hours  # compute at all hours again")
def unset(name: Annotated[str, typer.Argument(help="The setting's name, as `shoal config show` prints it.")]) -> None:
    """Remove a setting, so that its default holds again."""
    from shoal.deploy.manners.config import unset_one

    _tell(name, unset_one(name))


def _tell(name: str, settings: "Settings") -> None:
    """Print the setting's new value, and when each running peer applies it."""
    import msgspec

    from shoal.deploy.control.control_socket import ask
    from shoal.deploy.manners.config import config_path, in_toml

    say(f"{config_path()}: {name} is {in_toml(settings, name)}")
    wanted = msgspec.to_builtins(settings.limits)
    for label, note in labelled_here():
        try:
            now = ask(Path(note.folder), "limits")["limits"]
        except LocalError as error:
            say(f"{label}: {error}", err=True)
            continue
        if name not in wanted:
            say(f"{label}: from its next start on")
        elif now.get(name) == wanted[name]:
            say(f"{label}: at once")
        else:
            say(f"{label}: from its next start on, unless --limit says otherwise then")
