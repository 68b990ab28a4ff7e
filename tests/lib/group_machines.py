"""Machines and a network that do what they like, under the replicas of one stage (`group_replicas.py`).

Played here: outboxes with one call at a time, Hellos and who has begun anew, frames. Between any two events anything
else may happen: calls and frames get lost, processes die and come back, machines sleep and handle what was queued when
they wake.

This file is long because the table of everything that may happen next needs all of the state in one place.
"""

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.core import ReplicaCore
from shoal.peer.replica.events import (
    DigestArrived,
    Event,
    MemberSilent,
    PeerDied,
    PeerReborn,
    PeerSaid,
    ProgressArrived,
    RoundArrived,
    TimerFired,
)
from shoal.protocol.errors import Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, Digest, Hello, Progress, RoundStart
from shoal.protocol.plan import Plan

Action = Callable[[], None]
STUCK_AFTER_S = 600.0
DRAIN_S = 30.0
PRESS_S = 5.0


class Box:
    """What `Outbox` is to one peer: the latest word under each key, one call at a time."""

    def __init__(self) -> None:
        self.queue: dict[object, object] = {}
        self.calling: tuple[object, object, dict[object, object]] | None = None
        self.retry_at_s = 0.0

    def post(self, key: object, message: object) -> None:
        self.queue.pop(key, None)
        self.queue[key] = message

    def call(self) -> None:
        key = next(iter(self.queue))
        self.calling = (key, self.queue.pop(key), self.queue)

    def failed(self, now_s: float) -> None:
        assert self.calling
        key, message, queue = self.calling
        self.calling = None
        if self.queue is queue:
            if key not in queue:
                self.queue = {key: message} | queue
            self.retry_at_s = now_s + 0.5


@dataclass(eq=False)
class Round:
    """One member's side of a reduction."""

    start: RoundStart
    parts: set[PeerID] = field(default_factory=set)
    results: set[PeerID] = field(default_factory=set)
    press_at_s: float = 0.0


@dataclass(eq=False)
class Tenure:
    """One replica: its core, and what its driver would keep."""

    core: ReplicaCore
    has_stepped: bool = False
    leaves_at_s: float = math.inf
    joins_at_s: float = math.inf
    boxes: dict[PeerID, Box] = field(default_factory=dict)
    unwanted: set[Microbatch] = field(default_factory=set)
    """What it computes though its group has the gradient."""
    claim: int | None = None
    """The number of the claim whose answer it waits for."""
    stepping: int = -1
    digest: str = ""
    means: dict[int, str] = field(default_factory=dict)
    by: dict[int, RoundStart] = field(default_factory=dict)
    """Step -> the round of ours that its mean is the result of."""
    rounds: dict[int, Round] = field(default_factory=dict)
    early: dict[tuple[int, int], list[tuple[PeerID, str]]] = field(default_factory=dict)

    @property
    def version(self) -> int:
        return self.core.group.version

    @property
    def ready(self) -> bool:
        return self.core.group.ready

    @property
    def leaving(self) -> bool:
        return self.leaves_at_s < math.inf


@dataclass(eq=False)
class Node:
    """One peer: a machine, its process if it lives, and its replica if it has one."""

    name: PeerID
    alive: bool = True
    asleep: bool = False
    quitting: bool = False
    life: int = 0
    tenures: int = 0
    count: int = 0
    order: Plan | None = None
    renewing: bool = False
    hellos: dict[PeerID, Hello] = field(default_factory=dict)
    boxes: dict[PeerID, Box] = field(default_factory=dict)
    inbox: list[Action] = field(default_factory=list)
    tenure: Tenure | None = None

    @property
    def acts(self) -> bool:
        return self.alive and not self.asleep


@dataclass(kw_only=True)
class Machines:
    """The first order is for `size` peers who begin from the seed.

    Args:
        changes: orders after the first that no fault asks for.
        deaths, sleeps, losses, flips: how many there may be, of processes, machines, calls and frames, states.
    """

    rng: random.Random
    size: int
    steps: int
    M: int
    s_max: int
    changes: int = 0
    deaths: int = 0
    sleeps: int = 0
    losses: int = 0
    flips: int = 0
    nodes: dict[PeerID, Node] = field(default_factory=dict)
    orders: list[Plan] = field(default_factory=list)
    later: list[tuple[Node, Action]] = field(default_factory=list)
    """What happens to somebody at some time, once awake."""
    now_s: float = 1.0
    grown_s: float = 0.0
    made: Counter[Microbatch] = field(default_factory=Counter)
    opened: dict[tuple[PeerID, int, int], RoundStart] = field(default_factory=dict)
    reports: dict[int, list[CommitReport]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    is_hard: bool = False
    """Something died, slept or got lost: microbatches may run twice, and reports be told twice."""
    loses_replicas: bool = False
    is_partial: bool = False
    """Some may reach who others cannot. Then two may act as lead for the length of a call: what both grant runs twice,
    and their rounds have different numbers."""

    def __post_init__(self) -> None:
        names = [PeerID(chr(97 + i)) for i in range(self.size)]
        self.nodes = {name: Node(name) for name in names}
        self._plan(names, (), "the first")
        self.loses_replicas = bool(self.changes + self.deaths + self.flips + self.sleeps)
        self.is_partial = bool(self.losses + self.flips + self.changes)
        self.is_hard = bool(self.changes + self.deaths + self.sleeps + self.losses + self.flips)

    def note(self, text: str) -> None:
        self.log.append(f"{self.now_s:.2f} {text}")

    # --- the loop ---

    def run(self) -> None:
        while not self._finished():
            actions = self._actions()
            faults = self._faults()
            due_s = min(self._due_s(), default=math.inf)
            is_quiet = not actions and (self.rng.random() < 0.5 or due_s > self.now_s + STUCK_AFTER_S)
            if faults and (is_quiet or self.rng.random() < 0.02):
                self.rng.choice(faults)()
            elif actions:
                self.now_s += self.rng.choice((0.001, 0.02))
                self.rng.choice(actions)()
            else:
                assert due_s < self.grown_s + STUCK_AFTER_S, f"waits for ever: {self.stuck()}"
                self.now_s = max(self.now_s, due_s)
            assert self.now_s < self.grown_s + 10 * STUCK_AFTER_S, f"it never ends: {self.stuck()}"
            leads = [n.name for n in self.nodes.values() if n.acts and n.tenure and n.tenure.core.group.is_lead]
            leads = [name for name in leads if not self._is_counted_out(self.nodes[name])]
            assert len(leads) <= 1 or self.is_partial, f"{leads} act as lead at once"

    def _finished(self) -> bool:
        order = self.orders[-1]
        for node in self.nodes.values():
            tenure = node.tenure
            if (node.name in names_of(order)) != (tenure is not None) or (node.alive and node.order is not order):
                return False
            if node.asleep or node.inbox or (tenure and (not tenure.ready or tenure.version < self.steps)):
                return False
        # What is to be said to somebody who has gone for good, nobody waits for.
        gone = {n.name for n in self.nodes.values() if not n.alive and n.name not in (*names_of(order), *order.spares)}
        idle = not any(box.calling or box.queue for _, peer, box in self._boxes() if peer not in gone)
        return idle and not self.later and not self._actions()

    def _boxes(self) -> Iterable[tuple[Node, PeerID, Box]]:
        for node in self.nodes.values():
            if node.alive:
                yield from ((node, peer, box) for peer, box in node.boxes.items())
                yield from ((node, peer, box) for peer, box in (node.tenure.boxes if node.tenure else {}).items())

    def _actions(self) -> list[Action]:
        actions: list[Action] = [partial(self._do, i) for i, (node, _) in enumerate(self.later) if not node.asleep]
        for node, peer, box in self._boxes():
            if box.calling is not None:
                actions.append(partial(self._arrive, node, peer, box))
            elif box.queue and box.retry_at_s <= self.now_s and not node.asleep:
                actions.append(box.call)
        for node in self.nodes.values():
            if not node.acts:
                continue
            tenure = node.tenure
            is_draining = tenure is not None and tenure.leaving and not node.quitting
            if (node.order is not self.orders[-1] or node.renewing) and not is_draining:
                actions.append(partial(self._follow, node))
            if tenure is not None:
                actions += self._deeds(node, tenure)
        return actions

    def _deeds(self, node: Node, tenure: Tenure) -> list[Action]:
        """What a replica may do now."""
        core, now_s = tenure.core, self.now_s
        deeds: list[Action] = []
        if core.next_timer_s() <= now_s:
            deeds.append(partial(self._handle, node, tenure, TimerFired()))
        if tenure.joins_at_s <= now_s:
            deeds.append(partial(self._join, node, tenure))
        for ours in tenure.rounds.values():
            if ours.start.step == tenure.version and ours.press_at_s <= now_s and tenure.version not in tenure.means:
                deeds.append(partial(self._press, node, tenure, ours))
        if tenure.leaving:
            drained = core.pipeline.is_idle and not core.group.owes
            if drained or tenure.leaves_at_s <= now_s:
                deeds.append(partial(self._leave, node, tenure, drained))
        return deeds

    def _due_s(self) -> Iterable[float]:
        for node in self.nodes.values():
            tenure = node.tenure
            if tenure and node.acts:
                yield from (tenure.core.next_timer_s(), tenure.leaves_at_s, tenure.joins_at_s)
                yield from (r.press_at_s for r in tenure.rounds.values() if tenure.version == r.start.step)
        yield from (box.retry_at_s for node, _, box in self._boxes() if box.queue and not node.asleep)

    def _do(self, at: int) -> None:
        self.later.pop(at)[1]()

    def _soon(self, node: Node, tenure: Tenure, action: Action) -> None:
        """In this tenure, or never."""
        self.later.append((node, lambda: action() if node.tenure is tenure else None))

    def _frame(self, source: Node, target: PeerID, act: Callable[[Tenure], None]) -> None:
        """To whatever replica is there; may be lost."""
        at = self.nodes[target]
        life, sender = at.life, source.life

        def arrive() -> None:
            dropped = source.life != sender and self.rng.random() < 0.5
            if at.alive and at.life == life and at.tenure and not dropped and not self._is_lost():
                act(at.tenure)

        self.later.append((at, arrive))

    def _is_lost(self) -> bool:
        if self.losses and self.rng.random() < 0.05:
            self.losses -= 1
            self.note("something gets lost")
            return True
        return False

    # --- calls ---

    def _arrive(self, node: Node, peer: PeerID, box: Box) -> None:
        """The call under way reaches `peer`, or does not."""
        assert box.calling
        at, message = self.nodes[peer], box.calling[1]
        hear = partial(self._hear, at, at.life, node, message)
        if at.acts and not self._is_lost():
            hear()
            if not self._is_lost():
                box.calling = None
                return
        elif at.alive and at.asleep and self.rng.random() < 0.5:
            at.inbox.append(hear)
        box.failed(self.now_s)
        if node.acts:
            self._silence(node, peer)

    def _forget(self, node: Node, boxes: dict[PeerID, Box], peer: PeerID) -> None:
        """What is under way may still arrive."""
        box = boxes.pop(peer, None)
        if box is not None and box.calling is not None and self.rng.random() < 0.5:
            at = self.nodes[peer]
            self.later.append((at, partial(self._hear, at, at.life, node, box.calling[1])))

    def _hear(self, at: Node, life: int, source: Node, message: object) -> None:
        if at.life != life:
            return
        if isinstance(message, Hello):
            self._heard(at, source.name, message)
            reply, source_life = self._hello(at), source.life
            self.later.append((source, lambda: self._replied(source, source_life, at.name, reply)))
            return
        tenure, event = at.tenure, heard_as(source.name, message)
        if tenure is not None:
            with contextlib.suppress(Refused):
                self._handle(at, tenure, event)

    def _replied(self, node: Node, life: int, source: PeerID, hello: Hello) -> None:
        if node.alive and node.life == life:
            self._heard(node, source, hello)

    def _silence(self, node: Node, peer: PeerID) -> None:
        tenure = node.tenure
        if tenure is not None:
            self._handle(node, tenure, MemberSilent(peer))
            if peer in names_of(tenure.core.plan):
                self._say_hello(node, [peer])

    # --- hellos ---

    def _hello(self, node: Node) -> Hello:
        node.count += 1
        tenure = node.tenure
        return Hello(
            incarnation=1000 * node.life + node.tenures,
            count=node.count,
            plan_sequence=node.order.sequence if node.order else 0,
            stage=0 if tenure else -1,
            version=tenure.version if tenure else 0,
            ready=bool(tenure and tenure.ready),
            is_open=bool(tenure and tenure.core.is_open),
            draining=bool(tenure and tenure.leaving),
        )

    def _say_hello(self, node: Node, audience: Iterable[PeerID]) -> None:
        for peer in audience:
            if peer != node.name:
                node.boxes.setdefault(peer, Box()).post("hello", self._hello(node))

    def _heard(self, node: Node, source: PeerID, hello: Hello) -> None:
        before = node.hellos.get(source)
        if before is not None and (hello.incarnation, hello.count) <= (before.incarnation, before.count):
            return
        node.hellos[source] = hello
        if before is not None and hello.incarnation > before.incarnation:
            self._forget(node, node.boxes, source)
            self._say_hello(node, [source])
            if node.tenure:
                self._handle(node, node.tenure, PeerReborn(source, hello.incarnation))
        if node.tenure:
            self._handle(node, node.tenure, PeerSaid(source, hello))

    def _died(self, node: Node, peer: PeerID) -> None:
        if node.tenure is not None:
            self._handle(node, node.tenure, PeerDied(peer))


def names_of(plan: Plan) -> tuple[PeerID, ...]:
    """The members of the stage."""
    return plan.stages[0].peers


def heard_as(source: PeerID, message: object) -> Event:
    """What a call tells the core that it is for."""
    if isinstance(message, Progress):
        return ProgressArrived(source, message)
    if isinstance(message, RoundStart):
        return RoundArrived(source, message)
    assert isinstance(message, Digest)
    return DigestArrived(source, message)
