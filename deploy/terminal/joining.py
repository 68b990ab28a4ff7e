"""Reports a peer's progress in joining and fetching its state; draws it as a line before the view opens."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, RenderableType

from shoal.deploy.record.report import Phase, write_report
from shoal.deploy.terminal.panel import phase_row
from shoal.deploy.terminal.screen import Screen
from shoal.peer.handoff.fetcher import FetchProgress

_USUAL_S = {
    "starting the network": 2.0,
    "looking for the run": 3.0,
    "reading the text": 2.0,
    "measuring this machine": 4.0,
}
"""The duration of each phase on an idle machine with two cores and responsive peers; only the bar depends on it."""


def expected(name: str, spent_s: float) -> Phase:
    """Return the progress `spent_s` seconds into the phase `name`; an overlong phase stops the bar at its end."""
    names = list(_USUAL_S)
    index = names.index(name)
    before_s = sum(_USUAL_S[other] for other in names[:index])
    here_s = min(spent_s, _USUAL_S[name])
    total_s = sum(_USUAL_S.values())
    return Phase(name=name, part=(before_s + here_s) / total_s, left_s=total_s - before_s - here_s)


class FetchWatch:
    """Estimates the remaining time of a state fetch from its pace so far."""

    def __init__(self) -> None:
        self._progress: FetchProgress | None = None
        self._began_s = 0.0

    def look(self, progress: FetchProgress | None, now_s: float) -> Phase | None:
        """Return new progress to report, or None. A phase without `part` means that the fetch is over."""
        if progress is not self._progress:
            over = progress is None
            self._progress, self._began_s = progress, now_s
            if over:
                return Phase(name="catching up")
        if progress is None:
            return None
        part = progress.done / progress.total if progress.total else 0.0
        left_s = (now_s - self._began_s) * (1.0 - part) / part if part > 0.0 else None
        return Phase(name=f"fetching {progress.what}", part=part, left_s=left_s)


class JoiningView:
    """One line that is redrawn while a peer joins. `tell` begins the next phase; `close` erases the line."""

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
        """Erase the line. Safe to call twice."""
        self._screen.close()

    def tell(self, name: str) -> None:
        self._name, self._since_s, self._part = name, self._now_s(), 0.0
        if self._reports:
            write_report(expected(name, 0.0))
        else:
            self._screen.draw(self._row, frames_per_s=4.0, stays=False)

    def reached(self, part: float) -> None:
        """Set the done share of this phase; from then on the bar shows this phase alone. Thread-safe."""
        self._part = part

    def now(self) -> Phase:
        """Return the present progress."""
        spent_s, part = self._now_s() - self._since_s, self._part
        if part <= 0:
            return expected(self._name, spent_s)
        return Phase(name=self._name, part=part, left_s=spent_s * (1 - part) / part)

    def _row(self) -> RenderableType:
        return phase_row(self.now())
