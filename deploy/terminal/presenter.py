"""Shows a run on a terminal, for a peer, `shoal demo` and `shoal status --watch`, which pass reports to a `Presenter`.

If the terminal can be redrawn, it draws a panel twice a second. Otherwise it prints a line for each step it gets, for
each standstill and its end, and for each risk. Both use the same `View` as the dashboard's page.
"""

import threading
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from shoal.deploy.base.words import printable
from shoal.deploy.dashboard.feed import Feed, RunFacts
from shoal.deploy.dashboard.view import View
from shoal.deploy.record.report import Note, Phase, Report, StepDone
from shoal.deploy.terminal.lines import current_risks, expert_lines, status_lines, step_line, trouble
from shoal.deploy.terminal.panel import run_panel
from shoal.deploy.terminal.screen import open_console, tell
from shoal.deploy.terminal.tables import tables


class Presenter:
    """Takes reports, and draws or prints the run.

    Args:
        title: the panel's title; empty: the run's name.
        counts_up: show how long this view has been up instead of the run's age.
        shows_mine: show the contribution of this process's own peer.
    """

    def __init__(
        self,
        facts: RunFacts,
        *,
        title: str = "",
        console: Console | None = None,
        counts_up: bool = True,
        shows_mine: bool = True,
    ) -> None:
        self.footer: Sequence[Text] = ()
        self.doing = ""
        """This process's activity, to show in place of the run's phase; empty: show the phase."""
        self._console = console or open_console()
        self._live: Live | None = None
        self._feed = Feed(facts, title=title, wall_minus_clock_s=time.time() - time.monotonic())
        self._started_s = time.monotonic()
        self._counts_up, self._shows_mine = counts_up, shows_mine
        self._lock = threading.Lock()  # the panel is drawn in another thread
        self._fetching: Phase | None = None
        self._step_told = (0, 0)
        """(era, steps done) of the last printed step; the era is the training generation."""
        self._trouble = ""
        """The cause of the standstill that was printed last; empty: its end was printed, too, or there was none."""
        self._stood_at = 0
        """How many steps were done when the run stood still for the last time."""
        self._risks: Sequence[str] = ()

    @property
    def redraws(self) -> bool:
        """True if a panel can be redrawn in place; false in a file or pipe."""
        return self._console.is_terminal

    def draw(self) -> None:
        """Show the panel if the terminal can be redrawn."""
        if self.redraws and self._live is None:
            self._live = Live(get_renderable=self.panel, console=self._console, refresh_per_second=2.0)
            self._live.start()

    def close(self) -> None:
        """Stop drawing; the panel's last frame stays. Safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def view(self) -> View:
        with self._lock:
            return self._feed.view(time.monotonic())

    def panel(self) -> RenderableType:
        view = self.view()
        if self.doing:
            view = msgspec.structs.replace(view, phase=self.doing)
        if not self._shows_mine:
            view = msgspec.structs.replace(view, mine=None)
        up_s = time.monotonic() - self._started_s if self._counts_up else None
        with self._lock:
            return run_panel(view, self._feed.curves, up_s=up_s, fetching=self._fetching, footer=self.footer)

    # --- what comes ---

    def take(self, report: Report) -> None:
        """Note a report, to be shown in the panel and in lines that are printed later. This prints nothing."""
        if isinstance(report, Phase):
            self._fetching = report if report.part is not None else None
        with self._lock:
            self._feed.take(report, time.monotonic())

    def note(self, text: str) -> None:
        """Show a sentence about an event: as a change in the panel, or as a line."""
        self.take(Note(text=text))
        if not self.redraws:
            self.say(text)

    # --- what is printed ---

    def say(self, text: str) -> None:
        """Print one permanent line above the panel; line breaks, maybe another peer's, become `?`."""
        tell(self._console, printable(text))

    def tell_step(self, step: StepDone) -> None:
        """Print a line for `step`, unless a panel shows it."""
        if not self.redraws:
            self.say(step_line(self.view(), step))

    def tell_status(self, *, again: bool = False) -> None:
        """If no panel is drawn, print a line for a new step, a new standstill, the end of one, and for each new risk.

        Args: again: print the step even if it is not new.
        """
        if self.redraws:
            return
        view = self.view()
        if again or (view.step and (view.era, view.step) > self._step_told):
            self._step_told = view.era, view.step
            self.say(step_line(view))
        self._tell_trouble(view)

    def show_once(self) -> None:
        """Print the output of `shoal status` (lines and tables) once."""
        view = self.view()
        for line in status_lines(view):
            self.say(line)
        for table in tables(view):
            self._console.print(table)

    def tell_experts(self) -> None:
        """Print a line for each stage with experts, unless a panel shows them."""
        if not self.redraws:
            for line in expert_lines(self.view()):
                self.say(line)

    def _tell_trouble(self, view: View) -> None:
        now = trouble(view)
        # Another wait may follow a single step, so say that the run goes on only after three steps.
        is_early = self._stood_at <= view.step < min(self._stood_at + 3, view.steps)
        if now:
            self._stood_at = view.step
            if now != self._trouble:
                self.say(f"{view.standstill}: {view.phase}")
        elif self._trouble and is_early:
            now = self._trouble
        elif self._trouble:
            self.say("the run goes on")
        risks = current_risks(view)
        for risk in risks if risks != self._risks else ():
            self.say(risk)
        self._trouble, self._risks = now, risks
