"""Writes to a person's terminal: permanent lines, and one picture below them that is redrawn in place."""

from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live

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


class Screen:
    """Owns rich's console and its live display."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or open_console()
        self._live: Live | None = None

    @property
    def redraws(self) -> bool:
        """True if a picture can be redrawn in place; false in a file or pipe."""
        return self._console.is_terminal

    def draw(self, picture: Callable[[], RenderableType]) -> None:
        """Draw `picture` twice a second until `close`, which leaves the last frame; no effect if the screen does not
        redraw."""
        if self.redraws and self._live is None:
            self._live = Live(get_renderable=picture, console=self._console, refresh_per_second=2.0)
            self._live.start()

    def say(self, text: str) -> None:
        """Print one sentence above the picture, as `tell` does; line breaks, maybe another peer's, become `?`."""
        tell(self._console, printable(text))

    def show(self, drawing: RenderableType) -> None:
        self._console.print(drawing)

    def close(self) -> None:
        """Stop drawing. Safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None
