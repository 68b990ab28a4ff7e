"""One bar with the time left, on standard error, for what takes long; nothing where nobody looks at it."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

OnShare = Callable[[float], None]
"""Told which share is done, in [0, 1]; 0 while nobody knows."""


@contextlib.contextmanager
def sign_of_life(what: str, *, console: Console | None = None) -> Iterator[None]:
    """While this lasts: for seconds of which nobody can say how many are left."""
    console = console or Console(stderr=True, highlight=False)
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def progress_bar(what: str, *, console: Console | None = None) -> Iterator[OnShare]:
    """While this lasts. `what` is a word or two in front of it."""
    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda share: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)

        def tell(share: float) -> None:
            if share > 0:
                progress.update(task, completed=share, total=1.0)

        yield tell
