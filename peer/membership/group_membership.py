"""The driver of one member of a group, from the plan that places it until it drains (states: `replica/member.py`).

A commit goes through this file as follows: `Tell` (`Progress` to the group) -> `_on_round_start` -> `Reduce` ->
`_reduce` -> frames `ReducePart` and `GatherPart` -> `_step_if_reduced` -> `stepped` -> `Tell` (`Digest`). Subclasses
produce the gradients and make the step: `replica_driver.py` for a stage, `expert_seats.py` for an expert.

The file is long because every use that a member makes of its endpoint, device and timer is here.
"""

import asyncio
import dataclasses
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from shoal.peer.base.outbox import Outbox
from shoal.peer.base.tasks import Tasks
from shoal.peer.base.tolerating import Tolerating
from shoal.peer.group.catching_up import CatchingUp
from shoal.peer.group.pieces import Pieces
from shoal.peer.group.reduce import MeanPiece, Reduction
from shoal.peer.group.reductions import PRESS_S, AbsentLight, EarlyPieces, Piece, Pressing, Reductions
from shoal.peer.group.telling import Telling
from shoal.peer.group.tied import TiedGradient
from shoal.peer.group.witnesses import Witnesses
from shoal.peer.membership.joining import Joining
from shoal.peer.membership.learner import Learner
from shoal.peer.model.layout import tied_spans
from shoal.peer.model.state import StageState, state_bytes
from shoal.peer.pipeline.shard import Shard
from shoal.peer.replica import commands, events
from shoal.peer.replica.group_core import GroupCore
from shoal.peer.replica.member import MemberCore
from shoal.peer.services.services import Services
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import (
    Digest,
    Done,
    GatherPart,
    PresenceUpdate,
    Progress,
    ReducePart,
    Repair,
    RoundStart,
)
from shoal.protocol.plan import Plan
from shoal.protocol.ports import Compute, Payload
from shoal.protocol.timer import Timer

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_CHUNKS_AT_ONCE: Final = 8
"""Chunks that another thread adds up in one call: a thread switch for each chunk would cost as much as the addition."""


def make_commit(services: Services, group_id: int, *, incarnation: int, has_loss: bool) -> GroupCore:
    """Make the part of a member's core that decides on commits. Args: has_loss: True in the last stage's group."""
    spec = services.spec
    return GroupCore(
        me=services.endpoint.peer_id,
        stage=group_id,
        steps=spec.training.steps,
        microbatches=spec.training.microbatches_per_step,
        tokens_per_microbatch=spec.training.microbatch_size * spec.model.context,
        has_loss=has_loss,
        incarnation=incarnation,
        deadline_s=spec.training.commit_deadline_s,
        quorum=spec.training.commit_quorum,
        sums=spec.wire.sums,
    )


Renew = Callable[[], None]
"""Called when our state differs from the group's: begins our membership anew, without a state."""


class GroupMembership(ABC):
    """The driver of one member of the group `core.group`. It owns the member's endpoint, device and timer. It alone
    passes events to the core, the member's decision logic (`handle`), and carries out the core's commands."""

    def __init__(self, services: Services, renew: Renew, core: MemberCore, runtime: Shard, *, incarnation: int) -> None:
        endpoint = services.endpoint
        self._s = services
        self._renew = renew
        self.core = core
        self.group_id = core.group.stage
        self.incarnation = incarnation
        self.compute: Compute = services.compute
        self._endpoint = endpoint
        self._clock = services.clock
        self._held = runtime
        self._closed = False
        self._timer = Timer(services.clock, self._ring)
        self._tasks = Tasks(services.failures.add)
        self._outbox = Outbox(endpoint, on_trouble=services.neighbours.unreachable)
        self._telling = Telling(core.group.me, self._outbox, self._audience_of)
        self._light: Learner | None = None
        self._absent = AbsentLight()
        self.reductions = Reductions(core.group, runtime, retained_from=self._means_wanted_from)
        self._unsound: set[PeerID] = set()
        self._pressing = Pressing()
        self._pieces = Pieces(endpoint, runtime.vectors, self._tasks, self._clock, self.compute)
        self._catching_up = CatchingUp(
            core.group,
            runtime,
            endpoint=endpoint,
            compute=self.compute,
            pieces=self._pieces,
            kept=self.reductions,
            wanted_from=self._lacks_from,
            on_mean=self._mean_came,
            on_behind=self._resync,
        )
        self._tied = self._make_tied()
        self.joining = Joining(services, core, runtime, self._catching_up, take_over=self._take_over)
        self.witnesses = Witnesses(core.group, endpoint=endpoint, compute=self.compute, tasks=self._tasks)
        self._sync_task: asyncio.Task[None] | None = None

    # --- the one door ---

    def handle(self, event: events.Event) -> None:
        """Pass an event to the core, and carry out its commands. Raises: Refused, RemoteError: the event is bad."""
        if self._closed:
            return
        try:
            self._carry_out(event)
            if self._tied is not None:
                self._tied.look()
        finally:
            if not self._closed:
                self._timer.set(self.core.next_timer_s())

    def _carry_out(self, event: events.Event) -> None:
        for command in self.core.handle(event, now_s=self._s.clock.now_s()):
            if (found := self._perform(command)) is not None:
                # At once, before the next command: a round must not begin before the group is told of each gradient in
                # its sum.
                self._carry_out(found)

    def _perform(self, command: commands.Command) -> events.Event | None:
        """Carry out a command. Returns: an event that follows from it at once, or None."""
        match command:
            case commands.Tell():
                self._telling.tell(command)
            case commands.Reduce(start):
                if self._tied is None or self._tied.may_begin(start):
                    self._begin_round(start)
            case commands.CatchUp(mate, step):
                return self._catch_up(mate, step)
            case commands.ForgetMember(peer):
                self._outbox.forget(peer)
                self._catching_up.mate_lost(peer)
                self._pieces.forget(peer)
                self.witnesses.mate_lost(peer)
                if self._tied is not None:
                    self._tied.mate_lost(peer)
            case commands.Accuse(peer):
                self._accuse(peer, f"{peer[-8:]} restarts without end")
            case commands.Count(counted):
                held_out = self._held.contribute(counted.microbatch, held_out=counted.held_out)
                if held_out is not None:  # else the device has stepped without it, and the core will soon hear of that
                    return dataclasses.replace(counted, held_out=held_out)
            case commands.AnnouncePresence():
                self._s.neighbours.announce()
            case commands.Report(report):
                self._s.reports.committed(report)
            case commands.Witness(report):
                self._s.reports.witnessed(report)
            case commands.AskRepair(step, indices):
                # Stage 0's leader grants again the microbatches that our group lacks.
                self._tasks.spawn(self._ask_repair(Repair(step=step, indices=indices)), f"repair step {step}")
            case commands.Resync(mate, version):
                logger.error("our state at version %d is not the group's: fetching it", version)
                self._resync(mate)
            case _:
                raise AssertionError(f"no driver carries out {command}")
        return None

    def _begin_round(self, start: RoundStart) -> None:
        self._tasks.spawn(self._reduce(*self.reductions.begin(start)), f"round {start.step}")

    def _ring(self) -> None:
        try:
            self.handle(events.TimerFired())
        except Exception as error:
            self._s.failures.add(error)

    # --- what others see ---

    @property
    def is_ready(self) -> bool:
        return self.core.group.ready and not self._closed

    @property
    def is_learner(self) -> bool:
        """True while we are a learner: we take part with weights alone, without optimizer moments."""
        return self.core.group.is_learner

    @property
    def learner_layers(self) -> tuple[int, int] | None:
        """Numbers of (layers with their state here, layers of the group), while we are a learner; else None."""
        return self._light.num_layers if self._light is not None and self.is_learner else None

    @property
    def is_open(self) -> bool:
        """True while we accept new microbatches."""
        return self.core.is_open and not self._closed

    @property
    def is_draining(self) -> bool:
        return self.core.is_draining

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of steps committed here."""

    @property
    def state(self) -> StageState | None:
        """The current state; None before the first state arrives, and while a step is being made."""
        return self._held.state

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the layers that the group holds."""
        return self._held.keys

    @property
    def state_bytes(self) -> int:
        """Size of our state in bytes, the same at every version."""
        return state_bytes(self._s.spec, self.keys)

    @property
    def is_stepping(self) -> bool:
        """True while an optimizer step is being made."""
        return self._held.is_stepping

    @property
    def audience(self) -> list[PeerID]:
        """The peers to tell about our readiness. If a newer plan no longer names us, peers of that plan are included:
        they may wait for our last presence update."""
        group = self.core.group
        peers = dict.fromkeys(peer for peers in (*self._near(), group.group_peers, group.draining) for peer in peers)
        return [peer for peer in peers if peer != self._s.endpoint.peer_id]

    # --- what a subclass defines ---

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """True if no microbatch is here."""

    @abstractmethod
    def _install(self) -> None:
        """Register handlers for the messages that only this kind of membership (replica or expert) receives."""

    @abstractmethod
    def _load(self, state: StageState) -> None:
        """Continue from `state`."""

    @abstractmethod
    def _step(self, step: int, mean_gradient_N: Tensor) -> None:
        """Make optimizer step `step` from this gradient, float32 [N], once the running job ends; call `stepped`."""

    @abstractmethod
    def _near(self) -> list[tuple[PeerID, ...]]:
        """Return, for each group that works with ours, its peers; our own group may be among them."""

    def _upstream(self) -> frozenset[PeerID]:
        """Return the present and recent holders of the stage before ours."""
        return frozenset()

    def _whereabouts(self) -> str:
        return ""

    @property
    def _is_needed(self) -> bool:
        """True if the group still needs us, so that we may not leave it."""
        return False

    # --- life ---

    def start(self) -> None:
        self._install()
        stage = self.group_id
        self._endpoint.on(Progress, self._on_progress, stage=stage)
        self._endpoint.on(RoundStart, self._on_round_start, stage=stage)
        self._endpoint.on(Digest, self._on_digest, stage=stage)
        self._endpoint.on_frame(ReducePart, self._on_piece, stage=stage)
        self._endpoint.on_frame(GatherPart, self._on_piece, stage=stage)
        self._catching_up.install()
        if self._tied is not None:
            self._tied.install()
        self._tasks.spawn(self._press(), "press")
        self.witnesses.install()
        self.follow(self.core.plan)
        self._sync_task = asyncio.create_task(self._join(), name=f"join group {self.group_id}")
        if self._s.life.is_paused:  # a plan has given us the place during the pause
            self.pause(at_once=True)

    def follow(self, plan: Plan) -> None:
        """Follow a plan that leaves our group and its layers unchanged."""
        self.handle(events.PlanFollowed(plan, self._s.plans.former(self.group_id), self._upstream()))
        if not self.is_stepping:  # else `stepped` calls it
            self.witnesses.look(self.state)

    def peer_state(self, peer: PeerID, presence: PresenceUpdate) -> None:
        """Apply a presence update of `peer`."""
        self.handle(events.PeerSaid(peer, presence))

    def peer_died(self, peer: PeerID) -> None:
        """Remove a peer that a plan has dropped although the peer had not announced that it leaves."""
        self.handle(events.PeerDied(peer))

    def peer_reborn(self, peer: PeerID, incarnation: int) -> None:
        """Record that a peer has restarted. If it is in our group, its Progress message may have told us already."""
        self.handle(events.PeerReborn(peer, incarnation))

    def peer_silent(self, peer: PeerID) -> None:
        """Record that a peer does not answer. The peer or the network may be to blame, and the peer may come back."""
        self.handle(events.MemberSilent(peer))

    def pause(self, *, at_once: bool) -> None:
        """Accept no new microbatches and return those that are here, but stay in the group: our contributions are still
        reduced. Args: at_once: also return microbatches after their forward; False: run their backwards first."""
        self.handle(events.Paused(at_once))

    def resume(self) -> None:
        self.handle(events.Resumed())

    async def drain(self, timeout_s: float, *, unless: Callable[[], bool]) -> bool:
        """Accept no new microbatches, finish those that are here, and wait until every contribution is committed. Give
        up after `timeout_s`, or when `unless()` is true. Returns: True if the drain is complete."""
        self.handle(events.DrainBegun())
        until_s = self._s.clock.now_s() + timeout_s
        while not self.is_idle or self.core.group.owes or self._is_needed:
            if unless() or not self.is_draining:
                return False
            if self._s.clock.now_s() >= until_s:
                logger.warning("left work behind: group %d did not drain in %.0f s", self.group_id, timeout_s)
                return False
            await asyncio.sleep(0.05)
        if not self.is_draining:
            return False
        self.handle(events.Drained())
        return True

    def stay(self, plan: Plan) -> None:
        """Stop draining: `plan` has given our place back to us."""
        self.handle(events.DrainEnded())
        self.follow(plan)

    def retire(self) -> None:
        """Ignore all events from now on."""
        self._closed = True
        self._timer.cancel()

    async def close(self) -> None:
        self.retire()
        if self._sync_task:
            self._sync_task.cancel()
            await asyncio.gather(self._sync_task, return_exceptions=True)
        self._endpoint.leave_stage(self.group_id)
        self._telling.close()
        await self._tasks.cancel()
        await self.witnesses.close()
        await self._outbox.close()

    async def keep(self) -> None:
        """Store a learner's incomplete state on disk for this machine's next process. Call it after `close`."""
        if self._light is not None:
            await self._light.keep()

    # --- state ---

    async def _join(self) -> None:
        try:
            await self._bring_base()
            self._light = self._make_learner()
            await self.joining.run(self.core.plan, self._light)
            self._light = None
        except (OSError, RuntimeError, ValueError) as error:
            self._s.failures.add(error)
            return
        logger.info("group %d is ready at version %d", self.group_id, self.version)
        self.handle(events.JoinedGroup(self._held.remembers))

    async def _bring_base(self) -> None:
        base, held = self._s.layers.base, self._held
        while base is not None:
            with Tolerating(logger.info, f"group {self.group_id} does not have its base yet"):
                group_peers = self.core.group.group_peers
                stored = await base.get(held.keys, self.core.plan.members, group_peers=group_peers)
                await self.compute.run("step", functools.partial(held.load_base, stored), flop=0.0)
                return
            await asyncio.sleep(_RETRY_S)

    async def _take_over(self, state: StageState) -> None:
        self._load(state)
        digest = (await self._s.compute.run("step", state.digest, flop=0.0)).value
        if self.version == state.version:
            self._reached(state, digest, None)
            self._s.layers.has_state(self, state)

    def _reached(self, state: StageState, digest: str, gradient_norm: float | None) -> None:
        by = self.reductions.reached(state.version)
        if self._tied is not None:
            self._tied.reached(state.version)
        self.handle(events.Stepped(state.version, digest, by, gradient_norm, self._held.remembers))
        self._step_if_reduced()

    def _resync(self, mate: PeerID) -> None:
        if self.is_ready and not self.is_draining:
            self._renew()

    # --- a commit: tell our progress, sum, reduce, step ---

    async def _on_progress(self, source: PeerID, message: Progress) -> Done:
        self.handle(events.ProgressArrived(source, message))
        return Done()

    async def _on_round_start(self, source: PeerID, message: RoundStart) -> Done:
        self.handle(events.RoundArrived(source, message))
        return Done()

    async def _on_digest(self, source: PeerID, message: Digest) -> Done:
        self.handle(events.DigestArrived(source, message))
        return Done()

    async def _reduce(self, reduction: Reduction, make_sum: Callable[[], Tensor | None], early: EarlyPieces) -> None:
        """Run a round: send our gradients, and add up our part of the sum. Args: early: pieces that came before it."""
        sum_N = await self.compute.run_on_host(make_sum)
        if sum_N is None:
            return  # our step has begun already: the members of this attempt will catch up with us
        due = reduction.begin(sum_N)
        del sum_N
        if self.reductions.is_void(reduction):
            return
        for peer in reduction.others:
            self._pieces.send(reduction.scatter_to(peer), reduction.start, ReducePart)
        for at in range(0, len(due), _CHUNKS_AT_ONCE):
            await self._add_up(reduction, due[at : at + _CHUNKS_AT_ONCE])
        for source, meta, payload in early:
            try:  # a bad early piece is its sender's fault, not that of the leader that opens the round
                await self._take(reduction, source, meta, payload)
            except RemoteError as error:
                logger.warning("an early piece of round %d: %s", reduction.start.step, error)
        self._end(reduction)

    async def _on_piece(self, source: PeerID, meta: Piece, payload: Payload) -> None:
        reduction = self.reductions.round_of(source, meta, payload)
        if reduction is not None:
            await self._take(reduction, source, meta, payload)

    async def _take(self, reduction: Reduction, source: PeerID, meta: Piece, payload: Payload) -> None:
        if isinstance(meta, ReducePart):
            if reduction.part_arrived(source, meta.start, payload):
                await self._add_up(reduction, [meta.start])
        elif (take := reduction.result_arrived(source, meta.start, payload)) is not None:
            if await self.compute.run_on_host(take):
                reduction.taken(meta.start)
                self._end(reduction)
            else:
                reduction.refused(source, meta.start)
                self._note_unsound(source, meta.step, "we ignore its means")

    async def _add_up(self, reduction: Reduction, chunks: Sequence[int]) -> None:
        for peer in sorted(await self.compute.run_on_host(reduction.adding(chunks))):
            self._note_unsound(peer, reduction.start.step, "ignored")
        self._pieces.send(reduction.added(chunks), reduction.start, GatherPart)
        self._end(reduction)

    def _note_unsound(self, peer: PeerID, step: int, what_comes_of_it: str) -> None:
        whose = "we have" if peer == self.core.group.me else f"{peer[-8:]} has sent us"
        numbers = "a gradient with NaN, infinity or numbers beyond 1e12"
        self._accuse(peer, f"step {step}: {whose} {numbers}: {what_comes_of_it}")

    def _accuse(self, peer: PeerID, why: str) -> None:
        """Report a peer with messages that are of no use to the group. Each peer is logged and reported only once."""
        if peer in self._unsound:
            return
        self._unsound.add(peer)
        logger.error("%s", why)
        if peer != self.core.group.me:
            self._s.reports.accuse(peer)

    def _end(self, reduction: Reduction) -> None:
        if not self.reductions.has_ended(reduction):
            return
        if self._tied is not None:
            self._tied.ended(reduction)
        else:
            self._reduced(reduction.mean_N, reduction.start, reduction.pieces)

    def _reduced(self, mean_N: Tensor, start: RoundStart, pieces: tuple[MeanPiece, ...] = ()) -> None:
        """Keep the reduced gradient of our round, and make the step if this is the gradient of our version's step.
        Args: pieces: the gradient as encoded by the round, to be sent again; empty if embedding and head are tied,
        since `mean_N` then also contains the gradient of the stage at the other end, which is added after the round."""
        self.reductions.keep(start.step, mean_N, start, pieces)
        if self._light is not None:
            self._light.took_part()
        self._step_if_reduced()

    def _mean_came(self, step: int, mean_N: Tensor, pieces: tuple[MeanPiece, ...]) -> None:
        self.reductions.keep(step, mean_N, None, pieces)
        self._step_if_reduced()

    def _step_if_reduced(self) -> None:
        if self._light is not None and not self._closed and self._held.state is None:
            self._light.reduced()
        elif not self._closed and (mean_N := self.reductions.next_mean()) is not None:
            version = self.core.group.version
            assert self.version == version, "the pipeline and the group disagree on the version"
            self._step(version, mean_N)

    def stepped(self, state: StageState, digest: str, skipped_layers: int) -> None:
        """Continue from the `state` that an optimizer step has made."""
        if skipped_layers:
            logger.error("step %d: %d layers had a gradient with NaN or infinity", state.version, skipped_layers)
        self._note_gradient(state)  # first: the next round may drop the gradient
        self._reached(state, digest, state.gradient_norm)
        self._note_lag()
        self.witnesses.look(state)
        if set(self.core.group.group_peers) == set(self.core.group.full_members):
            self._s.layers.server.forget_weights(self.keys)
        self.joining.stepped()
        self._s.layers.has_state(self, state)

    def _note_gradient(self, state: StageState) -> None:
        """Keep the reduced gradient of the step that made `state`: the next layout's members may ask for it, to replay
        the step."""
        gradient_log, mean_N = self._s.layers.server.gradient_log, self.reductions.means.get(state.version - 1)
        if not gradient_log.is_wanted or mean_N is None:
            return
        parts, start = dict[str, Tensor](), 0
        for key, layer in state.layers.items():
            parts[key] = mean_N[start : start + layer.param_N.numel()]
            start += layer.param_N.numel()
        gradient_log.note(self._endpoint.era, state.version, parts)

    # --- a commit that stands still ---

    async def _press(self) -> None:
        """Repeat messages that may have been lost, when the group stands still. If a round is under way, send its
        pieces again, since no peer knows which pieces a broken stream has lost; a member that has ended the round
        answers with its digest. If no round has begun, repeat our contributions: the leader may have dropped them while
        it could not reach us."""
        group, version, waits = self.core.group, -1, ""
        while True:
            await asyncio.sleep(PRESS_S)
            if version == group.version < group.steps and group.ready:
                before, waits = waits, group.waits_for() + self._whereabouts()
                if waits == before:  # else the step is slow, but goes on
                    logger.info("stage %d stays at version %d: %s", group.stage, version, waits)
                self._note_lag()
                if version not in self.reductions:
                    self.handle(events.StoodStill())
            version, now_s = group.version, self._clock.now_s()
            reduction = self.reductions.get(version)
            if not self._pressing.stands_still(reduction, now_s) or reduction is None or self._closed:
                continue
            owing = ", ".join(peer[-8:] for peer in sorted(reduction.missing_from()))
            logger.info("round %d does not end: pieces are missing from %s", version, owing)
            for peer in sorted(reduction.refused_from):  # we refuse its means, so the next round must do without it
                self.handle(events.PeerDied(peer, is_barred=True))
            self.handle(events.StoodStill())
            for peer in reduction.others:
                took_s = self._pieces.slowest_s(peer)
                if not self._pieces.is_sending_to(peer) and self._pressing.is_due(peer, now_s, took_s=took_s):
                    self._send_again(reduction, peer)

    def _send_again(self, reduction: Reduction, peer: PeerID) -> None:
        self._pieces.send(reduction.scatter_to(peer), reduction.start, ReducePart)
        finished = (out for out in reduction.finished() if out.target == peer)
        self._pieces.send(finished, reduction.start, GatherPart)

    def _catch_up(self, mate: PeerID, step: int) -> events.Event | None:
        """Fetch the reduced gradient of `step` (a learner: weights) from `mate`, unless a fetch is under way."""
        if self._light is not None:
            self._light.behind()
            return self._lagging()
        owing: list[PeerID] = []
        reduction = self.reductions.get(step)
        if reduction is not None:
            group = self.core.group
            # Peers after us in the order of peer IDs come first, so that not all members ask the same one.
            owing = sorted(
                reduction.missing_from().intersection(group.group_peers), key=lambda peer: (peer < group.me, peer)
            )
        is_still = reduction is None or self._pressing.was_in_vain(reduction)
        if is_still and not self._pressing.believes(self._clock.now_s()):
            owing = []
        catch_up = self._catching_up.catch_up(mate, step, owing=owing, is_still=is_still)
        self._tasks.spawn(catch_up, f"catch up with step {step}")
        return None

    # --- inside ---

    def _make_learner(self) -> Learner | None:
        """Make the object that runs our learner phase while the state comes; None: this group has no learners."""
        return None

    def _lagging(self) -> events.Lagging | None:
        """Return an event if our weights have become too old for the group's microbatches, or new enough again."""
        return None

    def _note_lag(self) -> None:
        if (lagging := self._lagging()) is not None:
            self.handle(lagging)

    def _means_wanted_from(self) -> int:
        """Return the first step with a gradient that other peers, or the layers that we fetch, still need."""
        group, now_s = self.core.group, self._clock.now_s()
        absent = self._absent.wanted_from(group.ready_members, group.full_members, version=self.version, now_s=now_s)
        return min(self._s.layers.server.pinned_from(), absent, self._lacks_from())

    def _lacks_from(self) -> int:
        return 2**62 if self._light is None else self._light.needs_from()

    def _make_tied(self) -> TiedGradient | None:
        """Make the object that adds up the gradients of the tied matrix, which the first and the last stage hold; None:
        our group holds no tied matrix."""
        spans = tied_spans(self._s.spec, self.keys)
        if not spans:
            return None
        return TiedGradient(
            self.core.group,
            spans,
            vectors=self._held.vectors,
            endpoint=self._endpoint,
            compute=self.compute,
            tasks=self._tasks,
            keep_steps=self._s.spec.training.s_max + 1,
            other_end=self._other_end,
            on_whole=self._reduced,
            begin=self._begin_round,
        )

    def _other_end(self) -> tuple[int, tuple[PeerID, ...]] | None:
        last = len(self.core.plan.stages) - 1
        stage = last - self.group_id
        return None if last == 0 else (stage, self.core.plan.stages[stage].peers)

    def _audience_of(self, message: Progress | RoundStart | Digest) -> list[PeerID]:
        group, named = self.core.group, list[PeerID]()
        if isinstance(message, RoundStart):
            named = [member.peer for member in message.members]
        elif isinstance(message, Digest):
            named = [*group.round_peers]
        near = [*group.group_peers, *group.draining]
        return [*near, *(peer for peer in named if peer != group.me and peer not in near)]

    async def _ask_repair(self, message: Repair) -> None:
        for _ in range(10):
            for peer in self.core.plan.stages[0].peers:
                with Tolerating(logger.debug, "no repair"):
                    await self._endpoint.ask(peer, message, Done)
                    return
            await asyncio.sleep(_RETRY_S)
