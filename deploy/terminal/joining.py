"""What a newcomer sees before there is a view of the run: what is being done, how far it is, and the time left."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, RenderableType

from shoal.deploy.report import Phase, write_report
from shoal.deploy.session.phases import expected
from shoal.deploy.terminal.panel import phase_row
from shoal.deploy.terminal.screen import Screen

_FRAMES_PER_S = 4.0


class JoiningView:
    """One line that is redrawn while a peer joins. `tell` begins the next phase; closing wipes the line away."""

    def __init__(
        self, *, reports: bool, console: Console | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._reports, self._now_s = reports, now_s
        self._screen = Screen(console)
        self._name, self._since_s, self._part = "", now_s(), 0.0

    def __enter__(self) -> "JoiningView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """A second call does nothing."""
        self._screen.close()

    def tell(self, name: str) -> None:
        self._name, self._since_s, self._part = name, self._now_s(), 0.0
        if self._reports:
            write_report(expected(name, 0.0))
        else:
            self._screen.draw(self._row, frames_per_s=_FRAMES_PER_S, stays=False)

    def reached(self, part: float) -> None:
        """The share of this phase that is done. From then on the bar is of this phase alone. Any thread may call it."""
        self._part = part

    def now(self) -> Phase:
        """What to show."""
        spent_s, part = self._now_s() - self._since_s, self._part
        if part <= 0:
            return expected(self._name, spent_s)
        return Phase(name=self._name, part=part, left_s=spent_s * (1 - part) / part)

    def _row(self) -> RenderableType:
        return phase_row(self.now())
