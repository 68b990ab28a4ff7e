"""Sends the reports of a peer process (`report.py`) to a parent process as JSON lines, or to a person."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from shoal.deploy.record.report import Note, Report, write_report


class Output(Protocol):
    @property
    def polls(self) -> bool:
        """True if the output wants the swarm's status also while this peer does not coordinate."""

    def say(self, report: Report) -> None: ...

    def close(self) -> None: ...


class JsonOutput:
    """Implements `Output` for a parent process, which reads `report.py`."""

    polls = False

    def say(self, report: Report) -> None:
        write_report(report)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Implements `Output`: passes every report to a listener, then to the output."""

    hear: Callable[[Report], None]
    output: Output
    is_watched: Callable[[], bool] = lambda: False
    """True if the listener wants the swarm's status."""

    @property
    def polls(self) -> bool:
        return self.output.polls or self.is_watched()

    def say(self, report: Report) -> None:
        self.hear(report)
        self.output.say(report)

    def close(self) -> None:
        self.output.close()


def tell_before_the_run(sentences: Iterable[str], *, reports: bool) -> None:
    """Print sentences, a line each, before the view of the run opens; they stay on the screen."""
    from shoal.deploy.terminal.screen import Screen  # a child of a parent that reads JSON needs no rich

    screen = Screen()
    for sentence in sentences:
        if reports:
            write_report(Note(text=sentence.strip()))
        else:
            screen.say(sentence)
