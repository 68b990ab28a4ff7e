"""A stage group of GroupCores with their issue books on a network that delays what it likes.

The world plays what is around the cores: drivers (outboxes, reductions, steps, catching up, fetching state), hellos,
claims, and a coordinator whose plans append newcomers and remove members that then drain. Every pair of peers has two
outboxes, one for hellos and one for the group, each with one call at a time; between any two events anything else may
happen. Not played: dead peers and lost calls.

This file is long because one random network, with everything that can go wrong in it, serves every property.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from shoal.peer.group.commands import CatchUp, Command, Reduce, Report, Resync, Tell
from shoal.peer.group.core import GroupCore
from shoal.peer.pipeline.issue import IssueBook
from shoal.peer.pipeline.microbatch import IndexSet, Microbatch
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, Digest, Hello, Progress, RoundStart
from shoal.protocol.plan import Member

Action = Callable[[], None]


class Box:
    """What `Outbox` is to one peer: the latest word under each key, one call at a time."""

    def __init__(self) -> None:
        self.queue: dict[object, object] = {}
        self.calling: object = None

    def post(self, key: object, message: object) -> None:
        self.queue[key] = message


@dataclass
class Node:
    """One peer and its replica, if it has one."""

    name: PeerID
    plan: int = -1
    core: GroupCore | None = None
    book: IssueBook | None = None
    is_open: bool = False
    leaving: bool = False
    syncing: bool = False
    claiming: bool = False
    stepping: int = -1
    digest: str = ""
    means: dict[int, str] = field(default_factory=dict)
    reductions: dict[int, RoundStart] = field(default_factory=dict)
    hellos: dict[PeerID, Hello] = field(default_factory=dict)
    work: list[Microbatch] = field(default_factory=list)


@dataclass
class World:
    """`plans` name the members in rank order; the first begins from the seed."""

    rng: random.Random
    plans: list[list[str]]
    steps: int
    M: int
    s_max: int
    flips: int
    nodes: dict[PeerID, Node] = field(default_factory=dict)
    boxes: dict[tuple[PeerID, PeerID, str], Box] = field(default_factory=dict)
    later: list[Action] = field(default_factory=list)
    now_s: float = 0.0
    newest: int = 0
    made: Counter[Microbatch] = field(default_factory=Counter)
    opened: dict[tuple[int, int], RoundStart] = field(default_factory=dict)
    reports: dict[int, CommitReport] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in sorted({name for plan in self.plans for name in plan}):
            self.nodes[PeerID(name)] = Node(PeerID(name))

    # --- the loop ---

    def run(self) -> None:
        for _ in range(6_000):
            actions = self._actions()
            if not actions and self._may_replan():
                self.newest += 1
                continue
            if not actions:
                due_s = min((n.core.next_timer_s() for n in self.nodes.values() if n.core), default=float("inf"))
                if due_s == float("inf"):
                    return
                self.now_s = max(self.now_s, due_s)
                continue
            self.now_s += 0.001
            if self.rng.random() < 0.01 and self._may_replan():
                self.newest += 1
            self.rng.choice(actions)()
            leads = [node.name for node in self.nodes.values() if node.core and node.core.is_lead]
            assert len(leads) <= 1, f"{leads} act as lead at once"
        raise AssertionError("it never ends")

    def _actions(self) -> list[Action]:
        actions: list[Action] = list(map(self._doing, range(len(self.later))))
        for pair, box in self.boxes.items():
            if box.calling is not None:
                actions.append(partial(self._arrive, pair))
            elif box.queue:
                actions.append(partial(self._call, pair))
        for node in self.nodes.values():
            core = node.core
            if node.plan < self.newest:
                actions.append(partial(self._obey, node))
            if core is None:
                continue
            if core.next_timer_s() <= self.now_s:
                actions.append(lambda n=node, c=core: self._perform(n, c.timer(now_s=self.now_s)))  # type: ignore[misc]
            if node.work:
                actions.append(partial(self._contribute, node))
            wants = core.ready and node.is_open and not node.claiming and len(node.work) < 2
            if wants and core.lead is not None and core.version < self.steps:
                actions.append(partial(self._claim, node, core.lead))
            if node.leaving and core.ready and not node.work and not node.claiming and not core.owes:
                actions.append(partial(self._leave, node))
            if self.flips and core.ready and node.is_open and self._ready_mates(node) and self.rng.random() < 0.03:
                actions.append(partial(self._flip, node))
        return actions

    def _doing(self, at: int) -> Action:
        return lambda: self.later.pop(at)()

    def _may_replan(self) -> bool:
        """The coordinator makes another plan when everyone works under the last one."""
        members = [self.nodes[PeerID(name)] for name in self.plans[self.newest]]
        obeyed = all(n.plan == self.newest and n.core and n.core.ready for n in members)
        return obeyed and self.newest + 1 < len(self.plans)

    # --- the network ---

    def _post(self, source: PeerID, target: PeerID, kind: str, key: object, message: object) -> None:
        self.boxes.setdefault((source, target, kind), Box()).post(key, message)

    def _call(self, pair: tuple[PeerID, PeerID, str]) -> None:
        box = self.boxes[pair]
        key = next(iter(box.queue))
        box.calling = box.queue.pop(key)

    def _arrive(self, pair: tuple[PeerID, PeerID, str]) -> None:
        box = self.boxes[pair]
        message, box.calling = box.calling, None
        source, node = pair[0], self.nodes[pair[1]]
        core = node.core
        if isinstance(message, tuple):
            hello, wants_reply = message
            if wants_reply:
                self._post(node.name, source, "hello", "hello", (self._hello(node), False))
            node.hellos[source] = hello
            self._heard(node, source)
        elif core is None:
            return  # refused
        elif isinstance(message, Progress):
            self._perform(node, core.progress(source, message, now_s=self.now_s))
            if node.book:
                node.book.take(message.step, IndexSet.from_bytes(message.indices, count=self.M))
                node.book.take(message.step, IndexSet.from_bytes(message.claimed, count=self.M))
        elif isinstance(message, RoundStart):
            self._perform(node, core.round_started(message))
        elif isinstance(message, Digest):
            self._perform(node, core.digest(source, message, now_s=self.now_s))

    def _hello(self, node: Node) -> Hello:
        return Hello(
            incarnation=0,
            plan_sequence=node.plan,
            stage=0 if node.core else -1,
            version=node.core.version if node.core else 0,
            ready=bool(node.core and node.core.ready),
            is_open=node.is_open,
        )

    def _heard(self, node: Node, source: PeerID) -> None:
        core, hello = node.core, node.hellos.get(source)
        if core is None or hello is None:
            return
        if hello.stage == 0:
            self._perform(node, core.mate_ready(source, hello.ready, hello.is_open, now_s=self.now_s))
        elif source in core.mates:
            self._perform(node, core.mate_lost(source, now_s=self.now_s))

    def _say_hello(self, node: Node) -> None:
        """To those whom the plan that it works under names, also when it is about to leave."""
        if node.core:
            for name in self.plans[node.plan - 1 if node.leaving else node.plan]:
                if name != node.name:
                    self._post(node.name, PeerID(name), "hello", "hello", (self._hello(node), True))

    # --- plans ---

    def _obey(self, node: Node) -> None:
        node.plan += 1
        members = [Member(PeerID(name), 1.0, 1.0) for name in self.plans[node.plan]]
        if node.leaving:
            return
        if node.name in self.plans[node.plan]:
            fresh = node.plan == 0
            joins = node.core is None
            if joins:
                node.core = GroupCore(
                    me=node.name,
                    stage=0,
                    steps=self.steps,
                    microbatches=self.M,
                    tokens_per_microbatch=1,
                    has_loss=True,
                    deadline_s=0.0,
                    quorum=1.0,
                )
                node.book = IssueBook(
                    steps=self.steps,
                    microbatches=self.M,
                    s_max=self.s_max,
                    validation_interval=0,
                    validation_microbatches=1,
                )
            assert node.core
            self._perform(node, node.core.plan_changed(members, node.plan + 1, now_s=self.now_s))
            for peer in self.nodes:
                if peer != node.name and peer in self.plans[node.plan]:
                    self._heard(node, peer)
            self._say_hello(node)
            if joins:
                self.later.append(partial(self._begin, node) if fresh else partial(self._fetch, node))
                node.syncing = True
        elif node.core:
            node.leaving, node.is_open = True, False
            self._perform(node, node.core.plan_changed(members, node.plan + 1, now_s=self.now_s))
            self._perform(node, node.core.set_open(False, now_s=self.now_s))
            self._say_hello(node)

    def _leave(self, node: Node) -> None:
        assert node.core
        self._perform(node, node.core.set_ready(False, now_s=self.now_s))
        self._say_hello(node)
        node.core = node.book = None

    def _begin(self, node: Node) -> None:
        self._stepped(node, 0, "seed")
        self._become_ready(node)

    def _become_ready(self, node: Node) -> None:
        assert node.core
        node.syncing = False
        self._perform(node, node.core.set_ready(True, now_s=self.now_s))
        node.is_open = not node.leaving
        self._say_hello(node)

    # --- state ---

    def _ready_mates(self, node: Node) -> list[Node]:
        """Those it believes to be ready and that are."""
        assert node.core
        mates = (self.nodes[mate] for mate in node.core.ready_mates)
        return [mate for mate in mates if mate.core and mate.core.ready and mate.is_open]

    def _flip(self, node: Node) -> None:
        """It finds its state wrong and fetches it again."""
        assert node.core
        self.flips -= 1
        self._resync(node)

    def _resync(self, node: Node) -> None:
        if node.core and not node.syncing:
            node.syncing, node.is_open = True, False
            self._perform(node, node.core.set_ready(False, now_s=self.now_s))
            self._say_hello(node)
            self.later.append(partial(self._fetch, node))

    def _fetch(self, node: Node) -> None:
        if node.core is None:
            return
        mates = self._ready_mates(node)
        if mates and mates[0].core and mates[0].core.version >= node.core.version and node.stepping < 0:
            self._stepped(node, mates[0].core.version, mates[0].digest)
            self.later.append(partial(self._replay, node))
        else:
            self.later.append(partial(self._fetch, node))

    def _replay(self, node: Node) -> None:
        if node.core is None:
            return
        mates, step = self._ready_mates(node), node.core.version
        if not mates or (mates[0].core and mates[0].core.version > step and step not in mates[0].means):
            self.later.append(partial(self._fetch, node))
        elif mates[0].core and mates[0].core.version > step:
            if node.stepping < 0:
                self._stepped(node, step + 1, self._digest_after(node, mates[0].means[step]))
            self.later.append(partial(self._replay, node))
        else:
            self._become_ready(node)

    def _digest_after(self, node: Node, mean: str) -> str:
        return str(hash((node.digest, mean)))

    def _stepped(self, node: Node, version: int, digest: str) -> None:
        assert node.core
        node.digest, node.stepping = digest, -1
        for step in [s for s in node.means if s < version - 1]:
            del node.means[step]
        for step in [s for s in node.reductions if s < version]:
            del node.reductions[step]
        if node.book:
            node.book.reach(version)
        self._perform(node, node.core.stepped(version, digest, now_s=self.now_s))
        self._commit_if_complete(node)

    def _commit_if_complete(self, node: Node) -> None:
        core = node.core
        if core and core.version in node.means and node.stepping < 0:
            node.stepping = core.version
            self.later.append(partial(self._step, node, core.version))

    def _step(self, node: Node, step: int) -> None:
        if node.core and node.core.version == step:
            self._stepped(node, step + 1, self._digest_after(node, node.means[step]))
        else:
            node.stepping = -1

    # --- work ---

    def _claim(self, node: Node, lead: PeerID) -> None:
        node.claiming = True
        self.later.append(partial(self._claim_arrives, node, lead))

    def _claim_arrives(self, node: Node, lead: PeerID) -> None:
        at = self.nodes[lead]
        granted: list[Microbatch] = []
        if at.core and at.book and at.core.is_lead:
            granted = at.book.grant(1)
        self.later.append(partial(self._grant_arrives, node, lead, granted))

    def _grant_arrives(self, node: Node, lead: PeerID, granted: list[Microbatch]) -> None:
        node.claiming = False
        if node.core is None or node.core.lead != lead:
            return  # as `Claims` does: the new lead will grant them again
        for microbatch in granted:
            self.made[microbatch] += 1
            assert self.made[microbatch] == 1, f"{microbatch} was granted twice"
            self._perform(node, node.core.claimed(microbatch.step, microbatch.index))
            node.work.append(microbatch)

    def _contribute(self, node: Node) -> None:
        assert node.core
        m = node.work.pop(self.rng.randrange(len(node.work)))
        self._perform(node, node.core.contributed(m.step, m.index, loss=1.0, staleness_steps=0, now_s=self.now_s))

    # --- commands ---

    def _perform(self, node: Node, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Tell(message):
                    self._tell(node, message)
                case Reduce(start):
                    node.reductions[start.step] = start
                    self._maybe_reduced(start)
                case Report(report):
                    assert report.step not in self.reports, f"step {report.step} was reported twice"
                    self.reports[report.step] = report
                case CatchUp(mate, step):
                    self.later.append(partial(self._catch_up, node, mate, step))
                case Resync():
                    raise AssertionError(f"{node.name} is told that its state is wrong")

    def _tell(self, node: Node, message: Progress | RoundStart | Digest) -> None:
        core = node.core
        assert core
        audience = [*core.mates, *core.departing]
        if isinstance(message, RoundStart):
            self._check_round(core, message)
            audience += [m.peer for m in message.members if m.peer != core.me and m.peer not in audience]
        key = (type(message), message.version if isinstance(message, Digest) else message.step)
        for mate in audience:
            self._post(node.name, mate, "group", key, message)

    def _check_round(self, core: GroupCore, start: RoundStart) -> None:
        assert (start.step, start.attempt) not in self.opened, "opened twice"
        self.opened[start.step, start.attempt] = start
        held: Counter[int] = Counter()
        for member in start.members:
            indices = IndexSet.from_bytes(member.indices, count=self.M)
            held.update(i for i in range(self.M) if i in indices)
        assert held == Counter(range(self.M)), f"the round of step {start.step} has {sorted(held.elements())}"
        assert {m.peer for m in start.members} >= {core.me, *core.ready_mates}

    def _maybe_reduced(self, start: RoundStart) -> None:
        """A round ends at all of its members once all take part in it."""
        members = [self.nodes[m.peer] for m in start.members]
        if all(node.reductions.get(start.step) == start for node in members):
            for node in members:
                self.later.append(partial(self._reduced, node, start))

    def _reduced(self, node: Node, start: RoundStart) -> None:
        if node.core and node.reductions.get(start.step) == start:
            node.means[start.step] = repr(start.members)
            self._commit_if_complete(node)

    def _catch_up(self, node: Node, mate: PeerID, step: int) -> None:
        at = self.nodes[mate]
        if node.core is None or node.core.version != step or node.stepping >= 0:
            return
        if at.core is None or (at.core.version > step and step not in at.means):
            self._resync(node)
        elif at.core.version > step:
            node.means[step] = at.means[step]
            self._commit_if_complete(node)

    # --- the end ---

    def check_the_end(self) -> None:
        final = [self.nodes[PeerID(name)] for name in self.plans[-1]]
        assert [n.core.version if n.core else -1 for n in final] == [self.steps] * len(final), self.stuck()
        assert len({n.digest for n in final}) == 1
        assert sorted(self.reports) == list(range(self.steps))
        for report in self.reports.values():
            assert (report.microbatches, report.duplicates, report.given_up) == (self.M, 0, 0)
            assert report.loss == 1.0
        for node in self.nodes.values():
            assert (node.core is not None) == (node.name in self.plans[-1]), f"{node.name} has not left"

    def stuck(self) -> str:
        return "; ".join(
            f"{n.name}: v{n.core.version} ready={n.core.ready} lead={n.core.lead} is_lead={n.core.is_lead} "
            f"work={n.work} rounds={list(n.core._rounds)} syncing={n.syncing} leaving={n.leaving}"
            for n in self.nodes.values()
            if n.core
        )
