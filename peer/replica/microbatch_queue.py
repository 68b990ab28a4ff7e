"""Decides which member of stage 0 computes which microbatch. Pure.

Theory of operation. A member whose window (limit on microbatches in flight) has room sends the group's leader a claim.
The leader keeps the list of grants (`WorkQueue`), and holds every claim open until it may grant the claimant a
microbatch, for `PATIENCE_S` at most. It serves all open claims of one turn of the event loop together. A claimant far
slower than the rest gets a microbatch now and then.

Each claimant gets its share of a step, by the plan, and up to a tenth more. Windows alone do not keep members to their
shares: a window is as large as the rate that it measures, and the rate is as high as the window is large, so nothing
brings back a member that has come to compute more than its share. The network of such a member carries more activations
than the plan assumes, and the whole group waits for its part of the reduction. A claimant that has had its full share
of a step may hold, at any time, no more than its share of the microbatches that are not granted yet. Beyond that it
goes on with the next step. Members that take no traffic have no share. If a claim has waited for `PATIENCE_S` while
microbatches could be granted, the claimant gets its share of them, however many it has had: the members for which they
are reserved may have gone unnoticed.

Work lost with a replica of any stage runs again: the leader divides it among the open members and asks each to run its
part. If a member declines, the leader runs that part. These microbatches are not claimed, because a claim waits for
room in a window, and the windows may be full of microbatches that wait for the lost ones.

Every member keeps the list, from the other members' reports of what they have computed and were granted, so that any
member can lead next.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.peer.pipeline.microbatch import Indices, Microbatch, indices_from
from shoal.peer.replica.commands import (
    Answer,
    DropClaim,
    HandOut,
    Make,
    MemberGranted,
    QueueCommand,
    ReportValidation,
    SendClaim,
    TellValidation,
)
from shoal.peer.replica.events import (
    ClaimArrived,
    ClaimFailed,
    GrantArrived,
    HaltAsked,
    QueueEvent,
    RepairArrived,
    RepairAsked,
    RepairDeclined,
    RunAhead,
    TimerFired,
    ValidationArrived,
    WorkReturned,
)
from shoal.peer.replica.router import PeerPace, Turns
from shoal.peer.replica.schedule import Schedule
from shoal.peer.replica.views import GroupView
from shoal.peer.replica.work_queue import WorkQueue
from shoal.protocol.errors import Refused, RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import HALTED_S_MAX, OPEN_STEPS_MAX, REPAIRED_SHARE
from shoal.protocol.messages import Grant, Halted, ValidationReport, ValidationResult
from shoal.protocol.plan import Plan

PATIENCE_S = 5.0
"""Seconds for which the leader keeps a claim (a request for microbatches) open if it may grant nothing."""
RETRY_S = 0.2
"""Seconds until a failed claim (a request for microbatches) is repeated."""
HALT_S = 10.0
"""Seconds that a halt (no step begins) lasts unless the leaving member renews it; at most `HALTED_S_MAX` in all."""
_STILL_STEPS = 2.0
"""The run counts as standing still if no step was made for this many step times. Then a peer's repairs are admitted
even beyond its share, since the work may really be lost."""
_SHARE_MIN = 1e-3
_SHARE_TIMES = 1.1
"""A member that is quicker than the plan assumes computes up to this multiple of its share, so that the step does not
wait for slower members. With more, its network card would carry more than the plan assumes."""


@dataclass(slots=True)
class _OpenClaim:
    count: int
    call: int
    until_s: float


@dataclass(frozen=True, slots=True)
class _Since:
    peer: PeerID
    at_s: float


@dataclass(slots=True)
class _Halt:
    """A leaving member's request that no step begins. The record stays after the halt, until a plan has dropped the
    member, so that the member cannot ask for more time."""

    ends_s: float
    """The latest time at which the halt ends, with all renewals."""
    until_s: float = -math.inf
    """Time at which the halt ends unless the member renews it; -inf: the halt is over."""

    @property
    def is_open(self) -> bool:
        return self.until_s > -math.inf


@dataclass(kw_only=True, slots=True)
class MicrobatchQueue:
    """The claims, grants and repairs that one replica of stage 0 knows of, and its decisions on them if it leads.

    Args: book: the list of grants; group: our view of the group; demand: our schedule, which wants microbatches."""

    book: WorkQueue
    group: GroupView
    demand: Schedule
    is_stopped: bool = False
    """True if we drain, pause or lag: then we claim nothing and run no repairs."""
    _claims: dict[PeerID, _OpenClaim] = field(init=False, default_factory=dict)
    _out: dict[Microbatch, _Since] = field(init=False, default_factory=dict)
    """Microbatch that is granted and not contributed yet -> (member, time of the grant)."""
    _had: dict[int, Counter[PeerID]] = field(init=False, default_factory=dict)
    """Step -> member -> how many microbatches of the step were granted to the member."""
    _made_s: dict[PeerID, float] = field(init=False, default_factory=dict)
    """Member -> time at which it last contributed a microbatch that we had granted to it."""
    _flows_s: float | None = field(init=False, default=None)
    """Time of the first contribution of a microbatch that we had granted. Members are not blamed for the time before
    it, in which stages may have waited for their state."""
    _pace: PeerPace = field(init=False, default_factory=PeerPace)
    _turns: Turns = field(init=False, default_factory=Turns)
    _halts: dict[PeerID, _Halt] = field(init=False, default_factory=dict)
    """The halts of members that leave and are the last holder of a stage. No step begins while a halt is open."""
    _reached_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=16))
    _repaired_until_s: dict[PeerID, float] = field(init=False, default_factory=dict)
    """Peer -> time until which its past repairs count, each for 1 / `REPAIRED_SHARE` times a microbatch."""
    _spared_s: float = field(init=False, default=0.0)
    """The time at which repairs beyond `REPAIRED_SHARE` were last admitted, because the run stood still."""
    _losses: dict[int, dict[int, float]] = field(init=False, default_factory=dict)
    _asked: _Since | None = field(init=False, default=None)
    """The leader to which our open claim (a request for microbatches) went, and when; None: no claim is open."""
    _answers_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=16))
    """Seconds from claim to answer, for our last claims. The least is the round trip of a claim answered at once."""
    _plan: Plan | None = field(init=False, default=None)
    _serves_at_s: float = field(init=False, default=math.inf)
    """When to answer open claims: at the end of this turn of the event loop if something changed; infinite: not now."""
    _claims_at_s: float = field(init=False, default=math.inf)
    _failed_until_s: float = field(init=False, default=0.0)
    """Time before which we send no new claim for microbatches, because one has failed."""

    @property
    def open_claims(self) -> tuple[PeerID, ...]:
        """The members that have asked for microbatches, and wait because none can be granted to them yet."""
        return tuple(self._claims)

    @property
    def halts(self) -> tuple[PeerID, ...]:
        """The members that have asked that no further step begins."""
        return tuple(peer for peer, halt in self._halts.items() if halt.is_open)

    def handle(self, event: QueueEvent, *, now_s: float) -> list[QueueCommand]:
        """Process an event; return commands. Raises: Refused, RemoteError: the event is invalid; nothing has
        changed."""
        match event:
            case TimerFired():
                return self._timer(now_s)
            case ClaimArrived(source, count, call):
                return self._open_claim(source, count, call, now_s)
            case GrantArrived():
                return self._take_grant(event, now_s)
            case ClaimFailed(leader):
                return self._claim_later(leader, now_s)
            case RepairAsked(source, step, bitmap):
                return self._repair(source, step, bitmap, now_s)
            case RepairArrived(source, items):
                return self._take_part(source, items)
            case RepairDeclined(_, microbatches):
                for microbatch in microbatches:
                    self._out.pop(microbatch, None)
                return [Make(microbatch, True) for microbatch in microbatches]
            case WorkReturned(source, microbatch, begun):
                return self._take_back(source, microbatch, begun)
            case HaltAsked(source, at_once, call):
                return self._halt(source, at_once, call, now_s)
            case ValidationArrived(source, step, index, loss):
                return self._take_validation(source, ValidationResult(step=step, index=index, loss=loss))

    def next_timer_s(self) -> float:
        due_s = min(self._serves_at_s, self._claims_at_s)
        for claim in self._claims.values():
            if claim.until_s < due_s:
                due_s = claim.until_s
        return min([due_s, *(halt.until_s for halt in self._halts.values() if halt.is_open)])

    def _timer(self, now_s: float) -> list[QueueCommand]:
        commands = self._end_halts(now_s) if self._halts else []
        if now_s >= self._serves_at_s or any(now_s >= claim.until_s for claim in self._claims.values()):
            self._serves_at_s = math.inf
            commands += self._serve(now_s)
        for source, claim in [*self._claims.items()]:
            if now_s >= claim.until_s:
                commands.append(self._answer(source, []))
        if now_s >= self._claims_at_s:
            self._claims_at_s = math.inf
            commands += self._claim(now_s)
        return commands

    # --- told by the core of the replica ---

    def follow(self, plan: Plan, *, now_s: float) -> list[QueueCommand]:
        # A member that is not in the plan has left, so its halt ends. A member that is back may ask for another halt.
        away = plan.dropped_since(self._plan) if self._plan is not None else []
        self._plan = plan
        self.book.cutover_version = plan.cutover_version
        self._halts = {p: halt for p, halt in self._halts.items() if plan.has(p) and p not in away}
        return self._end_halts(now_s)

    def look_again(self, now_s: float) -> list[QueueCommand]:
        """Claim and grant again after a change: the window has room, the leader is new, or a member became ready."""
        ended: list[QueueCommand] = []
        if self.group.leader != self.group.me:
            # The claimants now claim from the new leader. If we kept these claims until we lead again, we would grant
            # them microbatches that no member computes.
            ended = [self._answer(source, []) for source in self.open_claims]
        if self._claims:
            self._serves_at_s = now_s
        if self._asked is not None:
            if self._asked.peer == self.group.leader:
                return ended  # The answer to our claim comes first.
            self._asked, self._claims_at_s = None, now_s
            return [*ended, DropClaim(), RunAhead(-1, 1.0)]
        self._claims_at_s = now_s
        return ended

    def reach(self, version: int, *, now_s: float) -> list[QueueCommand]:
        """Record that we hold `version`, by a step or a fetched state."""
        self._reached_s.append(now_s)
        self.book.reach(version)
        self._losses = {step: losses for step, losses in self._losses.items() if step >= version - 4}
        self._out = {m: granted for m, granted in self._out.items() if m.step >= version}
        self._had = {step: had for step, had in self._had.items() if step >= version}
        return self.look_again(now_s)

    def note(self, source: PeerID, step: int, indices: bytes, granted: bytes, *, now_s: float) -> None:
        """Record the microbatches of `step` that a member has contributed (`indices`, a bitmap) and was granted."""
        count = self.book.microbatches
        made = indices_from(indices, count=count)
        taken = made | indices_from(granted, count=count)
        self.book.take(step, taken)
        if step >= self.book.version:  # the next leader continues from this
            had = self._had.setdefault(step, Counter())
            had[source] = max(had[source], taken.bit_count())
        for microbatch, out in list(self._out.items()):
            if out.peer == source and microbatch.step == step and made >> microbatch.index & 1:
                self.made(microbatch, now_s=now_s)

    def made(self, microbatch: Microbatch, *, now_s: float) -> None:
        """Record that a member, perhaps this one, has contributed `microbatch`."""
        granted = self._took(microbatch, now_s)
        if granted is not None:
            self._made_s[granted.peer] = now_s
            if granted.peer in self._claims:
                self._serves_at_s = now_s  # the member holds less now, so more may be due to it
            self._turns.made(granted.peer, given_s=granted.at_s, now_s=now_s)

    def _took(self, microbatch: Microbatch, now_s: float) -> _Since | None:
        """End the grant of `microbatch`, if it is granted and not contributed yet, and count its time as the member's.
        Returns: the grant."""
        granted = self._out.pop(microbatch, None)
        if granted is not None:
            if self._flows_s is None:
                self._flows_s = now_s
            self._pace.took(granted.peer, now_s - granted.at_s, blamed_s=now_s - max(granted.at_s, self._flows_s))
        return granted

    def lost(self, peer: PeerID, *, now_s: float) -> list[QueueCommand]:
        """Forget the grants of a lost member. Keep its measured speed, in case it comes back."""
        self._out = {m: granted for m, granted in self._out.items() if granted.peer != peer}
        for had in self._had.values():
            had.pop(peer, None)  # others run its work again; if it comes back, its whole share is due to it again
        # Close its open claim: microbatches granted to it would be lost unnoticed.
        answers: list[QueueCommand] = [self._answer(peer, [])] if peer in self._claims else []
        if self.book.version < self.book.steps:
            return answers
        self.book.validate_again(self._losses.get(self.book.steps, {}))
        return [*answers, *self.look_again(now_s)]

    # --- the claimant ---

    def _claim(self, now_s: float) -> list[QueueCommand]:
        count, leader = self._wanted(), self.group.leader
        if self._asked is not None or count <= 0 or leader is None:
            return []
        if now_s < self._failed_until_s:
            self._claims_at_s = self._failed_until_s
            return []
        self._asked = _Since(leader, now_s)
        return [SendClaim(leader, count)]

    def _wanted(self) -> int:
        window = self.demand.window
        if self.is_stopped or window is None or not self.group.ready:
            return 0
        # Ask for more than fits now: places in the window will become free while the claim is on its way.
        ahead = 1 + min(window.size, math.ceil(window.rate_per_s * min(self._answers_s, default=0.0)))
        return self.demand.room + ahead - self.demand.num_waiting

    def _take_grant(self, grant: GrantArrived, now_s: float) -> list[QueueCommand]:
        asked, leader = self._asked, grant.leader
        if asked is None or asked.peer != leader:
            return []
        try:
            self._check(leader, grant.items, validates=True)
            if not 1.0 <= grant.gain < math.inf:
                raise RemoteError(leader, f"wants {grant.gain} times what the pipeline holds in flight")
        except RemoteError:
            self._claim_later(leader, now_s)
            raise
        self._asked, self._claims_at_s = None, now_s
        self._answers_s.append(now_s - asked.at_s)
        commands: list[QueueCommand] = [RunAhead(grant.steps_ahead, grant.gain)]
        # If the leader has changed meanwhile, drop these: the new leader does not know them, and grants them again.
        for step, index in grant.items if leader == self.group.leader else ():
            if index >= 0:
                self.book.take(step, 1 << index)  # for our Progress, and in case we lead next
                if leader != self.group.me:  # else we counted it when we granted it
                    self._had.setdefault(step, Counter())[self.group.me] += 1
            commands.append(Make(Microbatch(step, index), False))
        return commands

    def _claim_later(self, leader: PeerID, now_s: float) -> list[QueueCommand]:
        if self._asked is not None and self._asked.peer == leader:
            self._asked, self._failed_until_s = None, now_s + RETRY_S
            self._claims_at_s = self._failed_until_s
        return []

    def _check(self, leader: PeerID, items: Sequence[tuple[int, int]], *, validates: bool = False) -> None:
        first = -self.book.validation_microbatches if validates else 0
        for step, index in items:
            if not (0 <= step <= self.book.steps and first <= index < self.book.microbatches):
                raise RemoteError(leader, f"grants microbatch ({step}, {index}), which this run does not have")

    # --- the leader ---

    def _open_claim(self, source: PeerID, count: int, call: int, now_s: float) -> list[QueueCommand]:
        if not self.group.is_leader or not self.group.has_place(source):
            raise Refused(self.group.me, "does not lead stage 0 for the sender")
        # Only a member's last claim counts: the member no longer waits for the answers to earlier claims.
        superseded: list[QueueCommand] = [self._answer(source, [])] if source in self._claims else []
        self._claims[source] = _OpenClaim(count, call, now_s + PATIENCE_S)
        self._serves_at_s = now_s
        return superseded

    def _answer(self, source: PeerID, granted: Iterable[Microbatch]) -> Answer:
        claim, items = self._claims.pop(source), tuple((m.step, m.index) for m in granted)
        choice = self.demand.control.choice if self.demand.control else None
        if choice is None:
            return Answer(claim.call, Grant(items=items))
        return Answer(claim.call, Grant(items=items, steps_ahead=choice.steps_ahead, gain=choice.gain))

    def _serve(self, now_s: float) -> list[QueueCommand]:
        """Answer each open claim with the microbatches that are due to the claimant; leave the claim open if none are
        due. A claimant that is not ready waits: we do not know the peer yet, or it was lost after it asked."""
        if not self.group.is_leader:
            return []
        commands: list[QueueCommand] = []
        everyone = (self.group.me, *self.group.ready_members)
        held = Counter(dict.fromkeys(everyone, 0))
        held.update(granted.peer for granted in self._out.values() if granted.peer in held)
        claims = [claim for claim in self._claims.items() if claim[0] in everyone]
        shares = self._shares(everyone, now_s) if claims else {}
        admissible, left_to_validate = self.book.admissible, self.book.left_to_validate
        for source, claim in claims:
            most = self._turns.most(source, held, left=self.book.admissible) - held[source]
            due: dict[int, int] | None = None
            due_to_validate: int | None = None
            if source not in shares:
                # The whole step would wait for this slow member. Grant it one microbatch now and then, as a trial.
                most = 1 if self._pace.is_due(source, now_s) else 0
            elif now_s < claim.until_s:
                due = self._due(source, shares[source], everyone)
                due_to_validate = math.ceil(shares[source] * left_to_validate)
            else:
                most = min(most, math.ceil(shares[source] * admissible))
            granted = self.book.grant(max(0, min(claim.count, most)), due, due_to_validate=due_to_validate)
            if granted:
                held[source] += len(granted)
                trained = [microbatch for microbatch in granted if not microbatch.validates]
                for microbatch in trained:
                    self._had.setdefault(microbatch.step, Counter())[source] += 1
                self._pace.given(source, now_s)
                commands += self._give(source, trained, now_s)
                commands.append(self._answer(source, granted))
        return commands

    def _shares(self, everyone: Sequence[PeerID], now_s: float) -> dict[PeerID, float]:
        """Return the shares, which sum to 1, of the members that take traffic and are not far too slow."""
        able = {self.group.me, *self.group.open_members, *self._claims}
        shares = {
            peer: max(self.group.share_of(peer), _SHARE_MIN)
            for peer in everyone
            if peer in able and self._keeps_pace(peer, everyone, now_s)
        }
        total = sum(shares.values())
        return {peer: share / total for peer, share in shares.items()}

    def _due(self, source: PeerID, share: float, everyone: Sequence[PeerID]) -> dict[int, int]:
        """Return open step -> how many of its microbatches may be granted to `source`, a member with the share `share`.
        A member that has become slow gets no more of a step than it can compute while the others compute the rest."""
        control = self.demand.control
        last = self.book.version + (control.steps_ahead if control is not None else math.inf)
        held: dict[int, Counter[PeerID]] = {step: Counter(dict.fromkeys(everyone, 0)) for step in self.book.left}
        for microbatch, granted in self._out.items():
            if microbatch.step in held and granted.peer in everyone:
                held[microbatch.step][granted.peer] += 1
        due: dict[int, int] = {}
        for step, left in self.book.left.items():
            had, holds = self._had[step][source] if step in self._had else 0, held[step][source]
            its_own, of_others = self._its_own(share) - had, math.ceil(share * left) - holds
            in_time = self._turns.most(source, held[step], left=left) - holds
            due[step] = max(0, min(max(its_own, of_others), in_time))
            if due[step] < left and step >= last:
                break  # Later steps are too far ahead: they would only delay the rest of this step.
        return due

    def _its_own(self, share: float) -> int:
        """Return how many microbatches of a step are a full share: by the plan, or up to a tenth more."""
        of_plan = share * self.book.microbatches
        return max(math.ceil(of_plan), math.floor(_SHARE_TIMES * of_plan))

    def _give(self, peer: PeerID, microbatches: Iterable[Microbatch], now_s: float) -> list[QueueCommand]:
        commands: list[QueueCommand] = []
        for microbatch in microbatches:
            self._out[microbatch] = _Since(peer, now_s)
            commands.append(MemberGranted(peer, microbatch))
        return commands

    def _keeps_pace(self, peer: PeerID, everyone: Sequence[PeerID], now_s: float) -> bool:
        since_s = now_s
        for granted in self._out.values():
            if granted.peer == peer and granted.at_s < since_s:
                since_s = granted.at_s
        # A member that has contributed since then is not stuck: its microbatch waits for a slow replica further on.
        since_s = max(since_s, self._made_s.get(peer, 0.0), self._flows_s or 0.0)
        return self._pace.weight(peer, everyone, waiting_s=now_s - since_s) == 1.0

    def _take_back(self, source: PeerID, microbatch: Microbatch, begun: bool) -> list[QueueCommand]:
        """Run ourselves a microbatch that `source` hands back because it pauses or lags."""
        if not self.group.is_leader or not self.group.has_place(source):
            raise Refused(self.group.me, "does not lead stage 0 for the sender")
        self._out.pop(microbatch, None)
        return [Make(microbatch, begun)]

    # --- repairs ---

    def _repair(self, source: PeerID, step: int, bitmap: bytes, now_s: float) -> list[QueueCommand]:
        self._check_holder(source)
        if not 0 <= step < self.book.steps:
            raise RemoteError(source, f"wants step {step} again, which this run does not have")
        count = self.book.microbatches
        asked = indices_from(bitmap, count=count)
        # A microbatch that is not back at stage 0 yet may still be on its way to the stage that asks for it.
        passed = [index for index in range(count) if asked >> index & 1 and not self.group.lacks(step, index)]
        may_run = self._count_repairs(source, len(passed), now_s)
        return self.run_again(step, sum(1 << index for index in passed[:may_run]), now_s=now_s)

    def _count_repairs(self, source: PeerID, asked: int, now_s: float) -> int:
        """Limit the repairs for `source` to a share of all work (`REPAIRED_SHARE`): a peer could ask for needless
        repairs, and only its own stage would notice.

        Returns: how many of `asked` may run now; the sender asks again for the rest. If the run stands still, now and
        then all may run. Raises: Refused: none may run."""
        seen = self._reached_s
        step_s = (seen[-1] - seen[0]) / (len(seen) - 1) if len(seen) > 1 else 10.0
        each_s = max(step_s, 1e-3) / self.book.microbatches / REPAIRED_SHARE
        at_once_s = (self.book.s_max + 2) * self.book.microbatches * each_s
        self._repaired_until_s = {p: until_s for p, until_s in self._repaired_until_s.items() if until_s > now_s}
        until_s = self._repaired_until_s.get(source, now_s)
        may_run = min(asked, math.floor((now_s + at_once_s - until_s) / each_s + 1e-6))
        if asked and may_run <= 0 and now_s >= max(seen[-1] if seen else 0.0, self._spared_s) + _STILL_STEPS * step_s:
            self._spared_s = now_s  # admit this once in `_STILL_STEPS`, for all askers together
            return asked
        if asked and may_run <= 0:
            raise Refused(self.group.me, "has used up the sender's share of repairs for now")
        self._repaired_until_s[source] = until_s + may_run * each_s
        return may_run

    def run_again(self, step: int, indices: Indices, *, now_s: float) -> list[QueueCommand]:
        """Divide lost microbatches of a step among open members that are not far too slow: one alone is slow."""
        self.book.take(step, indices)
        again = [Microbatch(step, index) for index in range(self.book.microbatches) if indices >> index & 1]
        parts, commands = self._shared(again, now_s), list[QueueCommand]()
        for microbatch in again:
            self._took(microbatch, now_s)  # else a slow leader never looks slow, since others repeat its work
        for peer, part in parts.items():
            if peer == self.group.me:
                commands += [Make(microbatch, True) for microbatch in part]
            else:
                # Note the grants now: if the member dies before it reports them, we still know what was lost.
                commands += [*self._give(peer, part, now_s), HandOut(peer, tuple(part))]
        return commands

    def _shared(self, again: Sequence[Microbatch], now_s: float) -> dict[PeerID, list[Microbatch]]:
        everyone = (self.group.me, *self.group.open_members)
        able = [peer for peer in everyone if self._keeps_pace(peer, everyone, now_s)] or [self.group.me]
        shares = {peer: max(self.group.share_of(peer), _SHARE_MIN) for peer in able}
        parts: dict[PeerID, list[Microbatch]] = {}
        for microbatch in again:
            peer = min(shares, key=lambda peer: (len(parts.get(peer, ())) + 1) / shares[peer])
            parts.setdefault(peer, []).append(microbatch)
        return parts

    def _take_part(self, source: PeerID, items: Sequence[tuple[int, int]]) -> list[QueueCommand]:
        if source != self.group.leader or self.is_stopped or not self.group.ready:
            raise Refused(self.group.me, "takes no repairs from the sender")
        self._check(source, items)
        # The leader may be two steps ahead of us.
        if any(step > self.book.version + self.book.s_max + 2 for step, _ in items):
            raise Refused(self.group.me, "has not reached that step")
        for step, index in items:
            self.book.take(step, 1 << index)
        return [Make(Microbatch(step, index), True) for step, index in items]

    # --- halts ---

    def _check_holder(self, source: PeerID) -> None:
        """Check a request. Raises: Refused: we do not lead stage 0, or the sender has no place in the plan or here."""
        if not self.group.is_leader:
            raise Refused(self.group.me, "does not lead stage 0")
        if self._plan is None or not (self._plan.groups_of(source) or self.group.has_place(source)):
            raise Refused(self.group.me, "does not know the sender as a holder")

    def _halt(self, source: PeerID, at_once: bool, call: int, now_s: float) -> list[QueueCommand]:
        """Begin no further step for `HALT_S` seconds, as `source` asks, which leaves the run; a repeated request
        prolongs this, up to `HALTED_S_MAX` in all. Answer `call` with the version at which all stages stop. Args:
        at_once: also grant no more of the begun steps. Raises: Refused: we do not lead stage 0, `source` holds no
        layers, or its time is used up."""
        self._check_holder(source)
        halt = self._halts.setdefault(source, _Halt(ends_s=now_s + HALTED_S_MAX))
        if now_s >= halt.ends_s:
            why = f"has halted for the sender for {HALTED_S_MAX:.0f} s, and halts again only once it has been away"
            raise Refused(self.group.me, why)
        halt.until_s = min(now_s + HALT_S, halt.ends_s)
        return [Answer(call, Halted(version=self.book.halt(at_once=at_once)))]

    def _end_halts(self, now_s: float) -> list[QueueCommand]:
        """End the halts that were not renewed. (A leaving peer renews its halt until the peer has gone.)"""
        for halt in self._halts.values():
            if halt.until_s <= now_s:
                halt.until_s = -math.inf
        if self.halts or self.book.halts_at is None:
            return []
        self.book.go_on()
        return self.look_again(now_s)

    # --- validation ---

    def validated(self, microbatch: Microbatch, loss: float) -> list[QueueCommand]:
        """Report the loss of a validation microbatch of ours that has passed through the pipeline."""
        result = ValidationResult(step=microbatch.step, index=-1 - microbatch.index, loss=loss)
        leader = self.group.leader or self.group.me
        return self._record(result) if leader == self.group.me else [TellValidation(leader, result)]

    def _take_validation(self, source: PeerID, result: ValidationResult) -> list[QueueCommand]:
        if not self.group.has_place(source):
            raise Refused(self.group.me, "does not know the sender as a member of stage 0")
        if not 0 <= result.index < self.book.validation_microbatches or not 0 <= result.step <= self.book.steps:
            raise RemoteError(source, "reports a validation microbatch that this run does not have")
        if result.step > self.book.version + OPEN_STEPS_MAX:
            raise Refused(self.group.me, "has not reached that step")
        return self._record(result)

    def _record(self, result: ValidationResult) -> list[QueueCommand]:
        losses = self._losses.setdefault(result.step, {})
        was_complete = len(losses) == self.book.validation_microbatches
        losses[result.index] = result.loss
        if was_complete or len(losses) < self.book.validation_microbatches:
            return []
        mean = sum(losses.values()) / len(losses)
        return [ReportValidation(ValidationReport(step=result.step, loss=mean, microbatches=len(losses)))]
