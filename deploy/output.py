"""Where a peer process says what happens: to a parent as JSON lines, to a person as a view or as lines."""

import re
import time
from collections.abc import Iterable
from typing import Protocol

from rich.console import Console
from rich.live import Live

from shoal.deploy.dashboard.view import DONE, TRAINING, run_phase, standstill
from shoal.deploy.live_view import Board, plain_line, render, risk_lines, short
from shoal.deploy.report import (
    Contribution,
    Joined,
    Left,
    Note,
    Phase,
    Ready,
    Report,
    Status,
    StepDone,
    Summary,
    Validated,
    write_report,
)
from shoal.deploy.words import duration, quantity
from shoal.protocol.messages import SwarmStatus

_FRAMES_PER_S = 2.0
_SPAN = re.compile(r", for \d+ (s|min|h)")
_HOW_TO_STOP = "Ctrl-C leaves once the work in hand is done; Ctrl-Z pauses and resumes"
_WHAT_NEXT = (
    "`shoal generate -p TEXT` lets the model write, `shoal export FOLDER` makes a folder for transformers of it"
)


class Output(Protocol):
    @property
    def polls(self) -> bool:
        """Whether it wants the swarm's status also from peers that do not coordinate."""

    def say(self, report: Report) -> None: ...

    def close(self) -> None: ...


class ReportOutput:
    """For a parent that reads `report.py`."""

    polls = False

    def say(self, report: Report) -> None:
        write_report(report)

    def close(self) -> None:
        pass


class TerminalOutput:
    """For a person. Redraws where that is possible, else prints a line a step.

    Steps come from the coordinator's status, about one a second: on a peer that does not coordinate nothing else
    knows of the whole run.
    """

    polls = True

    def __init__(self, *, title: str, steps_total: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=False)
        self._board = Board(title=title, started_s=time.monotonic(), steps_total=steps_total)
        self._live: Live | None = None
        self._hosts = False
        self._has_left = self._is_summed_up = False
        self._trouble = ""
        """What the run stands still for, as it was told last; empty: it does not."""
        self._risks: tuple[str, ...] = ()
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=lambda: render(self._board, time.monotonic()),
                console=self._console,
                refresh_per_second=_FRAMES_PER_S,
                transient=False,
            )
            self._live.start()

    def say(self, report: Report) -> None:
        match report:
            case Ready():
                self._hosts = True
                self._print("others join with:")
                # One logical line, whatever the terminal's width: it is there to be copied.
                self._print(f"shoal join {report.invite}", soft_wrap=True)
            case Joined():
                self._board.phase = "waiting for a plan"
                self._note(f"takes part as {report.name} ({short(report.peer)})")
                self._note(_HOW_TO_STOP)
            case Status():
                self._take_status(report)
            case Contribution():
                self._board.mine = report
            case Phase():
                self._take_phase(report)
            case Validated():
                self._board.validation = report.report.step, report.report.loss
            case Note():
                self._note(report.text)
            case Left():
                self._has_left = True
                self._board.phase = DONE if report.finished else "left"
                if report.state_dir:
                    self._print(f"state and snapshots: {report.state_dir}", soft_wrap=True)
                if self._board.mine is not None:
                    self._print(given(self._board.mine))
                if report.finished and self._hosts:
                    self._print(_WHAT_NEXT)
            case Summary():
                self._close_view()  # its last frame stands above the summary
                self._is_summed_up = True
                for line in report.lines:
                    self._print(line)
            case StepDone():
                pass  # the status says it

    def close(self) -> None:
        self._close_view()
        status = self._board.status
        if status is not None and self._has_left and not self._is_summed_up:
            loss = "" if status.loss is None else f", loss {status.loss:.4f}"
            self._print(f"the run: step {status.step:,} of {status.steps:,}{loss}")

    def _close_view(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _take_phase(self, phase: Phase) -> None:
        board = self._board
        board.fetching = phase if phase.part is not None else None
        if board.step is None:
            is_news = phase.part is None and phase.name != board.phase
            board.phase = phase.name
            if self._live is None and is_news:
                self._print(phase.name)

    def _take_status(self, report: Status) -> None:
        board, status = self._board, report.status
        board.add_status(status, time.monotonic())
        board.steps_total = status.steps
        if status.validation_loss is not None and status.validation_step is not None:
            board.validation = status.validation_step, status.validation_loss
        self._take_step(status)
        if board.fetching is None:
            board.phase = DONE if status.step >= status.steps else TRAINING
        if self._live is None:
            self._tell_trouble(status)

    def _tell_trouble(self, status: SwarmStatus) -> None:
        """Where nothing can be redrawn: each standstill and each risk once, and the end of a standstill."""
        if status.stands_s and status.step < status.steps:
            # How long each thing has lasted is another each second.
            trouble = _SPAN.sub("", run_phase(status))
            if trouble != self._trouble:
                self._print(f"{standstill(status)}: {run_phase(status)}")
            self._trouble = trouble
        elif self._trouble:
            self._trouble = ""
            self._print("the run goes on")
        if status.risks != self._risks:
            self._risks = status.risks
            for line in risk_lines(status):
                self._print(line.plain)

    def _take_step(self, status: SwarmStatus) -> None:
        board = self._board
        last = -1 if board.step is None else board.step.step
        if status.step - 1 <= last:
            return
        step = StepDone(
            step=status.step - 1,
            loss=status.loss,
            validation_loss=None,  # the board has it
            validation_step=None,
            tokens_per_s=status.tokens_per_s,
            staleness_mean=status.staleness_steps_mean,
            duplicates=0,
            given_up=0,
            dissenting=0,
            era=status.era,
            term=status.term,
            peers=len(status.peers),
            coordinator=status.coordinator,
        )
        board.add_step(step)
        if self._live is None:
            self._print(plain_line(board, time.monotonic()))

    def _note(self, text: str) -> None:
        self._board.notes.append(text)
        if self._live is None:
            self._print(text)

    def _print(self, text: str, *, soft_wrap: bool = True) -> None:
        self._console.print(text, soft_wrap=soft_wrap, markup=False, highlight=False)


def given(mine: Contribution) -> str:
    """What this peer has done for the run since it came."""
    return (
        f"this peer computed {mine.microbatches_total:,} microbatches in {duration(mine.uptime_s)}, "
        f"sent {quantity(mine.sent_bytes_total, 'B')} and received {quantity(mine.received_bytes_total, 'B')}"
    )


def make_output(*, reports: bool, title: str, steps_total: int) -> Output:
    if reports:
        return ReportOutput()
    return TerminalOutput(title=title, steps_total=steps_total)


def tell_before_the_run(sentences: Iterable[str], *, reports: bool) -> None:
    """What is known before a view of the run is up, and should stay on the screen: a line each."""
    console = Console(stderr=False)
    for sentence in sentences:
        if reports:
            write_report(Note(text=sentence.strip()))
        else:
            console.print(sentence, soft_wrap=True, markup=False, highlight=False)
