"""The replicas of one stage, each with the core of the product, in the world of `group_machines.py`.

Played here: a coordinator whose plans add members, move them away and drop them, what `peer/driver.py` does with a
plan, what a driver does with a command (jobs, frames, claims, the way to a state), and the checks. The stage is the
only one, so a microbatch is one job. `World.run` ends when everybody is at the last version, or with an AssertionError.

This file is long because one world, with everything that can go wrong in it, serves every property.
"""

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from group_machines import DRAIN_S, PRESS_S, Action, Box, Machines, Membership, Node, Round, names_of
from shoal.peer.pipeline.microbatch import Microbatch, indices_from
from shoal.peer.replica.commands import (
    AnnouncePresence,
    Answer,
    CatchUp,
    Command,
    Count,
    DropClaim,
    Forget,
    ForgetMember,
    HandOut,
    Reduce,
    Report,
    SendClaim,
    Tell,
    Witness,
)
from shoal.peer.replica.core import ReplicaCore
from shoal.peer.replica.events import (
    ClaimArrived,
    ClaimFailed,
    DrainBegun,
    Drained,
    Event,
    GrantArrived,
    JobDone,
    JoinedGroup,
    PeerSaid,
    PlanFollowed,
    RepairArrived,
    RepairDeclined,
    Stepped,
    StepReady,
    StoodStill,
    VersionSet,
)
from shoal.peer.replica.flow import Window
from shoal.peer.replica.group_core import GroupCore
from shoal.peer.replica.job import Job
from shoal.peer.replica.microbatch_queue import MicrobatchQueue
from shoal.peer.replica.router import Router
from shoal.peer.replica.schedule import Schedule
from shoal.peer.replica.views import GroupView
from shoal.peer.replica.work_queue import WorkQueue
from shoal.protocol.errors import Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, Digest, Grant, Progress, RoundStart
from shoal.protocol.plan import Member, Plan, Stage


@dataclass(kw_only=True)
class World(Machines):
    calls: dict[int, tuple[Node, Membership]] = field(default_factory=dict)
    """Number of a claim -> whose it is."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    # --- faults and plans ---

    def _faults(self) -> list[Action]:
        """What the world, or its coordinator, may do now."""
        order, rng = self.orders[-1], self.rng
        faults: list[Action] = []
        nodes = list(self.nodes.values())
        gone = [n for n in nodes if n.name in (*names_of(order), *order.spares) and not n.alive]
        away = [n for n in nodes if n.name in names_of(order) and n.asleep]
        faults += [partial(self._drop, n) for n in gone + away if self._others_go_on(n)]
        faults += [partial(self._wake_up, n) for n in nodes if n.asleep]
        if not self._others_go_on(None):
            return faults
        if self.changes:
            faults += [
                partial(self._add, n) for n in nodes if n.acts and not n.quitting and n.name not in names_of(order)
            ]
            faults.append(partial(self._add, None))
            movable = [n for n in nodes if n.name in names_of(order) and self._others_go_on(n)]
            faults += [partial(self._move_away, n) for n in movable if rng.random() < 0.5]
        for node in nodes:
            if not node.acts or node.name not in names_of(order) or not self._others_go_on(node):
                continue
            if self.deaths and rng.random() < 0.3:
                faults.append(partial(rng.choice((self._die, self._crash_and_return, self._quit)), node))
            if self.sleeps and rng.random() < 0.3:
                faults.append(partial(self._sleep, node))
            if self.flips and node.membership and node.membership.ready and not node.membership.leaving:
                faults.append(partial(self._flip, node))
        return faults

    def _others_go_on(self, without: "Node | None") -> bool:
        """Somebody else holds the state, every reported version included, and no plan takes it from it."""
        order, reported = self.orders[-1], max(self.reports, default=-1)
        return any(
            node is not without
            and node.acts
            and not node.quitting
            and not node.renewing
            and node.order is not None
            and node.name in names_of(order)
            and order.since_of(node.name) <= node.order.sequence
            and node.membership is not None
            and node.membership.ready
            and not node.membership.leaving
            and node.membership.version > reported
            for node in self.nodes.values()
        )

    def _is_counted_out(self, node: "Node") -> bool:
        """A plan that it has not seen goes on without it."""
        assert node.order
        later = [order for order in self.orders if order.sequence > node.order.sequence]
        return any(
            node.name not in (*names_of(order), *order.spares)
            or (node.name in names_of(order) and order.since_of(node.name) > node.order.sequence)
            for order in later
        )

    def _plan(self, names: Iterable[PeerID], rest: Iterable[PeerID], why: str) -> None:
        """Args: rest: its members that are not of this stage."""
        before = self.orders[-1] if self.orders else None
        sequence = before.sequence + 1 if before else 1
        held = {member.peer: member.since for member in before.stages[0].members} if before else {}
        members = tuple(Member(name, 1.0, 1.0, held.get(name, sequence)) for name in names)
        stages = (Stage(0, 1, members),)
        self.orders.append(Plan("run", 1, sequence, "", members[0].peer, stages, tuple(rest)))
        self.note(f"plan {sequence}: {' '.join(members.peer for members in members)} ({why})")

    def _drop(self, node: "Node") -> None:
        order = self.orders[-1]
        names, rest = ([n for n in some if n != node.name] for some in (names_of(order), order.spares))
        self._plan(names, rest, f"without {node.name}")

    def _add(self, node: "Node | None") -> None:
        self.changes -= 1
        if node is None:
            node = Node(PeerID(chr(97 + len(self.nodes))))
            self.nodes[node.name] = node
        order = self.orders[-1]
        names = list(names_of(order))
        names.insert(self.rng.randrange(len(names) + 1), node.name)
        self._plan(names, [n for n in order.spares if n != node.name], f"{node.name} comes")

    def _move_away(self, node: "Node") -> None:
        self.changes -= 1
        order = self.orders[-1]
        self._plan(
            [n for n in names_of(order) if n != node.name], [*order.spares, node.name], f"{node.name} moves away"
        )

    def _die(self, node: "Node") -> None:
        self.note(f"{node.name} dies")
        self.deaths -= 1
        self._end_process(node)

    def _end_process(self, node: "Node") -> None:
        self._abandon(node)
        node.alive, node.order, node.presences, node.boxes, node.inbox = False, None, {}, {}, []
        node.renewing = node.quitting = False
        node.life, node.memberships, node.count = node.life + 1, 0, 0

    def _crash_and_return(self, node: "Node") -> None:
        self._die(node)
        node.alive = True

    def _quit(self, node: "Node") -> None:
        """Its person wants it back: it drains and leaves."""
        self.note(f"{node.name} quits")
        self.deaths -= 1
        node.quitting = True
        if node.membership:
            self._drain(node, node.membership)

    def _sleep(self, node: "Node") -> None:
        self.note(f"{node.name} sleeps")
        self.sleeps -= 1
        node.asleep = True

    def _wake_up(self, node: "Node") -> None:
        self.note(f"{node.name} wakes")
        node.asleep = False
        inbox, node.inbox = node.inbox, []
        for act in inbox:
            act()

    def _flip(self, node: "Node") -> None:
        """It finds its state wrong and fetches it again."""
        self.note(f"{node.name} begins anew")
        self.flips -= 1
        node.renewing = True

    # --- following a plan ---

    def _follow(self, node: "Node") -> None:
        before, me = node.order, node.name
        newer = [order for order in self.orders if before is None or order.sequence > before.sequence]
        order = self.rng.choice([newer[0], newer[-1]]) if newer else before
        node.order = order
        if before is not None:
            self._count_out(node, before, order)
        membership = node.membership
        renewing, node.renewing = node.renewing, False
        if membership is not None and me not in names_of(order):
            is_counted_out = me not in order.spares and not node.quitting
            if before is not None and order.sequence == before.sequence + 1 and not is_counted_out:
                self._handle(node, membership, self._followed(order))
                if not membership.leaving:
                    self._drain(node, membership)
                return
            self._abandon(node)
        elif membership is not None and (renewing or (before is not None and order.since_of(me) > before.sequence)):
            self._abandon(node)
        if node.quitting and node.membership is not None:
            return
        if me in names_of(order) and not node.quitting:
            if node.membership is None:
                self._begin(node, order)
            else:
                self._handle(node, node.membership, self._followed(order))
        elif node.quitting and node.membership is None:
            self._end_process(node)
            return
        for peer, presence in sorted(node.presences.items()):
            if node.membership and peer in names_of(order):
                self._handle(node, node.membership, PeerSaid(peer, presence))
        if node.membership:
            self._announce_presence(node, audience(node.membership))

    def _count_out(self, node: "Node", before: Plan, order: Plan) -> None:
        for peer in sorted({*names_of(before), *before.spares} - {node.name}):
            same_place = (peer in names_of(before)) == (peer in names_of(order))
            returned = same_place and order.since_of(peer) > before.sequence
            if peer in (*names_of(order), *order.spares) and not returned:
                continue
            presence = node.presences.pop(peer, None)
            self._forget(node, node.boxes, peer)
            if returned or presence is None or not presence.draining:
                self._died(node, peer)

    def _begin(self, node: "Node", order: Plan) -> None:
        node.memberships += 1
        group = GroupCore(
            me=node.name,
            incarnation=1000 * node.life + node.memberships,
            stage=0,
            steps=self.steps,
            microbatches=self.M,
            tokens_per_microbatch=1,
            has_loss=True,
            deadline_s=0.0,
            quorum=1.0,
        )
        window = Window(num_stages=1)
        pipeline = Schedule(
            stage=0, num_stages=1, s_max=self.s_max, version=0, router=Router(), window=window, control=None
        )
        book = WorkQueue(
            steps=self.steps, microbatches=self.M, s_max=self.s_max, validation_interval=0, validation_microbatches=1
        )
        queue = MicrobatchQueue(book=book, group=group, demand=pipeline)
        node.membership = membership = Membership(ReplicaCore(group, pipeline, queue, order))
        self._handle(node, membership, self._followed(order))
        if order.sequence == 1 and node.life == 0 and node.memberships == 1:
            self._soon(node, membership, partial(self._take_over, node, membership, 0, "seed"))
        else:
            membership.joins_at_s = self.now_s

    def _followed(self, order: Plan) -> PlanFollowed:
        """Who may still drain a replica knows from the plans before, which come with the newest."""
        former = {name for earlier in self.orders[: order.sequence] for name in names_of(earlier)}
        return PlanFollowed(order, frozenset(former.difference(names_of(order))))

    def _drain(self, node: "Node", membership: "Membership") -> None:
        membership.leaves_at_s = self.now_s + DRAIN_S
        self._handle(node, membership, DrainBegun())

    def _leave(self, node: "Node", membership: "Membership", drained: bool) -> None:
        self.note(f"{node.name} leaves, drained: {drained}")
        if drained:
            self._handle(node, membership, Drained())
        self._abandon(node)
        if node.quitting:
            for peer, box in node.boxes.items():  # its last word, as far as it can be reached
                if box.queue and self.nodes[peer].acts:
                    self._heard(self.nodes[peer], node.name, box.queue["hello"])
            self._end_process(node)

    def _abandon(self, node: "Node") -> None:
        """The replica ends; calls under way may still arrive."""
        membership, node.membership = node.membership, None
        if membership is not None:
            for peer in list(membership.boxes):
                self._forget(node, membership.boxes, peer)
            self._announce_presence(node, audience(membership))  # that there is nothing to wait for any more

    # --- state ---

    def _join(self, node: "Node", membership: "Membership") -> None:
        """Fetch the newest state of those who are ready, as far as we know and in truth; then replay."""
        group_peers = [peer for peer in membership.core.group.ready_members if self.nodes[peer].acts]
        holders = [self.nodes[peer].membership for peer in group_peers]
        versions = {t.version: t.digest for t in holders if t and t.ready}
        membership.joins_at_s = self.now_s + 1.0
        if versions and not self._is_lost():
            version = max(versions)
            if version >= membership.version:
                self._soon(node, membership, partial(self._take_over, node, membership, version, versions[version]))
                membership.joins_at_s = math.inf

    def _take_over(self, node: "Node", membership: "Membership", version: int, digest: str) -> None:
        if version >= membership.version:
            self._handle(node, membership, VersionSet(version))
            self._reached(node, membership, version, digest)
        if version == 0 and digest == "seed":
            self._become_ready(node, membership)
        else:
            self._soon(node, membership, partial(self._replay, node, membership))

    def _replay(self, node: "Node", membership: "Membership") -> None:
        group_peers, step = membership.core.group.ready_members, membership.version
        there = self.nodes[group_peers[0]].membership if group_peers and self.nodes[group_peers[0]].acts else None
        if membership.stepping >= step:
            self._soon(node, membership, partial(self._replay, node, membership))
        elif there is None or self._is_lost() or (there.version > step and step not in there.means):
            membership.joins_at_s = self.now_s + 1.0
        elif there.version > step:
            membership.means[step] = there.means[step]
            membership.by.pop(step, None)
            self._commit_if_complete(node, membership)
            self._soon(node, membership, partial(self._replay, node, membership))
        else:
            self._become_ready(node, membership)

    def _become_ready(self, node: "Node", membership: "Membership") -> None:
        self.note(f"{node.name} is ready at {membership.version}")
        self._handle(node, membership, JoinedGroup(self._remembers(membership)))

    def _remembers(self, membership: "Membership") -> bool:
        return self.s_max > 0 or membership.has_stepped

    def _reached(
        self, node: "Node", membership: "Membership", version: int, digest: str, by: RoundStart | None = None
    ) -> None:
        membership.digest = digest
        self.note(f"{node.name} is at {version} {digest}")
        membership.rounds = {step: r for step, r in membership.rounds.items() if step >= version}
        membership.early = {key: frames for key, frames in membership.early.items() if key[0] >= version}
        self.grown_s = self.now_s
        self._handle(node, membership, Stepped(version, digest, by, remembers=self._remembers(membership)))
        self._commit_if_complete(node, membership)

    def _commit_if_complete(self, node: "Node", membership: "Membership") -> None:
        step = membership.version
        if step in membership.means and membership.stepping < step:
            membership.stepping = step
            self._handle(node, membership, StepReady(step))

    # --- the device ---

    def _begin_job(self, node: "Node", membership: "Membership", job: Job) -> None:
        m = job.microbatch
        if m is not None:
            self.made[m] += 1
            assert self.is_hard or self.made[m] == 1, f"{m} ran twice"
            if not membership.core.group.lacks(m.step, m.index):
                membership.unwanted.add(m)
        self._soon(node, membership, partial(self._end_job, node, membership, job))

    def _end_job(self, node: "Node", membership: "Membership", job: Job) -> None:
        step, is_due = job.version, membership.core.pipeline.version == job.version
        self._handle(node, membership, JobDone(job, None if job.microbatch is None else 1.0))
        if job.microbatch is None and is_due:  # else a state was loaded while it ran
            digest = f"{zlib.crc32((membership.digest + membership.means[step]).encode()):08x}"
            membership.has_stepped = True
            self._reached(node, membership, step + 1, digest, membership.by.get(step))

    # --- claims ---

    def _claim_arrives(self, node: "Node", membership: "Membership", leader: PeerID, count: int, call: int) -> None:
        at = self.nodes[leader]
        try:
            if not at.acts or at.membership is None or self._is_lost():
                raise Refused(leader, "cannot be reached")
            self._handle(at, at.membership, ClaimArrived(node.name, count, call))
        except Refused:
            self._claim_failed(node, membership, leader, call)

    def _claim_failed(self, node: "Node", membership: "Membership", leader: PeerID, call: int) -> None:
        if membership.claim == call:
            membership.claim = None
            self._handle(node, membership, ClaimFailed(leader))

    def _grant_arrives(self, node: "Node", membership: "Membership", leader: PeerID, call: int, grant: Grant) -> None:
        if membership.claim == call:
            if self._is_lost():
                self._claim_failed(node, membership, leader, call)
            else:
                membership.claim = None
                self._handle(node, membership, GrantArrived(leader, grant.items, grant.steps_ahead, grant.gain))

    def _hand_out(
        self, node: "Node", membership: "Membership", member: PeerID, microbatches: tuple[Microbatch, ...]
    ) -> None:
        at = self.nodes[member]
        try:
            if not at.acts or at.membership is None or self._is_lost():
                raise Refused(member, "cannot be reached")
            self._handle(at, at.membership, RepairArrived(node.name, tuple((m.step, m.index) for m in microbatches)))
        except Refused:
            self._handle(node, membership, RepairDeclined(member, microbatches))

    # --- commands ---

    def _handle(self, node: "Node", membership: "Membership", event: Event) -> None:
        for command in membership.core.handle(event, now_s=self.now_s):
            self._perform(node, membership, command)

    def _perform(self, node: "Node", membership: "Membership", command: Command) -> None:
        match command:
            case Job():
                self._begin_job(node, membership, command)
            case Count(counted):
                if counted.microbatch not in membership.unwanted:
                    self._handle(node, membership, counted)
            case Forget(microbatch):
                membership.unwanted.discard(microbatch)
            case Tell(message, to=to):
                self._tell(node, membership, message, to)
            case Reduce(start):
                self._reduce(node, membership, start)
            case Report(report) | Witness(report):
                self._check_report(node, report, is_report=isinstance(command, Report))
            case CatchUp(mate, step):
                self._soon(node, membership, partial(self._catch_up, node, membership, mate, step))
            case ForgetMember(peer):
                self._forget(node, membership.boxes, peer)
            case AnnouncePresence():
                self._announce_presence(node, audience(membership))
            case SendClaim(leader, count):
                membership.claim = call = next(self._numbers)
                self.calls[call] = node, membership
                self._soon(node, membership, partial(self._claim_arrives, node, membership, leader, count, call))
            case DropClaim():
                membership.claim = None
            case Answer(call, Grant() as grant):
                claimant, of = self.calls.pop(call)
                self._soon(claimant, of, partial(self._grant_arrives, claimant, of, node.name, call, grant))
            case HandOut(member, microbatches):
                self.note(f"{node.name} hands out {' '.join(map(str, microbatches))} again to {member}")
                assert self.is_hard, "nothing is lost"
                self._soon(node, membership, partial(self._hand_out, node, membership, member, microbatches))
            case _:
                raise AssertionError(f"{node.name} is asked for {command}")

    def _tell(
        self, node: "Node", membership: "Membership", message: Progress | RoundStart | Digest, to: PeerID | None
    ) -> None:
        core = membership.core.group
        audience = [*core.group_peers, *core.draining]
        if isinstance(message, RoundStart):
            self._check_round(core, message)
            audience += [m.peer for m in message.members if m.peer != core.me and m.peer not in audience]
        elif isinstance(message, Digest):
            audience += [peer for peer in core.round_peers if peer not in audience]
        key = (type(message), message.version if isinstance(message, Digest) else message.step)
        for mate in audience if to is None else [to]:
            membership.boxes.setdefault(mate, Box()).post(key, message)

    def _reduce(self, node: "Node", membership: "Membership", start: RoundStart) -> None:
        self.note(f"{node.name} reduces {start.step}.{start.attempt} of {' '.join(m.peer for m in start.members)}")
        membership.rounds[start.step] = Round(start, press_at_s=self.now_s + PRESS_S)
        for member in start.members:
            self._send(node, membership, member.peer, start, "part")
        for source, kind in membership.early.pop((start.step, start.attempt), []):
            self._take(node, membership, source, start.step, kind)

    def _press(self, node: "Node", membership: "Membership", ours: "Round") -> None:
        """What was lost on the way is sent again."""
        self._handle(node, membership, StoodStill())
        ours.press_at_s = self.now_s + PRESS_S
        members = [member.peer for member in ours.start.members]
        for kind in ("part", "result") if ours.parts == set(members) else ("part",):
            for peer in members:
                self._send(node, membership, peer, ours.start, kind)

    def _send(self, node: "Node", membership: "Membership", target: PeerID, start: RoundStart, kind: str) -> None:
        at = self.nodes[target]
        if target == node.name:
            self._soon(node, membership, partial(self._frame_arrives, node, membership, node.name, start, kind))
        else:
            self._frame(node, target, lambda there: self._frame_arrives(at, there, node.name, start, kind))

    def _frame_arrives(
        self, node: "Node", membership: "Membership", source: PeerID, start: RoundStart, kind: str
    ) -> None:
        step, attempt = start.step, start.attempt
        ours = membership.rounds.get(step)
        if step < membership.version:
            return
        if ours is None or ours.start.attempt < attempt:
            membership.early.setdefault((step, attempt), []).append((source, kind))
        elif ours.start.attempt == attempt:
            assert ours.start == start, f"two rounds {step}.{attempt}: {ours.start} and {start}"
            self._take(node, membership, source, step, kind)

    def _take(self, node: "Node", membership: "Membership", source: PeerID, step: int, kind: str) -> None:
        ours = membership.rounds[step]
        members = {member.peer for member in ours.start.members}
        if kind == "part" and source not in ours.parts:
            ours.parts.add(source)
            if ours.parts == members:
                for peer in sorted(members):
                    self._send(node, membership, peer, ours.start, "result")
        elif kind == "result":
            ours.results.add(source)
            if ours.results == members and step == membership.version:
                membership.means[step] = repr(ours.start.members)
                membership.by[step] = ours.start
                self._commit_if_complete(node, membership)

    def _catch_up(self, node: "Node", membership: "Membership", mate: PeerID, step: int) -> None:
        there = self.nodes[mate].membership if self.nodes[mate].acts else None
        if membership.version != step or membership.stepping >= step or there is None or self._is_lost():
            return
        if there.version > step and step not in there.means:
            if membership.ready and not membership.leaving:
                node.renewing = True
        elif there.version > step:
            membership.means[step] = there.means[step]
            membership.by.pop(step, None)
            self._commit_if_complete(node, membership)

    # --- checks ---

    def _check_round(self, core: GroupView, start: RoundStart) -> None:
        known = self.opened.setdefault((core.me, start.step, start.attempt), start)
        assert known == start, f"{start.step}.{start.attempt} opened twice: {known} and {start}"
        held: Counter[int] = Counter()
        for member in start.members:
            indices = indices_from(member.indices, count=self.M)
            held.update(i for i in range(self.M) if indices >> i & 1)
        assert sorted(held) == list(range(self.M)), f"the round of step {start.step} has {sorted(held)}"
        assert start.duplicates == sum(held.values()) - self.M
        assert self.is_hard or not start.duplicates
        assert start.given_up == 0
        assert start.loss_sum == sum(held.values())
        assert {m.peer for m in start.members} >= {core.me, *core.ready_members}

    def _check_report(self, node: "Node", report: CommitReport, *, is_report: bool) -> None:
        self.note(f"{node.name} {'reports' if is_report else 'witnesses'} {report.step} {report.digest}")
        assert report.loss == 1.0
        assert report.dissenting == 0
        for other in self.reports.get(report.step, ()):
            assert outcome(other) == outcome(report), f"two histories of step {report.step}"
        if is_report:
            self.grown_s = self.now_s
            self.reports.setdefault(report.step, []).append(report)
            assert self.is_hard or len(self.reports[report.step]) == 1, f"step {report.step} was reported twice"

    def check_the_end(self) -> None:
        final = [self.nodes[name] for name in names_of(self.orders[-1])]
        assert len({node.membership.digest for node in final}) == 1, "different states"
        # What everybody who could report it has stepped past with a new replica, nobody reports.
        unreported = sorted(set(range(self.steps)) - set(self.reports))
        assert self.loses_replicas or not unreported, f"not reported: {unreported}"

    def stuck(self) -> str:
        lines = []
        for n in self.nodes.values():
            if n.membership:
                t, c = n.membership, n.membership.core.group
                lines.append(
                    f"{n.name}: v{c.version} acts={n.acts} ready={c.ready} open={t.core.is_open} lead={c.leader} "
                    f"is_lead={c.is_leader} waits for {c.waits_for()} leaving={t.leaving} "
                    f"order={n.order.sequence if n.order else None} claim={t.claim} ready_mates={c.ready_members} "
                    f"departing={c.draining}"
                )
        return "\n".join(lines)


def outcome(report: CommitReport) -> tuple[object, ...]:
    return (report.step, report.digest, report.duplicates, report.microbatches, report.given_up)


def audience(membership: "Membership") -> list[PeerID]:
    """Whom the plan names that it works under, and the mates that it has, if that is another."""
    group = membership.core.group
    return list(dict.fromkeys((*names_of(membership.core.plan), *group.group_peers, *group.draining)))
