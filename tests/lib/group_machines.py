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
from shoal.protocol.messages import CommitReport, Digest, PresenceUpdate, Progress, RoundStart
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
class Membership:
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
    memberships: int = 0
    count: int = 0
    order: Plan | None = None
    renewing: bool = False
    presences: dict[PeerID, PresenceUpdate] = field(default_factory=dict)
    boxes: dict[PeerID, Box] = field(default_factory=dict)
    inbox: list[Action] = field(default_factory=list)
    membership: Membership | None = None

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
            leads = [
                n.name for n in self.nodes.values() if n.acts and n.membership and n.membership.core.group.is_leader
            ]
            leads = [name for name in leads if not self._is_counted_out(self.nodes[name])]
            assert len(leads) <= 1 or self.is_partial, f"{leads} act as lead at once"

    def _finished(self) -> bool:
        order = self.orders[-1]
        for node in self.nodes.values():
            membership = node.membership
            if (node.name in names_of(order)) != (membership is not None) or (node.alive and node.order is not order):
                return False
            if node.asleep or node.inbox or (membership and (not membership.ready or membership.version < self.steps)):
                return False
        # What is to be said to somebody who has gone for good, nobody waits for.
        gone = {n.name for n in self.nodes.values() if not n.alive and n.name not in (*names_of(order), *order.spares)}
        idle = not any(box.calling or box.queue for _, peer, box in self._boxes() if peer not in gone)
        return idle and not self.later and not self._actions()

    def _boxes(self) -> Iterable[tuple[Node, PeerID, Box]]:
        for node in self.nodes.values():
            if node.alive:
                yield from ((node, peer, box) for peer, box in node.boxes.items())
                yield from (
                    (node, peer, box) for peer, box in (node.membership.boxes if node.membership else {}).items()
                )

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
            membership = node.membership
            is_draining = membership is not None and membership.leaving and not node.quitting
            if (node.order is not self.orders[-1] or node.renewing) and not is_draining:
                actions.append(partial(self._follow, node))
            if membership is not None:
                actions += self._deeds(node, membership)
        return actions

    def _deeds(self, node: Node, membership: Membership) -> list[Action]:
        """What a replica may do now."""
        core, now_s = membership.core, self.now_s
        deeds: list[Action] = []
        if core.next_timer_s() <= now_s:
            deeds.append(partial(self._handle, node, membership, TimerFired()))
        if membership.joins_at_s <= now_s:
            deeds.append(partial(self._join, node, membership))
        for ours in membership.rounds.values():
            if (
                ours.start.step == membership.version
                and ours.press_at_s <= now_s
                and membership.version not in membership.means
            ):
                deeds.append(partial(self._press, node, membership, ours))
        if membership.leaving:
            drained = core.pipeline.is_idle and not core.group.owes
            if drained or membership.leaves_at_s <= now_s:
                deeds.append(partial(self._leave, node, membership, drained))
        return deeds

    def _due_s(self) -> Iterable[float]:
        for node in self.nodes.values():
            membership = node.membership
            if membership and node.acts:
                yield from (membership.core.next_timer_s(), membership.leaves_at_s, membership.joins_at_s)
                yield from (r.press_at_s for r in membership.rounds.values() if membership.version == r.start.step)
        yield from (box.retry_at_s for node, _, box in self._boxes() if box.queue and not node.asleep)

    def _do(self, at: int) -> None:
        self.later.pop(at)[1]()

    def _soon(self, node: Node, membership: Membership, action: Action) -> None:
        """In this tenure, or never."""
        self.later.append((node, lambda: action() if node.membership is membership else None))

    def _frame(self, source: Node, target: PeerID, act: Callable[[Membership], None]) -> None:
        """To whatever replica is there; may be lost."""
        at = self.nodes[target]
        life, sender = at.life, source.life

        def arrive() -> None:
            dropped = source.life != sender and self.rng.random() < 0.5
            if at.alive and at.life == life and at.membership and not dropped and not self._is_lost():
                act(at.membership)

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
        if isinstance(message, PresenceUpdate):
            self._heard(at, source.name, message)
            reply, source_life = self._presence(at), source.life
            self.later.append((source, lambda: self._replied(source, source_life, at.name, reply)))
            return
        membership, event = at.membership, heard_as(source.name, message)
        if membership is not None:
            with contextlib.suppress(Refused):
                self._handle(at, membership, event)

    def _replied(self, node: Node, life: int, source: PeerID, presence: PresenceUpdate) -> None:
        if node.alive and node.life == life:
            self._heard(node, source, presence)

    def _silence(self, node: Node, peer: PeerID) -> None:
        membership = node.membership
        if membership is not None:
            self._handle(node, membership, MemberSilent(peer))
            if peer in names_of(membership.core.plan):
                self._announce_presence(node, [peer])

    # --- hellos ---

    def _presence(self, node: Node) -> PresenceUpdate:
        node.count += 1
        membership = node.membership
        return PresenceUpdate(
            incarnation=1000 * node.life + node.memberships,
            count=node.count,
            plan_sequence=node.order.sequence if node.order else 0,
            stage=0 if membership else -1,
            version=membership.version if membership else 0,
            ready=bool(membership and membership.ready),
            is_open=bool(membership and membership.core.is_open),
            draining=bool(membership and membership.leaving),
        )

    def _announce_presence(self, node: Node, audience: Iterable[PeerID]) -> None:
        for peer in audience:
            if peer != node.name:
                node.boxes.setdefault(peer, Box()).post("hello", self._presence(node))

    def _heard(self, node: Node, source: PeerID, presence: PresenceUpdate) -> None:
        before = node.presences.get(source)
        if before is not None and (presence.incarnation, presence.count) <= (before.incarnation, before.count):
            return
        node.presences[source] = presence
        if before is not None and presence.incarnation > before.incarnation:
            self._forget(node, node.boxes, source)
            self._announce_presence(node, [source])
            if node.membership:
                self._handle(node, node.membership, PeerReborn(source, presence.incarnation))
        if node.membership:
            self._handle(node, node.membership, PeerSaid(source, presence))

    def _died(self, node: Node, peer: PeerID) -> None:
        if node.membership is not None:
            self._handle(node, node.membership, PeerDied(peer))


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
