"""Plays a scenario in virtual time: the real drivers, whose own coordinators decide, on modelled devices and links.

What the simulator does not know is left out, and the comparison with real peers shows what it costs: the lengths of
queues, jitter but for its mean, snapshots. Of lost packets it knows that they make a connection slower (`tcp.py`), of
NATs which pairs do not meet (`Scenario.nat_pairs`), or meet over a third host. A quota (`Host.cores`) is a steady
device: it is never fast for a moment and then still, and only its probe is as wrong as the real one's was.
"""

import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from carried import CarriedTransport
from figures import Figures, Step, paces, shown_layout
from limited import LimitedCompute
from pinned import PinnedAllocator
from scenario import Event, Host, Scenario
from shoal.deploy.simulate.logbook import SimLedger
from shoal.deploy.simulate.modelled_swarm import ModelledSwarm, Ports, name_of, peer_ids
from shoal.deploy.simulate.result import StepCommitted
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LANES_MAX
from shoal.protocol.plan import Plan
from shoal.protocol.sim.dirt import Cores, Dirt
from shoal.protocol.sim.loop import run as run_in_virtual_time
from shoal.protocol.sim.network import CardSpec, LinkSpec, MatrixNetwork
from shoal.protocol.sim.paths import Cut
from shoal.protocol.sim.world import SimPeer, World
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import Topology, make_topology
from tcp import either_loses, tcp_bytes_per_s

_MBIT = 1e6 / 8
_BACKBONE_BYTES_PER_S = 10e9 / 8
"""What a path lets through, beside which lines are slow."""
_CHUNK_BYTES = 1 << 20
"""As in life."""
_RECONNECTS_S = 0.1
"""A change of address breaks all connections, as the death of a network daemon does."""
_KNOWN = ("up_mbps", "down_mbps", "last_mile_ms", "jitter_ms", "loss")
_QUOTA_PERIOD_S = 0.1
GFLOPS = 10.0
"""The speed of a device that nobody has measured."""


class _Ledger(SimLedger):
    """Keeps every layout, and who was counted out though nothing was done to it."""

    def __init__(self, virtual: "_Virtual", num_devices: int, *, steps: int) -> None:
        super().__init__(num_devices, steps=steps, keeps_timeline=False, on_step=virtual.stepped)
        self._virtual = virtual

    def obeyed(self, plan: Plan) -> None:
        before = self.plan
        super().obeyed(plan)
        if self.plan is not before:
            self._virtual.planned(before, plan)


class _Swarm(ModelledSwarm):
    """Puts the ports of a scenario's hosts into its nodes."""

    def __init__(self, virtual: "_Virtual", spec: RunSpec, machines: Mapping[str, Cores]) -> None:
        scenario = virtual.scenario
        super().__init__(
            virtual.world,
            virtual.topology,
            spec,
            PinnedAllocator() if scenario.is_pinned else None,
            virtual.ledger,
            chunk_bytes=_CHUNK_BYTES,
            dirt=lambda device: (dirt_of(scenario, device), machines.get(scenario.hosts[device].machine)),
        )
        self._virtual = virtual

    def ports_of(self, device: int, peer: SimPeer) -> Ports:
        return self._virtual.ports_of(device, peer)


@dataclass(slots=True, eq=False)
class _Virtual:
    """One scenario under way."""

    scenario: Scenario
    topology: Topology
    world: World
    probe_times: list[float]
    """By device: how often faster its probe finds it than it is at work."""
    steps: list[Step] = field(default_factory=list)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    planned_s: float | None = None
    layouts: list[str] = field(default_factory=list)
    false_deaths: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    away: set[int] = field(default_factory=set)
    """Devices that something keeps away."""
    started_s: dict[int, float] = field(default_factory=dict)
    begun_bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    rollbacks: int = 0
    _cuts: dict[tuple[str, ...], Cut] = field(default_factory=dict)
    _devices: dict[PeerID, int] = field(default_factory=dict)
    _lines: dict[str, dict[str, float]] = field(default_factory=dict)
    """What can be set, by line, as it is now."""
    swarm: ModelledSwarm = field(init=False)
    ledger: _Ledger = field(init=False)

    def __post_init__(self) -> None:
        spec, file = _spec(self.scenario.spec), self.scenario.file
        machines: dict[str, Cores] = {}
        if file.machine_cores is not None:
            machines = {host.machine: Cores(file.machine_cores) for host in file.hosts}
        self.ledger = _Ledger(self, self.topology.num_devices, steps=spec.training.steps)
        self.swarm = _Swarm(self, spec, machines)
        self._devices = {peer: i for i, peer in peer_ids(self.world, range(self.topology.num_devices)).items()}
        self._lines = _settable(self.scenario)

    def ports_of(self, device: int, peer: SimPeer) -> Ports:
        peers = peer_ids(self.world, range(self.topology.num_devices))
        carriers = {
            peers[there]: peers[carrier]
            for (here, there), carrier in carriers_of(self.scenario).items()
            if here == device
        }
        host = self.scenario.hosts[device]
        peer.compute.device_flop_per_s /= host.compute_share * _quota(host)  # the topology's is within both
        limited = LimitedCompute(peer.compute, host.compute_share, probe_times=self.probe_times[device])
        return CarriedTransport(peer.transport, carriers), limited, None

    def launch(self, device: int) -> None:
        self.started_s[device] = asyncio.get_running_loop().time()
        self.swarm.launch(device)

    def stepped(self, step: StepCommitted) -> None:
        self.steps.append(Step(step.step, step.committed_at_s))
        if not self.first.is_set():
            self.begun_bytes = dict(self.world.sent_bytes)
            self.first.set()

    def planned(self, before: Plan | None, plan: Plan) -> None:
        if self.planned_s is None:
            self.planned_s = asyncio.get_running_loop().time()
        members = [[self._name(peer) for peer in stage.peers] for stage in plan.stages]
        bounds = [(stage.first_layer, stage.last_layer) for stage in plan.stages]
        shown = shown_layout(bounds, members, [self._name(peer) for peer in plan.spares])
        if shown not in self.layouts[-1:]:
            self.layouts.append(shown)
        self.rollbacks = plan.rollbacks
        for peer in set(before.members if before else ()) - set(plan.members):
            if self._devices[peer] not in self.away and self.steps:
                at_s = asyncio.get_running_loop().time() - self.steps[0].at_s
                self.false_deaths.append(f"{self._name(peer)} was counted out at {at_s:.0f} s")

    def happen(self, event: Event) -> None:
        device, rest = self._device(event.host), event.rest
        peer = self._peer(device)
        match event.word:
            case "set" if rest[0] in self._lines[self.scenario.line_of[event.host]]:
                self._set(event.host, rest[0], float(rest[1]))
            case "cut":
                self._keep_away(event.host)
            case "heal":
                self._let_back(event.host)
            case "sever":
                cut = self.world.partition([peer], [self._peer(self._device(rest[0]))])
                self._cuts[event.host, rest[0]] = self._cuts[rest[0], event.host] = cut
            case "join":
                self.world.heal(self._cuts[event.host, rest[0]])
            case "suspend":
                self._keep_away(event.host)
                self.world.pause(peer)
            case "resume":
                self.world.resume(peer)
                self._let_back(event.host)
            case "address":
                self.world.kill_daemon(peer, restarts_in_s=_RECONNECTS_S)
            case "kill":
                self.away.add(device)
                self.swarm.remove(device)
            case "leave":
                self.away.add(device)
                self.swarm.leave(device)
            case "start":
                self.away.discard(device)
                self.launch(device)

    def _keep_away(self, host: str) -> None:
        """Cut the line of the host off from all others."""
        line = self.scenario.line_of[host]
        inside = [self._device(name) for name, at in self.scenario.line_of.items() if at == line]
        self.away |= set(inside)
        here = [self._peer(device) for device in inside if device in self.started_s]
        others = [self._peer(device) for device in self.started_s if device not in inside]
        self._cuts[(host,)] = self.world.partition(here, others)

    def _let_back(self, host: str) -> None:
        line = self.scenario.line_of[host]
        self.away -= {self._device(name) for name, at in self.scenario.line_of.items() if at == line}
        self.world.heal(self._cuts.pop((host,)))

    def _set(self, host: str, what: str, value: float) -> None:
        line = self.scenario.line_of[host]
        now = self._lines[line]
        now[what] = value
        card = CardSpec(up_bytes_per_s=now["up_mbps"] * _MBIT, down_bytes_per_s=now["down_mbps"] * _MBIT)
        for device in self.started_s:
            if self.scenario.line_of[self.scenario.hosts[device].name] == line:
                self.world.set_card(self._peer(device), card)
        if what in ("last_mile_ms", "jitter_ms", "loss"):
            self._set_paths()

    def _set_paths(self) -> None:
        latency_s = _latency_s(self.scenario, self._lines)
        bytes_per_s = _bytes_per_s(self.scenario, self._lines, latency_s)
        for source in self.started_s:
            for destination in self.started_s:
                if source != destination:
                    link = LinkSpec(
                        latency_s=float(latency_s[source, destination]),
                        rate_bytes_per_s=float(bytes_per_s[source, destination]),
                    )
                    self.world.set_link(self._peer(source), self._peer(destination), link)

    def _device(self, host: str) -> int:
        return [each.name for each in self.scenario.hosts].index(host)

    def _peer(self, device: int) -> SimPeer:
        return self.world.peers[name_of(device)]

    def _name(self, peer: PeerID) -> str:
        return self.scenario.hosts[self._devices[peer]].name


def play(
    scenario: Scenario, gflops: Mapping[str, float] | None = None, probed: Mapping[str, float] | None = None
) -> Figures:
    """Args:
    gflops: the speed of each host's device at work; what the scenario says goes before it. A device of which neither
        says anything is like the others.
    probed: what the probe of each host found, GFLOP/s; what the scenario says goes before it. Where nothing is said:
        as at work, in processor seconds.
    """
    began_s = time.monotonic()
    known = gflops or {}
    usual = statistics.median(known.values()) if known else GFLOPS
    speeds = {host.name: host.gflops or known.get(host.name, usual) for host in scenario.hosts}
    found = {
        host.name: host.probed_gflops or (probed or {}).get(host.name, speeds[host.name] / _quota(host))
        for host in scenario.hosts
    }
    figures = run_in_virtual_time(_play(scenario, speeds, found))
    return msgspec.structs.replace(figures, wall_s=time.monotonic() - began_s)


async def _play(scenario: Scenario, gflops: dict[str, float], probed: dict[str, float]) -> Figures:
    file, loop = scenario.file, asyncio.get_running_loop()
    topology = topology_of(scenario, gflops)
    world = World(file.seed, MatrixNetwork(topology), acquainted=True)
    virtual = _Virtual(
        scenario, topology, world, [probed[host.name] / gflops[host.name] * _quota(host) for host in scenario.hosts]
    )
    for device, host in enumerate(scenario.hosts):
        if host.joins_s:
            loop.call_at(host.joins_s, virtual.launch, device)
        else:
            virtual.launch(device)
    try:
        async with asyncio.timeout(file.waits_s):
            await virtual.first.wait()
    except TimeoutError:
        virtual.problems.append(f"no step was made after {file.waits_s:g} s")
    else:
        zero_s = virtual.steps[0].at_s
        for event in sorted(file.events, key=lambda event: event.at_s):
            await asyncio.sleep(max(0.0, zero_s + event.at_s - loop.time()))
            virtual.happen(event)
        await asyncio.sleep(max(0.0, zero_s + file.seconds - loop.time()))
    return _figures(virtual, gflops)


def _figures(virtual: _Virtual, gflops: dict[str, float]) -> Figures:
    scenario, ledger = virtual.scenario, virtual.ledger
    steps, steps_per_s, parts, gap_s = paces(scenario, virtual.steps)
    zero_s = virtual.steps[0].at_s if virtual.steps else 0.0
    before = [at_s for at_s in virtual.started_s.values() if at_s <= zero_s]
    planned_s = zero_s if virtual.planned_s is None else min(virtual.planned_s, zero_s)
    up_mb = dict.fromkeys(scenario.lines, 0.0)
    for (source, destination), count in virtual.world.sent_bytes.items():
        here, there = (scenario.line_of[scenario.hosts[device].name] for device in (source, destination))
        if here != there:
            up_mb[here] += (count - virtual.begun_bytes.get((source, destination), 0)) / 1e6
    raised = [f"{name}: {error!r}" for name, error in virtual.world.failures]
    return Figures(
        world="virtual",
        first_step_s=zero_s - max(before) if steps else None,
        steps=steps,
        steps_per_s=steps_per_s,
        tokens_per_s=steps * scenario.spec.tokens_per_step / (scenario.file.seconds + zero_s - planned_s),
        step_at_s=tuple(step.at_s - zero_s for step in virtual.steps),
        parts=parts,
        gap_s_max=gap_s,
        false_deaths=tuple(virtual.false_deaths),
        given_up=ledger.given_up,
        duplicates=ledger.duplicates,
        rollbacks=virtual.rollbacks,
        up_mb=up_mb,
        layout=virtual.layouts[-1] if virtual.layouts else "",
        layouts=len(virtual.layouts),
        gflops=gflops,
        problems=(*virtual.problems, *ledger.failures, *raised),
    )


def topology_of(scenario: Scenario, gflops: Mapping[str, float]) -> Topology:
    """The network as `shoal plan` would be told of it. Device i is host i."""
    homes = list(scenario.lines)
    ends = [scenario.lines[scenario.line_of[host.name]] for host in scenario.hosts]
    lines = _settable(scenario)
    latency_s = _latency_s(scenario, lines)
    rates = _bytes_per_s(scenario, lines, latency_s)
    for here, there in _pairs_apart(scenario):
        rates[here, there] = 0.0
    return make_topology(
        latency_s,
        rates,
        flop_per_s=np.array([gflops[host.name] for host in scenario.hosts]) * 1e9,
        up_bytes_per_s=np.array([line.up_mbps for line in ends]) * _MBIT,
        down_bytes_per_s=np.array([line.down_mbps for line in ends]) * _MBIT,
        card=[homes.index(scenario.line_of[host.name]) for host in scenario.hosts],
        names=tuple(host.name for host in scenario.hosts),
        regions=tuple(host.place or host.name for host in scenario.hosts),
    )


def _quota(host: Host) -> float:
    """The part of a core that the host's quota leaves to its device, which computes on one."""
    return min(1.0, host.cores or 1.0)


def dirt_of(scenario: Scenario, device: int) -> Dirt:
    """Of a host and the line of its home. A quota or a machine's cores do not show in a probe, as of a CPU: it counts
    processor seconds (`ThreadCompute`)."""
    host = scenario.hosts[device]
    dirt = host.dirt or scenario.file.dirt
    if host.cores is not None and host.cores < 1.0:
        return msgspec.structs.replace(
            dirt, throttled=host.cores, burst_s=_QUOTA_PERIOD_S * host.cores, probe_waits=False
        )
    return msgspec.structs.replace(dirt, probe_waits=False) if scenario.file.machine_cores is not None else dirt


def carriers_of(scenario: Scenario) -> dict[tuple[int, int], int]:
    """(from, to) -> the host that carries, by number: of those behind no NAT the one with the shortest way; none where
    nobody carries."""
    if scenario.file.nat_pairs != "carried":
        return {}
    able = [i for i, host in enumerate(scenario.hosts) if scenario.lines[scenario.line_of[host.name]].nat == "none"]
    latency_s = _latency_s(scenario, _settable(scenario))
    return {
        (here, there): min(able, key=lambda i: (latency_s[here, i] + latency_s[i, there], i))
        for here, there in _pairs_apart(scenario)
        if able
    }


def _pairs_apart(scenario: Scenario) -> list[tuple[int, int]]:
    """The pairs of hosts between which nothing passes, by number, both ways."""
    if scenario.file.nat_pairs == "open":
        return []
    names = [host.name for host in scenario.hosts]
    pairs = [(names.index(one), names.index(other)) for one, other in scenario.nat_pairs]
    return [*pairs, *((there, here) for here, there in pairs)]


def _settable(scenario: Scenario) -> dict[str, dict[str, float]]:
    """What of each line the simulator knows and events may change."""
    return {name: {what: getattr(line, what) for what in _KNOWN} for name, line in scenario.lines.items()}


def _latency_s(scenario: Scenario, lines: Mapping[str, Mapping[str, float]]) -> npt.NDArray[np.float64]:
    """[N, N], one way, with the mean of jitters. Args: lines: as of `_settable`."""
    latency_ms = np.zeros((len(scenario.hosts), len(scenario.hosts)))
    for i, source in enumerate(scenario.hosts):
        for j, destination in enumerate(scenario.hosts):
            a, b = scenario.line_of[source.name], scenario.line_of[destination.name]
            if a != b:
                path = scenario.path(a, b)
                jitter_ms = path.jitter_ms + lines[a]["jitter_ms"] + lines[b]["jitter_ms"]
                latency_ms[i, j] = path.ms + lines[a]["last_mile_ms"] + lines[b]["last_mile_ms"] + jitter_ms / 2
    return latency_ms / 1e3


def _bytes_per_s(
    scenario: Scenario, lines: Mapping[str, Mapping[str, float]], latency_s: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """[N, N], of all lanes of a stream over what lies between the lines. Args: lines: as of `_settable`."""
    lost = [lines[scenario.line_of[host.name]]["loss"] for host in scenario.hosts]
    round_trip_s = latency_s + latency_s.T
    return np.array(
        [
            [
                min(
                    _BACKBONE_BYTES_PER_S,
                    LANES_MAX * tcp_bytes_per_s(round_trip_s[i, j], either_loses(lost[i], lost[j])),
                )
                for j in range(len(lost))
            ]
            for i in range(len(lost))
        ]
    )


def _spec(spec: RunSpec) -> RunSpec:
    """Without what modelled peers cannot do: keep snapshots."""
    swarm = msgspec.structs.replace(spec.swarm, snapshot_interval_steps=0)
    return msgspec.structs.replace(spec, swarm=swarm)
