"""Decides what one replica of one stage computes and sends next. Pure: it holds no socket, clock, file or tensor.

Theory of operation. A microbatch (t, i) at a replica of version v is in one of four states:

    waiting   forward not begun: its step is not yet admitted (t - v > s_max), or the device is busy
    away      forward done, activation sent on, gradient not back
    returned  gradient is back, backward not begun
    (gone)    backward done, contributed to its step, gradient sent to the stage before

The device runs one job at a time. Backward goes before forward (it frees memory here and unblocks the stage before),
but after each backward a waiting forward has its turn (1F1B). Gradients come in bursts: a stage that ran a whole burst
of backwards first would send its next activations late, and the stages after it would idle. A commit's optimizer step
goes before forwards and backwards (each job after it is one step less stale). Lower steps go before higher ones. The
last stage has no `away`: forward, loss and backward are one job.

A job that waits for other peers (for experts that are elsewhere) is parked, and the device runs other jobs. Otherwise
two peers could wait for each other for ever, or a forward could wait for ever for a holder's next version, made by
backwards queued behind that forward.

A pause gives back every microbatch that is not contributed: first those without a forward, a little later the rest.
Microbatches that still arrive go back at once. Commits go on: the group waits for our part.

At stage 0 a forward also needs room in the window and, if its step is later than the version, permission of `Control`.

A microbatch is accepted only from a replica that a recent plan names in the stage before, and its gradient only from
the replica to which we sent the microbatch. The driver asks the core before it keeps a tensor (`takes_from`, `awaits`),
so it keeps no tensor of a sender that the core ignores.
"""

import math
from dataclasses import dataclass, field

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.commands import (
    Finished,
    Forget,
    RejectMicrobatch,
    ScheduleCommand,
    SendActivation,
    SendGradient,
)
from shoal.peer.replica.events import (
    Arrived,
    Contributed,
    GradientArrived,
    HandedBack,
    JobDone,
    JobDropped,
    JobFailed,
    JobParked,
    Lagging,
    Paused,
    PeerLost,
    PeerReady,
    Resumed,
    RunAhead,
    ScheduleEvent,
    StepReady,
    TrafficPlanned,
    VersionSet,
)
from shoal.peer.replica.flow import CommitTimes, Control, Window
from shoal.peer.replica.job import Job, JobKind
from shoal.peer.replica.router import Router
from shoal.protocol.identity import PeerID
from shoal.protocol.staleness import staleness_bound


@dataclass(slots=True)
class Flight:
    """The state of one microbatch at this replica."""

    sources: dict[PeerID, int]
    """Peer of the stage before that waits for the gradient -> its incarnation. Empty at stage 0; several peers if the
    stage before sent the microbatch again, by another peer."""
    validates: bool
    retried: bool = False
    """The microbatch may have run elsewhere before it came here; we tell this to later stages, too."""
    sent_before: bool = False
    staleness_steps: int = 0
    target: PeerID | None = None
    """The next stage's peer that owes us the gradient; None before the activation is sent, and once the gradient is
    back."""
    doubted: PeerID | None = None
    """The peer that had the microbatch before it was sent again. It may be slow, so another peer is preferred."""
    handed_back: bool = False
    """The microbatch was handed back while its job was parked, so that job will have no result."""
    loss: float = 0.0
    """The microbatch's loss, if known: at the last stage, and on the way back of a validation microbatch."""
    waiting_since_s: float = 0.0
    waited_s: float = 0.0
    sent_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class Schedule:
    """Decides what one replica of stage `stage`, of `num_stages`, computes and sends.

    Args:
        s_max: a microbatch of step t may run when t - version <= s_max.
        synchronous_steps: number of first steps t that run only when t == version.
        router: chooses replicas of the next stage (unused at the last stage).
        window: limits the microbatches in flight, at stage 0; elsewhere None.
        control: chooses how far stage 0 runs ahead; None: only s_max limits that.
    """

    stage: int
    num_stages: int
    is_first: bool = field(init=False)
    is_last: bool = field(init=False)
    s_max: int
    version: int
    router: Router
    window: Window | None = None
    control: Control | None = None
    synchronous_steps: int = 0
    upstream: frozenset[PeerID] = frozenset()
    """The senders of activations that we accept: replicas of the stage before, draining ones included."""
    _flights: dict[Microbatch, Flight] = field(init=False, default_factory=dict)
    _waiting: set[Microbatch] = field(init=False, default_factory=set)
    _returned: set[Microbatch] = field(init=False, default_factory=set)
    _unsent: set[Microbatch] = field(init=False, default_factory=set)
    _running: Job | None = field(init=False, default=None)
    _running_flight: Flight | None = field(init=False, default=None)
    _parked: dict[Microbatch, Flight] = field(init=False, default_factory=dict)
    _commits: CommitTimes = field(init=False, default_factory=CommitTimes)
    _step_ready: bool = field(init=False, default=False)
    _pause: Paused | None = field(init=False, default=None)
    _is_lagging: bool = field(init=False, default=False)
    _was_backward: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.is_first = self.stage == 0
        self.is_last = self.stage == self.num_stages - 1

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def room(self) -> int:
        """Stage 0: number of further microbatches that may begin now; negative after the limit in flight has shrunk."""
        assert self.window is not None
        most_ahead = math.inf if self.control is None else self.control.most_ahead(self.window)
        for microbatch in self._waiting:
            if microbatch.step - self.version > most_ahead and not self._flights[microbatch].retried:
                return 0
        return self.window.size - self.window.in_flight

    @property
    def is_idle(self) -> bool:
        """True if no microbatch is here and no job runs."""
        return not self._flights and self._running is None and not self._parked

    def goes_on(self, job: Job) -> bool:
        """True if the result of a parked job is still wanted."""
        assert job.microbatch is not None, "a step waits for nobody"
        return not self._parked[job.microbatch].handed_back

    def holds(self, microbatch: Microbatch) -> bool:
        return microbatch in self._flights

    def takes_from(self, source: PeerID) -> bool:
        """True if we accept activations from `source`."""
        return source in self.upstream

    def awaits(self, microbatch: Microbatch, source: PeerID) -> bool:
        """True if `source` owes us the gradient of `microbatch`, or its loss."""
        flight = self._flights.get(microbatch)
        return flight is not None and flight.target == source

    def has_more(self, step: int) -> bool:
        """True if this replica has microbatches of `step` that it has not contributed yet."""
        return bool([m for m in self._flights if m.step == step and m.index >= 0])

    def whereabouts(self, now_s: float) -> str:
        """Describe where our microbatches are, for the log of a stage that stands still."""
        sent: dict[PeerID, list[float]] = {}
        for flight in self._flights.values():
            if flight.target is not None:
                sent.setdefault(flight.target, []).append(flight.sent_s)
        words = [f"{len(of)} at {peer[-8:]} for {now_s - min(of):.0f} s" for peer, of in sorted(sent.items())]
        here = (("waiting", self._waiting), ("unsent", self._unsent), ("returned", self._returned))
        words += [f"{len(of)} {what}" for what, of in here if of]
        return ", ".join(words) or "none here"

    def handle(self, event: ScheduleEvent, *, now_s: float) -> list[ScheduleCommand]:
        match event:
            case Arrived():
                commands = self._arrive(event, now_s)
            case GradientArrived():
                self._commits.told(event.commit_s)
                commands = self._gradient(event, now_s)
            case JobDone(job, loss):
                commands = self._job_done(job, loss, now_s)
            case JobParked(job):
                commands = self._park(job)
            case JobDropped(job):
                commands = self._drop_parked(job)
            case JobFailed(job):
                commands = self._failed(job)
            case StepReady(step):
                assert step == self.version, f"a step to {step + 1} at version {self.version}"
                self._step_ready = True
                commands = []
            case VersionSet(version):
                assert version >= self.version, f"version would fall from {self.version} to {version}"
                if version > self.version:
                    self._step_ready = False  # The reduced gradient belongs to a version that we no longer have.
                self.version = version
                self._commits.loaded(version)
                commands = []
            case TrafficPlanned(shares, upstream):
                self.upstream = upstream
                commands = []
                if shares is not None:
                    self.router.set_shares(shares)
                    commands = self._send_unsent(now_s)
            case PeerReady(peer, is_open):
                self.router.set_ready(peer, is_open)
                commands = self._send_unsent(now_s) if is_open else []
            case PeerLost(peer, successor):
                commands = self._lost(peer, math.inf if successor is None else successor, now_s)
            case HandedBack(microbatch, peer):
                commands = self._handed_back(microbatch, peer, now_s)
            case RunAhead(steps_ahead, gain):
                if self.control is not None:
                    self.control.follow(steps_ahead, gain)
                commands = []
            case Paused() | Resumed():
                self._pause = event if isinstance(event, Paused) else None
                commands = []
            case Lagging(lags):
                self._is_lagging = lags
                commands = []
        if self._pause is not None or self._is_lagging:
            commands += self._hand_back(all_of_it=self._pause is not None and self._pause.at_once)
        return commands if self._running is not None else commands + self._next_job(now_s)

    def _arrive(self, event: Arrived, now_s: float) -> list[ScheduleCommand]:
        microbatch, source = event.microbatch, event.source
        if source is not None and source not in self.upstream:
            return []  # A stranger: it would get a gradient, and the run would learn from its activation.
        flight = self._flights.get(microbatch)
        if flight is None:
            flight = Flight({}, microbatch.validates, retried=event.retried, waiting_since_s=now_s)
            self._flights[microbatch] = flight
            self._waiting.add(microbatch)
        if source is not None:
            # The microbatch may be here already: an earlier stage doubted a peer, and sent it again by another. We
            # cannot know which sender still needs the gradient, so both get it; the other one ignores it.
            waits = source in flight.sources
            flight.sources[source] = max(event.incarnation, flight.sources.get(source, 0))
        else:
            waits = True
        if waits and flight.target is not None:
            # The sender asks again, so the activation or the gradient was lost between us and the target.
            self.router.gave_up(flight.target, now_s - flight.sent_s)
            flight.doubted, flight.target = flight.target, None
            flight.waiting_since_s = now_s
            self._unsent.add(microbatch)
            return self._send_unsent(now_s)
        return []

    def _gradient(self, event: GradientArrived, now_s: float) -> list[ScheduleCommand]:
        microbatch, source, waited_s = event.microbatch, event.source, event.waited_s
        flight = self._flights.get(microbatch)
        if flight is None or flight.target != source:
            return []  # It comes from a replica that we had given up on, or for a second time.
        self.router.returned(source)
        flight.target = None
        flight.waited_s += waited_s
        flight.waiting_since_s = now_s
        if flight.validates:
            flight.loss = event.loss
            return self._leave(microbatch, flight, now_s)
        self.router.took(source, max(0.0, now_s - flight.sent_s - waited_s))
        self._returned.add(microbatch)
        return []

    def _park(self, job: Job) -> list[ScheduleCommand]:
        assert job == self._running, f"{job} is not the job that runs"
        assert job.microbatch is not None, "a step waits for nobody"
        assert self._running_flight is not None
        self._parked[job.microbatch] = self._running_flight
        self._running = self._running_flight = None
        return []

    def _drop_parked(self, job: Job) -> list[ScheduleCommand]:
        assert job.microbatch is not None, "a step waits for nobody"
        assert not self.goes_on(job), f"{job} has not been handed back"
        del self._parked[job.microbatch]
        return [] if self.holds(job.microbatch) else [Forget(job.microbatch)]

    def _failed(self, job: Job) -> list[ScheduleCommand]:
        """Put the microbatch back into its state before the job. (The driver has paused us, so that the microbatch goes
        back to its sender next.)"""
        assert job == self._running, f"{job} is not the job that runs"
        microbatch, flight, self._running, self._running_flight = job.microbatch, self._running_flight, None, None
        assert microbatch is not None, "a step is tried until it is made"
        if self._flights.get(microbatch) is not flight:
            return [] if self.holds(microbatch) else [Forget(microbatch)]
        (self._returned if job.kind == "backward" else self._waiting).add(microbatch)
        return []

    def _is_busy(self, flight: Flight) -> bool:
        return flight is self._running_flight or any(flight is parked for parked in self._parked.values())

    def _job_done(self, job: Job, loss: float | None, now_s: float) -> list[ScheduleCommand]:
        flight = None if job.microbatch is None else self._parked.pop(job.microbatch, None)
        if flight is None:
            assert job == self._running, f"{job} is not the job that runs, {self._running} is"
            flight, self._running, self._running_flight = self._running_flight, None, None
        if job.microbatch is None:
            if job.version == self.version:  # else a state was loaded while it ran
                self.version += 1
                self._commits.stepped(self.version, now_s=now_s)
                if self.control and self.window:
                    self.control.reached(self.version, self.window, commit_s=self._commits.longest_s)
            return []
        assert flight is not None
        if loss is not None:
            flight.loss = loss
        commands: list[ScheduleCommand] = []
        if job.kind in ("backward", "loss"):
            # The gradient counts even if the sender of the microbatch is lost.
            commands = [Contributed(job.microbatch, flight.staleness_steps, flight.retried, flight.loss)]
            self._commits.contributed(job.microbatch.step, now_s=now_s)
        if self._flights.get(job.microbatch) is not flight:
            # Its sender was lost while the job ran; meanwhile another peer may have sent the microbatch again.
            return commands if self.holds(job.microbatch) else [*commands, Forget(job.microbatch)]
        if job.kind in ("backward", "loss") or (job.kind == "validate" and self.is_last):
            return [*commands, *self._leave(job.microbatch, flight, now_s)]
        flight.waiting_since_s = now_s
        self._unsent.add(job.microbatch)
        return self._send_unsent(now_s)

    def _send_unsent(self, now_s: float) -> list[ScheduleCommand]:
        commands: list[ScheduleCommand] = []
        for microbatch in sorted(self._unsent):
            flight = self._flights[microbatch]
            target = self.router.pick(now_s=now_s, avoid=flight.doubted)
            if target is None:
                break
            self._unsent.remove(microbatch)
            commands.append(SendActivation(microbatch, target, flight.retried or flight.sent_before))
            flight.target = target
            flight.sent_before = True
            flight.sent_s = now_s
            flight.waited_s += now_s - flight.waiting_since_s
        return commands

    def _leave(self, microbatch: Microbatch, flight: Flight, now_s: float) -> list[ScheduleCommand]:
        del self._flights[microbatch]
        if self.is_first:
            if self.window and flight.validates:
                self.window.forget(microbatch)  # Its round trip had no backward: no sample for the window.
            elif self.window:
                self.window.returned(microbatch, now_s=now_s, waited_s=flight.waited_s)
            return [Finished(microbatch, flight.loss), Forget(microbatch)]
        commit_s = self._commits.longest_s
        sources, waited_s, loss = sorted(flight.sources), flight.waited_s, flight.loss
        back = [SendGradient(microbatch, source, waited_s, commit_s, loss) for source in sources]
        return [*back, Forget(microbatch)]

    def _lost(self, peer: PeerID, successor: float, now_s: float) -> list[ScheduleCommand]:
        """Send to other replicas the microbatches that `peer` had. Drop those that `peer` sent us in incarnations
        before `successor`; keep those that incarnation `successor` has sent, as each is sent only once."""
        self.router.set_ready(peer, False)
        commands: list[ScheduleCommand] = []
        for microbatch, flight in sorted(self._flights.items(), key=lambda item: item[0]):
            if flight.target == peer:
                self.router.returned(peer)
                flight.target = None
                flight.waiting_since_s = now_s
                self._unsent.add(microbatch)
            if flight.sources.get(peer, successor) < successor:
                del flight.sources[peer]
                if not flight.sources:
                    # No peer waits for this gradient; stage 0 will run the microbatch again.
                    commands += self._drop(microbatch)
        return commands + self._send_unsent(now_s)

    def _handed_back(self, microbatch: Microbatch, peer: PeerID, now_s: float) -> list[ScheduleCommand]:
        flight = self._flights.get(microbatch)
        if flight is None or flight.target != peer:
            return []
        self.router.returned(peer)
        flight.doubted, flight.target = peer, None
        flight.waiting_since_s = now_s
        self._unsent.add(microbatch)
        return self._send_unsent(now_s)

    def _hand_back(self, *, all_of_it: bool) -> list[ScheduleCommand]:
        commands: list[ScheduleCommand] = []
        for microbatch in sorted(self._flights if all_of_it else self._waiting):
            flight = self._flights[microbatch]
            if flight is self._running_flight:
                continue
            flight.handed_back = True
            begun = flight.retried or microbatch not in self._waiting
            back = [RejectMicrobatch(microbatch, source, begun) for source in sorted(flight.sources)]
            commands += back or [RejectMicrobatch(microbatch, None, begun)]
            if self.window:
                self.window.forget(microbatch)
            commands += self._drop(microbatch)
        return commands

    def _drop(self, microbatch: Microbatch) -> list[ScheduleCommand]:
        flight = self._flights.pop(microbatch)
        if flight.target is not None:
            self.router.returned(flight.target)
        for place in (self._waiting, self._returned, self._unsent):
            place.discard(microbatch)
        return [] if self._is_busy(flight) else [Forget(microbatch)]

    def _next_job(self, now_s: float) -> list[ScheduleCommand]:
        if self._step_ready:
            self._step_ready, self._running_flight = False, None
            self._running = Job("step", None, self.version)
            return [self._running]
        forward_first = self._was_backward or not self._returned
        microbatch = self._admitted() if forward_first else None
        if microbatch is not None:
            self._was_backward = False
            kind = self._begin(microbatch, now_s)
        elif self._returned:
            self._was_backward = True
            kind, microbatch = "backward", min(self._returned)
            self._returned.remove(microbatch)
            self._flights[microbatch].waited_s += now_s - self._flights[microbatch].waiting_since_s
        else:
            return []
        self._running, self._running_flight = Job(kind, microbatch, self.version), self._flights[microbatch]
        return [self._running]

    def _begin(self, microbatch: Microbatch, now_s: float) -> JobKind:
        """Begin the forward of `microbatch`. Return the kind of job that runs a forward at this stage."""
        self._waiting.remove(microbatch)
        flight = self._flights[microbatch]
        flight.staleness_steps = max(0, microbatch.step - self.version)
        if self.window:
            self.window.sent(microbatch, now_s=now_s)
        else:
            flight.waited_s += now_s - flight.waiting_since_s
        if flight.validates:
            return "validate"
        if self.control and not flight.retried:
            self.control.begun(microbatch.step)
        return "loss" if self.is_last else "forward"

    def _admitted(self) -> Microbatch | None:
        if not self._waiting:
            return None
        version, window, control = self.version, self.window, self.control
        most_ahead = math.inf if control is None or window is None else control.most_ahead(window)
        is_full = window is not None and not window.has_room
        first: Microbatch | None = None
        for microbatch in self._waiting:
            ahead = microbatch.step - version
            if (first is not None and first < microbatch) or microbatch in self._parked:
                continue  # A parked microbatch came again from another peer while its first job waits.
            if ahead >= 0:  # Else it is a repair, for which other members wait: no limit holds it back.
                if is_full or (ahead > most_ahead and not self._flights[microbatch].retried):
                    continue
                if ahead > 0 and (self._flights[microbatch].validates or ahead > self._most_stale(microbatch.step)):
                    continue  # Validation needs committed weights, never predicted ones.
            first = microbatch
        return first

    def _most_stale(self, step: int) -> int:
        return staleness_bound(step, s_max=self.s_max, synchronous_steps=self.synchronous_steps)
