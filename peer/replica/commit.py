"""Decides when a stage group reduces, who takes part, and whether its members agree. Pure.

Theory of operation. The group is the ready replicas of one stage, in the plan's order (rank). For each step every
member tells its mates which microbatches it has accumulated (`Progress`). When the union is the whole step, the
*lead* (the first ready and open member by rank that holds the state) opens a round: it names the members and what each
contributes (`RoundStart`). Members reduce exactly that, step, and tell each other the digest of the new state. Explicit
rounds are what lets replicas come and go without agreeing on a step at which a plan takes effect: membership is per
round, and an average never counts somebody who did not contribute to it.

Who is lead changes with readiness and with plans, and two leads at once would grant one microbatch twice or open two
rounds. So a lead *acts* only when it has heard every member of the plan since it became ready itself, and every ready
one names it as lead in its latest Progress; a member that names somebody else has stopped acting, and its Progress
says what it had granted until then. A member that drains is no longer *open* and resigns at once; it stays ready,
and is heard, until its contributions are committed, whether or not a plan still names it.

A layout that ends at a version (`Plan.ends_at`) commits no step from there on, even if all of it is here: what has been
begun of such a step the next layout makes again.

`attempt` orders the leads' words for one step: plan sequence first, then the lead's own retries. Members obey the
highest. A member that was left out of a round, or missed its end, sees from its mates' digests that it is behind and
asks one of them for the reduced gradient (`CatchUp`).

A *light* member (`peer/light.py`) is ready with weights alone. It contributes and takes part in rounds, which name it
as light; it never leads, tells no digest, and nobody counts on it for a state.

This file is long because every event of a group enters here: its parts (members, tallies, rounds, losses, agreement)
are in files of their own, and nobody else calls them.
"""

import math
from dataclasses import dataclass, field

from shoal.peer.group.agreement import UNCOMPARED_MAX, Agreement
from shoal.peer.group.attestations import voters
from shoal.peer.group.losses import Losses
from shoal.peer.group.members import Members
from shoal.peer.group.rounds import Rounds
from shoal.peer.group.standstill import standstill
from shoal.peer.group.tally import Tallies, round_of
from shoal.peer.pipeline.microbatch import indices_from
from shoal.peer.replica.commands import Accuse, CatchUp, CommitCommand, ForgetMember, Reduce, Tell
from shoal.peer.replica.events import (
    CommitEvent,
    DigestArrived,
    GradientCounted,
    GroupPlanned,
    MemberElsewhere,
    MemberGranted,
    MemberLost,
    MemberSilent,
    MemberState,
    OpenSet,
    ProgressArrived,
    ReadySet,
    RoundArrived,
    Stepped,
    StoodStill,
    TimerFired,
    WorkGranted,
)
from shoal.protocol.errors import Refused, RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import DIGEST_CHARS_MAX, OPEN_STEPS_MAX, RESTARTS_MAX, RESTARTS_PER_S
from shoal.protocol.live.allowance import Allowance
from shoal.protocol.messages import Digest, Progress, RoundStart
from shoal.protocol.wire_format import WireFormat


@dataclass(kw_only=True, slots=True)
class Commit:
    """One replica's view of its stage group.

    Args:
        microbatches: M, per step.
        tokens_per_microbatch: for the ledger.
        deadline_s: after this long at a version the lead commits with what there is, if that is at least
            `quorum` of M. 0: waits for all of it.
        catch_up_after_s: a mate's digest may overtake the end of a round that names us by this much.
        incarnation: of this replica; it dies with all that it holds, and the next one has a higher number.
        sums: the formats in which a reduction may travel (`WireSpec.sums`).
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
    incarnation: int = 0
    sums: tuple[WireFormat, ...] = ("fp32",)
    _members: Members = field(init=False)
    _light_until: dict[PeerID, int] = field(init=False, default_factory=dict)
    """Who has come to hold the state of late -> the last step of which a round may still call it light."""
    _count: int = field(init=False, default=0)
    _announced_lead: PeerID | None = field(init=False, default=None)
    _tallies: Tallies = field(init=False)
    _rounds: Rounds = field(init=False)
    _behind_at_s: float = field(init=False, default=math.inf)
    """When to ask a mate that is ahead."""
    _num_asked: int = field(init=False, default=0)
    _agreement: Agreement = field(init=False)
    _losses: Losses = field(init=False)
    _restarts: Allowance[PeerID] = field(init=False)
    _version_since_s: float = field(init=False, default=0.0)
    _ends_at: int = field(init=False, default=0)
    """The version at which the layout ends; 0: it does not."""
    _form: WireFormat = field(init=False)
    """The format of the rounds that we open."""

    def __post_init__(self) -> None:
        self._members = Members(me=self.me)
        self._rounds = Rounds(members=self._members, forms=self.sums)
        self._form = self.sums[0]
        self._tallies = Tallies(me=self.me, microbatches=self.microbatches)
        self._agreement = Agreement(
            me=self.me,
            stage=self.stage,
            microbatches=self.microbatches,
            tokens_per_microbatch=self.tokens_per_microbatch,
            has_loss=self.has_loss,
        )
        self._losses = Losses(microbatches=self.microbatches, is_first=self.stage == 0)
        self._restarts = Allowance(most=RESTARTS_MAX, per_s=RESTARTS_PER_S)

    # --- who ---

    @property
    def ready(self) -> bool:
        return self._members.ready

    @property
    def mates(self) -> tuple[PeerID, ...]:
        """The others of the plan's group, ready or not, in rank order."""
        return self._members.mates

    @property
    def ready_mates(self) -> tuple[PeerID, ...]:
        return self._members.ready_mates

    @property
    def whole_mates(self) -> tuple[PeerID, ...]:
        """Ready, with the state and not with weights alone."""
        return self._members.whole_mates

    @property
    def is_light(self) -> bool:
        """We take part with weights alone."""
        return self._members.is_light

    @property
    def _whole(self) -> set[PeerID]:
        """Who has said that it holds the state, ourselves among them if we do."""
        return {*self.whole_mates, self.me} if self.ready and not self.is_light else set(self.whole_mates)

    @property
    def open_mates(self) -> tuple[PeerID, ...]:
        """Ready, and taking traffic."""
        return self._members.open_mates

    @property
    def departing(self) -> tuple[PeerID, ...]:
        """Ready, but no longer in the plan: they drain."""
        return self._members.departing

    @property
    def holders(self) -> tuple[PeerID, ...]:
        """Who else has the stage's state, those who stay first."""
        light = self._members.light
        return (*self.whole_mates, *(peer for peer in self.departing if peer not in light))

    @property
    def lead(self) -> PeerID | None:
        """The first ready and open member by rank that holds the state; if all of them drain, the first that does."""
        return self._members.lead

    @property
    def standing(self) -> tuple[int, int]:
        """(our rank among the members that hold the state from 0, how many there are)."""
        return self._members.standing

    @property
    def is_lead(self) -> bool:
        """We are the lead, and everyone who could think otherwise has said so."""
        return self._members.is_lead

    def share_of(self, peer: PeerID) -> float:
        """Its part of the traffic among the ready members, in [0, 1]."""
        return self._members.share_of(peer)

    # --- events ---

    def handle(self, event: CommitEvent, *, now_s: float) -> list[CommitCommand]:
        """Raises: Refused, RemoteError: of events that another peer has caused; nothing has changed then."""
        match event:
            case TimerFired():
                return self._timer(now_s)
            case WorkGranted(step, index, again):
                self._tallies.claim(step, index)
                # Another leader knows what it has granted. If we lead, the mates must know it should we die; and if we
                # led until just now, whoever leads does not know what we have found to run again.
                is_known = self._members.lead != self.me and not again
                return [Tell(self._progress(step), can_wait=True, can_rest=is_known)]
            case MemberGranted(peer, microbatch):
                if peer != self.me:
                    self._losses.claimed(peer, microbatch.step, 1 << microbatch.index)
                return []
            case GradientCounted():
                return self._contribute(event, now_s)
            case ProgressArrived(source, progress):
                return self._take_progress(source, progress, now_s)
            case RoundArrived(source, start):
                return self._take_round(source, start)
            case DigestArrived(source, digest):
                return self._take_digest(source, digest, now_s)
            case Stepped():
                return self._stepped(event, now_s)
            case GroupPlanned():
                return self._plan_changed(event, now_s)
            case ReadySet(ready, light):
                was_light = self.is_light
                self._members.set_ready(ready, light=light)
                self._note_whole(self.me, was_light=was_light)
                self._look_ahead(now_s)
                return [*self._tell_open_steps(), *self._lead_may_have_changed(now_s)]
            case OpenSet(is_open):
                # Who takes no traffic leads only if nobody else could, but sees its contributions committed.
                self._members.set_open(is_open)
                return self._lead_may_have_changed(now_s)
            case MemberState():
                return self._take_state(event, now_s)
            case MemberElsewhere(peer, incarnation):
                if not self._is_near(peer) or incarnation < self._members.incarnation(peer):
                    return []
                self._members.has_no_state(peer)
                return self._lose(peer, now_s)
            case MemberLost(peer, is_barred):
                if not self._is_near(peer):
                    return []
                if is_barred:
                    self._members.bar(peer)
                return [ForgetMember(peer, died=True), *self._lose(peer, now_s)]
            case MemberSilent(peer):
                return self._fell_silent(peer, now_s) if self._is_near(peer) else []
            case StoodStill():
                return self._press()

    def _plan_changed(self, event: GroupPlanned, now_s: float) -> list[CommitCommand]:
        before = self.mates
        self._members.plan(event.members, event.former, now_s=now_s)
        self._losses.begins_at = event.begins_at
        self._rounds.plan_sequence = event.sequence
        self._ends_at = event.ends_at
        self._form = event.sums or self.sums[0]
        known = {self.me, *self.mates, *self.departing, *event.former, *self._rounds.named}
        self._members.forget_all_but(known)
        self._light_until = {peer: step for peer, step in self._light_until.items() if peer in known}
        self._agreement.forget_all_but(known)
        gone = sorted(peer for peer in before if not self._is_near(peer))
        return [*self._lead_may_have_changed(now_s), *(ForgetMember(peer) for peer in gone)]

    def _take_state(self, event: MemberState, now_s: float) -> list[CommitCommand]:
        """Who is in no plan, and was in this group by none of late, changes nothing: a mate that nobody can hear would
        keep the group from ever reducing."""
        peer, ready = event.peer, event.ready
        if self._members.is_barred(peer):
            return []
        forgotten = [ForgetMember(peer)] if self._has_begun_anew(peer, event.incarnation) else []
        if ready and event.drains and event.has_moved:
            self._members.moves_away(peer, now_s=now_s)
        is_near = self._is_near(peer) or (ready and event.drains and self._members.may_drain(peer, now_s))
        if not is_near or event.incarnation < self._members.incarnation(peer):
            return [*forgotten]
        reborn = self._reborn(peer, event.incarnation, now_s)
        if not ready and (peer not in self.mates or self._members.is_ready(peer)):
            # It has left, and nobody waits for it: nor for its part of a round that it has not heard of.
            self._members.has_no_state(peer)
            return [*forgotten, *reborn, *self._lose(peer, now_s)]
        was_light = peer in self._members.light
        is_news = self._members.state(peer, ready=ready, is_open=event.is_open, light=event.light)
        self._note_whole(peer, was_light=was_light)
        told = self._tell_open_steps(to=peer) if is_news else []
        return [*forgotten, *reborn, *told, *self._lead_may_have_changed(now_s)]

    def _note_whole(self, peer: PeerID, *, was_light: bool) -> None:
        """Whoever is light no more may be called so by this step's round, which may have been opened before, and by
        the next one, whose lead may not have heard of it."""
        if was_light and peer in self._whole:
            self._light_until[peer] = self.version + 1

    def _has_begun_anew(self, peer: PeerID, incarnation: int) -> bool:
        """Whether what we know of it is of an earlier incarnation."""
        return -1 < self._members.incarnation(peer) < incarnation

    def _reborn(self, peer: PeerID, incarnation: int, now_s: float) -> list[CommitCommand]:
        """A mate speaks as `incarnation`: an earlier one is lost. A Progress may have said so before the Hello does.

        The caller tries a round, once all that the mate says is known: it may be ready again."""
        commands: list[CommitCommand] = []
        if self._has_begun_anew(peer, incarnation):
            commands = self._count_out(peer, now_s)
            if not self._restarts.takes(peer, now_s):
                self._members.bar(peer)
                commands += [ForgetMember(peer, died=True), Accuse(peer)]
        self._members.speaks_as(peer, incarnation)
        return commands

    def _lose(self, peer: PeerID, now_s: float) -> list[CommitCommand]:
        """It died or dropped its state: its contributions to open steps died with it."""
        return [*self._count_out(peer, now_s), *self._lead_may_have_changed(now_s)]

    def _count_out(self, peer: PeerID, now_s: float) -> list[CommitCommand]:
        self._members.lost(peer)
        self._losses.mate_died()
        for step in sorted(self._losses.steps_claimed_by(peer).union(self._tallies.steps)):
            self._losses.died(peer, step, self._tallies.lose(peer, step))
        self._rounds.void_if_dead(self.version)
        left = self._agreement.reports_left_by(peer)
        return [*left, *self._compare(now_s)]

    def _fell_silent(self, peer: PeerID, now_s: float) -> list[CommitCommand]:
        """It cannot be reached: nobody can wait for its word on who leads, least of all if it was about to leave."""
        if peer in self.departing:
            commands = self._lose(peer, now_s)
        else:
            self._members.silent(peer)
            commands = self._try_round(now_s)
        return commands if peer in self.mates else [*commands, ForgetMember(peer)]

    def lacks(self, step: int, index: int) -> bool:
        """Nobody here has contributed it, as far as we know."""
        return step >= self.version and not self._tallies.is_held(step, index)

    def _contribute(self, event: GradientCounted, now_s: float) -> list[CommitCommand]:
        step, index = event.microbatch.step, event.microbatch.index
        if step < self.version or not self._tallies.add(
            step, index, loss=event.loss, staleness_steps=event.staleness_steps, apart=event.apart
        ):
            return []
        self._losses.grown(now_s)
        if step in self._rounds.open:
            self._void_round_if_outgrown(step, self.me)
        # Should we die, what we have contributed dies with us: the mates need our word for the round, and if we lead
        # not even for that.
        can_rest = self.deadline_s == 0 and (event.more_follows or self._members.lead == self.me)
        return [Tell(self._progress(step), can_wait=True, can_rest=can_rest), *self._try_round(now_s)]

    def _take_progress(self, source: PeerID, message: Progress, now_s: float) -> list[CommitCommand]:
        if not self._is_near(source):
            return []  # The last words of one whom we have counted out.
        known = self._members.incarnation(source)
        if message.incarnation < known:
            return []  # They were of one that has begun anew.
        commands: list[CommitCommand] = []
        if message.incarnation > known:
            commands = [ForgetMember(source)] if known > -1 else []
            commands += self._reborn(source, message.incarnation, now_s)
        if not self._members.has_spoken(source):
            commands += self._tell_open_steps(to=source)  # it did not know us before, and may have let ours pass
        self._members.names(source, message.lead, count=message.count)
        if self.version <= message.step < self.version + OPEN_STEPS_MAX:
            claimed = indices_from(message.claimed, count=self.microbatches)
            self._losses.claimed(source, message.step, claimed)
            if self._tallies.take(source, message):
                self._losses.grown(now_s)
            if message.step in self._rounds.open:
                self._void_round_if_outgrown(message.step, source)
        return [*commands, *self._lead_may_have_changed(now_s)]

    def _take_round(self, source: PeerID, start: RoundStart) -> list[CommitCommand]:
        if not self._is_near(source):
            raise Refused(self.me, f"does not know the sender as a member of group {self.stage}")
        if not self._rounds.is_sound(start):
            raise RemoteError(source, "opens a round that nobody can reduce, or under a number from far ahead")
        return self._hold_to(start)

    def _hold_to(self, message: RoundStart) -> list[CommitCommand]:
        """Take part in a round, be it the leader's or the one that we open as the leader."""
        if not self.ready:
            return []  # It named an earlier tenure of ours, which had what this one lacks.
        if message.step < self.version or not self._rounds.outbids(message):
            return []
        if any(message.step > self._light_until.get(peer, -1) for peer in self._whole.intersection(message.light)):
            return []  # It would leave out the digest of somebody who holds the state, by the word of a liar.
        if self.is_lead and self._rounds.is_dead(message):
            return []  # Who holds to it will hold to ours instead.
        mine = next((member.indices for member in message.members if member.peer == self.me), None)
        if mine is not None and not self._tallies.may_bring(self.me, message.step, mine):
            # Our sum holds more than the lead knew: an average must count what it contains. It will open another.
            return [Tell(self._progress(message.step))]
        self._rounds.open[message.step] = message
        return [Reduce(message)] if mine is not None else []

    def _void_round_if_outgrown(self, step: int, peer: PeerID) -> None:
        """As the lead: a member has more than our round says of it (a microbatch ran in two places)."""
        start = self._rounds.open[step]
        if step != self.version or self._members.lead != self.me:
            return
        said = next((member.indices for member in start.members if member.peer == peer), None)
        if said is not None and not self._tallies.may_bring(peer, step, said):
            self._rounds.void(step)

    def _stepped(self, event: Stepped, now_s: float) -> list[CommitCommand]:
        version, by = event.version, event.by
        assert version >= self.version, f"version fell from {self.version} to {version}"
        if by is not None:
            self._rounds.open.setdefault(by.step, by)
        self._losses.stepped(version, by_a_step=version == self.version + 1, now_s=now_s)
        self.version = version
        self._version_since_s = now_s
        self._rounds.retries = 0
        self._tallies.forget_before(version)
        commands: list[CommitCommand] = []
        if event.digest is not None:
            self._agreement.stepped(version, event.digest, event.gradient_norm)
            commands += map(Tell, self._agreement.own)
        commands += self._compare(now_s)
        for kept in (self._rounds, self._agreement):
            kept.forget_before(version - UNCOMPARED_MAX)
        self._behind_at_s = math.inf
        self._look_ahead(now_s)
        return commands + self._try_round(now_s)

    def _take_digest(self, source: PeerID, message: Digest, now_s: float) -> list[CommitCommand]:
        if len(message.digest) > DIGEST_CHARS_MAX:
            raise RemoteError(source, f"sent a digest of {len(message.digest)} characters")
        if not self._is_near(source) and source not in self._rounds.named:
            return []
        if message.version < self.version and not self.has_round(message.version - 1):
            return []
        self._agreement.heard(source, message.version, message.digest)
        self._look_ahead(now_s)
        return self._compare(now_s)

    def _timer(self, now_s: float) -> list[CommitCommand]:
        overstayed: list[CommitCommand] = []
        for peer in self._members.overstayed(now_s):
            overstayed += self._lose(peer, now_s)
        if now_s >= self._behind_at_s:
            return [*overstayed, *self._catch_up(now_s)]
        return [*overstayed, *self._compare(now_s), *self._try_round(now_s)]

    def next_timer_s(self) -> float:
        members = self._members
        due_s = min(self._agreement.next_s, self._behind_at_s)
        if members.departing:
            due_s = min(due_s, members.overstays_at_s)
        if self.version not in self._rounds.open and not self._has_ended:
            if self.deadline_s > 0:
                due_s = min(due_s, self._version_since_s + self.deadline_s)
            if members.is_lead and self.version < self.steps:
                due_s = min(due_s, self._losses.suspect_at_s)
        return due_s

    def _press(self) -> list[CommitCommand]:
        """We stand still: say again what somebody may have forgotten with a mate that it counted lost. As the lead our
        round, since a member may have held to that one's; else to the lead what is here, and that it leads."""
        if self.lead not in (None, self.me):
            return self._tell_open_steps(to=self.lead)
        start = self._rounds.open.get(self.version)
        return [Tell(start)] if self.is_lead and start is not None else []

    @property
    def _has_ended(self) -> bool:
        """The layout ends at our version, or before it."""
        return 0 < self._ends_at <= self.version

    def has_place(self, peer: PeerID) -> bool:
        """It is ourselves, a mate by the plan, or one that drains."""
        return peer == self.me or self._members.is_near(peer)

    def is_gone(self, peer: PeerID) -> bool:
        """Nothing is to be heard from it: it died, it cannot be reached and is not ready, or it has left."""
        return self._members.is_gone(peer)

    def _is_near(self, peer: PeerID) -> bool:
        """It is a mate by the plan, or one that drains."""
        return self._members.is_near(peer)

    def voters(self, newcomer: PeerID) -> tuple[PeerID, ...]:
        """More than half of whom must have signed a state before `newcomer` fetches it."""
        members = self._members
        leaving = tuple(peer for peer in self.departing if peer not in members.light)
        if self.ready and not members.in_plan and not members.is_light:
            leaving = (*leaving, self.me)
        return voters(members.planned, newcomer, without_state=members.without_state, departing=leaving)

    def has_round(self, step: int) -> bool:
        """A round of `step` is open, with what we have said so far."""
        return step in self._rounds.open

    def are_past(self, step: int) -> bool:
        """All others have said that they have made `step`, and none is on its way to us: its gradient helps nobody."""
        is_whole = len(self.ready_mates) == len(self.mates)
        return is_whole and self._agreement.are_past(step, (*self.mates, *self.departing))

    def most_are_past(self, version: int) -> bool:
        """More than half of those who hold the state have said that they are past `version`."""
        return 2 * self._agreement.num_past(version, self.whole_mates) > len(self.whole_mates)

    def waits_for(self) -> str:
        """What keeps us at this version, for the log."""
        missing = [index for index in range(self.microbatches) if self.lacks(self.version, index)]
        return standstill(self._members, self._rounds.open.get(self.version), missing)

    @property
    def owes(self) -> bool:
        """Others count on us: for what we have contributed, for our part of a round and our word on its result, or for
        a version that nobody else has reached."""
        alone = not self.is_light and self._agreement.is_alone_at(self.version, self.whole_mates)
        return alone or self._tallies.has_own or self.me in self._rounds.named

    @property
    def round_mates(self) -> tuple[PeerID, ...]:
        """Who else is in a round whose result has not been compared."""
        return tuple(sorted(self._rounds.named - {self.me}))

    # --- inside ---

    def _progress(self, step: int, *, names_lead: bool = True) -> Progress:
        self._count += 1
        lead = self._members.lead if names_lead and self._members.lead is not None else PeerID("")
        return self._tallies.word(step, stage=self.stage, lead=lead, incarnation=self.incarnation, count=self._count)

    @property
    def _attempt(self) -> int:
        rank = [member.peer for member in self._members.planned].index(self.me)
        return self._rounds.number(rank, self.incarnation)

    def _tell_open_steps(self, *, to: PeerID | None = None) -> list[CommitCommand]:
        """Of the current one always, and last: only it names our lead, who must not grant again what the others say."""
        own = self._agreement.own if to and self.version else ()  # it may lead, and not know how far the others are
        said: list[Digest | Progress] = [*own]
        said += [self._progress(s, names_lead=False) for s in sorted(self._tallies.steps) if s != self.version]
        return [Tell(message, to=to) for message in (*said, self._progress(self.version))]

    def _lead_may_have_changed(self, now_s: float) -> list[CommitCommand]:
        if self.lead == self._announced_lead:
            return self._try_round(now_s)
        self._announced_lead = self.lead
        return [*self._tell_open_steps(), *self._try_round(now_s)]

    def _try_round(self, now_s: float) -> list[CommitCommand]:
        step, members = self.version, self._members
        if step >= self.steps or self._has_ended or not members.is_lead:
            return []
        if step in self._rounds.open:
            self._rounds.void_if_dead(step)  # it may have been dead before we came to its step
            if step in self._rounds.open:
                return []
        # Ready members in rank order, then those who contributed and have since left the plan: they owe and are owed.
        # A member that is not ready takes no part, so what it has contributed is not there until it is ready again.
        ranked = members.ranked
        if members.departing:
            tallies = self._tallies.of(step)
            ranked += tuple(peer for peer in members.departing if peer in tallies and tallies[peer].indices)
        num_held = self._tallies.held(step, ranked).bit_count()
        if num_held < self.microbatches:
            overdue = self.deadline_s > 0 and now_s >= self._version_since_s + self.deadline_s
            if not overdue or num_held < self.quorum * self.microbatches:
                return self._losses.ask(step, self.lacks, now_s=now_s)
        bandwidths = {member.peer: member.bandwidth for member in members.planned}
        start = round_of(
            ranked,
            self._tallies.of(step),
            bandwidths,
            stage=self.stage,
            step=step,
            attempt=self._attempt,
            microbatches=self.microbatches,
            form=self._form,
            light=members.light,
        )
        return [Tell(start), *self._hold_to(start)]

    def _look_ahead(self, now_s: float) -> None:
        """If a mate is past our version, ask it soon: at once where no round brings us what it has, since until then it
        may be the only one that has it."""
        if self._agreement.is_behind(self.version):
            round_brings_it = self._rounds.has_named(self.me, self.version)
            self._behind_at_s = min(self._behind_at_s, now_s + (self.catch_up_after_s if round_brings_it else 0.0))

    def _catch_up(self, now_s: float) -> list[CommitCommand]:
        """Another one each time: a mate may be dead, and not all of us should ask the same."""
        self._behind_at_s = now_s + 2 * self.catch_up_after_s
        self._num_asked += 1
        ahead = self._agreement.ahead_of(self.version, self._members.is_gone) if self.ready else []
        return [CatchUp(ahead[(self.standing[0] + self._num_asked) % len(ahead)], self.version)] if ahead else []

    def _compare(self, now_s: float) -> list[CommitCommand]:
        """Compare the states of all committed versions of which every member of the round has spoken."""
        gone = {peer for peer in self._rounds.named if self._members.is_gone(peer)}
        commands: list[CommitCommand] = []
        for start in self._agreement.settle(
            self._rounds.open, self.version, gone, now_s=now_s, has_ended=self._has_ended
        ):
            del self._rounds.open[start.step]
            commands += self._agreement.conclude(start, gone, in_plan=self._members.in_plan)
        return commands
