"""Prints for the person at a peer's terminal: an invite to pass on, how to stop, the run, and a final summary."""

from rich.console import Console
from rich.text import Text

from shoal.deploy.base.words import amount, counted, quantity, short, span
from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.record.report import Contribution, Invites, Joined, Left, Note, Phase, Ready, Report, Status, Summary
from shoal.deploy.terminal.presenter import Presenter

_HOW_TO_STOP = "Ctrl-C leaves once the work in hand is done; Ctrl-Z pauses and resumes"
_WHAT_NEXT = "`shoal generate -p TEXT` lets the model write, `shoal export FOLDER` makes a folder that others load"


class PeerOutput:
    """Shows a peer's reports to a person.

    It takes steps from the coordinator's status, which comes about once a second: a peer that does not coordinate has
    no other source about the whole run.
    """

    def __init__(self, facts: RunFacts, *, title: str, console: Console | None = None) -> None:
        self._facts = facts
        self._first_step = -1
        """How many steps the run had done when this peer first got its status; -1: it has got none yet."""
        self.presenter = Presenter(facts, title=title, console=console)
        self._hosts = False
        self._phase = ""
        self._given: Contribution | None = None
        self._has_status = self._has_left = self._is_summed_up = False
        self.presenter.draw()

    def say(self, report: Report) -> None:
        presenter = self.presenter
        if isinstance(report, Note):
            presenter.note(report.text)
            return
        presenter.take(report)
        match report:
            case Ready():
                self._hosts = True
                presenter.say("others join with:")
                presenter.say(f"shoal join {report.invite}")
            case Invites() if self._hosts:
                presenter.say(
                    f"an invite that works without this machine, too (it names {counted(report.peers, 'member')}):"
                )
                presenter.say(f"shoal join {report.invite}")
            case Joined():
                self._phase = "waiting for a plan"
                sentences = (f"takes part as {report.name} ({short(report.peer)})", _HOW_TO_STOP)
                presenter.footer = [Text(sentence, style="dim") for sentence in sentences]
                for sentence in () if presenter.redraws else sentences:
                    presenter.say(sentence)
            case Status():
                self._has_status = True
                if self._first_step < 0:
                    self._first_step = report.status.step
                presenter.tell_status()
            case Contribution():
                self._given = report
            case Phase() if report.part is None and not presenter.view().step:
                # Each phase before training once, unless a panel shows it.
                if report.name != self._phase and not presenter.redraws:
                    presenter.say(report.name)
                self._phase = report.name
            case Left():
                self._take_leave(report)
            case Summary():
                presenter.close()  # keeps the panel's last frame above the summary
                self._is_summed_up = True
                for line in report.lines:
                    presenter.say(line)

    def close(self) -> None:
        self.presenter.close()
        if self._has_status and self._has_left and not self._is_summed_up:
            view = self.presenter.view()
            loss = "" if view.loss is None else f", loss {view.loss:.4f}"
            self.presenter.say(f"the run: step {view.step:,} of {view.steps:,}{loss}")

    def _take_leave(self, left: Left) -> None:
        self._has_left = True
        if left.state_dir:
            self.presenter.say(f"state and snapshots: {left.state_dir}")
        if self._given is not None:
            steps = self.presenter.view().step - self._first_step if self._has_status else 0
            self.presenter.say(given(self._given, self._facts, steps=steps))
        if left.finished and self._hosts:
            self.presenter.say(_WHAT_NEXT)


def given(mine: Contribution, facts: RunFacts, *, steps: int) -> str:
    """Return a sentence about this peer's contribution. Args: steps: steps that the run did meanwhile."""
    tokens, trained = mine.microbatches_total * facts.tokens_per_microbatch, steps * facts.tokens_per_step
    share = f": {min(1.0, tokens / trained):.0%} of what the run trained on meanwhile" if trained else ""
    work = counted(mine.microbatches_total, "microbatch", "microbatches")
    traffic = f"{quantity(mine.sent_bytes_total, 'B')} and received {quantity(mine.received_bytes_total, 'B')}"
    return f"this peer computed {work} ({amount(tokens)} tokens) in {span(mine.uptime_s)}{share}. It sent {traffic}"
