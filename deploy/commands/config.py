"""`shoal config`: what this user has set on this machine."""

from typing import Annotated

import typer

from shoal.deploy.commands.options import examples


@examples(
    "shoal config show  # all settings, and what each means",
    "shoal config show --json  # for a script",
)
def show(json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Show all settings, and what each means."""
    import msgspec

    from shoal.deploy.config import as_toml, load_settings

    settings = load_settings()
    typer.echo(msgspec.json.encode(settings).decode() if json else as_toml(settings), nl=json)


@examples("shoal config path  # where the file is, or would be")
def path() -> None:
    """Say where the file is, or would be."""
    from shoal.deploy.config import config_path

    typer.echo(str(config_path()))


@examples(
    "shoal config check  # read the file, and say what is wrong with it",
    "shoal config check --json  # for a script; exit code 2 if something is",
)
def check(json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Say what is wrong with the file."""
    import msgspec

    from shoal.deploy.config import config_path, load_settings

    load_settings()
    if json:
        said = {"path": str(config_path()), "exists": config_path().exists()}
        typer.echo(msgspec.json.encode(said).decode())
        return
    typer.echo(
        f"{config_path()}: " + ("no fault in it" if config_path().exists() else "not there, so all defaults hold")
    )


@examples(
    "shoal config set upload_mbit_s 5  # send at most 5 Mbit/s",
    "shoal config set hours 22:00-07:00  # compute at night",
    "shoal config set only_when_idle true  # compute while nobody uses this machine",
    "shoal config set compute_share 0.5  # half of the device's time",
    "shoal config set keep_record true  # a record of each run in which this machine takes part",
)
def set_(
    name: Annotated[str, typer.Argument(help="As `shoal config show` has it.")],
    value: Annotated[str, typer.Argument(help="Its new value.")],
) -> None:
    """Change one, from the next start on."""
    from shoal.deploy.config import config_path, set_one

    set_one(name, value)
    typer.echo(f"{config_path()}: {name} is {value} from the next start on")
