"""How far a peer is with joining, and with fetching its state: as reports, and as the line that a newcomer sees before
there is a view of the run."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, RenderableType

from shoal.deploy.report import Phase, write_report
from shoal.deploy.terminal.panel import phase_row
from shoal.deploy.terminal.screen import Screen
from shoal.peer.handoff.fetcher import FetchProgress

_FRAMES_PER_S = 4.0
_USUAL_S = {
    "starting the network": 2.0,
    "looking for the run": 3.0,
    "reading the text": 2.0,
    "measuring this machine": 4.0,
}
"""How long each phase takes on an idle machine of two cores, with peers that answer. Only the bar follows from it."""


def expected(name: str, spent_s: float) -> Phase:
    """How far joining has come, `spent_s` after it began with the phase `name`; a phase that lasts holds the bar up."""
    names = list(_USUAL_S)
    index = names.index(name)
    before_s = sum(_USUAL_S[other] for other in names[:index])
    here_s = min(spent_s, _USUAL_S[name])
    total_s = sum(_USUAL_S.values())
    return Phase(name=name, part=(before_s + here_s) / total_s, left_s=total_s - before_s - here_s)


class FetchWatch:
    """How long a fetch of state still takes, by its pace so far."""

    def __init__(self) -> None:
        self._progress: FetchProgress | None = None
        self._began_s = 0.0

    def look(self, progress: FetchProgress | None, now_s: float) -> Phase | None:
        """What to say now. None: there is nothing new. A phase without a part says that the fetch is over."""
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
