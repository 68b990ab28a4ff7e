"""Knows which steps are committed, from reports of each stage's leader, and decides when all stages save. Pure.

A report may arrive late, twice (a heartbeat's reply was lost, or the role moved), or after other reports of its step
went to the previous coordinator. Each (stage, step) counts once. The node is told of a step once and in order: when the
last stage's report, which alone has the loss, is here, and either all stages have reported and the step before it was
told, or `PATIENCE_HEARTBEATS` have passed since all committed it. A step before the newest told one is not told.

A report is one peer's claim: a step, its loss and its effect on the rate count only once a majority of the last stage's
members has passed that step (`Confirmations`). When the run rolls back (a new era), the steps after the restored
version are trained, and reported, again.

A version of a group counts once a majority of the members that hold the group's state report at least that version. The
end of the run counts once a majority of *all* members of every group has signed it: a member that stops cannot come
back, so silence is no consent. A learner, which has weights but no optimizer state, may sign too. Heartbeat replies
carry the signatures (`HeartbeatReply.ends`), and each peer checks them before it stops."""

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.coordinator.token_rate import AGE_S_MAX, TokenRate
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import REPORTS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import CommitReport, Heartbeat, TransferLeadership, ValidationReport
from shoal.protocol.plan import Plan
from shoal.protocol.spec import RunSpec

WAITING_MAX = 4096
"""Reports that a peer keeps while there is no coordinator: one a second for an hour. Then the oldest are dropped."""
HISTORY_STEPS = 1024
"""Number of newest steps that are remembered; a report of an older step counts as a repetition."""
PATIENCE_HEARTBEATS = 2.0
_NOTICE_HEARTBEATS = 2.5
"""How early the version to save is named: each peer learns of the version by its next heartbeat, which may be late."""
_FIRST_S = 30.0
"""Seconds until the first snapshot. Before it, a layer with a single holder has no copy."""

Waiting = tuple[float, CommitReport | ValidationReport]
"""(the time at which the report was queued, the report)."""
Ends = tuple[tuple[PeerID, bytes], ...]
"""(member, its signature of `end_body`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One complete step, for the log and the live view. `duplicates` and `given_up` (microbatches) are sums over the
    stages that have reported."""

    step: int
    """The number of the step, counted from 0; after step s, versions are s + 1."""
    loss: float | None
    validation: ValidationReport | None
    """The newest validation result; None: it was in an earlier record, or there is none."""
    tokens_per_s: float
    staleness_mean: float
    """Mean staleness in steps over the stages that have reported."""
    duplicates: int
    given_up: int
    dissenting: int
    """Number of members, in all stages together, that differed from their group's state after the commit."""
    era: int
    term: int
    peers: int
    gradient_norm: float | None = None
    """The 2-norm of the whole model's reduced gradient before clipping; None: not every group has reported its part."""


class ReportQueue:
    """Sends a peer's reports, oldest first, a few with each heartbeat, and keeps each until a coordinator has it."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque(maxlen=WAITING_MAX)
        self._sent: tuple[Waiting, ...] = ()

    def enclose(self, heartbeat: Heartbeat, now_s: float) -> tuple[Heartbeat, tuple[Waiting, ...]]:
        """Queue the reports in `heartbeat`, and replace them by the oldest queued ones, or by none while earlier ones
        are in flight. Each commit report gets its age.
        Returns: (the heartbeat to send, its reports, to be passed to `returned`)."""
        known = [report for _, report in self._waiting]
        new: tuple[CommitReport | ValidationReport, ...] = (*heartbeat.commits, *heartbeat.validations)
        self._waiting.extend((now_s, report) for report in new if report not in known)
        sent: tuple[Waiting, ...] = ()
        if not self._sent:
            sent = self._sent = tuple(self._waiting)[:REPORTS_PER_HEARTBEAT_MAX]
        commits = tuple(
            msgspec.structs.replace(report, age_s=report.age_s + max(0.0, now_s - since_s))
            for since_s, report in sent
            if isinstance(report, CommitReport)
        )
        validations = tuple(report for _, report in sent if isinstance(report, ValidationReport))
        return msgspec.structs.replace(heartbeat, commits=commits, validations=validations), sent

    def returned(self, sent: tuple[Waiting, ...], *, arrived: bool) -> None:
        """Drop the `sent` reports if they have arrived at a coordinator; otherwise send them again."""
        for waiting in sent if arrived else ():
            if self._waiting and self._waiting[0] == waiting:  # otherwise the full queue has dropped it
                self._waiting.popleft()
        if sent and sent == self._sent:
            self._sent = ()


class Ledger:
    """The commits of one run, as far as this peer has heard of them."""

    def __init__(self, spec: RunSpec) -> None:
        self.era = 0
        self._num_stages = 1  # until a plan says how many
        self._num_experts = spec.model.num_experts if spec.swarm.expert_slots else 0
        self._stages_before = 0, 1
        """(version at which the era began, number of stages in the steps before that version)."""
        self._steps = spec.training.steps
        self._microbatches = spec.training.microbatches_per_step
        self._validates = spec.training.validation_interval_steps > 0
        self._patience_s = PATIENCE_HEARTBEATS * spec.swarm.heartbeat_s
        self._reports: dict[int, dict[int, CommitReport]] = {}
        """Step -> group -> its report. Stages come first; reports of placed experts only add to the gradient norm."""
        self._unconfirmed: dict[int, tuple[CommitReport, float]] = {}
        """Step -> (the last stage's report of it, its arrival time), until members of that stage confirm the step."""
        self._untold: dict[int, float] = {}
        self._told_to = 0
        """The step after the newest one that was told."""
        self._validation: ValidationReport | None = None
        self._validation_told = -1
        self._versions = [0] * self._num_groups(1)
        self.loss: float | None = None
        self._loss_step = -1
        self.validation_loss: float | None = None
        self.validation_step: int | None = None
        self.staleness_mean = 0.0
        self.pace = TokenRate(tokens_per_step=spec.tokens_per_step)

    @property
    def step(self) -> int:
        """The number of steps that every stage has committed."""
        return min(self._versions[: self._num_stages])

    @property
    def version_max(self) -> int:
        return max(self._versions[: self._num_stages])

    @property
    def done(self) -> bool:
        """True if all stages and experts have committed the last step, and the result has been validated."""
        validated = self._validation is not None and self._validation.step >= self._steps
        return min(self._versions) >= self._steps and (validated or not self._validates)

    def divide(self, num_stages: int) -> None:
        """Set the number of stages of the era's first layout; later divisions begin a new era (`rewind`)."""
        if num_stages != self._num_stages:
            self._versions = [self.step] * self._num_groups(num_stages)
            self._num_stages = num_stages

    def rewind(self, era: int, version: int, *, num_stages: int) -> None:
        """Roll back to `version`, where `era` begins with `num_stages` stages. Keep the steps before `version`."""
        self.era = era
        self._stages_before, self._num_stages = (version, self._num_stages), num_stages
        self.pace.begin_era(era, version)
        self._versions = [min(version, self._steps)] * self._num_groups(num_stages)
        self._reports = {step: by_stage for step, by_stage in self._reports.items() if step < version}
        self._untold = {step: at_s for step, at_s in self._untold.items() if step < version}
        self._unconfirmed = {step: report for step, report in self._unconfirmed.items() if step < version}
        self._told_to = min(self._told_to, version)
        self._loss_step = min(self._loss_step, version - 1)
        if self._validation is not None and self._validation.step > version:
            self._validation = self.validation_loss = self.validation_step = None
        self._validation_told = min(self._validation_told, version)
        self._confirm()

    def _num_groups(self, num_stages: int) -> int:
        return num_stages * (1 + self._num_experts)

    def note_version(self, group: int, version: int) -> None:
        """Record that most holders of a group are at `version`."""
        if 0 <= group < len(self._versions):
            self._versions[group] = min(max(self._versions[group], version), self._steps)
        self._confirm()

    def note_commits(self, reports: Iterable[CommitReport], now_s: float) -> list[str]:
        """Record reports. Returns: the flaws of inconsistent reports, which do not count."""
        flaws, oldest = [], max(0, self.version_max - HISTORY_STEPS)
        for report in reports:
            is_known = report.era == self.era and 0 <= report.stage < len(self._versions)
            if not (is_known and oldest <= report.step < self._steps):
                continue
            if report.stage < self._num_stages and (flaw := self._flaw(report)):
                flaws.append(flaw)
                continue
            by_group = self._reports.setdefault(report.step, {})
            if report.stage not in by_group and report.stage == self._num_stages - 1:
                self._unconfirmed[report.step] = report, now_s
            by_group.setdefault(report.stage, report)
        self._confirm()
        self._trim(self._reports)
        self._trim(self._unconfirmed)
        return flaws

    def _confirm(self, *, flush: bool = False) -> None:
        """Count the steps that the last stage's leader has reported and its members have confirmed. Args: flush: also
        count the reported steps that follow without a gap: another coordinator will see them confirmed."""
        confirmed = self._versions[self._num_stages - 1]
        while flush and confirmed in self._unconfirmed:
            confirmed += 1
        for step in sorted(step for step in self._unconfirmed if step < confirmed):
            report, came_s = self._unconfirmed.pop(step)
            age_s = min(max(0.0, report.age_s), AGE_S_MAX)
            self.pace.committed(report.era, report.step, report.tokens, came_s - age_s)
            if report.step >= self._told_to:
                self._untold[report.step] = came_s
            if report.loss is not None and report.step >= self._loss_step:
                self.loss, self._loss_step = report.loss, report.step

    def _trim(self, table: dict[int, Any]) -> None:
        """Cut a table to `HISTORY_STEPS`: first drop steps far in the future, then the oldest."""
        while len(table) > HISTORY_STEPS:
            last = max(table)
            del table[last if last >= self.version_max + HISTORY_STEPS else min(table)]

    def _flaw(self, report: CommitReport) -> str:
        """Say what is wrong with a report; empty: nothing. Every microbatch must be counted once or given up."""
        held, lost, again = report.microbatches, report.given_up, report.duplicates
        if held >= 0 and lost >= 0 and again >= 0 and held + lost == self._microbatches:
            return ""
        return (
            f"step {report.step} of stage {report.stage} with {held} microbatches, {lost} given up and {again} "
            f"duplicates, of {self._microbatches}"
        )

    def note_validations(self, reports: Iterable[ValidationReport]) -> None:
        """Record losses of versions up to `version_max`. Ignore later ones: stage 0's leader repeats such reports."""
        for report in reports:
            if report.era != self.era or not 0 <= report.step <= self.version_max or not math.isfinite(report.loss):
                continue
            if self._validation is None or report.step > self._validation.step:
                self._validation = report
                self.validation_loss, self.validation_step = report.loss, report.step

    def take_over(self, transfer: TransferLeadership, now_s: float) -> None:
        """Take over the previous coordinator's figures that we lack; if it is in another era, only the run's rate."""
        self.pace.take_over(transfer.pace, now_s)
        if transfer.era != self.era:
            return
        if transfer.loss is not None and transfer.version > self._loss_step:
            self.loss, self._loss_step = transfer.loss, transfer.version - 1
        if transfer.validation_loss is not None:
            self.validation_loss, self.validation_step = transfer.validation_loss, transfer.validation_step
        for stage in range(self._num_stages):
            self.note_version(stage, transfer.step)
        self.staleness_mean = transfer.staleness_steps_mean

    def tell(self, now_s: float, *, term: int, peers: int, flush: bool = False) -> list[StepRecord]:
        """Return the records of steps that are due, in order. Args: flush: return every step that has a loss."""
        records = []
        self._confirm(flush=flush)
        for step in sorted(self._untold):
            num_stages = self._stages_of(step)
            by_stage = {group: report for group, report in self._reports.get(step, {}).items() if group < num_stages}
            complete = len(by_stage) == num_stages
            if step == self._steps - 1:
                complete = self.done  # the run's last record contains its last validation
            if step >= self.step:
                self._untold[step] = now_s  # some stage has not committed it, so it cannot have reported
            due = flush or (complete and step == self._told_to) or now_s >= self._untold[step] + self._patience_s
            if not due:
                break  # people read steps in order, so later steps wait for this one
            del self._untold[step]
            self._told_to = step + 1
            records.append(self._record(step, by_stage, now_s, term=term, peers=peers))
        return records

    def _record(
        self, step: int, by_stage: dict[int, CommitReport], now_s: float, *, term: int, peers: int
    ) -> StepRecord:
        reports = list(by_stage.values())
        last = by_stage.get(self._stages_of(step) - 1)
        self.staleness_mean = sum(report.staleness_steps_mean for report in reports) / max(1, len(reports))
        validation = self._validation
        if validation is not None and validation.step <= self._validation_told:
            validation = None
        elif validation is not None:
            self._validation_told = validation.step
        return StepRecord(
            step=step,
            loss=last.loss if last else None,
            validation=validation,
            tokens_per_s=self.pace.tokens_per_s(now_s),
            staleness_mean=self.staleness_mean,
            duplicates=sum(report.duplicates for report in reports),
            given_up=sum(report.given_up for report in reports),
            dissenting=sum(report.dissenting for report in reports),
            era=self.era,
            term=term,
            peers=peers,
            gradient_norm=self._gradient_norm(step),
        )

    def _stages_of(self, step: int) -> int:
        begun, before = self._stages_before
        return before if step < begun else self._num_stages

    def has_reported(self, version: int) -> bool:
        """True if every stage, and every group of placed experts, has reported the step that made `version`."""
        step = version - 1
        return step < 0 or len(self._reports.get(step, {})) == self._num_groups(self._stages_of(step))

    def _gradient_norm(self, step: int) -> float | None:
        norms = [report.gradient_norm for report in self._reports.get(step, {}).values()]
        squares = [norm * norm for norm in norms if norm is not None and 0.0 <= norm < math.inf]
        if len(squares) < self._num_groups(self._stages_of(step)):
            return None
        return math.sqrt(sum(squares))


def end_body(*, era: int, steps: int, revision: int) -> bytes:
    """Encode what a member signs, as an `end` statement, once all state that it holds is at the run's last version."""
    return msgspec.msgpack.encode((era, steps, revision))


def proves_end(plan: Plan, signers: Collection[PeerID]) -> bool:
    """True if the signers are a majority of every group of the plan."""
    return all(
        2 * sum(1 for peer in group if peer in signers) > len(group)
        for group in ([stage.peers for stage in plan.stages] + [expert.peers for expert in plan.experts])
    )


class Confirmations:
    """Knows the versions that the live plan's members report; other peers do not count."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._versions: dict[int, dict[PeerID, int]] = {}
        """Group -> member that holds the group's state -> its version."""
        self._ends: dict[PeerID, bytes] = {}

    def obey(self, plan: Plan) -> None:
        """Record a live plan. A member that has lost its place in a group does not count for that group any more."""
        if self._plan is not None and plan.era != self._plan.era:
            self._versions, self._ends = {}, {}
        self._plan = plan
        for group, said in list(self._versions.items()):
            members = {member.peer for member in plan.group_members(group)}
            self._versions[group] = {peer: version for peer, version in said.items() if peer in members}
        self._ends = {peer: signature for peer, signature in self._ends.items() if plan.has(peer)}

    def note(self, peer: PeerID, group: int, version: int, *, holds: bool) -> None:
        """Record that a heartbeat of the plan's era reports `version` for the peer's state of this group."""
        if self._plan is None or group not in self._plan.groups_of(peer):
            return
        said = self._versions.setdefault(group, {})
        if holds:
            said[peer] = version
        else:
            said.pop(peer, None)

    def version(self, group: int) -> int:
        """The version that a majority of the group's holders has reached; 0: no member holds the state."""
        said = sorted(self._versions.get(group, {}).values(), reverse=True)
        return max(0, said[len(said) // 2]) if said else 0

    def note_ends(self, ends: Iterable[tuple[PeerID, bytes]]) -> None:
        """Record signatures of the run's end; the caller has verified them."""
        if self._plan is not None:
            self._ends.update((peer, signature) for peer, signature in ends if self._plan.has(peer))

    def knows_end_of(self, peer: PeerID) -> bool:
        return peer in self._ends

    @property
    def ends(self) -> Ends:
        """The signatures that prove the run's end; empty: too few yet."""
        if self._plan is None or not self._ends or not proves_end(self._plan, self._ends):
            return ()
        return tuple(sorted(self._ends.items()))


class SnapshotSchedule:
    """Decides when all stages write a snapshot of the same version; together these are a complete snapshot.

    Heartbeats report how long ago each stage last wrote a snapshot (`Heartbeat.unsaved_s`). If that is too long for any
    peer, the coordinator's replies name a version that no stage has reached yet (`HeartbeatReply.save_at`). A stage
    that learns of it too late still reports itself as unsaved, and the coordinator names another version. A young run
    saves sooner: after `_FIRST_S`, and each time that its age has doubled.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._interval_s, self._heartbeat_s = spec.swarm.snapshot_interval_s, spec.swarm.heartbeat_s
        self._lead_steps = spec.training.s_max + 1
        """How many versions one stage may be ahead of another one."""
        self.save_at = 0
        """The version to write; 0: none is due."""
        self._look_at_s = -math.inf

    def begin(self) -> None:
        self.save_at = 0
        self._look_at_s = -math.inf

    def look(self, beats: Iterable[Heartbeat], now_s: float, *, elapsed_s: float, step_s: float) -> None:
        """Choose a version if a snapshot is due.
        Args: beats: every live peer's newest heartbeat of the live era; read at most twice a heartbeat interval.
        step_s: the usual time of a step; 0: unknown."""
        if self._interval_s <= 0.0 or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + self._heartbeat_s / 2
        members = [beat for beat in beats if beat.synced and beat.stage is not None]
        if not members:
            return
        if self.save_at > min(beat.version for beat in members):
            return  # a member has not reached it yet
        self.save_at = 0
        if max(beat.unsaved_s for beat in members) >= min(self._interval_s, max(_FIRST_S, elapsed_s / 2.0)):
            ahead = math.ceil(_NOTICE_HEARTBEATS * self._heartbeat_s / step_s) if step_s > 0.0 else 0
            self.save_at = max(beat.version for beat in members) + self._lead_steps + ahead
