"""Registers the subcommands of `shoal`, which are functions in `commands/`, and maps their errors to exit codes.

Heavy imports are deferred: `shoal status`, `--version` and the parent of `shoal demo` never import torch.
"""

import asyncio
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from shoal.deploy.commands.config import check, path, set_, show, unset
from shoal.deploy.commands.demo import demo
from shoal.deploy.commands.doctor import doctor
from shoal.deploy.commands.eval_ import eval_
from shoal.deploy.commands.export import export
from shoal.deploy.commands.generate import generate
from shoal.deploy.commands.import_ import import_
from shoal.deploy.commands.invite import exclude, invite, new, readmit, revoke
from shoal.deploy.commands.invite import list_ as list_invites
from shoal.deploy.commands.leave import leave, pause, resume
from shoal.deploy.commands.options import EXIT_INTERRUPTED, EXIT_USER_ERROR, examples_of
from shoal.deploy.commands.plan import plan
from shoal.deploy.commands.recover import recover
from shoal.deploy.commands.report import report
from shoal.deploy.commands.runs import list_, remove
from shoal.deploy.commands.service import install, show_, uninstall
from shoal.deploy.commands.simulate import simulate
from shoal.deploy.commands.status import status
from shoal.deploy.commands.take_part import continue_, host, join
from shoal.deploy.commands.tokenizer import train
from shoal.deploy.dashboard.address import with_default
from shoal.deploy.terminal.plain import say
from shoal.protocol.errors import ShoalError


class _Group(TyperGroup):
    """The group of shoal's subcommands. If one fails for a known reason, prints one line and no traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except ShoalError as error:
            say(f"shoal: {error}", err=True)
            raise typer.Exit(EXIT_USER_ERROR) from error
        except UnicodeEncodeError as error:  # a path on the command line; all our output is UTF-8
            say(f"shoal: {error.object[:200]!r} is not UTF-8: name a path that is", err=True)
            raise typer.Exit(EXIT_USER_ERROR) from error
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


class _Command(TyperCommand):
    """A command that accepts `--dashboard` without a value, which typer cannot express."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_default(args))


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Strangers lend spare GPUs to one training run.",
    epilog="""\b
Begin with:
  # a swarm of six peers on this machine
  shoal demo
  # a run of your own, and an invite to it
  shoal host run.toml
  # take part in somebody's
  shoal join shoal1…""",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {importlib.metadata.version('shoal')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


def _add(group: typer.Typer, *commands: Callable[..., Any], name: str | None = None) -> None:
    for command in commands:
        group.command(name, cls=_Command, epilog=examples_of(command))(command)


_add(app, demo, host, join, exclude, readmit, leave, pause, resume, doctor, status, plan, simulate, recover, report)
_add(app, export, generate)
_add(app, continue_, name="continue")
_add(app, eval_, name="eval")
_add(app, import_, name="import")

config = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Show or change how much this machine gives, and when."
)
_add(config, show, unset, check, path)
_add(config, set_, name="set")
app.add_typer(config, name="config")

runs = typer.Typer(rich_markup_mode=None, help="List or delete the runs that this machine took part in.")
runs.callback(invoke_without_command=True, epilog=examples_of(list_))(list_)
_add(runs, remove)
app.add_typer(runs, name="runs")

invites = typer.Typer(rich_markup_mode=None, help="Print, make, list and revoke invites to the run that is up here.")
invites.callback(invoke_without_command=True, epilog=examples_of(invite))(invite)
_add(invites, new, revoke)
_add(invites, list_invites, name="list")
app.add_typer(invites, name="invite")

service = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Run a peer that starts with this user's services."
)
_add(service, install, uninstall)
_add(service, show_, name="show")
app.add_typer(service, name="service")

tokenizer = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make a vocabulary for a run's text.")
_add(tokenizer, train)
app.add_typer(tokenizer, name="tokenizer")


def run(command: Callable[..., object]) -> None:
    """Run a command. If a background thread still works at the end, exit without Python's teardown: that thread may be
    compiling the kernels of the layout search, and LLVM crashes if its memory is freed meanwhile."""
    try:
        command(prog_name="shoal")
    except SystemExit as end:
        background = sys.modules.get("shoal.deploy.session.background")  # most commands never import it
        if background is not None and background.is_working():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


if __name__ == "__main__":
    run(app)
