"""Shows a bar with the time left on standard error during long work, if that is a terminal."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

OnShare = Callable[[float], None]
"""Takes the done share, in [0, 1]; 0 means unknown."""


@contextlib.contextmanager
def sign_of_life(what: str, *, console: Console | None = None) -> Iterator[None]:
    """Show a spinner inside the context, for work of unknown length."""
    console = console or Console(stderr=True, highlight=False, emoji=False)
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def progress_bar(what: str, *, console: Console | None = None) -> Iterator[OnShare]:
    """Show a bar inside the context, labelled `what`, a word or two."""
    console = console or Console(stderr=True, highlight=False, emoji=False)
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
