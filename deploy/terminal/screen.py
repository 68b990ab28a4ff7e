"""Writes lines to a console: a person's terminal, a file or a pipe."""

from rich.console import Console

from shoal.deploy.base.words import printable
from shoal.deploy.terminal.plain import wrapped


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console that does not narrow tables in a file or pipe."""
    console = Console(highlight=False, emoji=False, stderr=stderr, quiet=quiet)
    if not console.is_terminal:
        console.width = 10_000
    return console


def tell(console: Console, text: str, *, style: str = "") -> None:
    """Print lines without markup and control characters, wrapped on a terminal, else unbroken for copying."""
    for line in text.split("\n"):
        said = printable(line)
        for each in wrapped(said, console.width) if console.is_terminal else [said]:
            console.print(each, style=style or None, soft_wrap=True, markup=False, highlight=False)
