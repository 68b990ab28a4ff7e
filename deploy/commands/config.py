"""`shoal config`: shows and changes the user's settings on this machine."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal.deploy.commands.options import Json, examples
from shoal.deploy.commands.running import labelled_here
from shoal.deploy.control import control_socket
from shoal.deploy.manners.config import Settings, as_toml, config_path, in_toml, load_settings, set_one, unset_one
from shoal.deploy.terminal.plain import say, say_json, say_result
from shoal.protocol.errors import LocalError

Name = Annotated[str, typer.Argument(help="The setting's name, as `shoal config show` prints it.")]


@examples("shoal config show  # all settings, and what each means", "shoal config show --json  # for a script")
def show(json: Json = False) -> None:
    """Show all settings with their meaning."""
    settings = load_settings()
    if json:
        say_json(settings)
    else:
        say(as_toml(settings).rstrip("\n"), whole=True)


@examples("shoal config path  # where the file is, or would be")
def path() -> None:
    """Print the path of the settings file."""
    typer.echo(str(config_path()))


@examples(
    "shoal config check  # read the file, and say what is wrong with it",
    "shoal config check --json  # for a script; exit code 2 if something is",
)
def check(json: Json = False) -> None:
    """Check the settings file."""
    load_settings()
    file, exists = config_path(), config_path().exists()
    words = [f"{file}: " + ("no fault in it" if exists else "not there, so all defaults hold")]
    say_result({"path": str(file), "exists": exists}, words, as_json=json)


@examples(
    "shoal config set upload_mbit_s 5  # send at most 5 Mbit/s",
    "shoal config set hours 22:00-07:00  # compute at night",
    "shoal config set only_when_idle true  # compute while nobody uses this machine",
    "shoal config set compute_share 50%  # half of the device's time",
    "shoal config set keep_record true  # a record of each run in which this machine takes part",
)
def set_(name: Name, value: Annotated[str, typer.Argument(help="The new value.")]) -> None:
    """Change a setting. A running peer applies it at once if possible."""
    _tell(name, set_one(name, value))


@examples("shoal config unset hours  # compute at all hours again")
def unset(name: Name) -> None:
    """Remove a setting, so that its default holds again."""
    _tell(name, unset_one(name))


def _tell(name: str, settings: Settings) -> None:
    """Print the setting's new value, and when each running peer applies it."""
    say(f"{config_path()}: {name} is {in_toml(settings, name)}")
    wanted = msgspec.to_builtins(settings.limits)
    for label, note in labelled_here():
        try:
            now = control_socket.ask(Path(note.folder), "limits")["limits"]
        except LocalError as error:
            say(f"{label}: {error}", err=True)
            continue
        if name not in wanted:
            say(f"{label}: from its next start on")
        elif now.get(name) == wanted[name]:
            say(f"{label}: at once")
        else:
            say(f"{label}: from its next start on, unless --limit says otherwise then")
