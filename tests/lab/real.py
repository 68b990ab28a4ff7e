"""Plays a scenario with real peers: `shoal host` and `shoal join` in the namespaces of an emulated internet."""

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

import pinned
from cpu_groups import CpuGroups
from figures import Figures, Step, paces, shown_layout
from internet.emulator import Internet
from scenario import Event, Host, Scenario
from shoal.deploy.base.children import CLI, Child, Children, last_line
from shoal.deploy.control.control_socket import ask
from shoal.deploy.control.invite_book import DEFAULT_SEATS
from shoal.deploy.demo.crew import environment
from shoal.deploy.demo.step_book import StepBook
from shoal.deploy.record.report import (
    Committed,
    Contribution,
    Joined,
    Obeys,
    Ready,
    Report,
    Status,
    StepDone,
    read_report,
)
from shoal.deploy.run.run_file import write_spec
from shoal.protocol.identity import PeerID
from shoal.protocol.invite import InviteKey, parse_invite
from shoal.protocol.live import leftovers
from shoal.protocol.messages import SwarmStatus

_PINNED_CLI = (sys.executable, pinned.__file__)
_END_S = 20.0
_STEP_PATIENCE_S = 8.0
"""How long a step waits for the word of a stage whose members may have died with it."""
_DEATH_S = 3.0
"""A peer that a status leaves out for so long was counted out: a new coordinator may not know everybody at once."""
_BUSY_MIN = 0.02
"""A device that works less than this says little of its speed, and one that holds no layers nothing: what its processor
does is the network's and the program's."""


class NoSwarm(Exception):
    """The swarm did not come up."""


@dataclass(slots=True, eq=False, kw_only=True)
class Peer:
    """The peer of a host, in its newest life."""

    host: Host
    child: Child
    peer: PeerID | None = None
    invite: str = ""
    invited_s: float | None = None
    """In `time.monotonic()`, as the next one."""
    works_s: float | None = None
    """When it said that it had computed something."""
    stepped_s: float | None = None
    """When its stage's group, with it, had first committed a step after that."""
    expected: bool = True
    """Whether it should be in the swarm: nothing was done to it that keeps it away."""
    ends: bool = False
    """Whether its end was ordered."""
    work: list[tuple[float, float]] = field(default_factory=list)
    """(FLOP/s, seconds of its device a second) while it held layers. Under a limit the latter are all of the process's
    processor seconds, those of its messages too, of which it gets no more than its share."""

    probed: float | None = None
    """GFLOP/s that its probe measured."""

    @property
    def gflops(self) -> float:
        """What its device does in a second if it always works, within its share."""
        flop_per_s, busy = (sum(figures) for figures in zip(*self.work, strict=True))
        return flop_per_s / busy * self.host.compute_share / 1e9

    @property
    def share_used(self) -> float:
        """How much it had of what it may have, in [0, 1]."""
        return sum(busy for _, busy in self.work) / len(self.work) / self.host.compute_share


@dataclass(slots=True, eq=False)
class RealSwarm:
    """The peers of one scenario, and what they say."""

    scenario: Scenario
    internet: Internet
    folder: Path
    groups: CpuGroups = field(default_factory=lambda: CpuGroups({}))
    problems: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """In `time.monotonic()`."""
    planned_s: float | None = None
    """When the first plan was heard of."""
    joined_s: list[float] = field(default_factory=list)
    false_deaths: list[str] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)
    status: SwarmStatus | None = None
    peers: dict[str, Peer] = field(default_factory=dict)
    book: StepBook = field(init=False)
    swarm: Children = field(init=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    used: "MachineTime | None" = None
    key: InviteKey | None = None
    """What lets any number of peers in, where there are more than the host's own invite has seats for."""
    _missing: dict[PeerID, float] = field(default_factory=dict)
    _seen: set[PeerID] = field(default_factory=set)
    _ending: bool = False

    def __post_init__(self) -> None:
        self.book = StepBook(lead_steps=self.scenario.spec.training.s_max + 2, patience_s=_STEP_PATIENCE_S)
        self.swarm = Children(on_line=self._on_line, on_exit=self._on_exit)

    # --- what is done ---

    async def start(self, host: Host) -> Peer:
        """Start the host's peer, which waits for its invite unless it hosts the run."""
        is_first = host.name == self.scenario.hosts[0].name
        what = ["host", str(self.folder / "run.toml")] if is_first else ["join", "-"]
        limits = ["--limit", "nice=0", "--limit", f"compute_share={host.compute_share:g}"]
        common = ["--name", host.name, "--state-dir", str(self.folder / host.name), "--threads", "1", "--device", "cpu"]
        inside = [*self.groups.inside(host.name), *self.internet.inside(host.name)]
        program = _PINNED_CLI if self.scenario.is_pinned else CLI
        argv = [*inside, *program, *what, *common, *limits, "--no-record", "--reports"]
        log = self.folder / f"{host.name}.log"
        child = await self.swarm.start(host.name, argv, env=environment(), log=log)
        self.peers[host.name] = peer = Peer(host=host, child=child)
        return peer

    async def let_in(self, peer: Peer) -> None:
        """Hand the peer an invite: the run's host's, or that of the eldest who lives."""
        invites = [other.invite for other in self.peers.values() if other.invite and other.expected]
        if not invites:
            raise NoSwarm("nobody has an invite")
        peer.invited_s = time.monotonic()
        invite = invites[0]
        if self.key is not None:
            invite = msgspec.structs.replace(parse_invite(invite), key=self.key).encode()
        await self.swarm.tell(peer.child, f"{invite}\n")

    async def happen(self, event: Event) -> None:
        peer, internet, host = self.peers[event.host], self.internet, event.host
        match event.word:
            case "set":
                await internet.set(host, event.rest[0], float(event.rest[1]))
            case "sever":
                await internet.sever(host, event.rest[0])
            case "join":
                await internet.join(host, event.rest[0])
            case "address":
                await internet.address(host)
            case "cut":
                peer.expected = False
                await internet.cut(host)
            case "heal":
                await internet.heal(host)
                peer.expected = True
            case "suspend":  # a laptop that is closed: it computes nothing, and its network is gone
                peer.expected = False
                await internet.cut(host)
                _signal_all(peer, signal.SIGSTOP)
            case "resume":
                _signal_all(peer, signal.SIGCONT)
                await internet.heal(host)
                peer.expected = True
            case "kill":
                peer.expected, peer.ends = False, True
                if left := await self.swarm.kill(peer.child):
                    self.problems.append(f"{host} left processes behind: {', '.join(map(str, left))}")
            case "leave":
                peer.expected, peer.ends = False, True
                peer.child.send(signal.SIGTERM)
            case "start":
                fresh = await self.start(peer.host)
                if peer.host is not self.scenario.hosts[0]:
                    await self.let_in(fresh)

    async def end(self) -> None:
        self._ending = True
        for peer in self.peers.values():
            _signal_all(peer, signal.SIGCONT)
        self.swarm.terminate()
        await self.swarm.wait(timeout_s=_END_S)

    # --- what they say ---

    def _on_line(self, child: Child, line: bytes) -> None:
        report = read_report(line)
        peer = self.peers.get(child.name)
        if report is not None and peer is not None and peer.child is child:
            self._take(peer, report, time.monotonic())
            self.changed.set()

    def _take(self, peer: Peer, report: Report, now_s: float) -> None:
        match report:
            case Ready():
                peer.invite = report.invite
            case Joined():
                peer.peer, peer.invite = report.peer, report.invite
                self.joined_s.append(now_s)
            case Obeys():
                self.planned_s = self.planned_s or now_s
                self.book.obey(report.era, begins=report.restored, num_stages=report.stages)
            case Committed():
                self.book.commit(report.report, now_s)
                if peer.works_s is not None and peer.stepped_s is None:
                    peer.stepped_s = now_s
            case StepDone():
                self.book.tell(report, now_s)
            case Contribution():
                if report.microbatches_total and peer.works_s is None:
                    peer.works_s = now_s
                if self.steps and report.synced and report.busy > _BUSY_MIN and report.flop_per_s > 0.0:
                    peer.work.append((report.flop_per_s, report.busy))
            case Status():
                self._see(report.status, now_s)
        self.tell_steps(now_s)

    def tell_steps(self, now_s: float) -> None:
        for at_s, done in self.book.due(now_s):
            before = [step.at_s for step in self.steps[-1:]]  # two stages' last words may be heard in the other order
            self.steps.append(Step(done.step, max([at_s, *before]), done.loss))

    def _see(self, status: SwarmStatus, now_s: float) -> None:
        before = self.status
        if before is not None and (status.term, status.plan_sequence) < (before.term, before.plan_sequence):
            return
        self.status = status
        speeds = {entry.peer: entry.flop_per_s / 1e9 for entry in status.peers}
        here = set(speeds)
        self._seen |= here
        for peer in self.peers.values():
            if peer.probed is None and peer.peer is not None:
                peer.probed = speeds.get(peer.peer) or None
            if peer.peer is not None and not peer.expected:
                self._seen.discard(peer.peer)  # who was counted out while it was away has yet to come back
            if peer.peer is None or peer.peer not in self._seen or peer.peer in here or not peer.expected:
                if peer.peer is not None:
                    self._missing.pop(peer.peer, None)
                continue
            since_s = self._missing.setdefault(peer.peer, now_s)
            if now_s >= since_s + _DEATH_S and self.steps:
                self._seen.discard(peer.peer)
                self.false_deaths.append(f"{peer.host.name} was counted out at {since_s - self.steps[0].at_s:.0f} s")
        members = [
            [entry.name for entry in status.peers if entry.stage == stage] for stage in range(len(status.stages))
        ]
        spares = [entry.name for entry in status.peers if entry.stage is None]
        shown = shown_layout(status.stages, members, spares)
        if status.stages and shown not in self.layouts[-1:]:
            self.layouts.append(shown)

    def _on_exit(self, child: Child, status: int) -> None:
        peer = self.peers.get(child.name)
        if peer is not None and peer.child is child and not peer.ends and not self._ending:
            self.problems.append(f"{child.name} ended with status {status}: {last_line(child.log)}")
        self.changed.set()


class MachineTime:
    """Processor time of this machine since this was made."""

    def __init__(self) -> None:
        self._begun = psutil.cpu_times()

    def share(self) -> float:
        """The part of all that there was, in [0, 1]."""
        now, begun = psutil.cpu_times(), self._begun
        all_s = sum(now) - sum(begun)
        idle_s = now.idle + now.iowait - begun.idle - begun.iowait
        return 1.0 - idle_s / all_s if all_s > 0.0 else 0.0


def _signal_all(peer: Peer, number: signal.Signals) -> None:
    """To the peer's process and its network daemon."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(peer.child.process.pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)


async def play(scenario: Scenario, *, keep: Path | None = None) -> Figures:
    """Args: keep: the folder to which the peers' logs go; None: they are thrown away.

    Raises: Refused, NoQuota, OSError: no internet, or no control group with a quota, can be made here.
    """
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="shoal-lab-"))
    try:
        async with live_swarm(scenario, folder) as real:
            counted: dict[str, int] = {}
            try:
                await _until_first_step(real)
                counted = await _sent(real)
                real.used = MachineTime()
                await _through_events(real)
            except NoSwarm as error:
                real.problems.append(str(error))
            sent = await _sent(real)
            figures = _figures(real, {line: sent[line] - counted.get(line, 0) for line in sent})
            await real.end()
        return msgspec.structs.replace(figures, wall_s=time.monotonic() - began_s)
    finally:
        await asyncio.to_thread(_clear, folder, scenario.name, keep)


def _clear(folder: Path, name: str, keep: Path | None) -> None:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("*.log"):
            shutil.copy(log, keep / f"{name}-{log.name}")
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def world_of(scenario: Scenario) -> AsyncIterator[tuple[Internet, CpuGroups]]:
    """The scenario's internet, and the quotas of its hosts. Raises: as `play`."""
    cores = {host.name: host.cores for host in scenario.hosts if host.cores is not None}
    internet = Internet(scenario.lines, scenario.line_of, scenario.path, scenario.file.seed)
    async with internet, CpuGroups(cores) as groups:
        yield internet, groups


@contextlib.asynccontextmanager
async def live_swarm(scenario: Scenario, folder: Path) -> AsyncIterator[RealSwarm]:
    """A swarm whose peers have yet to be started. Its processes are gone afterwards, and their sockets too."""
    write_spec(scenario.spec, folder / "run.toml")
    async with world_of(scenario) as (internet, groups):
        real = RealSwarm(scenario, internet, folder, groups)
        try:
            yield real
        finally:
            await real.swarm.close()
            for host in scenario.hosts:
                if (folder / host.name).exists():
                    await leftovers.clear(folder / host.name)


async def _until_first_step(real: RealSwarm) -> None:
    """Let everybody in; who joins later waits for its invite. Raises: NoSwarm."""
    scenario = real.scenario
    await until_host_is_up(real)
    others = [real.peers[host.name] for host in scenario.hosts[1:]]

    async def let_in(peer: Peer) -> None:
        await asyncio.sleep(peer.host.joins_s)
        await real.let_in(peer)

    first_step = asyncio.create_task(
        _wait_for(real, lambda: bool(real.steps), scenario.file.waits_s, "no step was made")
    )
    tasks = [first_step, *(asyncio.create_task(let_in(peer)) for peer in others)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_host_is_up(real: RealSwarm) -> None:
    """Start everybody at once, so that their imports overlap, and wait until there are invites. Raises: NoSwarm."""
    scenario = real.scenario
    for host in scenario.hosts:
        await real.start(host)
    first, *others = (real.peers[host.name] for host in scenario.hosts)
    await _wait_for(real, lambda: bool(first.invite), scenario.file.waits_s, "the run's host is not up")

    if len(others) > DEFAULT_SEATS:
        made = await asyncio.to_thread(ask, real.folder / first.host.name, "invite-new")
        real.key = parse_invite(made["invite"]).key


async def _wait_for(real: RealSwarm, condition: Callable[[], bool], timeout_s: float, complaint: str) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                if real.problems:
                    raise NoSwarm(complaint)
                real.changed.clear()
                await real.changed.wait()
    except TimeoutError:
        raise NoSwarm(f"{complaint} after {timeout_s:g} s") from None


async def _through_events(real: RealSwarm) -> None:
    """Let everything happen, and wait until the scenario's time is over."""
    zero_s = real.steps[0].at_s
    for event in sorted(real.scenario.file.events, key=lambda event: event.at_s):
        await asyncio.sleep(zero_s + event.at_s - time.monotonic())
        await real.happen(event)
    await asyncio.sleep(zero_s + real.scenario.file.seconds - time.monotonic())
    real.tell_steps(time.monotonic())


async def _sent(real: RealSwarm) -> dict[str, int]:
    """Bytes that have gone up each line."""
    sent = {}
    for host, line in real.scenario.line_of.items():
        sent[line] = (await real.internet.stats(host)).up_bytes
    return sent


def _figures(real: RealSwarm, sent: dict[str, int]) -> Figures:
    steps, steps_per_s, parts, gap_s = paces(real.scenario, real.steps)
    zero_s = real.steps[0].at_s if real.steps else 0.0
    before = [at_s for at_s in real.joined_s if at_s <= zero_s]
    planned_s = zero_s if real.planned_s is None else min(real.planned_s, zero_s)
    return Figures(
        world="real",
        first_step_s=zero_s - max(before) if before else None,
        works_s={
            name: peer.works_s - peer.invited_s
            for name, peer in real.peers.items()
            if peer.works_s is not None and peer.invited_s is not None
        },
        steps=steps,
        steps_per_s=steps_per_s,
        tokens_per_s=steps * real.scenario.spec.tokens_per_step / (real.scenario.file.seconds + zero_s - planned_s),
        step_at_s=tuple(step.at_s - zero_s for step in real.steps),
        parts=parts,
        gap_s_max=gap_s,
        false_deaths=tuple(real.false_deaths),
        given_up=real.book.given_up,
        duplicates=real.book.duplicates,
        dissenting=real.book.dissenting,
        rollbacks=real.status.rollbacks if real.status else 0,
        up_mb={line: count / 1e6 for line, count in sent.items()},
        layout=real.layouts[-1] if real.layouts else "",
        layouts=len(real.layouts),
        gflops={name: peer.gflops for name, peer in real.peers.items() if peer.work},
        probed={name: peer.probed for name, peer in real.peers.items() if peer.probed is not None},
        share_used={name: peer.share_used for name, peer in real.peers.items() if peer.work},
        machine_busy=real.used.share() if real.used is not None else 0.0,
        problems=tuple(real.problems),
    )
