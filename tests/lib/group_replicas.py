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

from group_machines import DRAIN_S, PRESS_S, Action, Box, Machines, Node, Round, Tenure, names_of
from shoal.peer.pipeline.microbatch import Microbatch, indices_from
from shoal.peer.replica.commands import (
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
    SayHello,
    SendClaim,
    Tell,
    Witness,
)
from shoal.peer.replica.commit import Commit
from shoal.peer.replica.core import ReplicaCore
from shoal.peer.replica.events import (
    ClaimArrived,
    ClaimFailed,
    DrainBegun,
    Drained,
    Event,
    GrantArrived,
    JobDone,
    Joined,
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
from shoal.peer.replica.job import Job
from shoal.peer.replica.router import Router
from shoal.peer.replica.schedule import Schedule
from shoal.peer.replica.supply import Supply
from shoal.peer.replica.views import GroupView
from shoal.peer.replica.work_queue import WorkQueue
from shoal.protocol.errors import Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, Digest, Grant, Progress, RoundStart
from shoal.protocol.plan import Member, Plan, Stage


@dataclass(kw_only=True)
class World(Machines):
    calls: dict[int, tuple[Node, Tenure]] = field(default_factory=dict)
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
            if self.flips and node.tenure and node.tenure.ready and not node.tenure.leaving:
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
            and node.tenure is not None
            and node.tenure.ready
            and not node.tenure.leaving
            and node.tenure.version > reported
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
        node.alive, node.order, node.hellos, node.boxes, node.inbox = False, None, {}, {}, []
        node.renewing = node.quitting = False
        node.life, node.tenures, node.count = node.life + 1, 0, 0

    def _crash_and_return(self, node: "Node") -> None:
        self._die(node)
        node.alive = True

    def _quit(self, node: "Node") -> None:
        """Its person wants it back: it drains and leaves."""
        self.note(f"{node.name} quits")
        self.deaths -= 1
        node.quitting = True
        if node.tenure:
            self._drain(node, node.tenure)

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
        tenure = node.tenure
        renewing, node.renewing = node.renewing, False
        if tenure is not None and me not in names_of(order):
            is_counted_out = me not in order.spares and not node.quitting
            if before is not None and order.sequence == before.sequence + 1 and not is_counted_out:
                self._handle(node, tenure, self._followed(order))
                if not tenure.leaving:
                    self._drain(node, tenure)
                return
            self._abandon(node)
        elif tenure is not None and (renewing or (before is not None and order.since_of(me) > before.sequence)):
            self._abandon(node)
        if node.quitting and node.tenure is not None:
            return
        if me in names_of(order) and not node.quitting:
            if node.tenure is None:
                self._begin(node, order)
            else:
                self._handle(node, node.tenure, self._followed(order))
        elif node.quitting and node.tenure is None:
            self._end_process(node)
            return
        for peer, hello in sorted(node.hellos.items()):
            if node.tenure and peer in names_of(order):
                self._handle(node, node.tenure, PeerSaid(peer, hello))
        if node.tenure:
            self._say_hello(node, audience(node.tenure))

    def _count_out(self, node: "Node", before: Plan, order: Plan) -> None:
        for peer in sorted({*names_of(before), *before.spares} - {node.name}):
            same_place = (peer in names_of(before)) == (peer in names_of(order))
            returned = same_place and order.since_of(peer) > before.sequence
            if peer in (*names_of(order), *order.spares) and not returned:
                continue
            hello = node.hellos.pop(peer, None)
            self._forget(node, node.boxes, peer)
            if returned or hello is None or not hello.draining:
                self._died(node, peer)

    def _begin(self, node: "Node", order: Plan) -> None:
        node.tenures += 1
        group = Commit(
            me=node.name,
            incarnation=1000 * node.life + node.tenures,
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
        supply = Supply(book=book, group=group, demand=pipeline)
        node.tenure = tenure = Tenure(ReplicaCore(group, pipeline, supply, order))
        self._handle(node, tenure, self._followed(order))
        if order.sequence == 1 and node.life == 0 and node.tenures == 1:
            self._soon(node, tenure, partial(self._take_over, node, tenure, 0, "seed"))
        else:
            tenure.joins_at_s = self.now_s

    def _followed(self, order: Plan) -> PlanFollowed:
        """Who may still drain a replica knows from the plans before, which come with the newest."""
        former = {name for earlier in self.orders[: order.sequence] for name in names_of(earlier)}
        return PlanFollowed(order, frozenset(former.difference(names_of(order))))

    def _drain(self, node: "Node", tenure: "Tenure") -> None:
        tenure.leaves_at_s = self.now_s + DRAIN_S
        self._handle(node, tenure, DrainBegun())

    def _leave(self, node: "Node", tenure: "Tenure", drained: bool) -> None:
        self.note(f"{node.name} leaves, drained: {drained}")
        if drained:
            self._handle(node, tenure, Drained())
        self._abandon(node)
        if node.quitting:
            for peer, box in node.boxes.items():  # its last word, as far as it can be reached
                if box.queue and self.nodes[peer].acts:
                    self._heard(self.nodes[peer], node.name, box.queue["hello"])
            self._end_process(node)

    def _abandon(self, node: "Node") -> None:
        """The replica ends; calls under way may still arrive."""
        tenure, node.tenure = node.tenure, None
        if tenure is not None:
            for peer in list(tenure.boxes):
                self._forget(node, tenure.boxes, peer)
            self._say_hello(node, audience(tenure))  # that there is nothing to wait for any more

    # --- state ---

    def _join(self, node: "Node", tenure: "Tenure") -> None:
        """Fetch the newest state of those who are ready, as far as we know and in truth; then replay."""
        mates = [peer for peer in tenure.core.group.ready_mates if self.nodes[peer].acts]
        holders = [self.nodes[peer].tenure for peer in mates]
        versions = {t.version: t.digest for t in holders if t and t.ready}
        tenure.joins_at_s = self.now_s + 1.0
        if versions and not self._is_lost():
            version = max(versions)
            if version >= tenure.version:
                self._soon(node, tenure, partial(self._take_over, node, tenure, version, versions[version]))
                tenure.joins_at_s = math.inf

    def _take_over(self, node: "Node", tenure: "Tenure", version: int, digest: str) -> None:
        if version >= tenure.version:
            self._handle(node, tenure, VersionSet(version))
            self._reached(node, tenure, version, digest)
        if version == 0 and digest == "seed":
            self._become_ready(node, tenure)
        else:
            self._soon(node, tenure, partial(self._replay, node, tenure))

    def _replay(self, node: "Node", tenure: "Tenure") -> None:
        mates, step = tenure.core.group.ready_mates, tenure.version
        there = self.nodes[mates[0]].tenure if mates and self.nodes[mates[0]].acts else None
        if tenure.stepping >= step:
            self._soon(node, tenure, partial(self._replay, node, tenure))
        elif there is None or self._is_lost() or (there.version > step and step not in there.means):
            tenure.joins_at_s = self.now_s + 1.0
        elif there.version > step:
            tenure.means[step] = there.means[step]
            tenure.by.pop(step, None)
            self._commit_if_complete(node, tenure)
            self._soon(node, tenure, partial(self._replay, node, tenure))
        else:
            self._become_ready(node, tenure)

    def _become_ready(self, node: "Node", tenure: "Tenure") -> None:
        self.note(f"{node.name} is ready at {tenure.version}")
        self._handle(node, tenure, Joined(self._remembers(tenure)))

    def _remembers(self, tenure: "Tenure") -> bool:
        return self.s_max > 0 or tenure.has_stepped

    def _reached(self, node: "Node", tenure: "Tenure", version: int, digest: str, by: RoundStart | None = None) -> None:
        tenure.digest = digest
        self.note(f"{node.name} is at {version} {digest}")
        tenure.rounds = {step: r for step, r in tenure.rounds.items() if step >= version}
        tenure.early = {key: frames for key, frames in tenure.early.items() if key[0] >= version}
        self.grown_s = self.now_s
        self._handle(node, tenure, Stepped(version, digest, by, remembers=self._remembers(tenure)))
        self._commit_if_complete(node, tenure)

    def _commit_if_complete(self, node: "Node", tenure: "Tenure") -> None:
        step = tenure.version
        if step in tenure.means and tenure.stepping < step:
            tenure.stepping = step
            self._handle(node, tenure, StepReady(step))

    # --- the device ---

    def _begin_job(self, node: "Node", tenure: "Tenure", job: Job) -> None:
        m = job.microbatch
        if m is not None:
            self.made[m] += 1
            assert self.is_hard or self.made[m] == 1, f"{m} ran twice"
            if not tenure.core.group.lacks(m.step, m.index):
                tenure.unwanted.add(m)
        self._soon(node, tenure, partial(self._end_job, node, tenure, job))

    def _end_job(self, node: "Node", tenure: "Tenure", job: Job) -> None:
        step, is_due = job.version, tenure.core.pipeline.version == job.version
        self._handle(node, tenure, JobDone(job, None if job.microbatch is None else 1.0))
        if job.microbatch is None and is_due:  # else a state was loaded while it ran
            digest = f"{zlib.crc32((tenure.digest + tenure.means[step]).encode()):08x}"
            tenure.has_stepped = True
            self._reached(node, tenure, step + 1, digest, tenure.by.get(step))

    # --- claims ---

    def _claim_arrives(self, node: "Node", tenure: "Tenure", leader: PeerID, count: int, call: int) -> None:
        at = self.nodes[leader]
        try:
            if not at.acts or at.tenure is None or self._is_lost():
                raise Refused(leader, "cannot be reached")
            self._handle(at, at.tenure, ClaimArrived(node.name, count, call))
        except Refused:
            self._claim_failed(node, tenure, leader, call)

    def _claim_failed(self, node: "Node", tenure: "Tenure", leader: PeerID, call: int) -> None:
        if tenure.claim == call:
            tenure.claim = None
            self._handle(node, tenure, ClaimFailed(leader))

    def _grant_arrives(self, node: "Node", tenure: "Tenure", leader: PeerID, call: int, grant: Grant) -> None:
        if tenure.claim == call:
            if self._is_lost():
                self._claim_failed(node, tenure, leader, call)
            else:
                tenure.claim = None
                self._handle(node, tenure, GrantArrived(leader, grant.items, grant.steps_ahead, grant.gain))

    def _hand_out(self, node: "Node", tenure: "Tenure", member: PeerID, microbatches: tuple[Microbatch, ...]) -> None:
        at = self.nodes[member]
        try:
            if not at.acts or at.tenure is None or self._is_lost():
                raise Refused(member, "cannot be reached")
            self._handle(at, at.tenure, RepairArrived(node.name, tuple((m.step, m.index) for m in microbatches)))
        except Refused:
            self._handle(node, tenure, RepairDeclined(member, microbatches))

    # --- commands ---

    def _handle(self, node: "Node", tenure: "Tenure", event: Event) -> None:
        for command in tenure.core.handle(event, now_s=self.now_s):
            self._perform(node, tenure, command)

    def _perform(self, node: "Node", tenure: "Tenure", command: Command) -> None:
        match command:
            case Job():
                self._begin_job(node, tenure, command)
            case Count(counted):
                if counted.microbatch not in tenure.unwanted:
                    self._handle(node, tenure, counted)
            case Forget(microbatch):
                tenure.unwanted.discard(microbatch)
            case Tell(message, to=to):
                self._tell(node, tenure, message, to)
            case Reduce(start):
                self._reduce(node, tenure, start)
            case Report(report) | Witness(report):
                self._check_report(node, report, is_report=isinstance(command, Report))
            case CatchUp(mate, step):
                self._soon(node, tenure, partial(self._catch_up, node, tenure, mate, step))
            case ForgetMember(peer):
                self._forget(node, tenure.boxes, peer)
            case SayHello():
                self._say_hello(node, audience(tenure))
            case SendClaim(leader, count):
                tenure.claim = call = next(self._numbers)
                self.calls[call] = node, tenure
                self._soon(node, tenure, partial(self._claim_arrives, node, tenure, leader, count, call))
            case DropClaim():
                tenure.claim = None
            case Answer(call, Grant() as grant):
                claimant, of = self.calls.pop(call)
                self._soon(claimant, of, partial(self._grant_arrives, claimant, of, node.name, call, grant))
            case HandOut(member, microbatches):
                self.note(f"{node.name} hands out {' '.join(map(str, microbatches))} again to {member}")
                assert self.is_hard, "nothing is lost"
                self._soon(node, tenure, partial(self._hand_out, node, tenure, member, microbatches))
            case _:
                raise AssertionError(f"{node.name} is asked for {command}")

    def _tell(self, node: "Node", tenure: "Tenure", message: Progress | RoundStart | Digest, to: PeerID | None) -> None:
        core = tenure.core.group
        audience = [*core.mates, *core.departing]
        if isinstance(message, RoundStart):
            self._check_round(core, message)
            audience += [m.peer for m in message.members if m.peer != core.me and m.peer not in audience]
        elif isinstance(message, Digest):
            audience += [peer for peer in core.round_mates if peer not in audience]
        key = (type(message), message.version if isinstance(message, Digest) else message.step)
        for mate in audience if to is None else [to]:
            tenure.boxes.setdefault(mate, Box()).post(key, message)

    def _reduce(self, node: "Node", tenure: "Tenure", start: RoundStart) -> None:
        self.note(f"{node.name} reduces {start.step}.{start.attempt} of {' '.join(m.peer for m in start.members)}")
        tenure.rounds[start.step] = Round(start, press_at_s=self.now_s + PRESS_S)
        for member in start.members:
            self._send(node, tenure, member.peer, start, "part")
        for source, kind in tenure.early.pop((start.step, start.attempt), []):
            self._take(node, tenure, source, start.step, kind)

    def _press(self, node: "Node", tenure: "Tenure", ours: "Round") -> None:
        """What was lost on the way is sent again."""
        self._handle(node, tenure, StoodStill())
        ours.press_at_s = self.now_s + PRESS_S
        members = [member.peer for member in ours.start.members]
        for kind in ("part", "result") if ours.parts == set(members) else ("part",):
            for peer in members:
                self._send(node, tenure, peer, ours.start, kind)

    def _send(self, node: "Node", tenure: "Tenure", target: PeerID, start: RoundStart, kind: str) -> None:
        at = self.nodes[target]
        if target == node.name:
            self._soon(node, tenure, partial(self._frame_arrives, node, tenure, node.name, start, kind))
        else:
            self._frame(node, target, lambda there: self._frame_arrives(at, there, node.name, start, kind))

    def _frame_arrives(self, node: "Node", tenure: "Tenure", source: PeerID, start: RoundStart, kind: str) -> None:
        step, attempt = start.step, start.attempt
        ours = tenure.rounds.get(step)
        if step < tenure.version:
            return
        if ours is None or ours.start.attempt < attempt:
            tenure.early.setdefault((step, attempt), []).append((source, kind))
        elif ours.start.attempt == attempt:
            assert ours.start == start, f"two rounds {step}.{attempt}: {ours.start} and {start}"
            self._take(node, tenure, source, step, kind)

    def _take(self, node: "Node", tenure: "Tenure", source: PeerID, step: int, kind: str) -> None:
        ours = tenure.rounds[step]
        members = {member.peer for member in ours.start.members}
        if kind == "part" and source not in ours.parts:
            ours.parts.add(source)
            if ours.parts == members:
                for peer in sorted(members):
                    self._send(node, tenure, peer, ours.start, "result")
        elif kind == "result":
            ours.results.add(source)
            if ours.results == members and step == tenure.version:
                tenure.means[step] = repr(ours.start.members)
                tenure.by[step] = ours.start
                self._commit_if_complete(node, tenure)

    def _catch_up(self, node: "Node", tenure: "Tenure", mate: PeerID, step: int) -> None:
        there = self.nodes[mate].tenure if self.nodes[mate].acts else None
        if tenure.version != step or tenure.stepping >= step or there is None or self._is_lost():
            return
        if there.version > step and step not in there.means:
            if tenure.ready and not tenure.leaving:
                node.renewing = True
        elif there.version > step:
            tenure.means[step] = there.means[step]
            tenure.by.pop(step, None)
            self._commit_if_complete(node, tenure)

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
        assert {m.peer for m in start.members} >= {core.me, *core.ready_mates}

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
        assert len({node.tenure.digest for node in final}) == 1, "different states"
        # What everybody who could report it has stepped past with a new replica, nobody reports.
        unreported = sorted(set(range(self.steps)) - set(self.reports))
        assert self.loses_replicas or not unreported, f"not reported: {unreported}"

    def stuck(self) -> str:
        lines = []
        for n in self.nodes.values():
            if n.tenure:
                t, c = n.tenure, n.tenure.core.group
                lines.append(
                    f"{n.name}: v{c.version} acts={n.acts} ready={c.ready} open={t.core.is_open} lead={c.lead} "
                    f"is_lead={c.is_lead} waits for {c.waits_for()} leaving={t.leaving} "
                    f"order={n.order.sequence if n.order else None} claim={t.claim} ready_mates={c.ready_mates} "
                    f"departing={c.departing}"
                )
        return "\n".join(lines)


def outcome(report: CommitReport) -> tuple[object, ...]:
    return (report.step, report.digest, report.duplicates, report.microbatches, report.given_up)


def audience(tenure: "Tenure") -> list[PeerID]:
    """Whom the plan names that it works under, and the mates that it has, if that is another."""
    group = tenure.core.group
    return list(dict.fromkeys((*names_of(tenure.core.plan), *group.mates, *group.departing)))
