"""Runs nodes on modelled devices in one simulated world: launches nodes, removes them, and records their actions."""

import asyncio
from collections.abc import Callable

import numpy as np

from shoal.coordinator.allocate.interface import Allocator
from shoal.deploy.node.node import Node, NodeListeners, NodePorts, NodeRun
from shoal.deploy.simulate.arithmetic import ModelledArithmetic
from shoal.deploy.simulate.extents import ModelledBase
from shoal.deploy.simulate.logbook import SimLedger
from shoal.deploy.simulate.routing import SimulatedRouting
from shoal.peer.replica.flow import Traffic
from shoal.protocol.access import Gate
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerID
from shoal.protocol.membership import Members
from shoal.protocol.ports import Compute, Transport
from shoal.protocol.sim.dirt import CLEAN, Cores, Dirt
from shoal.protocol.sim.trust import TrustingSeals
from shoal.protocol.sim.world import SimPeer, World
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import Topology

Ports = tuple[Transport, Compute, Traffic | None]
"""A node's access to the simulated world: (transport, device, traffic control or None: the node makes its own)."""


class ModelledSwarm:
    """The nodes of one run. Device i of the topology is the peer `name_of(i)`.

    Args:
        routing: draws the number of tokens for each expert; needed if the run places experts.
        dirt: maps a device to (its disturbances, the processor cores that it shares with other devices or None).
    """

    def __init__(
        self,
        world: World,
        topology: Topology,
        spec: RunSpec,
        allocator: Allocator | None,
        ledger: SimLedger,
        *,
        chunk_bytes: int,
        routing: SimulatedRouting | None = None,
        dirt: Callable[[int], tuple[Dirt, Cores | None]] = lambda device: (CLEAN, None),
    ) -> None:
        self._world = world
        self._topology = topology
        self._spec = spec
        self._allocator = allocator
        self._ledger = ledger
        self._chunk_bytes = chunk_bytes
        self._routing = routing
        self._dirt = dirt
        self._seals = TrustingSeals()
        self._owner: PeerID | None = None
        self._lives: dict[int, int] = {}
        self._peers: dict[int, SimPeer] = {}
        self._nodes: dict[int, Node] = {}
        """Device -> its running node. A node that has been told to leave is no longer listed."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._apart: dict[int, set[int]] = {}
        """Device -> the other devices that have no path to it or from it."""
        passes = topology.bytes_per_s > 0.0
        for one, other in np.argwhere(~(passes & passes.T)).tolist():
            if one != other:
                self._apart.setdefault(one, set()).add(other)

    def launch(self, device: int) -> None:
        """Start a process of `device`; do nothing if one runs."""
        if device in self._peers and self._peers[device].is_alive:
            return
        t, name = self._topology, name_of(device)
        dirt, cores = self._dirt(device)
        peer = self._world.add_peer(
            name,
            place=device,
            device_flop_per_s=float(t.flop_per_s[device]),
            up_bytes_per_s=float(t.up_bytes_per_s[device]),
            down_bytes_per_s=float(t.down_bytes_per_s[device]),
            plug=int(t.card[device]),
            dirt=dirt,
            cores=cores,
        )
        if device not in self._peers and (apart := self._apart.get(device, set()).intersection(self._peers)):
            self._world.partition([peer], [self._peers[other] for other in sorted(apart)])
        self._peers[device] = peer
        self._nodes.pop(device, None)
        self._owner = self._owner or peer.peer_id
        self._lives[device] = life = self._lives.get(device, -1) + 1
        self._ledger.joined(device, peer, t.names[device])
        task = peer.spawn(self._live(device, life, peer), name="life")
        task.add_done_callback(lambda done: self._over(device, done))
        self._tasks[device] = task

    def remove(self, device: int) -> None:
        """End the device's process as a power cut does; do nothing if none runs."""
        peer = self._peers.get(device)
        if peer is not None and peer.is_alive:
            self._world.crash(peer)
            self._ledger.left(device, self._topology.names[device])

    def leave(self, device: int) -> None:
        """Let the device's process leave in order, as a real process does at its first signal. If the node has not
        started yet, end the process at once."""
        node, peer = self._nodes.pop(device, None), self._peers.get(device)
        if node is None or peer is None or not peer.is_alive:
            self.remove(device)
            return
        life = self._tasks[device]
        life.cancel()

        async def go() -> None:
            await asyncio.wait([life])
            await node.leave()
            await node.close()

        def gone(done: asyncio.Task[None]) -> None:
            self._world.crash(peer)  # the process has ended, and with it its network daemon
            self._over(device, done)

        peer.spawn(go(), name="farewell").add_done_callback(gone)
        self._ledger.left(device, self._topology.names[device])

    def ports_of(self, device: int, peer: SimPeer) -> Ports:
        """Return the ports of a device's node. Benchmarks override this to imitate other systems."""
        return peer.transport, peer.compute, None

    async def _live(self, device: int, life: int, peer: SimPeer) -> None:
        assert self._owner is not None
        transport, compute, traffic = self.ports_of(device, peer)
        t, ledger = self._topology, self._ledger
        # The host has the base of adapters; the others fetch their layers of it over the network.
        has_base = self._spec.adapter is not None and peer.peer_id == self._owner
        run = NodeRun(spec=self._spec, owner=self._owner, initial=ModelledBase(self._spec) if has_base else None)
        node = Node(
            run,
            NodePorts(
                transport=transport,
                directory=peer.directory,
                compute=compute,
                clock=peer.clock,
                disk=None,
                rng=self._world.rng(f"{name_of(device)}, life {life}"),
                machine=f"card {t.card[device]}",
            ),
            identity=peer.identity,
            gate=Gate(Members(run.id, self._owner, is_open=True), peer.peer_id),
            name=t.names[device],
            hears=NodeListeners(on_plan=lambda plan: ledger.obeyed(plan.plan), on_commit=ledger.committed),
            arithmetic=ModelledArithmetic(
                self._spec,
                has_text=bool(t.may_feed[device]),
                memory_bytes=float(t.memory_bytes[device]),
                chunk_bytes=self._chunk_bytes,
                routing=self._routing,
            ),
            traffic=traffic,
            seals=self._seals,
            allocator=self._allocator,
        )
        await node.start()
        self._nodes[device] = node
        await node.wait_done()
        await node.close()

    def _over(self, device: int, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._ledger.failures.append(f"{self._topology.names[device]}: {error!r}")
            if not isinstance(error, Exception):
                raise error


def name_of(device: int) -> str:
    return f"device {device}"


def peer_ids(world: World, devices: range) -> dict[int, PeerID]:
    """Return {device: its peer identifier}, also for devices that are absent."""
    return {device: world.identity(name_of(device)).peer_id for device in devices}


def check_devices(topology: Topology, devices: set[int], what: str) -> None:
    """Check device numbers. Raises: LocalError: the topology lacks a device that `what` names."""
    strange = sorted(device for device in devices if not 0 <= device < topology.num_devices)
    if strange:
        raise LocalError(f"{what} names device {strange[0]}, the network has {topology.num_devices}")
