"""A world of simulated peers: made from one seed, and reproducible event for event."""

import asyncio
import contextvars
import hashlib
import logging
import math
import random
import struct
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import CALL_TIMEOUT_S
from shoal.protocol.sim.clock import Agenda, SimClock
from shoal.protocol.sim.compute import SimCompute
from shoal.protocol.sim.directory import Records, SimDirectory
from shoal.protocol.sim.dirt import CLEAN, Cores, DevicePace, Dirt, LineDirt
from shoal.protocol.sim.disk import SimDisk
from shoal.protocol.sim.links import Links
from shoal.protocol.sim.loop import owned_context
from shoal.protocol.sim.machine import Machine
from shoal.protocol.sim.network import CardSpec, LinkSpec, Network
from shoal.protocol.sim.paths import Cut, Disturbance, Disturbed, Paths
from shoal.protocol.sim.post import Post
from shoal.protocol.sim.stream import Plug
from shoal.protocol.sim.trace import Event, Kind, Trace
from shoal.protocol.sim.transport import SimTransport

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimPeer:
    """One process of a peer: an identity and the five ports.

    Start the peer's work with `spawn`: tasks started in another way survive a crash and go on during a pause.
    """

    name: str
    number: int
    identity: Identity
    transport: SimTransport
    directory: SimDirectory
    compute: SimCompute
    clock: SimClock
    disk: SimDisk

    @property
    def peer_id(self) -> PeerID:
        return self.identity.peer_id

    @property
    def is_alive(self) -> bool:
        return self.transport.card.is_alive

    def context(self) -> contextvars.Context:
        """Return a new context in which tasks belong to this peer."""
        return owned_context(self.number)

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> "asyncio.Task[T]":
        """Run `work`, and all that it starts, as this peer. After a crash the task never ends: do not await it."""
        return asyncio.get_running_loop().create_task(
            work, name=f"{self.name}: {name or 'work'}", context=self.context()
        )


class World:
    """Peers and the network between them.

    Args:
        seed: determines everything random: identities, jitter, loss, and every `rng(name)`.
        stall_s: time without progress after which a stream to a silent peer breaks.
        acquainted: if True, all peers know all addresses; otherwise a peer can be reached only after an introduction.
        modelled: if True, jobs take their time but compute nothing.
        watch: called with every event of the trace.
    """

    def __init__(
        self,
        seed: int,
        network: Network,
        *,
        stall_s: float = CALL_TIMEOUT_S,
        modelled: bool = False,
        acquainted: bool = False,
        watch: Callable[[Event], None] | None = None,
    ) -> None:
        self.seed = seed
        self.network = network
        self.peers: dict[str, SimPeer] = {}
        self.failures: list[tuple[str, Exception]] = []
        """(a peer's name, an error of one of its handlers): a bug in that peer's code, unless a test expects it."""
        self._modelled = modelled
        self._acquainted = acquainted
        self._agenda = Agenda()
        self._trace = Trace(watch)
        self._paths = Paths(network)
        self._links = Links(self._paths, self._agenda, self._trace, self.rng, stall_s=stall_s)
        self._post = Post(self._paths, self._links.cuts, self._agenda, self._trace, self._links.stream)
        self._records = Records(self._links.cuts)
        self._machines: dict[str, Machine] = {}
        self._name_at: dict[int, str] = {}
        self._next_place = 0
        self._plugs: dict[Hashable, Plug] = {}
        self._by_id: dict[PeerID, SimPeer] = {}
        self._num_joined = 0

    def add_peer(
        self,
        name: str,
        *,
        device_flop_per_s: float = 1e12,
        overhead_s: float = 0.0,
        up_bytes_per_s: float = math.inf,
        down_bytes_per_s: float = math.inf,
        plug: Hashable = None,
        place: int | None = None,
        dirt: Dirt = CLEAN,
        cores: Cores | None = None,
    ) -> SimPeer:
        """Start the process of a peer. A peer that crashed or closed returns with its identity, machine and address.

        Args:
            plug: peers with equal keys here share one uplink and downlink, with the rates of the first; None: own ones.
            dirt: the dirt of the device if the machine is new, and of the line if the plug is new (`dirt.py`).
            cores: the cores that the device shares with devices of other peers, if the machine is new.
        Raises: LocalError: a peer of that name is alive, or the network has no place for it.
        """
        if name in self.peers and self.peers[name].is_alive:
            raise LocalError(f"a peer named {name!r} is alive in this world")
        if name in self.peers:
            self.peers[name].compute.halt()
        is_new = name not in self._machines
        machine = self._machine(name, place)
        if is_new and (dirt.is_on_device or cores is not None):
            machine.pace = DevicePace(dirt, cores or Cores(), self.rng(f"dirt/{name}"))
        number = self._num_joined
        self._num_joined += 1
        identity = self.identity(name)
        transport = SimTransport(
            identity.peer_id,
            number=number,
            place=machine.place,
            plug=self._plug(
                name, plug, CardSpec(up_bytes_per_s=up_bytes_per_s, down_bytes_per_s=down_bytes_per_s), dirt
            ),
            links=self._links,
            post=self._post,
            agenda=self._agenda,
            trace=self._trace,
            find=self._find,
            acquainted=self._acquainted,
            failed=lambda error: self._handler_failed(name, error),
        )
        peer = SimPeer(
            name=name,
            number=number,
            identity=identity,
            transport=transport,
            directory=SimDirectory(
                transport.card,
                machine,
                self._records,
                self._agenda,
                self._trace,
                latency_s=self.network.typical_latency_s,
            ),
            compute=SimCompute(
                self._agenda,
                self._trace,
                number=number,
                machine=machine,
                device_flop_per_s=device_flop_per_s,
                overhead_s=overhead_s,
                is_modelled=self._modelled,
            ),
            clock=SimClock(self._agenda, machine),
            disk=machine.disk,
        )
        self.peers[name] = self._by_id[identity.peer_id] = peer
        digest = int.from_bytes(identity.public_key[:8], "little")
        joined_s = self._agenda.now_s() if self._agenda.is_running else 0.0
        self._trace.add(joined_s, Kind.JOINED, number, machine.place, 0, digest)
        return peer

    def identity(self, name: str) -> Identity:
        """Return the identity of the present or future peer with this name."""
        return Identity(hashlib.blake2b(f"shoal sim identity/{self.seed}/{name}".encode(), digest_size=32).digest())

    @property
    def sent_bytes(self) -> Mapping[tuple[int, int], int]:
        """Return (sender's place, receiver's place) -> bytes of all frames that began to leave, without calls."""
        return self._links.sent_bytes

    def trace_hash(self) -> str:
        """Return the hash of all events so far, in hexadecimal."""
        return self._trace.hexdigest()

    @property
    def num_events(self) -> int:
        return self._trace.num_events

    def now_s(self) -> float:
        return self._agenda.now_s()

    def rng(self, name: str) -> random.Random:
        """Return a new random generator, determined by the world's seed and `name`."""
        return random.Random(f"shoal sim/{self.seed}/{name}")  # strings are hashed by SHA-512, not by `hash`

    def set_link(self, source: SimPeer, destination: SimPeer, spec: LinkSpec) -> None:
        """Change the link in one direction. Messages in flight keep their latency; disturbances stay in force."""
        self._paths.set(source.transport.card.place, destination.transport.card.place, spec)
        self._path_changed()

    def set_card(self, peer: SimPeer, card: CardSpec) -> None:
        """Change the rates of the peer's plug from the next frame on, also for peers that share the plug."""
        self._links.set_card(peer.transport.card.plug, card)

    # Faults -------------------------------------------------------------------------------------------------------

    def crash(self, peer: SimPeer) -> None:
        """Cut the power of the peer's machine: connections break, no `finally` runs, unsent data is lost, and unsynced
        files may be torn."""
        if not peer.is_alive:
            return
        self._trace.add(self.now_s(), Kind.CRASHED, peer.number, -1)
        self._agenda.loop.freeze(peer.number)
        peer.compute.halt()
        self._links.gone(peer.transport.card, why=None)
        peer.transport.abandon_calls()
        self._machines[peer.name].disk = peer.disk.crash()

    def pause(self, peer: SimPeer) -> None:
        """Stop the peer as SIGSTOP does: connections stay, frames and calls pile up, and timers fire at `resume`."""
        self._trace.add(self.now_s(), Kind.PAUSED, peer.number, -1)
        self._agenda.loop.freeze(peer.number)

    def resume(self, peer: SimPeer) -> None:
        if not peer.is_alive:
            raise LocalError(f"{peer.name} has crashed: add it again instead")
        self._trace.add(self.now_s(), Kind.RESUMED, peer.number, -1)
        self._agenda.loop.thaw(peer.number)

    def partition(self, a: Iterable[SimPeer], b: Iterable[SimPeer], *, one_way: bool = False) -> Cut:
        """Block everything from `a` to `b`, and back unless `one_way`. Returns: the cut, which `heal` ends."""
        places_a, places_b = _sides(a, b)
        cut = self._links.cut(places_a, places_b, one_way=one_way)
        self._trace_cut(Kind.CUT, cut)
        return cut

    def heal(self, cut: Cut | None = None) -> None:
        """End the partition `cut`; None: end all. Frames that a cut held arrive now, on streams still unbroken."""
        self._trace_cut(Kind.HEALED, cut)
        self._links.heal(cut)

    def disturb(
        self, a: Iterable[SimPeer], b: Iterable[SimPeer], disturbance: Disturbance, *, one_way: bool = False
    ) -> Disturbed:
        """Disturb the paths from `a` to `b`, and back unless `one_way`. Returns: the disturbance, which `calm` ends.

        Raises: LocalError: a peer is on both sides, or a probability is invalid.
        """
        disturbed = self._paths.disturb(*_sides(a, b), disturbance, one_way=one_way)
        self._trace_cut(Kind.DISTURBED, disturbed, str(disturbance))
        self._path_changed()
        return disturbed

    def calm(self, disturbed: Disturbed | None = None) -> None:
        """End the disturbance `disturbed`; None: end all of them."""
        self._trace_cut(Kind.CALMED, disturbed)
        self._paths.calm(disturbed)
        self._path_changed()

    def slow_device(self, peer: SimPeer, factor: float) -> None:
        """Make the jobs of the machine's device take `factor` times as long, from the next job on; 1: normal speed."""
        if not 0.0 < factor < math.inf:
            raise LocalError(f"a device cannot be {factor} times slower")
        self._machines[peer.name].slowdown = factor
        self._trace_machine(Kind.DEVICE_SLOWED, peer, factor)

    def jump_clock(self, peer: SimPeer, seconds: float) -> None:
        """Move the machine's wall clock by `seconds`. The monotonic clock (`now_s`) does not jump, as on a real
        machine."""
        if not math.isfinite(seconds):
            raise LocalError(f"a clock cannot jump by {seconds} s")
        self._machines[peer.name].clock_ahead_s += seconds
        self._trace_machine(Kind.CLOCK_JUMPED, peer, seconds)

    def kill_daemon(self, peer: SimPeer, *, restarts_in_s: float = 2.0) -> None:
        """Kill the peer's network daemon, if it runs. The peer's process restarts the daemon (later if paused).

        All connections of the peer break. Meanwhile the peer's operations wait, and nothing answers at its address.
        """
        if not peer.is_alive or not peer.transport.card.is_up:
            return
        self._trace.add(self.now_s(), Kind.DAEMON_DIED, peer.number, -1)
        others = [other.transport for other in self.peers.values() if other is not peer and other.is_alive]
        peer.transport.daemon_died(others)
        restarts_s = self.now_s() + restarts_in_s
        self._agenda.loop.call_at(restarts_s, self._restart_daemon, peer, context=peer.context())

    def _restart_daemon(self, peer: SimPeer) -> None:
        if peer.is_alive:
            self._trace.add(self.now_s(), Kind.DAEMON_RESTARTED, peer.number, -1)
            peer.transport.daemon_restarted()

    def limit_disk(self, peer: SimPeer, free_bytes: int | None) -> None:
        """Leave `free_bytes` of room on the machine's disk; None: no limit."""
        self._machines[peer.name].disk.limit(free_bytes)
        self._trace_machine(Kind.DISK_LIMITED, peer, math.inf if free_bytes is None else free_bytes)

    def fail_disk(self, peer: SimPeer, *, times: float = math.inf) -> None:
        """Fail the next `times` disk operations with EIO; each may still have its effect, or a part of that effect."""
        self._machines[peer.name].disk.fail(times=times)
        self._trace_machine(Kind.DISK_FAILING, peer, times)

    def cut_power(self, peer: SimPeer, *, after: int = 0) -> None:
        """Let `after` disk operations succeed, then crash the peer in the next one, unless `mend_disk` is called."""
        self._machines[peer.name].disk.cut_power(after=after, then=lambda: self.crash(peer))
        self._trace_machine(Kind.POWER_FAILING, peer, after)

    def mend_disk(self, peer: SimPeer) -> None:
        """End the effects of `limit_disk`, `fail_disk` and `cut_power`."""
        disk = self._machines[peer.name].disk
        disk.limit(None)
        disk.mend()
        self._trace_machine(Kind.DISK_MENDED, peer, 0.0)

    def _trace_cut(self, kind: Kind, cut: Cut | Disturbed | None, more: str = "") -> None:
        text = "all" if cut is None else f"{sorted(cut.sources)} {sorted(cut.destinations)} {cut.one_way}{more}"
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        self._trace.add(self.now_s(), kind, -1, -1, 0, digest)

    def _trace_machine(self, kind: Kind, peer: SimPeer, amount: float) -> None:
        digest = int.from_bytes(struct.pack("<d", amount), "little")
        self._trace.add(self.now_s(), kind, peer.number, -1, 0, digest)

    # --------------------------------------------------------------------------------------------------------------

    def _path_changed(self) -> None:
        if self._agenda.is_running:  # links may be set before the run
            self._links.path_changed()

    def _machine(self, name: str, place: int | None) -> Machine:
        machine = self._machines.get(name)
        if place is None:
            while self._next_place in self._name_at:
                self._next_place += 1
            place = machine.place if machine is not None else self._next_place
        if self._name_at.get(place, name) != name:
            raise LocalError(f"place {place} of the network is taken by {self._name_at[place]!r}")
        if not 0 <= place < self.network.num_places:
            raise LocalError(f"the network has {self.network.num_places} places, none for {name!r}")
        if machine is None:
            machine = self._machines[name] = Machine(place=place, disk=SimDisk(self.rng(f"disk/{name}"), name))
        machine.place = place
        self._name_at[place] = name
        return machine

    def _plug(self, name: str, key: Hashable, spec: CardSpec, dirt: Dirt) -> Plug:
        if key is not None and key in self._plugs:
            return self._plugs[key]
        plug = Plug(spec)
        if dirt.is_on_line:
            plug.up_dirt, plug.down_dirt = (LineDirt(dirt, self.rng(f"line/{name}/{way}")) for way in ("up", "down"))
        return plug if key is None else self._plugs.setdefault(key, plug)

    def _find(self, peer_id: PeerID) -> SimTransport | None:
        peer = self._by_id.get(peer_id)
        return None if peer is None else peer.transport

    def _handler_failed(self, name: str, error: Exception) -> None:
        self.failures.append((name, error))
        logger.error("a handler of %s failed", name, exc_info=error)


def _sides(a: Iterable[SimPeer], b: Iterable[SimPeer]) -> tuple[set[int], set[int]]:
    places_a = {peer.transport.card.place for peer in a}
    places_b = {peer.transport.card.place for peer in b}
    if places_a & places_b:
        raise LocalError("a peer cannot be cut off from itself")
    return places_a, places_b
