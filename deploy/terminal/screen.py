"""A person's terminal: lines that stay, and one picture below them that is drawn again in place."""

from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live

from shoal.deploy.terminal.plain import wrapped
from shoal.deploy.words import printable

FRAMES_PER_S = 2.0
_WIDTH_OF_A_PIPE = 10_000


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that leaves tables as wide as they are where no terminal bounds them: in a file or a pipe."""
    console = Console(highlight=False, stderr=stderr, quiet=quiet)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_PIPE
    return console


def tell(console: Console, text: str, *, style: str = "") -> None:
    """Print lines: wrapped at blanks on a terminal, unbroken anywhere else, so that they can be copied. Rich reads no
    markup in them. Control characters, which may be another peer's, are gone."""
    for line in text.split("\n"):
        said = printable(line)
        for each in wrapped(said, console.width) if console.is_terminal else [said]:
            console.print(each, style=style or None, soft_wrap=True, markup=False, highlight=False)


class Screen:
    """The only owner of rich's console and of its live display."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or open_console()
        self._live: Live | None = None

    @property
    def redraws(self) -> bool:
        """Whether a picture can be drawn again in place. In a file or a pipe there are only lines."""
        return self._console.is_terminal

    def draw(
        self, picture: Callable[[], RenderableType], *, frames_per_s: float = FRAMES_PER_S, stays: bool = True
    ) -> None:
        """Draw `picture` at this rate until `close`. A screen that does not redraw ignores this call.

        Args: stays: the last frame remains on the terminal after `close`.
        """
        if self.redraws and self._live is None:
            self._live = Live(
                get_renderable=picture, console=self._console, refresh_per_second=frames_per_s, transient=not stays
            )
            self._live.start()

    def say(self, text: str) -> None:
        """Print one sentence above the picture, as `tell` does. No peer's words begin a line of their own."""
        tell(self._console, printable(text))

    def show(self, drawing: RenderableType) -> None:
        """Print a drawing once."""
        self._console.print(drawing)

    def close(self) -> None:
        """Stop drawing. A second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
