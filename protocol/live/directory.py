"""The port `Directory` on hivemind's DHT node, in our event loop and on the transport's network daemon.

Each restart of the daemon makes a new DHT node, with the id and the records of the former node. The new node finds its
neighbours through the peers that the transport knows.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID as HivemindPeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS

from shoal.protocol.ending import end_tasks
from shoal.protocol.errors import TransportError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import RECORD_BYTES_MAX, RECORD_EXPIRES_S_MAX
from shoal.protocol.live import hivemind_guard
from shoal.protocol.live.record_store import KeyRule, KeyRules, NothingCached, RecordStore
from shoal.protocol.live.transport import LiveTransport

logger = logging.getLogger(__name__)

_GET_TIMEOUT_S = 10.0
"""Time limit of a search. Otherwise a record that hivemind cannot merge would make the search run for ever."""
_JOIN_AGAIN_S = 20.0


class LiveDirectory:
    """Our DHT node. Call `start` after the transport has started and dialled its initial peers."""

    def __init__(self, transport: LiveTransport, accept: Mapping[str, KeyRule] | None) -> None:
        self._transport = transport
        self._rules: KeyRules | None = None
        if accept is not None:
            self._rules = {DHTID.generate(source=self._key(key)).to_bytes(): rule for key, rule in accept.items()}
        self._node: Any = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_open = True
        self._has_met = asyncio.Event()
        """Set once the node has looked for neighbours: before that it finds no records, so `store` and `get` wait."""

    @classmethod
    async def start(cls, transport: LiveTransport, *, accept: Mapping[str, KeyRule] | None = None) -> "LiveDirectory":
        """Join the directory through the peers to which `transport` is connected; without peers, begin a new one.

        Args:
            accept: key -> rule for the records that this node stores, forwards and reads; records of other keys are
                refused. None: any record is accepted. All peers must have the same rules.
        """
        self = cls(transport, accept)
        await transport.daemon.add_setup(self._set_up)
        transport.daemon.on_restart.append(self._meet_connected)  # after the transport's own callback, which dials them
        await self._meet_connected()
        self._keeper = asyncio.create_task(self._keep_joined(), name="stay in the directory")
        return self

    @property
    def num_neighbours(self) -> int:
        """Number of nodes in the DHT's routing table."""
        return len(self._node.protocol.routing_table.uid_to_peer_id) if self._node is not None else 0

    async def store(self, key: str, subkey: str, value: bytes, *, expires_in_s: float) -> bool:
        """Store a record; return True if a node accepted it.

        Raises: ValueError: `value` or `expires_in_s` is over the limit. TransportError: the directory is closed.
        """
        if len(value) > RECORD_BYTES_MAX:
            raise ValueError(f"a record of {len(value)} bytes is larger than the {RECORD_BYTES_MAX} that nodes accept")
        if not 0 < expires_in_s <= RECORD_EXPIRES_S_MAX:
            raise ValueError(f"a record cannot expire in {expires_in_s} s")
        node = await self._ready()
        # hivemind keeps the copy that expires later, so a newer record must not expire before the one it replaces
        stored: bool = await node.store(self._key(key), value, time.time() + expires_in_s, subkey=subkey)
        return stored

    async def get(self, key: str) -> Mapping[str, bytes]:
        """Return subkey -> value of `key`'s unexpired records; none if it takes ten seconds. Raises: TransportError."""
        node = await self._ready()
        try:
            async with asyncio.timeout(_GET_TIMEOUT_S):
                found = await node.get(self._key(key), latest=True)
        except TimeoutError:
            logger.warning("the directory gave no answer about %r in %g s", key, _GET_TIMEOUT_S)
            return {}
        if found is None or not isinstance(found.value, dict):
            return {}
        now_s = time.time()
        return {
            subkey: record.value
            for subkey, record in found.value.items()
            if isinstance(subkey, str) and isinstance(record.value, bytes) and record.expiration_time > now_s
        }

    async def join(self) -> int:
        """Look for neighbours among the connected peers. Return the number of neighbours."""
        node = await self._ready()
        await self._meet(node, await self._transport.connected())
        return self.num_neighbours

    async def _keep_joined(self) -> None:
        """Look for neighbours at intervals. Peers that started without each other have separate directories until one
        of them finds the other.

        hivemind waits for replies with `asyncio.wait_for`, which in Python 3.11 drops a cancellation that comes
        together with the reply. So this loop also checks `_is_open`, to end after `close`.
        """
        while self._is_open:
            await asyncio.sleep(_JOIN_AGAIN_S)
            try:
                await self.join()
            except Exception as error:  # the daemon has died: the next node joins by itself
                logger.debug("could not look for neighbours: %r", error)

    async def close(self) -> None:
        """Leave the directory; the transport stays open. Safe to call twice."""
        self._is_open = False
        self._transport.daemon.remove_setup(self._set_up)
        with suppress(ValueError):
            self._transport.daemon.on_restart.remove(self._meet_connected)
        self._has_met.set()
        await end_tasks(self._keeper)
        if self._node is not None:
            node, self._node = self._node, None
            node.is_alive = False
            await end_tasks(node.cache_refresh_task)
            if not self._transport.daemon.is_open:
                return  # the handlers are gone with the daemon
            try:
                async with asyncio.timeout(5.0):
                    await node.shutdown()
            except Exception as error:  # the daemon may die in between
                logger.debug("the directory's handlers could not be removed: %r", error)

    def _key(self, key: str) -> str:
        return f"{self._transport.run}/{key}"

    async def _ready(self) -> Any:
        await self._transport.daemon.p2p()
        await self._has_met.wait()
        if self._node is None:
            raise TransportError("the directory is closed")
        return self._node

    async def _set_up(self, p2p: Any) -> None:
        former = self._node
        node = await DHTNode.create(
            p2p=p2p,
            node_id=former.node_id if former is not None else None,
            record_validator=hivemind_guard.RecordGate(self._rules),
            authorizer=hivemind_guard.MemberPass(self._transport.members),
            cache_locally=False,  # every `get` asks other nodes for the latest records anyway
            cache_nearest=0,  # hivemind would store whole dictionaries with another expiry
        )
        node.protocol.storage = RecordStore(self._rules, keys_max=20_000)
        node.protocol.cache = NothingCached()
        if former is not None:
            former.is_alive = False
            node.protocol.storage = former.protocol.storage
        self._node = node
        self._has_met.clear()

    async def _meet_connected(self) -> None:
        node = self._node
        try:
            if node is not None:
                await self._meet(node, await self._transport.connected())
        finally:
            if node is self._node:
                self._has_met.set()

    async def _meet(self, node: Any, peers: set[PeerID] | frozenset[PeerID]) -> None:
        known = set(node.protocol.routing_table.peer_id_to_uid)
        strangers = [peer for peer in map(HivemindPeerID.from_base58, sorted(peers)) if peer not in known]
        met = await asyncio.gather(*(node.protocol.call_ping(peer) for peer in strangers))
        if any(met):
            await node.find_nearest_nodes([node.node_id])
            await self._compare_clocks(node, [peer for peer, uid in zip(strangers, met, strict=True) if uid])

    async def _compare_clocks(self, node: Any, peers: list[HivemindPeerID]) -> None:
        """Log an error if our clock is over 3 s off those of all peers asked: then records expire wrongly."""
        differences = []
        for peer in peers[:3]:
            difference = await _clock_difference_s(node.protocol, peer)
            if difference is not None:
                differences.append((abs(difference), difference, peer.to_base58()))
        if differences and min(differences)[0] > MAX_DHT_TIME_DISCREPANCY_SECONDS:
            _, ours_ahead_s, peer_id = min(differences)
            logger.error(
                "this machine's clock is %.1f s %s that of peer %s: its records lapse too %s for the others, and "
                "theirs too %s for it; set the clock (NTP)",
                abs(ours_ahead_s),
                "ahead of" if ours_ahead_s > 0 else "behind",
                peer_id[-8:],
                *(("late", "early") if ours_ahead_s > 0 else ("early", "late")),
            )


async def _clock_difference_s(protocol: DHTProtocol, peer: HivemindPeerID) -> float | None:
    """Return how far our clock is ahead of the peer's, accurate to half a round trip; None: it gave no answer."""
    sent_s = time.time()
    try:
        async with asyncio.timeout(protocol.wait_timeout):
            reply = await protocol.get_stub(peer).rpc_ping(dht_pb2.PingRequest(), timeout=protocol.wait_timeout)
    except Exception as error:  # any reply of a foreign node
        logger.debug("no time from %s: %r", peer, error)
        return None
    return (sent_s + time.time()) / 2 - float(reply.dht_time)
