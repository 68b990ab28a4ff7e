"""Decides when a stage group reduces, which members take part, and whether they agree. Pure.

Theory of operation. The group is the ready replicas of one stage, in the plan's order (rank). For each step, every
member tells the others which microbatches it has accumulated (`Progress`). When the union is the whole step, the
*leader* (the first ready and open member by rank that holds the state) opens a round: it names the members and what
each contributes (`RoundStart`). Members reduce exactly these contributions, step, and tell each other the digest of the
new state. Because membership is per round, replicas come and go without agreeing on a step at which a plan takes
effect, and an average never counts a member that did not contribute to it.

The leader changes with readiness and with plans, and two leaders at once would grant one microbatch twice or open two
rounds. So a leader *acts* only when it has heard from every member of the plan since it became ready, and the latest
Progress of every ready member names it. A member that names another leader has stopped acting as one,
and its Progress lists what it had granted until then. A draining member is no longer *open* and stops leading at once;
it stays ready, and its messages count, until its contributions are committed, whether or not a plan still names it.

A layout that ends at a version (`Plan.cutover_version`) commits no later step, even a complete one: the next layout
makes that step.

`attempt` orders the rounds of one step: by plan sequence, then by the leader's own retries. Members follow the round
with the highest number. A member that was left out of a round, or missed the round's end, sees from the other members'
digests that it is behind, and asks one of these members for the reduced gradient (`CatchUp`).

A learner (`peer/membership/learner.py`) is a member that is ready with weights alone. It contributes and takes part in
rounds, which list it in `learners`; it never leads, sends no digest, and does not count as a holder of the state.

This file is long because every event of a group enters here. Its parts (members, tallies, rounds, losses, agreement)
are in files of their own, and get events only from here.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.peer.pipeline.microbatch import Microbatch, indices_from
from shoal.peer.replica.agreement import UNCOMPARED_MAX
from shoal.peer.replica.commands import Accuse, CatchUp, CommitCommand, ForgetMember, Reduce, Tell
from shoal.peer.replica.events import (
    CommitEvent,
    DigestArrived,
    GradientCounted,
    MemberSilent,
    ProgressArrived,
    RoundArrived,
    Stepped,
    StoodStill,
    TimerFired,
)
from shoal.peer.replica.losses import Losses
from shoal.peer.replica.rounds import attempt
from shoal.peer.replica.tally import round_of
from shoal.peer.replica.views import GroupView
from shoal.protocol.errors import Refused, RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import DIGEST_CHARS_MAX, OPEN_STEPS_MAX, RESTARTS_MAX, RESTARTS_PER_S
from shoal.protocol.live.allowance import Allowance
from shoal.protocol.messages import Digest, Progress, RoundStart
from shoal.protocol.plan import Plan
from shoal.protocol.wire_format import WireFormat


@dataclass(kw_only=True, slots=True)
class GroupCore(GroupView):
    """One replica's view of its stage group, and the events that change it.

    Args:
        deadline_s: after this long at a version, the leader commits with at least `quorum` (a fraction) of the step's
            microbatches. 0: the leader always waits for all.
        catch_up_after_s: how long we wait for the end of a round that names us once another member has a later version.
        incarnation: number of this replica's start here; after a restart it has lost its state and has a higher number.
    """

    deadline_s: float
    quorum: float
    catch_up_after_s: float = 1.0
    incarnation: int = 0
    _learner_until: dict[PeerID, int] = field(init=False, default_factory=dict)
    """Learner that became a full member -> the last step for which a round may still list it as a learner."""
    _count: int = field(init=False, default=0)
    _announced_leader: PeerID | None = field(init=False, default=None)
    _behind_at_s: float = field(init=False, default=math.inf)
    _num_asked: int = field(init=False, default=0)
    _losses: Losses = field(init=False)
    _restarts: Allowance[PeerID] = field(init=False)
    _version_since_s: float = field(init=False, default=0.0)
    _cutover_version: int = field(init=False, default=0)
    """The version at which the layout ends; 0: no end is planned."""
    _form: WireFormat = field(init=False)

    def __post_init__(self) -> None:
        GroupView.__post_init__(self)
        self._form = self.sums[0]
        self._losses = Losses(microbatches=self.microbatches, is_first=self.stage == 0)
        self._restarts = Allowance(most=RESTARTS_MAX, per_s=RESTARTS_PER_S)

    # --- events ---

    def handle(self, event: CommitEvent, *, now_s: float) -> list[CommitCommand]:
        """Process an event; return commands. Raises: Refused, RemoteError: the event is invalid; nothing has
        changed."""
        match event:
            case TimerFired():
                return self._timer(now_s)
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
            case MemberSilent(peer):
                return self._fell_silent(peer, now_s) if self.is_near(peer) else []
            case StoodStill():
                return self._press()

    # --- told by the core of the replica ---

    def follow(self, plan: Plan, former: Collection[PeerID], *, now_s: float) -> list[CommitCommand]:
        """Follow a plan. Args: former: other peers that recent plans had in the group; they may still drain."""
        before = self.group_peers
        self.set_planned(plan.group_members(self.stage), former, now_s=now_s)
        self._losses.begins_at = plan.restore_version
        self._rounds.plan_sequence = plan.sequence
        self._cutover_version = plan.cutover_version
        self._form = plan.sums_of(self.stage) or self.sums[0]
        known = {self.me, *self.group_peers, *self.draining, *former, *self._rounds.named}
        self.forget_all_but(known)
        self._learner_until = {peer: step for peer, step in self._learner_until.items() if peer in known}
        self._agreement.forget_all_but(known)
        gone = sorted(peer for peer in before if not self.is_near(peer))
        return [*self._leader_may_have_changed(now_s), *(ForgetMember(peer) for peer in gone)]

    def take_part(self, ready: bool, *, learner: bool = False, now_s: float) -> list[CommitCommand]:
        """Take part, with the group's state or, if `learner`, its weights alone; if not `ready`, stop taking part."""
        was_learner = self.is_learner
        self.set_ready(ready, learner=learner)
        self._note_whole(self.me, was_learner=was_learner)
        self._look_ahead(now_s)
        return [*self._tell_open_steps(), *self._leader_may_have_changed(now_s)]

    def take_traffic(self, is_open: bool, *, now_s: float) -> list[CommitCommand]:
        """Begin or stop to accept microbatches. A closed member leads only if all full members are closed; its
        contributions are still committed."""
        self.set_open(is_open)
        return self._leader_may_have_changed(now_s)

    def granted(self, microbatch: Microbatch, *, retried: bool) -> list[CommitCommand]:
        """Record a grant to us, at stage 0. `retried`: `microbatch` runs again; a new leader may not know that."""
        self._tallies.claim(microbatch.step, microbatch.index)
        # A leader knows its own grants. But if we lead, the other members must know our grants in case we die. And if
        # we have just stopped leading, the new leader does not know which microbatches we decided to run again.
        is_known = self.leader != self.me and not retried
        return [Tell(self._progress(microbatch.step), can_wait=True, can_rest=is_known)]

    def granted_to(self, peer: PeerID, microbatch: Microbatch) -> None:
        """Record, as stage 0's leader, that `microbatch` is granted to `peer`."""
        if peer != self.me:
            self._losses.claimed(peer, microbatch.step, 1 << microbatch.index)

    def member_lost(self, peer: PeerID, *, is_barred: bool = False, now_s: float) -> list[CommitCommand]:
        """Remove a member that died. `is_barred`: the member lives, but is ignored from now on (see `PeerDied`)."""
        if not self.is_near(peer):
            return []
        if is_barred:
            self.bar(peer)
        return self._lose(peer, now_s)

    def member_elsewhere(self, peer: PeerID, incarnation: int, *, now_s: float) -> list[CommitCommand]:
        """Remove a peer that reports that it has left our group or has not joined yet."""
        if not self.is_near(peer) or incarnation < self.incarnation_of(peer):
            return []
        self.has_no_state(peer)
        return self._lose(peer, now_s)

    def member_said(
        self,
        peer: PeerID,
        *,
        ready: bool,
        is_open: bool,
        incarnation: int,
        drains: bool = False,
        has_moved: bool = False,
        learner: bool = False,
        now_s: float,
    ) -> list[CommitCommand]:
        """Apply a member's presence. Ignore a peer that no recent plan names: a stranger that joins and does not answer
        would block every reduction.

        Args:
            ready, is_open: the member takes part in rounds; the member accepts microbatches.
            drains: the member is leaving; perhaps plans dropped it before we joined.
            has_moved: the plan gives the member another place.
        """
        if self.is_barred(peer):
            return []
        if ready and drains and has_moved:
            self.moves_away(peer, now_s=now_s)
        is_near = self.is_near(peer) or (ready and drains and self.may_drain(peer, now_s))
        if not is_near or incarnation < self.incarnation_of(peer):
            return [ForgetMember(peer)] if self._has_begun_anew(peer, incarnation) else []
        reborn = self._reborn(peer, incarnation, now_s)
        if self.is_barred(peer):
            return [*reborn, *self._leader_may_have_changed(now_s)]
        if not ready and (peer not in self.group_peers or self.is_ready(peer)):
            # It has left. Do not wait for it, nor for its part in a round of which it never heard.
            self.has_no_state(peer)
            return [*reborn, *self._lose(peer, now_s)]
        was_learner = peer in self.learners
        is_news = self.announced(peer, ready=ready, is_open=is_open, learner=learner)
        self._note_whole(peer, was_learner=was_learner)
        told = self._tell_open_steps(to=peer) if is_news else []
        return [*reborn, *told, *self._leader_may_have_changed(now_s)]

    def _note_whole(self, peer: PeerID, *, was_learner: bool) -> None:
        """Record that a learner became a full member. The rounds of this step and the next may still list the peer as a
        learner: their leader may not know of the promotion yet."""
        if was_learner and peer in self._whole:
            self._learner_until[peer] = self.version + 1

    def _has_begun_anew(self, peer: PeerID, incarnation: int) -> bool:
        return -1 < self.incarnation_of(peer) < incarnation

    def _reborn(self, peer: PeerID, incarnation: int, now_s: float) -> list[CommitCommand]:
        """Remove a member's earlier incarnation if it now reports `incarnation`, in a Progress or a PresenceUpdate. A
        member that restarts too often is reported, and barred.

        This opens no round. The caller may, once it has applied the whole message (the member may be ready)."""
        commands: list[CommitCommand] = []
        if self._has_begun_anew(peer, incarnation):
            commands = self._count_out(peer, now_s)
            if not self._restarts.takes(peer, now_s):
                self.bar(peer)
                commands.append(Accuse(peer))
        self.speaks_as(peer, incarnation)
        return commands

    def _lose(self, peer: PeerID, now_s: float) -> list[CommitCommand]:
        return [*self._count_out(peer, now_s), *self._leader_may_have_changed(now_s)]

    def _count_out(self, peer: PeerID, now_s: float) -> list[CommitCommand]:
        self.lost(peer)
        self._losses.mate_died()
        for step in sorted(self._losses.steps_claimed_by(peer).union(self._tallies.steps)):
            self._losses.died(peer, step, self._tallies.lose(peer, step))
        self._rounds.void_if_dead(self.version)
        left = self._agreement.reports_left_by(peer)
        return [ForgetMember(peer), *left, *self._compare(now_s)]

    def _fell_silent(self, peer: PeerID, now_s: float) -> list[CommitCommand]:
        """Remove an unreachable member if it drains. If it is not ready, do not wait until it names a leader."""
        if peer in self.draining:
            return self._lose(peer, now_s)
        self.silent(peer)
        commands = self._try_round(now_s)
        return commands if peer in self.group_peers else [*commands, ForgetMember(peer)]

    def _contribute(self, event: GradientCounted, now_s: float) -> list[CommitCommand]:
        step, index = event.microbatch.step, event.microbatch.index
        if step < self.version or not self._tallies.add(
            step, index, loss=event.loss, staleness_steps=event.staleness_steps, held_out=event.held_out
        ):
            return []
        self._losses.grown(now_s)
        if step in self._rounds.open:
            self._void_round_if_outgrown(step, self.me)
        # If we die, our contribution dies with us, so the others need our report only to open the round, and not even
        # for that if we lead.
        can_rest = self.deadline_s == 0 and (event.more_follows or self.leader == self.me)
        return [Tell(self._progress(step), can_wait=True, can_rest=can_rest), *self._try_round(now_s)]

    def _take_progress(self, source: PeerID, message: Progress, now_s: float) -> list[CommitCommand]:
        if not self.is_near(source) or self.is_barred(source):
            return []  # A removed member may still send its last Progress.
        if message.incarnation < self.incarnation_of(source):
            return []  # An earlier incarnation of the sender has sent it.
        commands = self._reborn(source, message.incarnation, now_s)
        if self.is_barred(source):
            return [*commands, *self._leader_may_have_changed(now_s)]
        if not self.has_spoken(source):
            commands += self._tell_open_steps(to=source)  # it may not have known us yet, and ignored our messages
        self.names(source, message.leader, count=message.count)
        if self.version <= message.step < self.version + OPEN_STEPS_MAX:
            claimed = indices_from(message.claimed, count=self.microbatches)
            self._losses.claimed(source, message.step, claimed)
            if self._tallies.take(source, message):
                self._losses.grown(now_s)
            if message.step in self._rounds.open:
                self._void_round_if_outgrown(message.step, source)
        return [*commands, *self._leader_may_have_changed(now_s)]

    def _take_round(self, source: PeerID, start: RoundStart) -> list[CommitCommand]:
        if not self.is_near(source):
            raise Refused(self.me, f"does not know the sender as a member of group {self.stage}")
        if not self._rounds.is_sound(start):
            raise RemoteError(source, "opens a round that cannot be reduced, or with a number far ahead")
        return self._hold_to(start)

    def _hold_to(self, message: RoundStart) -> list[CommitCommand]:
        """Follow and join the round of `message`, unless it is old, outbid, dead or a lie. If it lists less than our
        sum contains, report our contribution instead, so that the leader opens another round."""
        if not self.ready:
            return []  # The round names an earlier incarnation of us; we lack its gradients.
        if message.step < self.version or not self._rounds.outbids(message):
            return []
        if any(message.step > self._learner_until.get(peer, -1) for peer in self._whole.intersection(message.learners)):
            return []  # A lie: it lists a full member as a learner, which would leave out that member's digest.
        if self.is_leader and self._rounds.is_dead(message):
            return []  # Our own round will replace it at all members.
        mine = next((member.indices for member in message.members if member.peer == self.me), None)
        if mine is not None and not self._tallies.may_bring(self.me, message.step, mine):
            # Our sum holds more than the leader knew, and a mean must count all of it: the leader opens another round.
            return [Tell(self._progress(message.step))]
        self._rounds.open[message.step] = message
        return [Reduce(message)] if mine is not None else []

    def _void_round_if_outgrown(self, step: int, peer: PeerID) -> None:
        """If we lead, drop our open round if it lists fewer microbatches of `peer` than are now in the peer's sum."""
        start = self._rounds.open[step]
        if step != self.version or self.leader != self.me:
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
        if not self.is_near(source) and source not in self._rounds.named:
            return []
        if message.version < self.version and not self.has_round(message.version - 1):
            return []
        self._agreement.heard(source, message.version, message.digest)
        self._look_ahead(now_s)
        return self._compare(now_s)

    def _timer(self, now_s: float) -> list[CommitCommand]:
        overstayed: list[CommitCommand] = []
        for peer in self.overstayed(now_s):
            overstayed += self._lose(peer, now_s)
        if now_s >= self._behind_at_s:
            return [*overstayed, *self._catch_up(now_s)]
        return [*overstayed, *self._compare(now_s), *self._try_round(now_s)]

    def next_timer_s(self) -> float:
        due_s = min(self._agreement.next_s, self._behind_at_s)
        if self.draining:
            due_s = min(due_s, self.overstays_at_s)
        if self.version not in self._rounds.open and not self._has_ended:
            if self.deadline_s > 0:
                due_s = min(due_s, self._version_since_s + self.deadline_s)
            if self.is_leader and self.version < self.steps:
                due_s = min(due_s, self._losses.suspect_at_s)
        return due_s

    def _press(self) -> list[CommitCommand]:
        """Repeat messages that another member may have dropped when it took their sender for lost. The leader repeats
        its round, because members may have followed a lost peer's round. The others repeat their progress to the
        leader; it also names the leader."""
        if self.leader not in (None, self.me):
            return self._tell_open_steps(to=self.leader)
        start = self._rounds.open.get(self.version)
        return [Tell(start)] if self.is_leader and start is not None else []

    def is_left_behind(self, now_s: float) -> bool:
        """True if most other full members are past our version, at which we have been for long: our device is slow."""
        return now_s > self._version_since_s + self._losses.usual_s and self.most_are_past(self.version)

    @property
    def _has_ended(self) -> bool:
        return 0 < self._cutover_version <= self.version

    # --- inside ---

    @property
    def _whole(self) -> set[PeerID]:
        """The plan's members that are ready with the whole state, ourselves included if we are one."""
        return {*self.full_members, self.me} if self.ready and not self.is_learner else set(self.full_members)

    def _progress(self, step: int, *, names_leader: bool = True) -> Progress:
        self._count += 1
        leader = self.leader if names_leader and self.leader is not None else PeerID("")
        return self._tallies.word(
            step, stage=self.stage, leader=leader, incarnation=self.incarnation, count=self._count
        )

    @property
    def _attempt(self) -> int:
        """The number of the next round that we open."""
        rank = [member.peer for member in self.planned].index(self.me)
        return attempt(self._rounds.plan_sequence, self._rounds.retries, rank=rank, incarnation=self.incarnation)

    def _tell_open_steps(self, *, to: PeerID | None = None) -> list[CommitCommand]:
        """Send our progress in all open steps. Only the last message names our leader: a leader acts once all members
        name it, and must know our grants by that time."""
        own = self._agreement.own if to and self.version else ()  # the receiver may not have heard our digest
        said: list[Digest | Progress] = [*own]
        said += [self._progress(s, names_leader=False) for s in sorted(self._tallies.steps) if s != self.version]
        return [Tell(message, to=to) for message in (*said, self._progress(self.version))]

    def _leader_may_have_changed(self, now_s: float) -> list[CommitCommand]:
        if self.leader == self._announced_leader:
            return self._try_round(now_s)
        self._announced_leader = self.leader
        return [*self._tell_open_steps(), *self._try_round(now_s)]

    def _try_round(self, now_s: float) -> list[CommitCommand]:
        step = self.version
        if step >= self.steps or self._has_ended or not self.is_leader:
            return []
        if step in self._rounds.open:
            self._rounds.void_if_dead(step)  # a member may have died before we came to this step
            if step in self._rounds.open:
                return []
        # The round's members: ready members in rank order, then draining members that have contributed to the step.
        # A member that is not ready takes no part, so its contributions do not count until it is ready again.
        ranked = self.ranked
        if self.draining:
            tallies = self._tallies.of(step)
            ranked += tuple(peer for peer in self.draining if peer in tallies and tallies[peer].indices)
        num_held = self._tallies.held(step, ranked).bit_count()
        if num_held < self.microbatches:
            overdue = self.deadline_s > 0 and now_s >= self._version_since_s + self.deadline_s
            if not overdue or num_held < self.quorum * self.microbatches:
                return self._losses.ask(step, self.lacks, now_s=now_s)
        bandwidths = {member.peer: member.bandwidth for member in self.planned}
        start = round_of(
            ranked,
            self._tallies.of(step),
            bandwidths,
            stage=self.stage,
            step=step,
            attempt=self._attempt,
            microbatches=self.microbatches,
            form=self._form,
            learners=self.learners,
        )
        return [Tell(start), *self._hold_to(start)]

    def _look_ahead(self, now_s: float) -> None:
        """If another member has a later version, we lack a gradient: set when to ask for it. That is now or, if an open
        round names us and so should bring it, after `catch_up_after_s`."""
        if self._agreement.is_behind(self.version):
            round_brings_it = self._rounds.has_named(self.me, self.version)
            self._behind_at_s = min(self._behind_at_s, now_s + (self.catch_up_after_s if round_brings_it else 0.0))

    def _catch_up(self, now_s: float) -> list[CommitCommand]:
        """Ask one of the members that are ahead for the gradient of our next step. A repeated call asks another one,
        since the first may be dead. Members that are behind begin with different ones, so that not all ask the same."""
        self._behind_at_s = now_s + 2 * self.catch_up_after_s
        self._num_asked += 1
        ahead = self._agreement.ahead_of(self.version, self.is_gone) if self.ready else []
        return [CatchUp(ahead[(self.standing[0] + self._num_asked) % len(ahead)], self.version)] if ahead else []

    def _compare(self, now_s: float) -> list[CommitCommand]:
        gone = {peer for peer in self._rounds.named if self.is_gone(peer)}
        commands: list[CommitCommand] = []
        for start in self._agreement.settle(
            self._rounds.open, self.version, gone, now_s=now_s, has_ended=self._has_ended
        ):
            del self._rounds.open[start.step]
            commands += self._agreement.conclude(start, gone, in_plan=self.in_plan)
        return commands
