"""`shoal runs`: lists and removes the runs of this machine."""

import time
from typing import Annotated

import typer
from rich.text import Text

from shoal.deploy.base.words import printable
from shoal.deploy.commands.options import Json, examples
from shoal.deploy.state.runs import FoundRun, all_names, all_runs, find
from shoal.deploy.state.runs import remove as remove_runs
from shoal.deploy.terminal.plain import say, say_json, say_result
from shoal.deploy.terminal.screen import open_console


@examples(
    "shoal runs  # name, step, loss, size, and whether a peer runs there now",
    "shoal runs --json  # for a script",
    "shoal runs remove notes  # delete one",
)
def list_(context: typer.Context, json: Json = False) -> None:
    """List the runs that this machine has hosted or joined."""
    if context.invoked_subcommand is not None:
        return
    found = all_runs()
    if json:
        say_json(found)
        return
    if not found:
        say("no run has been hosted or joined on this machine")
        return
    console = open_console()
    console.print(_table(found))
    total = sum(run.size_bytes for run in found)
    if found[1:]:
        console.print(f"{len(found)} runs, {_size(total)}")


@examples(
    "shoal runs remove notes  # asks, then deletes its snapshots and its record",
    "shoal runs remove 3f0c --yes  # without a question; the first letters of its id are enough",
)
def remove(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The run's name, its id, or the first letters of its id.", autocompletion=all_names
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete a run from this machine. Other machines keep their copies."""
    found = find(run, all_runs())
    first = found[0]
    if not yes:
        where = "\n".join(f"  {one.folder}" for one in found)
        steps = f" of {first.steps}" if first.steps else ""
        say(
            f"run {first.name or '?'} ({first.run}), step {first.step}{steps}: "
            f"{_size(sum(one.size_bytes for one in found))} in\n{where}",
            err=json,
        )
        if any(one.role == "host" for one in found):
            say("The key that owns the run goes too: nobody can continue it then.", err=json)
        typer.confirm("Delete it?", abort=True, err=json)
    freed = remove_runs(found)
    told = {"run": first.run, "name": first.name, "folders": [one.folder for one in found], "bytes": freed}
    say_result(told, [f"deleted run {first.name or '?'} ({first.run}): {_size(freed)}"], as_json=json)


def _table(found: list[FoundRun]) -> object:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", overflow="ellipsis")  # only this column shrinks
    for title in ("run", "role"):
        table.add_column(title, no_wrap=True)
    for title in ("step", "loss", "size"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("last used", no_wrap=True)
    now_s = time.time()
    for run in found:
        used = "up now" if run.running else _ago(now_s - run.used_s)
        table.add_row(
            Text(printable(run.name or "?")),
            run.run[:8] or "?",
            run.role,
            f"{run.step}/{run.steps}" if run.steps else str(run.step),
            "" if run.loss is None else f"{run.loss:.3f}",
            _size(run.size_bytes),
            used + (", finished" if run.finished and not run.running else ""),
        )
    return table


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def _ago(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"
