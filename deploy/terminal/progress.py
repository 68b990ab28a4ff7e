"""Shows a bar with the time left during long work, on standard error if it is a terminal."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class PhaseBar:
    """A progress bar. To move it, call it with the share of the work done, in [0, 1]; 0: unknown. Thread-safe."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress, self._task = progress, progress.add_task(what, total=None)

    def __call__(self, share: float) -> None:
        if share > 0:
            self._progress.update(self._task, completed=share, total=1.0)

    def begin(self, what: str) -> None:
        """Begin the next phase of the work."""
        self._progress.reset(self._task, description=what, total=None)


@contextlib.contextmanager
def sign_of_life(what: str, *, console: Console | None = None) -> Iterator[None]:
    """Show a spinner inside the context, for work of unknown length."""
    console = console or Console(stderr=True, highlight=False, emoji=False)
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def progress_bar(what: str, *, console: Console | None = None, hides: bool = False) -> Iterator[PhaseBar]:
    """Show a progress bar inside the context, with the label `what` (a word or two). Args: hides: show nothing."""
    console = console or Console(stderr=True, highlight=False, emoji=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=hides or not console.is_terminal) as progress:
        yield PhaseBar(progress, what)
