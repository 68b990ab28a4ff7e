"""Builds a view of the run from a peer's reports (`record/report.py`). Holds no socket, clock or file.

The owner passes every report to `take`; displays call `view` and read `curves`. Nothing here asks another peer, and
texts of other peers are stripped of control characters and cut to a length.
"""

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from shoal.deploy.base.words import ENDING, duration, listed, quantity, short
from shoal.deploy.dashboard.census import Census, clean
from shoal.deploy.dashboard.curves import Curves
from shoal.deploy.dashboard.limiting import limited_by
from shoal.deploy.dashboard.picture import expert_views, links
from shoal.deploy.dashboard.view import (
    DONE,
    FIRST_STEP,
    STALE_S,
    TRAINING,
    ChangeView,
    GoneView,
    MineView,
    PeerView,
    View,
    peer_state,
    run_phase,
    standstill,
    unanswered,
)
from shoal.deploy.record.lines import StepLine
from shoal.deploy.record.reading import Record
from shoal.deploy.record.report import (
    Contribution,
    Given,
    Joined,
    Left,
    Note,
    Obeys,
    Phase,
    Ready,
    Recorded,
    Report,
    Status,
    StepDone,
    Validated,
)
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PEER_NAME_CHARS_MAX
from shoal.protocol.messages import FetchStatus, PeerStatus, PlanNote, SwarmStatus
from shoal.protocol.spec import RunSpec
from shoal.protocol.wire_format import WireFormat, tensor_bytes

CHANGES_SHOWN = 60
NEW_S = 20.0
"""Seconds for which an arrived peer is shown as new, and a departed peer as gone."""
_MANY = 4096
"""The number of elements of a tensor by which the sizes of wire formats are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The part of the run spec that a view needs."""

    name: str
    steps: int
    num_layers: int
    tokens_per_step: int = 0
    """The tokens of a training step; 0: unknown, because this process does not have the run's spec."""
    tokens_per_microbatch: int = 0
    activation_bytes_per_token: int = 0
    """The bytes that a token's activation takes between two stages, in the widest format that the run allows."""
    activations: WireFormat = "bf16"
    """The widest format that the run allows for activations."""

    @classmethod
    def of(cls, spec: RunSpec) -> "RunFacts":
        return cls(
            name=spec.name,
            steps=spec.training.steps,
            num_layers=spec.model.num_layers,
            tokens_per_step=spec.tokens_per_step,
            tokens_per_microbatch=spec.training.microbatch_size * spec.model.context,
            activation_bytes_per_token=tensor_bytes(spec.wire.forward[0], spec.model.written_width),
            activations=spec.wire.forward[0],
        )

    def activation_bytes(self, status: SwarmStatus | None) -> tuple[float, ...]:
        """Return [K - 1], the bytes of a token's activation from each stage to the next, in the plan's format."""
        cuts = max(0, len(status.stages) - 1) if status is not None else 0
        forms = status.formats.activations if status is not None and status.formats is not None else ()
        if len(forms) != cuts:  # unknown, or an impossible value from another peer
            return (self.activation_bytes_per_token,) * cuts
        widest = tensor_bytes(self.activations, _MANY)
        return tuple(self.activation_bytes_per_token * tensor_bytes(form, _MANY) / widest for form in forms)

    @classmethod
    def of_status(cls, status: SwarmStatus) -> "RunFacts":
        """Return the facts as far as `status` has them, for a command without the run's spec."""
        layers = max((last for _, last in status.stages), default=1)
        return cls(name=status.name, steps=status.steps, num_layers=layers)


class Feed:
    """Collects reports, and builds views of the run.

    Args:
        title: the page's title.
        wall_minus_clock_s: add it to `now_s` to get seconds since 1970.
    """

    def __init__(self, facts: RunFacts, *, title: str, wall_minus_clock_s: float) -> None:
        self.curves = Curves()
        self.me: PeerID | None = None
        """This machine's peer: the first one that reported."""
        self._facts, self._title, self._wall_s = facts, title, wall_minus_clock_s
        self._phase = "starting"
        self._run = ""
        self._status: SwarmStatus | None = None
        self._status_at_s = 0.0
        self._plan: Obeys | PlanNote | None = None
        self._plans_told: set[tuple[int, int]] = set()
        self._census = Census()
        self._changes: list[ChangeView] = []
        """Changes, oldest first. They name peers by the end of their identifiers, as plans do."""
        self._contributions: dict[PeerID, tuple[float, Contribution]] = {}
        self._told = (0, 0)
        """(era, steps done) of the last point in the curves; the era is the training generation."""
        self._step: StepDone | None = None
        """The newest step that came as a `StepDone`, which the coordinator sends apart from its status."""
        self._is_recorded = False
        """True if the run's record reports every step; then statuses add no points to the curves."""
        self._validation: tuple[int, float] | None = None
        """(version, loss) of the newest validation."""

    # --- what comes ---

    def take(self, report: Report, now_s: float) -> None:
        match report:
            case Ready():
                self.me, self._run = self.me or report.peer, report.run
            case Joined():
                self.me = self.me or report.peer
                self._census.name(report.peer, report.name)
                if report.peer == self.me and self._status is None:
                    self._phase = "waiting for a plan"
            case Obeys():
                self._take_plan(report, now_s)
            case Status():
                self._take_status(report.status, now_s)
            case StepDone():
                self._phase, self._step = TRAINING, report
                if not self._is_recorded:
                    line = StepLine(
                        time=now_s + self._wall_s,
                        step=report.step + 1,
                        era=report.era,
                        loss=report.loss,
                        tokens=self._facts.tokens_per_step,
                        tokens_per_s=report.tokens_per_s,
                        staleness=report.staleness_mean,
                        learning_rate=report.learning_rate,
                        gradient_norm=report.gradient_norm,
                        peers=report.peers,
                    )
                    self._add_step(line)
            case Recorded():
                self._is_recorded = True
                for line in report.steps:
                    self._add_step(line)
                for validation in report.validations:
                    self._validate(validation.step, validation.loss, validation.time)
            case Validated():
                self._validate(report.report.step, report.report.loss, now_s + self._wall_s)
            case Contribution():
                self._contributions[report.peer] = now_s, report
            case Phase():
                if self._status is None:
                    self._phase = clean(report.name)
            case Note():
                self._note(now_s, "note", report.text)
            case Left():
                if report.peer == self.me:
                    self._phase = DONE if report.finished else "left"

    def _take_plan(self, plan: Obeys | PlanNote, now_s: float) -> None:
        """Add a plan to the history once (in a demo every peer reports each plan), and remember the newest plan."""
        order = plan.term, plan.sequence
        if order in self._plans_told:
            if isinstance(plan, PlanNote):
                self._correct(plan, now_s)
            return
        self._plans_told.add(order)
        if self._plan is None or order > (self._plan.term, self._plan.sequence):
            self._plan = plan
        ago_s = plan.seconds_ago if isinstance(plan, PlanNote) else 0.0
        change = ChangeView(
            at_s=now_s - ago_s + self._wall_s,
            kind="plan",
            text=clean(plan.reason),
            sequence=plan.sequence,
            term=plan.term,
            coordinator=plan.coordinator,
        )
        self._add_change(change)

    def _correct(self, plan: PlanNote, now_s: float) -> None:
        """Correct a plan's time and outcome in the history. If reports differ in the time, the earlier time is right: a
        peer that joins later reports when it joined. An outcome may still change until a newer plan is known."""
        newest, order, at_s = self._plan, (plan.term, plan.sequence), now_s - plan.seconds_ago + self._wall_s
        is_over = bool(plan.outcome) and newest is not None and order < (newest.term, newest.sequence)
        outcome = {"outcome": clean(plan.outcome)} if is_over else {}
        self._changes = [
            msgspec.structs.replace(known, at_s=min(known.at_s, at_s), **outcome)
            if known.kind == "plan" and (known.term, known.sequence) == order
            else known
            for known in self._changes
        ]

    def _take_status(self, status: SwarmStatus, now_s: float) -> None:
        before = self._status
        if before is not None and (status.term, status.plan_sequence) < (before.term, before.plan_sequence):
            return  # from a former coordinator that was suspended, and does not know yet that it was replaced
        self._status, self._status_at_s, self._run = status, now_s, clean(status.run)
        joined, _, gone = self._census.take(status, now_s)
        for note in status.plans:
            self._take_plan(note, now_s)
        if self._plan is None or (status.term, status.plan_sequence) > (self._plan.term, self._plan.sequence):
            self._plan = PlanNote(status.term, status.plan_sequence, 0.0, status.coordinator, status.plan_reason)
        for peer in joined:
            if math.isfinite(self._census.since_s(peer.peer)):  # peers of the first table did not just arrive
                self._note(now_s, "joined", f"{short(peer.peer)} joined")
        for departure in gone:
            self._note(now_s, "left", f"{short(departure.peer)} left")
        phase = run_phase(status)
        if phase != FIRST_STEP or self._phase != "left":
            self._phase = phase
        if status.validation_loss is not None and status.validation_step is not None:
            self._validate(status.validation_step, status.validation_loss, now_s + self._wall_s)
        if status.step > 0 and not self._is_recorded:
            line = StepLine(
                time=now_s + self._wall_s,
                step=status.step,
                era=status.era,
                loss=status.loss,
                tokens=self._facts.tokens_per_step,
                tokens_per_s=status.tokens_per_s,
                staleness=status.staleness_steps_mean,
                learning_rate=None,
                peers=len(status.peers),
            )
            self._add_step(line)

    def restore(self, record: Record) -> None:
        """Fill the curves from the run's record of earlier starts."""
        self._told = record.reached
        self.curves.restore(record.steps)
        for line in record.validations:
            self._validate(line.step, line.loss, line.time)

    def _add_step(self, line: StepLine) -> None:
        if (line.era, line.step) <= self._told:
            return
        if line.era > self._told[0]:
            self.curves.go_back(line.step)
            if self._validation is not None and self._validation[0] >= line.step:
                self._validation = None
        self._told = line.era, line.step
        self.curves.add(line)

    def _validate(self, step: int, loss: float, at_s: float) -> None:
        if self._validation is None or (step, loss) != self._validation:
            self.curves.validate(at_s, step, loss)
        if self._validation is None or step >= self._validation[0]:
            self._validation = step, loss

    def _note(self, now_s: float, kind: Literal["joined", "left", "note"], text: str) -> None:
        self._add_change(ChangeView(at_s=now_s + self._wall_s, kind=kind, text=clean(text)))

    def _add_change(self, change: ChangeView) -> None:
        """Add a change to the history. A plan replaces the line about an arrival or departure that its reason names."""
        if any(_says(known, change) for known in self._changes):
            return
        kept = [known for known in self._changes if not _says(change, known)]
        self._changes = sorted([*kept, change], key=lambda known: known.at_s)[-200:]

    # --- what is shown ---

    def view(self, now_s: float) -> View:
        status, plan, census = self._status, self._plan, self._census
        peers = status.peers if status else ()
        status_age_s = now_s - self._status_at_s if status else None
        is_old = status_age_s is not None and status_age_s > STALE_S
        tokens_per_s = status.tokens_per_s if status and not is_old else None
        if status is None and self._step is not None:
            tokens_per_s = self._step.tokens_per_s
        comparison = status.comparison if status and not is_old else None
        coordinator = plan.coordinator if plan else PeerID("")
        # A peer's report about its contribution is shown for 20 s only.
        contributions = {peer: told for peer, (at_s, told) in self._contributions.items() if now_s - at_s < 20.0}
        steps = status.steps if status else self._facts.steps
        step, loss, staleness_steps = self._newest_step()
        bytes_per_s = tuple((tokens_per_s or 0.0) * each for each in self._facts.activation_bytes(status))
        mine = contributions.get(self.me) if self.me else None
        return View(
            title=self._title,
            run=self._run,
            name=clean(status.name if status else self._facts.name),
            phase=self._spoken_phase(status_age_s),
            term=plan.term if plan else 0,
            sequence=plan.sequence if plan else 0,
            reason=self._with_names(clean(plan.reason)) if plan else "",
            era=status.era if status else 0,
            rollbacks=status.rollbacks if status else 0,
            step=step,
            steps=steps,
            loss=loss,
            validation_loss=self._validation[1] if self._validation else None,
            validation_step=self._validation[0] if self._validation else None,
            tokens_per_s=tokens_per_s,
            foreseen=clean(comparison.sentence) if comparison else "",
            formats=clean(status.formats.sentence) if status and status.formats else "",
            foreseen_tokens_per_s=(comparison.today_tokens_per_s or comparison.foreseen_tokens_per_s)
            if comparison
            else None,
            seen_tokens_per_s=(comparison.seen_tokens_per_s or None) if comparison else None,
            staleness_steps_mean=staleness_steps,
            now_s=now_s + self._wall_s,
            elapsed_s=status.elapsed_s + now_s - self._status_at_s if status else 0.0,
            left_s=None if is_old else self._left_s(status_age_s),
            standstill=standstill(status) if status and not is_old else "",
            risks=tuple(clean(risk) for risk in status.risks) if status else (),
            status_age_s=status_age_s,
            coordinator=coordinator,
            coordinator_name=census.name_of(coordinator) if coordinator else "",
            stages=status.stages if status else (),
            peers=tuple(self._peer(peer, coordinator, now_s) for peer in peers),
            gone=tuple(
                GoneView(id=gone.peer, name=gone.name, stage=gone.stage, ago_s=now_s - gone.at_s)
                for gone in census.departures
                if now_s - gone.at_s < NEW_S
            ),
            links=links(peers, contributions, bytes_per_s),
            flows=tuple(round(2 * rate) for rate in bytes_per_s),
            experts=expert_views(status) if status else (),
            mine=self._mine(mine) if mine else None,
            others=tuple(self._mine(told) for peer, told in sorted(contributions.items()) if peer != self.me),
            changes=tuple(self._named(change) for change in self._changes[: -CHANGES_SHOWN - 1 : -1]),
        )

    def _newest_step(self) -> tuple[int, float | None, float]:
        """Return (steps done, loss, staleness) from the coordinator's status, or from a `StepDone` if that is newer."""
        status, step = self._status, self._step
        if step is not None and (status is None or (step.era, step.step + 1) > (status.era, status.step)):
            return step.step + 1, step.loss, step.staleness_mean
        return (status.step, status.loss, status.staleness_steps_mean) if status else (0, None, 0.0)

    def _left_s(self, status_age_s: float | None) -> float | None:
        """Return the coordinator's estimate of the seconds to the last step, minus its age; None: unknown or done."""
        status = self._status
        left_s = status.left_s if status and status.step < status.steps else None
        return None if left_s is None or status_age_s is None else max(0.0, left_s - status_age_s)

    def _spoken_phase(self, status_age_s: float | None) -> str:
        silence = unanswered(status_age_s)
        if silence and self._phase not in ("left", DONE):
            return silence
        return self._phase

    def _peer(self, peer: PeerStatus, coordinator: PeerID, now_s: float) -> PeerView:
        return PeerView(
            id=peer.peer,
            name=self._census.name_of(peer.peer),
            device=clean(peer.device, PEER_NAME_CHARS_MAX),
            stage=peer.stage,
            state=peer_state(peer),
            version=peer.version,
            seen_s_ago=round(peer.seen_s_ago, 1),
            paused_s=None if peer.paused_s is None else round(peer.paused_s, 1),
            forward_s=round(peer.forward_s, 5),
            window=peer.window,
            share=peer.share,
            flop_per_s=float(f"{peer.flop_per_s:.3g}"),
            is_coordinator=peer.peer == coordinator,
            is_me=peer.peer == self.me,
            is_new=now_s - self._census.since_s(peer.peer) < NEW_S,
            shortages=peer.shortages,
            light=peer.light,
            fetch=self._fetch_text(peer.fetch) if peer.fetch is not None else "",
        )

    def _fetch_text(self, fetch: FetchStatus) -> str:
        if not fetch.total_bytes:
            return f"fetching {fetch.what}: asking for holders"
        left, whole = quantity(fetch.left_bytes, "B"), quantity(fetch.total_bytes, "B")
        time = "" if fetch.left_s is None else f", {duration(fetch.left_s)}"
        names = clean(listed([self._census.name_of(peer) for peer in fetch.sources]))
        return f"fetching {fetch.what}: {left} of {whole}{time} left" + (f", from {names}" if names else "")

    def _mine(self, told: Contribution) -> MineView:
        status, facts = self._status, self._facts
        stages = status.stages if status else ()
        tokens_per_s = told.microbatches_per_s * facts.tokens_per_microbatch
        held = stages[told.stage] if told.stage is not None and told.stage < len(stages) else (0, 0)
        swarm_tokens_per_s = status.tokens_per_s if status else 0.0
        layers = tokens_per_s * (held[1] - held[0]) / facts.num_layers
        given = {name: getattr(told, name) for name in Given.__struct_fields__}
        return MineView(
            **given | {"name": self._census.name_of(told.peer)},
            limited_by=limited_by(told, status.peers if status else (), num_stages=len(stages)),
            tokens_per_s=tokens_per_s,
            work_share=min(1.0, layers / swarm_tokens_per_s) if swarm_tokens_per_s > 0.0 else 0.0,
            sent_bytes_per_s=sum(sent for _, sent, _ in told.links),
            received_bytes_per_s=sum(received for _, _, received in told.links),
            tokens_total=told.microbatches_total * facts.tokens_per_microbatch,
        )

    def _named(self, change: ChangeView) -> ChangeView:
        coordinator = self._census.name_of(PeerID(change.coordinator)) if change.coordinator else ""
        return msgspec.structs.replace(change, text=self._with_names(change.text), coordinator=coordinator)

    def _with_names(self, text: str) -> str:
        return ENDING.sub(lambda found: self._census.named(found.group()), text)


def _says(plan: ChangeView, change: ChangeView) -> bool:
    """True if the reason of `plan` names the arrival or departure `change`, and the two are less than 30 s apart."""
    return (
        plan.kind == "plan"
        and change.kind in ("joined", "left")
        and change.text in plan.text
        and abs(change.at_s - plan.at_s) < 30.0
    )
