"""Plain lines for a person, from commands that draw nothing."""

import typer

from shoal.deploy.words import printable


def say(text: str, *, err: bool = False) -> None:
    """Print lines. What they name may be another peer's or a file's: their control characters are gone.

    Args: err: to standard error.
    """
    typer.echo("\n".join(printable(line) for line in text.split("\n")), err=err)
