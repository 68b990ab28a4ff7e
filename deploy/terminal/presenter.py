"""The one presenter of a run on a terminal. A peer, `shoal demo` and `shoal status --watch` tell it what they hear.

Where the terminal can be redrawn, the presenter draws a panel twice a second. Elsewhere it prints a line for each step,
for each standstill with its end, and for each risk. Both are made of the same `View` as the dashboard's page.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from rich.console import Console, RenderableType
from rich.text import Text

from shoal.deploy.dashboard.feed import Feed, RunFacts
from shoal.deploy.dashboard.view import View
from shoal.deploy.report import Note, Phase, Report, StepDone
from shoal.deploy.terminal.lines import current_risks, expert_lines, status_lines, step_line, trouble
from shoal.deploy.terminal.panel import run_panel
from shoal.deploy.terminal.screen import Screen
from shoal.deploy.terminal.tables import tables

RECOVERED_STEPS: Final = 3
"""A run goes on once it has made so many steps without standing still: one alone may be followed by another wait."""


class Presenter:
    """Args:
    title: of the panel; empty: the run's name.
    counts_up: the panel says how long this view has been up, not how old the run is.
    shows_mine: the panel says what this process's own peer gives.
    now_s: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        facts: RunFacts,
        *,
        title: str = "",
        console: Console | None = None,
        counts_up: bool = True,
        shows_mine: bool = True,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.footer: Sequence[Text] = ()
        """Sentences that stay at the bottom of the panel."""
        self.doing = ""
        """What this process does, where that says more than the phase of the run; empty: the phase is shown."""
        self._screen = Screen(console)
        self._feed = Feed(facts, title=title, wall_minus_clock_s=time.time() - now_s())
        self._now_s, self._started_s = now_s, now_s()
        self._counts_up, self._shows_mine = counts_up, shows_mine
        self._lock = threading.Lock()  # the panel is drawn from a thread of its own
        self._fetching: Phase | None = None
        self._step_told = (0, 0)
        """(era, steps done) of the last step that has a line."""
        self._trouble = ""
        """What the run stands still for, as the last line about it says; empty: the run moves."""
        self._stood_at = 0
        """The step at which it was last seen to stand still."""
        self._risks: Sequence[str] = ()

    @property
    def redraws(self) -> bool:
        return self._screen.redraws

    def draw(self) -> None:
        """Begin with the panel, if the terminal can be redrawn."""
        self._screen.draw(self.panel)

    def close(self) -> None:
        """The panel's last frame stays."""
        self._screen.close()

    def view(self) -> View:
        with self._lock:
            return self._feed.view(self._now_s())

    def panel(self) -> RenderableType:
        """The panel as it is now."""
        view = self.view()
        if self.doing:
            view = msgspec.structs.replace(view, phase=self.doing)
        if not self._shows_mine:
            view = msgspec.structs.replace(view, mine=None)
        up_s = self._now_s() - self._started_s if self._counts_up else None
        with self._lock:
            return run_panel(view, self._feed.curves, up_s=up_s, fetching=self._fetching, footer=self.footer)

    # --- what comes ---

    def take(self, report: Report) -> None:
        """The panel and the later lines know it from now on; nothing is printed."""
        if isinstance(report, Phase):
            self._fetching = report if report.part is not None else None
        with self._lock:
            self._feed.take(report, self._now_s())

    def note(self, text: str) -> None:
        """A sentence about what happened: a change in the panel, or a line."""
        self.take(Note(text=text))
        if not self.redraws:
            self.say(text)

    # --- what is printed ---

    def say(self, text: str) -> None:
        """One line that stays on the terminal, above the panel if there is one."""
        self._screen.say(text)

    def tell_step(self, step: StepDone) -> None:
        """A line for `step`, where nothing is redrawn."""
        if not self.redraws:
            self.say(step_line(self.view(), step))

    def tell_status(self, *, again: bool = False) -> None:
        """Where nothing is redrawn: a line if there is a new step, and lines for what has begun or ended since.

        Args: again: a line for the step in any case.
        """
        if self.redraws:
            return
        view = self.view()
        if again or (view.step and (view.era, view.step) > self._step_told):
            self._step_told = view.era, view.step
            self.say(step_line(view))
        self._tell_trouble(view)

    def show_once(self) -> None:
        """The head and the tables, for who looks once."""
        view = self.view()
        for line in status_lines(view):
            self.say(line)
        for table in tables(view):
            self._screen.show(table)

    def tell_experts(self) -> None:
        """Where nothing is redrawn: a line for each stage that has experts."""
        if not self.redraws:
            for line in expert_lines(self.view()):
                self.say(line)

    def _tell_trouble(self, view: View) -> None:
        now = trouble(view)
        if now:
            self._stood_at = view.step
            if now != self._trouble:
                self.say(f"{view.standstill}: {view.phase}")
        elif self._trouble and not _has_recovered(view, self._stood_at):
            now = self._trouble
        elif self._trouble:
            self.say("the run goes on")
        risks = current_risks(view)
        for risk in risks if risks != self._risks else ():
            self.say(risk)
        self._trouble, self._risks = now, risks


def _has_recovered(view: View, stood_at: int) -> bool:
    """Whether the run has made enough steps since it stood at step `stood_at`, so that the next slow one is news."""
    return view.step >= min(stood_at + RECOVERED_STEPS, view.steps) or view.step < stood_at
