"""The port `Transport` on libp2p: calls are unary requests, frames travel on long-lived raw streams.

Handler names contain the protocol version and the run, so libp2p itself refuses peers of another run or version.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError, P2PHandlerError
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID as HivemindPeerID
from hivemind.utils.multiaddr import Multiaddr

from shoal.protocol.ending import end_tasks
from shoal.protocol.errors import LocalError, RemoteError, TransportError, Unreachable, first_line
from shoal.protocol.identity import Identity, PeerID, public_key_of
from shoal.protocol.invite import only_direct, split_address
from shoal.protocol.limits import ADDRESSES_MAX, CONTROL_BYTES_MAX, PEERS_MAX, PROTOCOL_VERSION
from shoal.protocol.live import hivemind_guard
from shoal.protocol.live.about import ABOUT_NAME, AboutAnswerer
from shoal.protocol.live.carriage import Streams
from shoal.protocol.live.carried import CarriedStreams
from shoal.protocol.live.carried_calls import CarriedCalls
from shoal.protocol.live.carrier import Carrier
from shoal.protocol.live.daemon import Daemon
from shoal.protocol.live.doorway import Doorway
from shoal.protocol.live.handshake import Greeter, StreamHello
from shoal.protocol.live.lane import Lane
from shoal.protocol.live.lane_door import LaneDoor
from shoal.protocol.live.lane_supply import LaneSupply
from shoal.protocol.live.link import Link
from shoal.protocol.live.listen import local_addresses
from shoal.protocol.live.receive_queue import ReceiveQueues
from shoal.protocol.live.redial import Redialer, hivemind_id
from shoal.protocol.live.routes import Routes, is_direct
from shoal.protocol.live.secure_channel import Purpose
from shoal.protocol.live.send_queue import SendQueue
from shoal.protocol.live.strangers import Strangers
from shoal.protocol.live.tcp_queues import TcpQueues, hosts_of, name_of
from shoal.protocol.live.throttle import Throttle
from shoal.protocol.live.uplink import Uplink
from shoal.protocol.membership import Members
from shoal.protocol.ports import CallHandler, FrameHandler, Payload, Priority

logger = logging.getLogger(__name__)

T = TypeVar("T")
_StreamHandler = Callable[[Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_DIAL_TIMEOUT_S = 5.0
_OPEN_TIMEOUT_S = 10.0
_LONELY_S = 10.0
_LANES_ROUND_TRIP_S_MIN = 0.002
"""Streams with a shorter round trip (within a house) get no lanes: one connection fills such a path."""
_NOT_DIALLED = ("failed to find any peer", "routing: not found", "failed to dial")
"""Errors of the daemon that show that a request never left, so that it may be sent again."""


class LiveTransport:
    """Calls and frames between this peer and others. Call `start`, then `serve`; incoming messages wait for `serve`."""

    def __init__(self, identity: Identity, members: Members, daemon: Daemon, throttle: Throttle) -> None:
        self._identity = identity
        self.members = members
        self.daemon = daemon
        self._throttle = throttle
        self._addresses: dict[PeerID, tuple[str, ...]] = {}
        self._places: dict[PeerID, tuple[str, ...]] = {}
        """Peer -> addresses from which the peer is connected to carriers, in addition to those that it announces."""
        self._send_queues: dict[PeerID, SendQueue] = {}
        self._receive_queues = ReceiveQueues()
        self._doorway = Doorway()
        self._lane_door = LaneDoor(identity, run=members.run, throttle=throttle)
        self._lane_supplies: dict[Link, LaneSupply] = {}
        self._on_call: CallHandler
        self._on_frame: FrameHandler
        self._served = asyncio.Event()
        self._closing = False
        self._keeper: asyncio.Task[None] | None = None
        self._dials: set[asyncio.Task[Any]] = set()
        self._about = AboutAnswerer(run=members.run, seen_at=self._seen_at)
        self._greeter = Greeter(identity=identity, members=members, addresses=self.addresses)
        # libp2p shows every connected peer the names of all handlers, so they contain a hash of the run.
        prefix = f"/shoal/{PROTOCOL_VERSION}/{blake3(members.run.encode()).hexdigest(length=8)}"
        self._call_name, self._frames_name = f"{prefix}/call", f"{prefix}/frames"
        self._carry_name, self._carried_name = f"{prefix}/carry", f"{prefix}/carried"
        self._carried = CarriedStreams(
            identity,
            members,
            open_stream=partial(self._open_stream_of, self._carry_name),
            seen=self._note_place,
            take=self._take_carried,
        )
        self._routes = Routes(
            identity.peer_id,
            connections=self._connections,
            dial=self._dial,
            ask=self._carried.ask,
            on_direct=self._move_frames,
        )
        self._carried_calls = CarriedCalls(self._carry_calls, self._answer_to)
        self._carrier = self._make_carrier()
        self._strangers = Strangers(
            members, connections=self._connections, hang_up=self._hang_up, shut_out=daemon.keep_out
        )
        self._redialer = Redialer(
            daemon,
            me=identity.peer_id,
            addresses=lambda peer: (*self._addresses.get(peer, ()), *self._places.get(peer, ())),
            known=lambda: tuple(self._addresses),
            again=f"{prefix}/again",
        )
        members.on_exclusion.append(self._close_excluded)

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        members: Members,
        state_dir: Path,
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce: Sequence[str] = (),
        initial_peers: Sequence[str] = (),
        use_relay: bool = True,
        throttle: Throttle | None = None,
    ) -> "LiveTransport":
        """Start the network daemon and connect to the initial peers that answer.

        Args:
            members: the members of the run; has the run's id and our certificate.
            listen: multiaddrs without `/p2p/…` on which the daemon listens.
            announce: multiaddrs without `/p2p/…` that we tell other peers; empty: those that libp2p finds.
            initial_peers: multiaddrs with `/p2p/…`. These peers need not be up.
            throttle: rate limits of the traffic; None: only the uplink's own limit.
        Raises: TransportError: the daemon cannot start, a port is in use, or the state folder is another peer's.
        """
        relays = only_direct(initial_peers)
        daemon = Daemon(identity, state_dir, listen=listen, announce=announce, relays=relays, use_relay=use_relay)
        await daemon.start()
        self = cls(identity, members, daemon, throttle or Throttle(uplink=Uplink()))
        try:
            for peer, places in _by_peer(initial_peers).items():
                if peer != self.peer_id:  # after a restart, our own address may be among them
                    self._remember(peer, places)
            daemon.on_restart.append(self._find_everyone)
            await daemon.add_setup(self._set_up)
            await self._dial_everyone()
            self._lane_door.listen(daemon.listening)
            self._keeper = asyncio.create_task(self._keep_connected(), name="stay connected")
            self._redialer.start()
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def peer_id(self) -> PeerID:
        return self._identity.peer_id

    @property
    def run(self) -> str:
        return self.members.run

    def addresses(self) -> tuple[str, ...]:
        return tuple(f"{address}/p2p/{self.peer_id}" for address in map(str, self.daemon.visible))[:ADDRESSES_MAX]

    def serve(self, *, on_call: CallHandler, on_frame: FrameHandler) -> None:
        if self._served.is_set():
            raise LocalError("a transport serves once")

        async def heard(source: PeerID, meta: bytes, payload: Payload) -> None:
            self._redialer.heard(source)
            await on_frame(source, meta, payload)

        self._on_call, self._on_frame = on_call, heard
        self._served.set()

    async def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        """Remember the addresses of `peer` and connect to it. Never raises, and takes at most five seconds."""
        if peer == self.peer_id:
            return
        self._remember(peer, addresses)
        await self._routes.introduced(peer)

    def want(self, peers: Sequence[PeerID]) -> None:
        """Stay connected to these peers (the other members of the plan): a lost peer is dialled until it answers."""
        self._redialer.want([peer for peer in peers if peer != self.peer_id])

    def limit_upload(self, bytes_per_s: float) -> None:
        """Change the volunteer's upload limit from now on. Infinite: there is none."""
        self._throttle.limit_upload(bytes_per_s)

    def known(self) -> dict[PeerID, tuple[str, ...]]:
        """Return the multiaddrs, with `/p2p/…`, of all peers with known addresses, dead or alive."""
        return {
            peer: tuple(f"{split_address(place)[0]}/p2p/{peer}" for place in places)
            for peer, places in self._addresses.items()
        }

    async def connected(self) -> frozenset[PeerID]:
        """Return the peers to which the daemon is connected, whichever end dialled. Wait while the daemon restarts."""
        return frozenset(await self._connections())

    async def _connections(self) -> dict[PeerID, list[str]]:
        try:
            infos = await (await self.daemon.p2p()).list_peers()
        except (TransportError, P2PDaemonError, OSError, EOFError):
            return {}
        return {PeerID(info.peer_id.to_base58()): [str(address) for address in info.addrs] for info in infos}

    async def call(self, peer: PeerID, request: bytes, *, timeout_s: float) -> bytes:
        """Return the reply to `request`. Raises: Unreachable. ValueError: `request` is larger than any peer accepts."""
        if len(request) > CONTROL_BYTES_MAX:
            raise ValueError(f"a call of {len(request)} bytes is larger than any peer accepts")
        self._refuse_if_pointless(peer)
        drops = self._redialer.drops(peer)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._go(
                    peer, partial(self._call, peer, request), partial(self._call_over_carrier, peer, request)
                )
        except TimeoutError as error:
            self._routes.failed(peer)
            self._redialer.failed(peer, "")
            raise Unreachable(peer, f"no answer in {timeout_s:g} s") from error
        except P2PDaemonError as error:
            if self._redialer.drops(peer) != drops:
                raise Unreachable(peer, "nothing came back, so its connection was closed", is_silence=True) from error
            raise Unreachable(peer, _reason(error)) from error
        except (TransportError, P2PHandlerError, OSError, EOFError, ValueError) as error:
            raise Unreachable(peer, _reason(error)) from error

    async def send(
        self, peer: PeerID, meta: bytes, payload: Payload, *, priority: Priority, again: bytes | None = None
    ) -> None:
        """Send one frame (`Transport.send`). Raises: Unreachable. ValueError: it is larger than any peer accepts."""
        self._refuse_if_pointless(peer)
        queue = self._send_queues.get(peer)
        if queue is None:
            queue = self._send_queues[peer] = SendQueue(peer, partial(self._open_link, peer))
        await queue.send(meta, payload, priority, again=again)

    async def close(self) -> None:
        """Wait up to two seconds until the frames that have left are handled, then stop all. Safe to call twice."""
        if not self._closing:
            self._closing = True
            await self._flush()
        await end_tasks(self._keeper)
        await end_tasks(*self._dials)
        await self._routes.close()
        await self._carried_calls.close()
        await asyncio.gather(*(queue.close() for queue in self._send_queues.values()))
        await self._receive_queues.close()
        await self._lane_door.close()
        if self._throttle.uplink is not None:
            self._throttle.uplink.close()
        await self._redialer.close()
        await self._strangers.close()
        await self.daemon.close()

    async def _flush(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.gather(*(queue.flush() for queue in self._send_queues.values()))

    async def _set_up(self, p2p: Any) -> None:
        if self._throttle.uplink is not None:
            try:
                self._throttle.uplink.follow(TcpQueues(self.daemon.process_id))
            except OSError as error:
                self._throttle.uplink.close()
                logger.info("the queue before the uplink cannot be read here: %s", error)
        hivemind_guard.admit(p2p._client.control, self._strangers.admits)
        await self._redialer.register(p2p)
        await p2p._client.add_unary_handler(self._call_name, self._answer)
        await p2p._client.add_unary_handler(ABOUT_NAME, self._about.answer)
        await p2p.add_binary_stream_handler(self._frames_name, self._of_admitted(self._accept))
        await p2p.add_binary_stream_handler(self._carried_name, self._of_admitted(self._carried.arrive))
        if self._carrier is not None:
            await p2p.add_binary_stream_handler(self._carry_name, self._of_admitted(self._carrier.carry))

    def _of_admitted(self, take: _StreamHandler) -> _StreamHandler:
        async def take_admitted(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await self._strangers.admits(PeerID(info.peer_id.to_base58())):
                await take(info, reader, writer)
            else:
                writer.transport.abort()

        return take_admitted

    async def _hang_up(self, peer: PeerID) -> None:
        with suppress(TransportError, P2PDaemonError, OSError, EOFError):
            await (await self.daemon.p2p())._client.disconnect(hivemind_id(peer))

    def _refuse_if_pointless(self, peer: PeerID) -> None:
        if self._closing:
            raise Unreachable(peer, "this peer is closing")
        if peer == self.peer_id:
            raise Unreachable(peer, "a peer does not dial itself")
        if self.members.is_excluded(peer):
            raise Unreachable(peer, "it is excluded from the run")

    async def _go(self, peer: PeerID, directly: Callable[[], Awaitable[T]], carried: Callable[[], Awaitable[T]]) -> T:
        """Use the present route to `peer`. If a direct route fails before any byte has left, find a route once more."""
        if not await self._routes.is_direct(peer):
            return await carried()
        try:
            return await directly()
        except P2PDaemonError as error:
            self._routes.failed(peer)
            self._redialer.failed(peer, str(error))
            if not _may_repeat(error):
                raise
        return await (directly() if await self._routes.is_direct(peer) else carried())

    # Calls

    async def _call(self, peer: PeerID, request: bytes) -> bytes:
        p2p = await self.daemon.p2p()
        reply: bytes = await p2p._client.call_unary_handler(hivemind_id(peer), self._call_name, request)
        self._throttle.called(sent=len(request), received=len(reply))
        self._redialer.heard(peer)
        return reply

    async def _answer(self, request: bytes, caller: HivemindPeerID) -> bytes:
        source = PeerID(caller.to_base58())
        self._redialer.heard(source)
        return await self._answer_to(source, request)

    async def _answer_to(self, source: PeerID, request: bytes) -> bytes:
        await self._served.wait()
        try:
            if len(request) > CONTROL_BYTES_MAX:
                raise RemoteError(source, f"sent a call of {len(request)} bytes; the limit is {CONTROL_BYTES_MAX}")
            reply = await self._on_call(source, request)
            if len(reply) > CONTROL_BYTES_MAX:
                raise ValueError(f"a reply of {len(reply)} bytes is larger than any peer accepts")
            self._throttle.called(sent=len(reply), received=len(request))
            return reply
        except RemoteError as error:
            logger.warning("refused a call: %s", error)
        except Exception:
            logger.exception("a call of %s could not be answered", source[-8:])
        raise _CallFailedError  # hivemind sends an exception's repr to the caller, so this one reveals nothing

    # Frames

    async def _open_link(self, peer: PeerID, queue: SendQueue) -> Link:
        self._refuse_if_pointless(peer)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                via, (reader, writer) = await self._go(
                    peer, partial(self._open_frames, peer), partial(self._routes.carry, peer, "frames")
                )
            link = Link(
                peer,
                on_frame=queue.on_frame,
                on_lost=self._lost,
                throttle=self._throttle,
                via=via,
                on_lane=self._count_lane,
            )
            port = self._lane_door.port if via is None else 0
            await link.open(reader, writer, self._greeter, calls=True, on_open=self._met, lane_port=port)
            await self._find_connection(via or peer)
            await self._supply_lanes(link)
            return link
        except TimeoutError as error:
            raise Unreachable(peer, f"no stream in {_OPEN_TIMEOUT_S:g} s") from error
        except (TransportError, P2PDaemonError, OSError, EOFError, ValueError) as error:
            raise Unreachable(peer, _reason(error)) from error

    async def _open_frames(self, peer: PeerID) -> tuple[PeerID | None, Streams]:
        await self._redialer.reach(peer)
        if self._addresses.get(peer) and peer not in await self.connected() and not await self._dial(peer):
            raise P2PDaemonError("failed to dial")
        return None, await self._open_stream_of(self._frames_name, peer)

    async def _open_stream_of(self, name: str, peer: PeerID) -> Streams:
        p2p = await self.daemon.p2p()
        _, reader, writer = await p2p.call_binary_stream_handler(hivemind_id(peer), name)
        return reader, writer

    def _lost(self, link: Link, why: str) -> None:
        """Handle the end of a stream to a peer; the connection under it may have ended, too."""
        self._send_queues[link.peer].on_lost(link, why)
        self._end_lanes(link)
        if link.via is None:
            self._routes.failed(link.peer)
        else:
            self._routes.shun(link.via)

    async def _accept(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._take_frames(PeerID(info.peer_id.to_base58()), None, (reader, writer))

    async def _take_frames(self, source: PeerID, via: PeerID | None, streams: Streams) -> None:
        reader, writer = streams
        if not self._served.is_set():
            with self._doorway.waits(source, writer.transport.abort):
                await self._served.wait()
        link = Link(
            source,
            on_frame=self._receive_queues.on_frame,
            on_lost=self._lost_incoming,
            throttle=self._throttle,
            via=via,
            on_lane=self._count_lane,
            on_lanes_asked=self._dial_lanes_back,
        )
        lane_port = self._lane_door.port if via is None else 0

        def opened(link: Link, hello: StreamHello) -> None:
            self._met(link, hello)
            if via is None:
                self._lane_door.expect(link)
            self._receive_queues.attach(link, self._on_frame)

        try:
            with self._doorway.waits(source, writer.transport.abort):
                await link.open(reader, writer, self._greeter, calls=False, on_open=opened, lane_port=lane_port)
        except RemoteError as error:
            logger.warning("refused a stream: %s", error)
        except (OSError, EOFError, TimeoutError) as error:
            logger.debug("a stream from %s did not open: %r", source[-8:], error)
        else:
            await link.lost.wait()

    def _lost_incoming(self, link: Link, why: str) -> None:
        self._receive_queues.on_lost(link, why)
        self._end_lanes(link)

    # Lanes

    async def _supply_lanes(self, link: Link) -> None:
        round_trip_s = self._round_trip_s(link.peer)
        if link.via is None and not link.lost.is_set() and round_trip_s >= _LANES_ROUND_TRIP_S_MIN:
            self._lane_door.expect(link)
            supply = LaneSupply(link, self._lane_door, partial(self._hosts_of, link.peer))
            self._lane_supplies[link] = supply
            link.before_frame = supply.used
            await supply.begin(0.05 + 4.0 * round_trip_s)  # lanes open within two round trips

    def _round_trip_s(self, peer: PeerID) -> float:
        """Return the round trip to `peer`; 0: the peer is on this machine, or the round trip is unknown."""
        uplink = self._throttle.uplink
        return 0.0 if uplink is None else uplink.round_trip_s(peer)

    def _dial_lanes_back(self, link: Link, count: int) -> None:
        if link.via is None:
            self._lane_door.dial_back(link, partial(self._hosts_of, link.peer), count)

    def _end_lanes(self, link: Link) -> None:
        self._lane_door.forget(link)
        supply = self._lane_supplies.pop(link, None)
        if supply is not None:
            supply.close()

    def _count_lane(self, link: Link, lane: Lane, is_more: bool) -> None:
        self._lane_door.counted(is_more)
        if self._throttle.uplink is None or not link.sends:
            return
        if is_more:
            self._throttle.uplink.joined(link.peer, lane.name)
        else:
            self._throttle.uplink.left(lane.name)

    async def _hosts_of(self, peer: PeerID) -> tuple[str, ...]:
        return hosts_of(await self._seen_at(peer))

    def _close_excluded(self) -> None:
        for peer, queue in tuple(self._send_queues.items()):
            if self.members.is_excluded(peer):
                queue.cut("excluded from the run")
        self._receive_queues.cut(self.members.is_excluded)
        self._carried_calls.cut(self.members.is_excluded)
        if self._carrier is not None:
            self._carrier.cut(self.members.is_excluded)
        if not self._closing:
            task = asyncio.create_task(self._disconnect_excluded(), name="disconnect the excluded")
            self._dials.add(task)
            task.add_done_callback(self._dials.discard)

    async def _disconnect_excluded(self) -> None:
        for peer in filter(self.members.is_excluded, await self.connected()):
            self._addresses.pop(peer, None)
            await self._hang_up(peer)

    # Carriers

    def _make_carrier(self) -> Carrier | None:
        relay_bytes_per_s = self._throttle.relay_bytes_per_s
        if not relay_bytes_per_s:
            return None
        return Carrier(
            self.members,
            self._throttle,
            relay_bytes_per_s=relay_bytes_per_s,
            connected=self._directly_connected,
            open_stream=partial(self._open_stream_of, self._carried_name),
            find_connection=self._find_connection,
        )

    async def _directly_connected(self) -> dict[PeerID, list[str]]:
        return {peer: places for peer, places in (await self._connections()).items() if is_direct(places)}

    def _note_place(self, peer: PeerID, places: Sequence[str]) -> None:
        is_new = self._places.pop(peer, None) != tuple(places)
        if is_new:
            self._routes.seen(peer)
        else:
            self._routes.comes_over(peer)
        self._places[peer] = tuple(places)
        if len(self._places) > PEERS_MAX:
            del self._places[next(iter(self._places))]

    async def _call_over_carrier(self, peer: PeerID, request: bytes) -> bytes:
        reply = await self._carried_calls.call(peer, request)
        self._throttle.called(sent=len(request), received=len(reply))
        return reply

    async def _carry_calls(self, peer: PeerID) -> Streams:
        _, streams = await self._routes.carry(peer, "calls")
        return streams

    async def _take_carried(self, source: PeerID, carrier: PeerID, purpose: Purpose, streams: Streams) -> None:
        self._redialer.missed_by(source)
        if purpose == "calls":
            await self._carried_calls.take(source, streams)
        else:
            await self._take_frames(source, carrier, streams)

    def _move_frames(self, peer: PeerID) -> None:
        """Move the frames to `peer` from a carrier to the direct route (`SendQueue.move`)."""
        queue = self._send_queues.get(peer)
        if queue is not None and queue.via is not None:
            queue.move()

    # Addresses of peers

    async def _seen_at(self, peer: PeerID) -> tuple[str, ...]:
        return tuple((await self._connections()).get(peer, ()))

    async def _find_connection(self, peer: PeerID) -> None:
        """Tell the uplink which of the daemon's connections a stream to `peer` uses."""
        if self._throttle.uplink is not None:
            with suppress(TransportError, P2PDaemonError, OSError, EOFError):
                names, here = map(name_of, await self._seen_at(peer)), local_addresses()
                ways = [name for name in names if name is not None and name.split()[0] not in here]
                lanes = [name for link in self._lane_supplies if link.peer == peer for name in link.lane_names()]
                self._throttle.uplink.opened(peer, [*ways, *lanes])

    def _met(self, link: Link, hello: StreamHello) -> None:
        self._remember(link.peer, hello.addresses)

    def _remember(self, peer: PeerID, addresses: Sequence[str]) -> None:
        if addresses:
            self._addresses.pop(peer, None)
            self._addresses[peer] = tuple(addresses[:ADDRESSES_MAX])
            if len(self._addresses) > PEERS_MAX:
                del self._addresses[next(iter(self._addresses))]  # the peer with the oldest addresses

    async def _dial(self, peer: PeerID) -> bool:
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                return await self._redialer.dial(peer)
        except TimeoutError:
            return False

    async def _find_everyone(self) -> None:
        """Connect a new daemon to all known peers that answer within `_DIAL_TIMEOUT_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                await self._dial_everyone()

    async def _dial_everyone(self) -> bool:
        """Dial all known peers. Return True soon after the first success (other dials go on), False if all fail."""
        gate = asyncio.Semaphore(16)

        async def dial(peer: PeerID) -> bool:
            async with gate:
                return await self._redialer.dial(peer)

        waiting = {asyncio.create_task(dial(peer), name="dial") for peer in tuple(self._addresses)}
        self._dials |= waiting
        for task in waiting:
            task.add_done_callback(self._dials.discard)
        reached = 0
        while waiting:
            patience_s = 0.5 if reached else None  # after the first answer, wait half a second for the next
            done, waiting = await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            reached += sum(task.result() for task in done if not task.cancelled())
        return reached > 0

    async def _keep_connected(self) -> None:
        """Dial all known peers again whenever all connections are lost. Warn once for each such loss."""
        was_connected = False
        while True:
            await asyncio.sleep(_LONELY_S)
            if await self.connected():
                was_connected = True
            elif self._addresses and not await self._dial_everyone():
                if was_connected:
                    logger.warning("none of the %d known peers can be reached now", len(self._addresses))
                was_connected = False


class _CallFailedError(Exception):
    """Tells the caller only that we could not answer, not why."""


def dialable(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the valid ones of these peer addresses: even addresses on our own disk may come from strangers."""
    kept = []
    for address in addresses:
        with suppress(TransportError):
            _by_peer((address,))
            kept.append(address)
    return tuple(kept)


def _by_peer(addresses: Sequence[str]) -> dict[PeerID, list[str]]:
    """Return peer -> addresses without `/p2p/…`. Raises: TransportError: an address is invalid or names no peer."""
    found: dict[PeerID, list[str]] = {}
    for address in addresses:
        where, peer = split_address(address)
        try:
            public_key_of(PeerID(peer))
            Multiaddr(where)
        except ValueError as error:
            raise TransportError(f"{address!r} is not the address of a peer") from error
        found.setdefault(PeerID(peer), []).append(where)
    return found


def _may_repeat(error: P2PDaemonError) -> bool:
    return any(text in str(error) for text in _NOT_DIALLED)


def _reason(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, P2PHandlerError):
        return "it failed to answer"
    if "protocols not supported" in text:
        return "it does not take part in this run, or speaks another version of the protocol"
    if "failed to find any peer" in text or "routing: not found" in text:
        return "nobody knows its address"
    if "failed to dial" in text:
        return "none of its addresses answers"
    return first_line(error)
