"""Joining, as a person sees it: what is being done now, how much of it is done, and how long it will take still."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from shoal.deploy.report import Phase, write_report
from shoal.peer.handoff.fetcher import FetchProgress

_USUAL_S = {
    "starting the network": 2.0,
    "looking for the run": 3.0,
    "reading the text": 2.0,
    "measuring this machine": 4.0,
}
"""On an idle machine of two cores, with peers that answer; for the bar alone."""
_FRAMES_PER_S = 4.0


def expected(name: str, spent_s: float) -> Phase:
    """How far joining has come, `spent_s` after it began with the phase `name`; a phase that lasts holds the bar up."""
    names = list(_USUAL_S)
    index = names.index(name)
    before_s = sum(_USUAL_S[other] for other in names[:index])
    here_s = min(spent_s, _USUAL_S[name])
    total_s = sum(_USUAL_S.values())
    return Phase(name=name, part=(before_s + here_s) / total_s, left_s=total_s - before_s - here_s)


def phase_row(phase: Phase) -> RenderableType:
    """One line: what, a bar, the time left."""
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    left = "" if phase.left_s is None else f"{phase.left_s:.0f} s left"
    row.add_row(phase.name, ProgressBar(total=1.0, completed=phase.part or 0.0), left)
    return row


class JoiningView:
    """Until the run's own view can take over. `tell` begins the next phase; closing leaves nothing on the terminal."""

    def __init__(
        self, *, reports: bool, console: Console | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._reports, self._now_s = reports, now_s
        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._name, self._since_s, self._part = "", now_s(), 0.0

    def __enter__(self) -> "JoiningView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Again does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def tell(self, name: str) -> None:
        self._name, self._since_s, self._part = name, self._now_s(), 0.0
        if self._reports:
            write_report(expected(name, 0.0))
        elif self._console.is_terminal and self._live is None:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=_FRAMES_PER_S,
                transient=True,
            )
            self._live.start()

    def reached(self, part: float) -> None:
        """The share of this phase that is done; from then on the bar is of this phase alone. Any thread may say so."""
        self._part = part

    def now(self) -> Phase:
        """What to show."""
        spent_s, part = self._now_s() - self._since_s, self._part
        if part <= 0:
            return expected(self._name, spent_s)
        return Phase(name=self._name, part=part, left_s=spent_s * (1 - part) / part)

    def _render(self) -> RenderableType:
        return phase_row(self.now())


class FetchWatch:
    """How long a fetch of state will take still, by its pace so far."""

    def __init__(self) -> None:
        self._progress: FetchProgress | None = None
        self._began_s = 0.0

    def look(self, progress: FetchProgress | None, now_s: float) -> Phase | None:
        """What to say now; None: nothing new. A phase without a part says that the fetch is over."""
        if progress is not self._progress:
            over = progress is None
            self._progress, self._began_s = progress, now_s
            if over:
                return Phase(name="catching up")
        if progress is None:
            return None
        part = progress.done / progress.total if progress.total else 0.0
        left_s = (now_s - self._began_s) * (1.0 - part) / part if part > 0.0 else None
        return Phase(name="fetching state", part=part, left_s=left_s)
