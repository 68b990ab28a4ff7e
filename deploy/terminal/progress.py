"""Shows a bar with the time left on standard error during long work, if that is a terminal."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class PhaseBar:
    """A bar that takes the done share, in [0, 1]; 0 means unknown. Thread-safe. Args: progress: None: draws nothing."""

    def __init__(self, progress: Progress | None, what: str) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(what, total=None)

    def __call__(self, share: float) -> None:
        if self._progress is not None and self._task is not None and share > 0:
            self._progress.update(self._task, completed=share, total=1.0)

    def begin(self, what: str) -> None:
        """Begin the next phase of the work."""
        if self._progress is not None and self._task is not None:
            self._progress.reset(self._task, description=what, total=None)


@contextlib.contextmanager
def sign_of_life(what: str, *, console: Console | None = None) -> Iterator[None]:
    """Show a spinner inside the context, for work of unknown length."""
    console = console or Console(stderr=True, highlight=False, emoji=False)
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def progress_bar(what: str, *, console: Console | None = None) -> Iterator[PhaseBar]:
    """Show a bar inside the context, labelled `what`, a word or two."""
    console = console or Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal:
        yield PhaseBar(None, what)
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
        yield PhaseBar(progress, what)
