"""Decides when a stage group reduces, who takes part, and whether its members agree. Pure.

Theory of operation. The group is the ready replicas of one stage, in the plan's order (rank). For each step every
member tells its mates which microbatches it has accumulated (`Progress`). When the union is the whole step, the
*lead* (the first ready and open member by rank) opens a round: it names the members and what each contributes
(`RoundStart`). Members reduce exactly that, step, and tell each other the digest of the new state. Explicit rounds
are what lets replicas come and go without agreeing on a step at which a plan takes effect: membership is per round,
and an average never counts somebody who did not contribute to it.

Who is lead changes with readiness and with plans, and two leads at once would grant one microbatch twice or open two
rounds. So a lead *acts* only when it has heard every member of the plan since it became ready itself, and every ready
one names it as lead in its latest Progress; a member that names somebody else has stopped acting, and its Progress
says what it had granted until then. A member that drains is no longer *open* and resigns at once; it stays ready,
and is heard, until its contributions are committed, whether or not a plan still names it.

`attempt` orders the leads' words for one step: plan sequence first, then the lead's own retries. Members obey the
highest. A member that was left out of a round, or missed its end, sees from its mates' digests that it is behind and
asks one of them for the reduced gradient (`CatchUp`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.peer.pipeline.microbatch import IndexSet
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, Digest, Progress, RoundMember, RoundStart
from shoal.protocol.plan import Member

_ATTEMPTS_PER_PLAN = 1000


# --- commands ---


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message` to every mate."""

    message: Progress | RoundStart | Digest


@dataclass(frozen=True, slots=True)
class Reduce:
    """Take part in this round; an older attempt of the same step is void."""

    round: RoundStart


@dataclass(frozen=True, slots=True)
class Report:
    """The group has committed and agrees. Only the lead reports."""

    report: CommitReport


@dataclass(frozen=True, slots=True)
class CatchUp:
    """`mate` is at a later version and its round was not ours: fetch the reduced gradient of `step` from it."""

    mate: PeerID
    step: int


@dataclass(frozen=True, slots=True)
class Resync:
    """Our state at `version` is not the group's: fetch it from `mate`."""

    mate: PeerID
    version: int


Command = Tell | Reduce | Report | CatchUp | Resync


@dataclass(slots=True)
class _Tally:
    """One member's contribution to one step, as far as we know."""

    indices: IndexSet = field(default_factory=IndexSet)
    loss_sum: float = 0.0
    staleness_sum: int = 0


@dataclass(kw_only=True, slots=True)
class GroupCore:
    """One replica's view of its stage group.

    Args:
        microbatches: M, per step.
        tokens_per_microbatch: for the ledger.
        deadline_s: after this long at a version the lead commits with what there is, if that is at least
            `quorum` of M. 0: waits for all of it.
        catch_up_after_s: a mate's digest may overtake the end of our own round by this much.
    """

    me: PeerID
    stage: int
    steps: int
    microbatches: int
    tokens_per_microbatch: int
    has_loss: bool
    deadline_s: float
    quorum: float
    catch_up_after_s: float = 1.0
    version: int = 0
    ready: bool = False
    is_open: bool = True
    _plan_sequence: int = 0
    _members: tuple[Member, ...] = ()
    _ready_mates: set[PeerID] = field(default_factory=set)
    _closed_mates: set[PeerID] = field(default_factory=set)
    _known_mates: set[PeerID] = field(default_factory=set)
    _named: dict[PeerID, PeerID] = field(default_factory=dict)
    _announced_lead: PeerID | None = None
    _tallies: dict[int, dict[PeerID, _Tally]] = field(default_factory=dict)
    _claimed: dict[int, IndexSet] = field(default_factory=dict)
    _rounds: dict[int, RoundStart] = field(default_factory=dict)
    _digests: dict[int, dict[PeerID, str]] = field(default_factory=dict)
    _behind: tuple[PeerID, float] | None = None
    _version_since_s: float = 0.0
    _retries: int = 0

    # --- who ---

    @property
    def mates(self) -> tuple[PeerID, ...]:
        """The others of the plan's group, ready or not, in rank order."""
        return tuple(member.peer for member in self._members if member.peer != self.me)

    @property
    def ready_mates(self) -> tuple[PeerID, ...]:
        return tuple(peer for peer in self.mates if peer in self._ready_mates)

    @property
    def departing(self) -> tuple[PeerID, ...]:
        """Ready, but no longer in the plan: they drain."""
        return tuple(sorted(self._ready_mates.difference(self.mates)))

    @property
    def lead(self) -> PeerID | None:
        """The first ready and open member by rank; if all of them drain, the first ready one."""
        ready = [member.peer for member in self._members if self._is_ready(member.peer)]
        return next((peer for peer in ready if self._is_open(peer)), ready[0] if ready else None)

    def share_of(self, peer: PeerID) -> float:
        """Its part of the traffic among the ready members, in [0, 1]."""
        shares = {member.peer: member.share for member in self._members if self._is_ready(member.peer)}
        return shares.get(peer, 0.0) / sum(shares.values()) if shares else 0.0

    @property
    def is_lead(self) -> bool:
        """We are the lead, and everyone who could think otherwise has said so."""
        return (
            self.lead == self.me
            and self._known_mates.issuperset(self.mates)
            and all(self._named.get(mate) == self.me for mate in self._ready_mates)
        )

    def _is_ready(self, peer: PeerID) -> bool:
        return self.ready if peer == self.me else peer in self._ready_mates

    def _is_open(self, peer: PeerID) -> bool:
        return self.is_open if peer == self.me else peer not in self._closed_mates

    # --- events ---

    def plan_changed(self, members: Sequence[Member], plan_sequence: int, *, now_s: float) -> list[Command]:
        self._members = tuple(members)
        self._plan_sequence = plan_sequence
        return self._lead_may_have_changed(now_s)

    def set_ready(self, ready: bool, *, now_s: float) -> list[Command]:
        """We hold the stage's state and take part, or do no longer."""
        self.ready = ready
        self._known_mates.clear()
        self._named.clear()
        return [*self._tell_open_steps(), *self._lead_may_have_changed(now_s)]

    def drain(self, *, now_s: float) -> list[Command]:
        """We take nothing new and lead no more, but see our contributions committed."""
        self.is_open = False
        return self._lead_may_have_changed(now_s)

    def mate_ready(self, peer: PeerID, ready: bool, is_open: bool, *, now_s: float) -> list[Command]:
        """A mate says whether it holds state and takes part, and whether it takes traffic (it drains otherwise)."""
        if peer not in self.mates and peer not in self._ready_mates:
            return []
        self._known_mates.add(peer)
        (self._closed_mates.discard if is_open else self._closed_mates.add)(peer)
        commands: list[Command] = []
        if ready and peer not in self._ready_mates:
            self._ready_mates.add(peer)
            # It needs to know what is there, and whom we take for the lead.
            commands = self._tell_open_steps()
        elif not ready:
            self._ready_mates.discard(peer)
            self._named.pop(peer, None)
        return [*commands, *self._lead_may_have_changed(now_s)]

    def mate_lost(self, peer: PeerID, *, now_s: float) -> list[Command]:
        """It died or dropped its state: its contributions to open steps died with it."""
        self._known_mates.add(peer)
        self._ready_mates.discard(peer)
        for tallies in self._tallies.values():
            tallies.pop(peer, None)
        return self._lead_may_have_changed(now_s)

    def mate_silent(self, peer: PeerID, *, now_s: float) -> list[Command]:
        """It cannot be reached: nobody can wait for its word on who leads, least of all if it was about to leave."""
        self._known_mates.add(peer)
        if peer not in self.mates:
            self._ready_mates.discard(peer)
        return self._try_round(now_s)

    def claimed(self, step: int, index: int) -> list[Command]:
        """Stage 0: we have been granted it."""
        self._claimed.setdefault(step, IndexSet()).add(index)
        return [Tell(self._progress(step))]

    def contributed(self, step: int, index: int, *, loss: float, staleness_steps: int, now_s: float) -> list[Command]:
        """Our backward of (step, index) is in the gradient sum."""
        if step < self.version:
            return []
        tally = self._tally(step, self.me)
        if index in tally.indices:
            return []
        tally.indices.add(index)
        tally.loss_sum += loss
        tally.staleness_sum += staleness_steps
        return [Tell(self._progress(step)), *self._try_round(now_s)]

    def progress(self, source: PeerID, message: Progress, *, now_s: float) -> list[Command]:
        self._named[source] = message.lead
        if message.step >= self.version:
            tally = self._tally(message.step, source)
            indices = IndexSet.from_bytes(message.indices, count=self.microbatches)
            if len(indices) >= len(tally.indices):  # Calls may overtake each other; a contribution only grows.
                tally.indices, tally.loss_sum, tally.staleness_sum = indices, message.loss_sum, message.staleness_sum
        return self._try_round(now_s)

    def round_started(self, message: RoundStart) -> list[Command]:
        """The lead's word (our own included)."""
        known = self._rounds.get(message.step)
        if message.step < self.version or (known is not None and known.attempt >= message.attempt):
            return []
        self._rounds[message.step] = message
        return [Reduce(message)] if any(m.peer == self.me for m in message.members) else []

    def stepped(self, version: int, digest: str, *, now_s: float) -> list[Command]:
        """We are at `version`, by a step or by fetching; `digest` is our state's."""
        assert version >= self.version, f"version fell from {self.version} to {version}"
        self.version = version
        self._version_since_s = now_s
        self._retries = 0
        self._behind = None
        for table, first in ((self._tallies, version), (self._claimed, version), (self._rounds, version - 1)):
            for step in [s for s in table if s < first]:
                del table[step]
        self._digests.setdefault(version, {})[self.me] = digest
        commands: list[Command] = [Tell(Digest(stage=self.stage, version=version, digest=digest))]
        commands += self._compare(version)
        late = max((v for v in self._digests if v > version), default=None)
        if late is not None:
            self._behind = (min(self._digests[late]), now_s + self.catch_up_after_s)
        return commands + self._try_round(now_s)

    def digest(self, source: PeerID, message: Digest, *, now_s: float) -> list[Command]:
        if message.version < self.version:
            return []
        self._digests.setdefault(message.version, {})[source] = message.digest
        if message.version > self.version:
            if self._behind is None:
                self._behind = (source, now_s + self.catch_up_after_s)
            return []
        return self._compare(message.version)

    def timer(self, *, now_s: float) -> list[Command]:
        if self._behind is not None and now_s >= self._behind[1]:
            mate = self._behind[0]
            self._behind = (mate, now_s + 2 * self.catch_up_after_s)
            return [CatchUp(mate, self.version)] if self.ready else []
        return self._try_round(now_s)

    def next_timer_s(self) -> float:
        times = [self._behind[1]] if self._behind else []
        if self.deadline_s > 0 and self.version not in self._rounds:
            times.append(self._version_since_s + self.deadline_s)
        return min(times, default=float("inf"))

    def round_failed(self, message: RoundStart, *, now_s: float) -> list[Command]:
        """The reduction broke off; the lead opens another attempt with whoever is ready."""
        if self._rounds.get(message.step) is not message or message.step != self.version:
            return []
        del self._rounds[message.step]
        self._retries += 1
        return self._try_round(now_s)

    @property
    def owes(self) -> bool:
        """We have contributed to a step that is not committed yet."""
        return any(len(tallies[self.me].indices) for tallies in self._tallies.values() if self.me in tallies)

    # --- inside ---

    def _tally(self, step: int, peer: PeerID) -> _Tally:
        return self._tallies.setdefault(step, {}).setdefault(peer, _Tally())

    def _progress(self, step: int) -> Progress:
        mine = self._tally(step, self.me)
        return Progress(
            stage=self.stage,
            step=step,
            lead=self.lead or PeerID(""),
            indices=mine.indices.to_bytes(),
            claimed=self._claimed.get(step, IndexSet()).to_bytes(),
            loss_sum=mine.loss_sum,
            staleness_sum=mine.staleness_sum,
        )

    def _open_steps(self) -> list[int]:
        """Steps about which there is something to say; the current one always."""
        return sorted({self.version, *(s for table in (self._tallies, self._claimed) for s in table)})

    def _tell_open_steps(self) -> list[Command]:
        return [Tell(self._progress(step)) for step in self._open_steps()]

    def _lead_may_have_changed(self, now_s: float) -> list[Command]:
        commands: list[Command] = []
        if self.lead != self._announced_lead:
            self._announced_lead = self.lead
            commands = self._tell_open_steps()
        return [*commands, *self._try_round(now_s)]

    def _try_round(self, now_s: float) -> list[Command]:
        step = self.version
        if not self.is_lead or step >= self.steps or step in self._rounds:
            return []
        tallies = self._tallies.get(step, {})
        union = IndexSet()
        for tally in tallies.values():
            union = union | tally.indices
        missing = self.microbatches - len(union)
        if missing:
            overdue = self.deadline_s > 0 and now_s >= self._version_since_s + self.deadline_s
            if not overdue or len(union) < self.quorum * self.microbatches:
                return []
        bandwidths = {member.peer: member.bandwidth for member in self._members}
        # Ready members in rank order, then those who contributed and have since left the plan: they owe and are owed.
        ranked = [member.peer for member in self._members if self._is_ready(member.peer)]
        ranked += [p for p in sorted(tallies) if p not in bandwidths and len(tallies[p].indices) and p != self.me]
        members = tuple(
            RoundMember(
                peer=peer,
                bandwidth=bandwidths.get(peer, min(bandwidths.values())),
                indices=tallies[peer].indices.to_bytes() if peer in tallies else b"",
            )
            for peer in ranked
        )
        counted = [tallies[peer] for peer in ranked if peer in tallies]
        start = RoundStart(
            stage=self.stage,
            step=step,
            attempt=self._plan_sequence * _ATTEMPTS_PER_PLAN + self._retries,
            members=members,
            duplicates=sum(len(tally.indices) for tally in counted) - len(union),
            given_up=missing,
            loss_sum=sum(tally.loss_sum for tally in counted),
            staleness_sum=sum(tally.staleness_sum for tally in counted),
        )
        return [Tell(start), *self.round_started(start)]

    def _compare(self, version: int) -> list[Command]:
        """Who agrees on the state of `version`, once all of its round's members have spoken."""
        start = self._rounds.get(version - 1)
        digests = self._digests.get(version, {})
        if start is None or any(member.peer not in digests for member in start.members):
            return []
        del self._rounds[version - 1]
        for old in [v for v in self._digests if v < version]:
            del self._digests[old]
        ranks = [member.peer for member in start.members]
        votes = [digests[peer] for peer in ranks]
        # The digest most members have; among equals the lead's.
        truth = max(dict.fromkeys(votes), key=lambda digest: (votes.count(digest), -votes.index(digest)))
        if digests[self.me] != truth:
            return [Resync(ranks[votes.index(truth)], version)]
        if ranks[0] != self.me:
            return []
        contributed = self.microbatches - start.given_up + start.duplicates
        return [
            Report(
                CommitReport(
                    stage=self.stage,
                    step=start.step,
                    members=len(ranks),
                    microbatches=self.microbatches - start.given_up,
                    duplicates=start.duplicates,
                    given_up=start.given_up,
                    tokens=(self.microbatches - start.given_up) * self.tokens_per_microbatch,
                    staleness_steps_mean=start.staleness_sum / max(1, contributed),
                    loss=start.loss_sum / max(1, contributed) if self.has_loss else None,
                    digest=truth,
                )
            )
        ]
