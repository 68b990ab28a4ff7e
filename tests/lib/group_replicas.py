"""A stage group of GroupCores and their Supplies, in the world of `group_machines.py`.

Played here: what is around the cores, as `peer/driver.py`, `peer/replica/`, `peer/joining.py` and the drivers of
`peer/group/` do it, a coordinator whose plans add members, move them away and drop them, and the checks. `World.run`
ends when everybody is at the last version, or with an AssertionError.

This file is long because one world, with everything that can go wrong in it, serves every property.
"""

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from group_machines import DRAIN_S, PRESS_S, Action, Box, Machines, Node, Order, Pipe, Round, Tenure
from shoal.peer.group.core import GroupCore
from shoal.peer.pipeline.issue import IssueBook
from shoal.peer.pipeline.microbatch import IndexSet, Microbatch
from shoal.peer.replica.commands import (
    Answer,
    AskRepair,
    CatchUp,
    DropClaim,
    ForgetMember,
    HandOut,
    Make,
    Reduce,
    Report,
    Resync,
    SendClaim,
    Tell,
    Witness,
)
from shoal.peer.replica.events import (
    Changed,
    ClaimArrived,
    ClaimFailed,
    CommitEvent,
    GradientCounted,
    GrantArrived,
    GroupPlanned,
    LossReported,
    Made,
    MemberGranted,
    OpenSet,
    ReadySet,
    RepairArrived,
    RepairDeclined,
    RunAhead,
    Stepped,
    StoodStill,
    SupplyEvent,
    SupplyStopped,
    VersionReached,
    WorkGranted,
)
from shoal.peer.replica.supply import Supply
from shoal.protocol.errors import Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, Digest, Grant, Progress, RoundStart
from shoal.protocol.plan import Member


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
        gone = [n for n in nodes if n.name in (*order.names, *order.rest) and not n.alive]
        away = [n for n in nodes if n.name in order.names and n.asleep]
        faults += [partial(self._drop, n) for n in gone + away if self._others_go_on(n)]
        faults += [partial(self._wake_up, n) for n in nodes if n.asleep]
        if not self._others_go_on(None):
            return faults
        if self.changes:
            faults += [partial(self._add, n) for n in nodes if n.acts and not n.quitting and n.name not in order.names]
            faults.append(partial(self._add, None))
            movable = [n for n in nodes if n.name in order.names and self._others_go_on(n)]
            faults += [partial(self._move_away, n) for n in movable if rng.random() < 0.5]
        for node in nodes:
            if not node.acts or node.name not in order.names or not self._others_go_on(node):
                continue
            if self.deaths and rng.random() < 0.3:
                faults.append(partial(rng.choice((self._die, self._crash_and_return, self._quit)), node))
            if self.sleeps and rng.random() < 0.3:
                faults.append(partial(self._sleep, node))
            if self.flips and node.tenure and node.tenure.core.ready and not node.tenure.leaving:
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
            and node.name in order.names
            and order.since_of(node.name) <= node.order.sequence
            and node.tenure is not None
            and node.tenure.core.ready
            and not node.tenure.leaving
            and node.tenure.core.version > reported
            for node in self.nodes.values()
        )

    def _is_counted_out(self, node: "Node") -> bool:
        """A plan that it has not seen goes on without it."""
        assert node.order
        later = [order for order in self.orders if order.sequence > node.order.sequence]
        return any(
            node.name not in (*order.names, *order.rest)
            or (node.name in order.names and order.since_of(node.name) > node.order.sequence)
            for order in later
        )

    def _plan(self, names: Iterable[PeerID], rest: Iterable[PeerID], why: str) -> None:
        before = self.orders[-1]
        sequence = before.sequence + 1
        held = {member.peer: member.since for member in before.members}
        members = tuple(Member(name, 1.0, 1.0, held.get(name, sequence)) for name in names)
        self.orders.append(Order(sequence, members, tuple(rest)))
        self.note(f"plan {sequence}: {' '.join(members.peer for members in members)} ({why})")

    def _drop(self, node: "Node") -> None:
        order = self.orders[-1]
        names, rest = ([n for n in some if n != node.name] for some in (order.names, order.rest))
        self._plan(names, rest, f"without {node.name}")

    def _add(self, node: "Node | None") -> None:
        self.changes -= 1
        if node is None:
            node = Node(PeerID(chr(97 + len(self.nodes))))
            self.nodes[node.name] = node
        order = self.orders[-1]
        names = list(order.names)
        names.insert(self.rng.randrange(len(names) + 1), node.name)
        self._plan(names, [n for n in order.rest if n != node.name], f"{node.name} comes")

    def _move_away(self, node: "Node") -> None:
        self.changes -= 1
        order = self.orders[-1]
        self._plan([n for n in order.names if n != node.name], [*order.rest, node.name], f"{node.name} moves away")

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
        if tenure is not None and me not in order.names:
            is_counted_out = me not in order.rest and not node.quitting
            if before is not None and order.sequence == before.sequence + 1 and not is_counted_out:
                self._commit(node, tenure, self._planned(order))
                if not tenure.leaving:
                    self._drain(node, tenure)
                return
            self._abandon(node)
        elif tenure is not None and (renewing or (before is not None and order.since_of(me) > before.sequence)):
            self._abandon(node)
        if node.quitting and node.tenure is not None:
            return
        if me in order.names and not node.quitting:
            if node.tenure is None:
                self._begin(node, order)
            else:
                self._obey(node, node.tenure, order)
        elif node.quitting and node.tenure is None:
            self._end_process(node)
            return
        for peer, hello in sorted(node.hellos.items()):
            if node.tenure and peer in node.tenure.order.names:
                self._peer_state(node, node.tenure, peer, hello)
        if node.tenure:
            self._say_hello(node, audience(node.tenure))

    def _count_out(self, node: "Node", before: "Order", order: "Order") -> None:
        for peer in sorted({*before.names, *before.rest} - {node.name}):
            same_place = (peer in before.names) == (peer in order.names)
            returned = same_place and order.since_of(peer) > before.sequence
            if peer in (*order.names, *order.rest) and not returned:
                continue
            hello = node.hellos.pop(peer, None)
            self._forget(node, node.boxes, peer)
            if returned or hello is None or not hello.draining:
                self._died(node, peer)

    def _begin(self, node: "Node", order: "Order") -> None:
        node.tenures += 1
        core = GroupCore(
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
        book = IssueBook(
            steps=self.steps, microbatches=self.M, s_max=self.s_max, validation_interval=0, validation_microbatches=1
        )
        pipe = Pipe()
        node.tenure = tenure = Tenure(core, Supply(book=book, group=core, demand=pipe), pipe, order)
        self._commit(node, tenure, OpenSet(False))
        self._obey(node, tenure, order)
        if order.sequence == 1 and node.life == 0 and node.tenures == 1:
            self._soon(node, tenure, partial(self._take_over, node, tenure, 0, "seed"))
        else:
            tenure.joins_at_s = self.now_s

    def _planned(self, order: "Order") -> GroupPlanned:
        """Who may still drain a replica knows from the plans before, which come with the newest."""
        former = {name for earlier in self.orders[: order.sequence] for name in earlier.names}.difference(order.names)
        return GroupPlanned(order.members, order.sequence, former)

    def _obey(self, node: "Node", tenure: "Tenure", order: "Order") -> None:
        tenure.order = order
        self._commit(node, tenure, self._planned(order))
        self._open_if_fit(node, tenure)
        self._supply(node, tenure, Changed())

    def _drain(self, node: "Node", tenure: "Tenure") -> None:
        tenure.leaves_at_s, tenure.is_open = self.now_s + DRAIN_S, False
        self._supply(node, tenure, SupplyStopped())
        self._commit(node, tenure, OpenSet(False))
        self._say_hello(node, audience(tenure))

    def _leave(self, node: "Node", tenure: "Tenure", drained: bool) -> None:
        self.note(f"{node.name} leaves, drained: {drained}")
        if drained:
            self._commit(node, tenure, ReadySet(False))
            self._say_hello(node, audience(tenure))
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

    def _open_if_fit(self, node: "Node", tenure: "Tenure") -> None:
        core = tenure.core
        if tenure.is_open or tenure.leaving or not core.ready:
            return
        if self.s_max or tenure.has_stepped or core.version == 0 or not core.open_mates:
            tenure.is_open = True
            self._commit(node, tenure, OpenSet(True))
            self._say_hello(node, audience(tenure))

    # --- state ---

    def _join(self, node: "Node", tenure: "Tenure") -> None:
        """Fetch the newest state of those who are ready, as far as we know and in truth; then replay."""
        core = tenure.core
        holders = [self.nodes[peer].tenure for peer in core.ready_mates if self.nodes[peer].acts]
        versions = {t.core.version: t.digest for t in holders if t and t.core.ready}
        tenure.joins_at_s = self.now_s + 1.0
        if versions and not self._is_lost():
            version = max(versions)
            if version >= core.version:
                self._soon(node, tenure, partial(self._take_over, node, tenure, version, versions[version]))
                tenure.joins_at_s = math.inf

    def _take_over(self, node: "Node", tenure: "Tenure", version: int, digest: str) -> None:
        if version >= tenure.core.version:
            self._stepped(node, tenure, version, digest)
        if version == 0 and digest == "seed":
            self._become_ready(node, tenure)
        else:
            self._soon(node, tenure, partial(self._replay, node, tenure))

    def _replay(self, node: "Node", tenure: "Tenure") -> None:
        mates, step = tenure.core.ready_mates, tenure.core.version
        there = self.nodes[mates[0]].tenure if mates and self.nodes[mates[0]].acts else None
        if tenure.stepping >= step:
            self._soon(node, tenure, partial(self._replay, node, tenure))
        elif there is None or self._is_lost() or (there.core.version > step and step not in there.means):
            tenure.joins_at_s = self.now_s + 1.0
        elif there.core.version > step:
            tenure.means[step] = there.means[step]
            tenure.by.pop(step, None)
            self._commit_if_complete(node, tenure)
            self._soon(node, tenure, partial(self._replay, node, tenure))
        else:
            self._become_ready(node, tenure)

    def _become_ready(self, node: "Node", tenure: "Tenure") -> None:
        self.note(f"{node.name} is ready at {tenure.core.version}")
        self._commit(node, tenure, ReadySet(True))
        self._open_if_fit(node, tenure)
        self._say_hello(node, audience(tenure))
        self._supply(node, tenure, Changed())

    def _stepped(self, node: "Node", tenure: "Tenure", version: int, digest: str, by: RoundStart | None = None) -> None:
        tenure.digest = digest
        self.note(f"{node.name} is at {version} {digest}")
        tenure.rounds = {step: r for step, r in tenure.rounds.items() if step >= version}
        tenure.early = {key: frames for key, frames in tenure.early.items() if key[0] >= version}
        self.grown_s = self.now_s
        self._commit(node, tenure, Stepped(version, digest, by))
        self._supply(node, tenure, VersionReached(version))
        self._commit_if_complete(node, tenure)

    def _commit_if_complete(self, node: "Node", tenure: "Tenure") -> None:
        step = tenure.core.version
        if step in tenure.means and tenure.stepping < step:
            tenure.stepping = step
            self._soon(node, tenure, partial(self._step, node, tenure, step))

    def _step(self, node: "Node", tenure: "Tenure", step: int) -> None:
        if tenure.core.version == step:
            digest = f"{zlib.crc32((tenure.digest + tenure.means[step]).encode()):08x}"
            tenure.has_stepped = True
            self._stepped(node, tenure, step + 1, digest, tenure.by.get(step))
            self._open_if_fit(node, tenure)

    # --- supply ---

    def _supply(self, node: "Node", tenure: "Tenure", event: SupplyEvent) -> None:
        for command in tenure.supply.handle(event, now_s=self.now_s):
            match command:
                case SendClaim(leader, count):
                    tenure.claim = call = next(self._numbers)
                    self.calls[call] = node, tenure
                    self._soon(node, tenure, partial(self._claim_arrives, node, tenure, leader, count, call))
                case DropClaim():
                    tenure.claim = None
                case Answer(call, Grant() as grant):
                    claimant, of = self.calls.pop(call)
                    self._soon(claimant, of, partial(self._grant_arrives, claimant, of, node.name, call, grant))
                case Make(microbatch, again):
                    self._make(node, tenure, microbatch, again)
                case MemberGranted():
                    self._commit(node, tenure, command)
                case HandOut(member, microbatches):
                    self._soon(node, tenure, partial(self._hand_out, node, tenure, member, microbatches))
                case RunAhead():
                    pass
                case _:
                    raise AssertionError(f"{command} in a world without validation and halts")

    def _claim_arrives(self, node: "Node", tenure: "Tenure", leader: PeerID, count: int, call: int) -> None:
        at = self.nodes[leader]
        try:
            if not at.acts or at.tenure is None or self._is_lost():
                raise Refused(leader, "cannot be reached")
            self._supply(at, at.tenure, ClaimArrived(node.name, count, call))
        except Refused:
            self._claim_failed(node, tenure, leader, call)

    def _claim_failed(self, node: "Node", tenure: "Tenure", leader: PeerID, call: int) -> None:
        if tenure.claim == call:
            tenure.claim = None
            self._supply(node, tenure, ClaimFailed(leader))

    def _grant_arrives(self, node: "Node", tenure: "Tenure", leader: PeerID, call: int, grant: Grant) -> None:
        if tenure.claim == call:
            if self._is_lost():
                self._claim_failed(node, tenure, leader, call)
            else:
                tenure.claim = None
                self._supply(node, tenure, GrantArrived(leader, grant.items, grant.steps_ahead, grant.gain))

    def _hand_out(self, node: "Node", tenure: "Tenure", member: PeerID, microbatches: tuple[Microbatch, ...]) -> None:
        at = self.nodes[member]
        try:
            if not at.acts or at.tenure is None or self._is_lost():
                raise Refused(member, "cannot be reached")
            self._supply(at, at.tenure, RepairArrived(node.name, tuple((m.step, m.index) for m in microbatches)))
        except Refused:
            self._supply(node, tenure, RepairDeclined(member, microbatches))

    def _make(self, node: "Node", tenure: "Tenure", m: Microbatch, again: bool) -> None:
        if not again:
            self.made[m] += 1
            assert self.is_hard or self.made[m] == 1, f"{m} was granted twice"
        if m.step >= tenure.core.version:
            self._commit(node, tenure, WorkGranted(m.step, m.index))
            if m not in (*tenure.work, *tenure.running):
                (tenure.again.add if again else tenure.again.discard)(m)
                tenure.work.append(m)

    def _compute(self, node: "Node", tenure: "Tenure", m: Microbatch) -> None:
        tenure.work.remove(m)
        tenure.running.append(m)
        self._soon(node, tenure, partial(self._computed, node, tenure, m, tenure.core.lacks(m.step, m.index)))

    def _computed(self, node: "Node", tenure: "Tenure", m: Microbatch, wanted: bool) -> None:
        tenure.running.remove(m)
        if wanted:
            self._commit(node, tenure, GradientCounted(m, 1.0, 0, apart=m in tenure.again))
            self._supply(node, tenure, Made(m))
        self._supply(node, tenure, Changed())

    # --- commands ---

    def _commit(self, node: "Node", tenure: "Tenure", event: CommitEvent) -> None:
        for command in tenure.core.handle(event, now_s=self.now_s):
            match command:
                case Tell(message, to=to):
                    self._tell(node, tenure, message, to)
                case Reduce(start):
                    self._reduce(node, tenure, start)
                case Report(report) | Witness(report):
                    self._check_report(node, report, is_report=isinstance(command, Report))
                case AskRepair(step, indices):
                    self.note(f"{node.name} repairs {step} {indices.hex()}")
                    assert self.is_hard, f"nothing is lost, but step {step} runs again"
                    self._supply(node, tenure, LossReported(step, IndexSet.from_bytes(indices, count=self.M)))
                case CatchUp(mate, step):
                    self._soon(node, tenure, partial(self._catch_up, node, tenure, mate, step))
                case ForgetMember(peer):
                    self._forget(node, tenure.boxes, peer)
                case Resync():
                    raise AssertionError(f"{node.name} is told that its state is wrong")

    def _tell(self, node: "Node", tenure: "Tenure", message: Progress | RoundStart | Digest, to: PeerID | None) -> None:
        core = tenure.core
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
        self._commit(node, tenure, StoodStill())
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
        if step < tenure.core.version:
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
            if ours.results == members and step == tenure.core.version:
                tenure.means[step] = repr(ours.start.members)
                tenure.by[step] = ours.start
                self._commit_if_complete(node, tenure)

    def _catch_up(self, node: "Node", tenure: "Tenure", mate: PeerID, step: int) -> None:
        there = self.nodes[mate].tenure if self.nodes[mate].acts else None
        if tenure.core.version != step or tenure.stepping >= step or there is None or self._is_lost():
            return
        if there.core.version > step and step not in there.means:
            if tenure.core.ready and not tenure.leaving:
                node.renewing = True
        elif there.core.version > step:
            tenure.means[step] = there.means[step]
            tenure.by.pop(step, None)
            self._commit_if_complete(node, tenure)

    # --- checks ---

    def _check_round(self, core: GroupCore, start: RoundStart) -> None:
        known = self.opened.setdefault((core.me, start.step, start.attempt), start)
        assert known == start, f"{start.step}.{start.attempt} opened twice: {known} and {start}"
        held: Counter[int] = Counter()
        for member in start.members:
            indices = IndexSet.from_bytes(member.indices, count=self.M)
            held.update(i for i in range(self.M) if i in indices)
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
        final = [self.nodes[name] for name in self.orders[-1].names]
        assert len({node.tenure.digest for node in final}) == 1, "different states"
        # What everybody who could report it has stepped past with a new replica, nobody reports.
        unreported = sorted(set(range(self.steps)) - set(self.reports))
        assert self.loses_replicas or not unreported, f"not reported: {unreported}"

    def stuck(self) -> str:
        lines = []
        for n in self.nodes.values():
            if n.tenure:
                t, c = n.tenure, n.tenure.core
                lines.append(
                    f"{n.name}: v{c.version} acts={n.acts} ready={c.ready} open={t.is_open} lead={c.lead} "
                    f"is_lead={c.is_lead} work={t.work} rounds={list(c._rounds.open)} leaving={t.leaving} "
                    f"order={n.order.sequence if n.order else None} claim={t.claim} ready_mates={c.ready_mates} "
                    f"departing={c.departing} absent={c._members._known}"
                )
        return "\n".join(lines)


def outcome(report: CommitReport) -> tuple[object, ...]:
    return (report.step, report.digest, report.duplicates, report.microbatches, report.given_up)


def audience(tenure: "Tenure") -> list[PeerID]:
    """Whom the plan names that it works under, and the mates that it has, if that is another."""
    core = tenure.core
    return list(dict.fromkeys((*tenure.order.names, *core.mates, *core.departing)))
