"""Watches the daemon's connections, closes the dead ones, and dials the peers of the run until they answer.

`../reconnection.py` decides; this file observes (the daemon's list, the kernel's sockets, this machine's addresses and
clocks), closes and dials. Calls that would make the daemon dial an absent peer wait here instead: the daemon's own
dials last for five seconds, and after a failure libp2p does not dial that address again for five seconds, then six,
nine, fourteen.

A peer that was away dials the other peers and tells each that it is back. Another peer's daemon may go on using an
older connection to the returning peer that only looks alive. So if the other peer has several connections to the
returning peer and has noticed no loss, it closes all of them, and the returning peer dials once more.
"""

import asyncio
import logging
import random
import re
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, TypeVar

from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID as HivemindPeerID
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from shoal.protocol.ending import end_tasks
from shoal.protocol.errors import TransportError
from shoal.protocol.identity import PeerID
from shoal.protocol.invite import is_open, only_direct, split_address
from shoal.protocol.limits import PEERS_MAX
from shoal.protocol.live.daemon import Daemon
from shoal.protocol.live.listen import local_addresses
from shoal.protocol.live.tcp_queues import name_of, ways_of
from shoal.protocol.reconnection import DialOutcome, Reconnection, Way, goes_first

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S: Final = 0.5
_ANSWER_TIMEOUT_S: Final = 2.0
_AFTER_THE_REPLY_S: Final = 0.1
_CLOSES: Final = b"closes"
_NOT_DIALLED: Final = ("dial backoff",)
_SILENT: Final = ("i/o timeout", "deadline exceeded", "unreachable", "no route to host")
_REFUSED: Final = ("connection refused", "peer id mismatch")
"""Parts of the daemon's error messages which say that an address refused the dial. The dial counts as refused only if
no other address was silent (`_SILENT`): the refusing address may by now belong to another machine, or to us. Any other
error counts as no answer, since it may be our own fault."""
_FAILURES = (TransportError, P2PDaemonError, OSError, EOFError, ValueError)
_WHERE: Final = re.compile(r"^/ip([46])/([^/]+)/tcp/(\d+)")
_ON_THIS_MACHINE: Final = Way(is_owed=False, silent_s=0.0, local="")
"""Stands for the figures of every connection within this machine, which then never counts as dead: the kernel answers
for both ends, so the true figures would never change."""
_BOOT_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that also counts while the machine is suspended, if the system has one."""


class Redialer:
    """Keeps one daemon connected to the peers that `want` names.

    Args:
        addresses: returns a peer's last known multiaddrs, with or without `/p2p/…`.
        known: returns all peers with known addresses.
        again: name of the handler to which a peer that was away reports that it is back.
    """

    def __init__(
        self,
        daemon: Daemon,
        *,
        me: PeerID,
        addresses: Callable[[PeerID], Sequence[str]],
        known: Callable[[], Sequence[PeerID]],
        again: str,
    ) -> None:
        self._daemon, self._addresses, self._known, self._again = daemon, addresses, known, again
        self._me = me
        self._core = Reconnection(self._goes_first, random.Random())  # random numbers are used for jitter only
        self._dials: dict[PeerID, tuple[tuple[str, ...], asyncio.Task[DialOutcome]]] = {}
        """Peer -> (addresses that are dialled, task of the dial)."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing: dict[PeerID, asyncio.Task[None]] = {}
        self._news: dict[PeerID, asyncio.Event] = {}
        """Absent peer -> event for which calls to it wait. Any news of the peer sets the event and removes it here."""
        self._drops: dict[PeerID, int] = {}
        self._wake = asyncio.Event()
        self._is_closed = False
        self._local, self._gone = local_addresses(), frozenset[str]()
        self._moved_until_s = 0.0

    def start(self) -> None:
        self._spawn(self._watch(), "stay connected to the plan")

    async def close(self) -> None:
        self._is_closed = True
        for peer in tuple(self._news):
            self._tell(peer)
        await end_tasks(*self._tasks)

    def want(self, peers: Sequence[PeerID]) -> None:
        """Stay connected to these peers from now on: a lost peer is dialled until it answers."""
        self._core.want(peers, _now_s())

    def heard(self, peer: PeerID) -> None:
        """Record that data of the peer has arrived."""
        self._core.heard(peer)
        if self._core.is_absent(peer):
            self._wake.set()

    def failed(self, peer: PeerID, why: str) -> None:
        """Record a failed call to the peer. Args: why: the daemon's error; empty: there was no answer."""
        if not why:
            self._core.unanswered(peer)
        elif outcome_of(why) is DialOutcome.REFUSED:
            self._core.refused(peer, _now_s())

    def missed_by(self, peer: PeerID) -> None:
        """Record that the peer reached us over a third peer: it has no connection to us, whatever our daemon shows."""
        if self._core.missed_by(peer, _now_s()):
            logger.info("%s has lost the connection with us: it is closed here, too", peer[-8:])
            self.drop(peer)
            self._dial(peer)

    def drops(self, peer: PeerID) -> int:
        """Return how often we have closed the peer's connections. If this number rises during a call, the call may have
        failed for that reason."""
        return self._drops.get(peer, 0)

    async def register(self, p2p: Any) -> None:
        """Register the handler `again` at a new daemon, and let calls to absent peers wait in `reach`."""
        await p2p._client.add_unary_handler(self._again, self._answer)
        call = p2p._client.call_unary_handler

        async def guarded(peer_id: HivemindPeerID, proto: str, data: bytes) -> bytes:
            await self.reach(PeerID(peer_id.to_base58()))
            reply: bytes = await call(peer_id, proto, data)
            return reply

        p2p._client.call_unary_handler = guarded

    async def reach(self, peer: PeerID) -> None:
        """Wait up to five seconds until an absent peer is connected again; return at once for other peers.

        Raises: P2PDaemonError: the peer does not come back; the error's text tells the caller not to dial again.
        """
        try:
            # A caller that fetches state asks another peer after five seconds; heartbeats have shorter limits.
            async with asyncio.timeout(5.0):
                while self._core.is_absent(peer) and self._addresses(peer):
                    if self._is_closed:
                        raise P2PDaemonError("this peer is closing")
                    if not self._core.may_be_there(peer):
                        raise P2PDaemonError("none of its addresses answers")
                    news = self._news.setdefault(peer, asyncio.Event())
                    if self._core.is_untried(peer):
                        self._dial(peer)
                    await news.wait()
        except TimeoutError as error:
            raise P2PDaemonError("nothing comes back from it") from error

    async def dial(self, peer: PeerID) -> bool:
        """Dial the peer; wait while the daemon restarts. Return True if the peer is connected."""
        if not self._addresses(peer):
            return False
        return await asyncio.shield(self._dial(peer)) is DialOutcome.REACHED

    def drop(self, peer: PeerID) -> "asyncio.Task[None]":
        """Close all connections to the peer, dead or alive."""
        if len(self._drops) >= PEERS_MAX:
            self._drops.clear()
        self._drops[peer] = self.drops(peer) + 1
        task = self._closing.get(peer)
        if task is None:
            task = self._closing[peer] = self._spawn(self._close(peer), f"disconnect {peer[-8:]}")
        return task

    async def _close(self, peer: PeerID) -> None:
        try:
            with suppress(*_FAILURES):
                await (await self._daemon.p2p())._client.disconnect(hivemind_id(peer))
        finally:
            self._closing.pop(peer, None)
            self._wake.set()

    def _goes_first(self, peer: PeerID) -> bool:
        ours, theirs = is_open(map(str, self._daemon.visible)), is_open(self._addresses(peer))
        return goes_first(self._me, peer, ours=ours, theirs=theirs)

    # --- watching ---

    async def _watch(self) -> None:
        took_s, slept_s = 0.0, _slept_s()
        while True:
            try:
                p2p = await self._daemon.p2p()
            except TransportError:
                return  # closed
            began_s = _now_s()
            with suppress(TimeoutError):
                # With hundreds of connections looking takes long: look less often, for a fiftieth of a core at most.
                async with asyncio.timeout(max(_LOOK_S, took_s / 0.02)):
                    await self._wake.wait()
            self._wake.clear()
            was_suspended, slept_s = _slept_s() - slept_s >= _LOOK_S, _slept_s()
            spent_s = time.thread_time()
            try:
                await self._look(p2p, stood_still_s=_now_s() - began_s, was_suspended=was_suspended)
            except _FAILURES as error:
                logger.debug("the daemon's connections could not be listed: %r", error)
                continue
            took_s = time.thread_time() - spent_s
            if _now_s() < self._moved_until_s:
                await self._daemon.refresh()

    async def _look(self, p2p: Any, *, stood_still_s: float, was_suspended: bool) -> None:
        infos, local = await p2p.list_peers(), local_addresses()
        if local != self._local:
            self._gone = (self._gone | self._local) - local
            # The daemon itself looks for new addresses every five seconds, so ask it for them until it has.
            self._local, self._moved_until_s = local, _now_s() + 12.0
        direct = (address for info in infos for address in only_direct(map(str, info.addrs)))
        names = {address: name for address in direct if (name := name_of(address)) is not None}
        ends_here = {address for address, name in names.items() if name.split()[0] in local}
        ways = self._ways() if len(ends_here) < len(names) else {}
        connections: dict[PeerID, dict[str, Way | None]] = {}
        for info in infos:
            of_peer = connections.setdefault(PeerID(info.peer_id.to_base58()), {})
            for address in map(str, info.addrs):
                if address in ends_here:
                    of_peer[address] = _ON_THIS_MACHINE
                else:
                    found: Mapping[str, Way | None] = ways.get(names.get(address, ""), {})
                    of_peer.update(found or {address: None})
        todo = self._core.look(
            connections,
            frozenset(self._known()),
            _now_s(),
            gone=self._gone,
            stood_still_s=stood_still_s,
            was_suspended=was_suspended,
        )
        for peer in todo.drop:
            logger.info("the connection to %s is dead: it is closed", peer[-8:])
            self.drop(peer)
        for peer in todo.dial:
            self._dial(peer)
        for peer in [peer for peer in self._news if not self._core.is_absent(peer)]:
            self._tell(peer)

    def _tell(self, peer: PeerID) -> None:
        if peer in self._news:
            self._news.pop(peer).set()

    def _ways(self) -> Mapping[str, Mapping[str, Way]]:
        """Return the daemon's connections: name -> kernel's id -> kernel's figures; empty: the kernel shows none."""
        try:
            return ways_of(self._daemon.process_id)
        except OSError as error:
            logger.debug("the kernel does not show the connections: %s", error)
            return {}

    # --- dialling ---

    def _dial(self, peer: PeerID) -> "asyncio.Task[DialOutcome]":
        """Return the running dial of this peer, if it uses the peer's present addresses; else start a new dial."""
        where = tuple(self._addresses(peer))
        old = self._dials.get(peer)
        if old is not None and old[0] == where and not old[1].done():
            return old[1]
        task = self._spawn(self._try(peer, where), f"dial {peer[-8:]}")
        self._dials[peer] = where, task
        task.add_done_callback(lambda done: self._dial_ended(peer, done))
        return task

    def _dial_ended(self, peer: PeerID, task: "asyncio.Task[DialOutcome]") -> None:
        if peer in self._dials and self._dials[peer][1] is task:
            del self._dials[peer]

    async def _try(self, peer: PeerID, where: Sequence[str]) -> DialOutcome:
        while peer in self._closing:  # the daemon would reuse the old connection instead of dialling
            await asyncio.shield(self._closing[peer])
        began_s, was_absent = _now_s(), self._core.is_absent(peer)
        patience_s, outcome = self._core.dials(peer), None
        try:
            outcome = await self._connect(await self._daemon.p2p(), peer, where, patience_s)
        except TransportError:
            pass  # closed
        finally:
            known = self._core.dialled(peer, outcome, began_s=began_s, now_s=_now_s())
            self._tell(peer)
        if known is DialOutcome.REACHED and was_absent:
            logger.info("connected to %s again", peer[-8:])
            self._spawn(self._say_again(peer), f"tell {peer[-8:]} that we are back")
        return known

    async def _connect(self, p2p: Any, peer: PeerID, where: Sequence[str], patience_s: int) -> DialOutcome | None:
        open_ways = [place for place in (split_address(text)[0] for text in where) if _has_route(place)]
        if not open_ways:
            await asyncio.sleep(0.5)
            return None
        try:
            async with asyncio.timeout(patience_s + _ANSWER_TIMEOUT_S):
                await _ask_to_connect(p2p, peer, open_ways, patience_s)
            return DialOutcome.REACHED
        except TimeoutError:
            return DialOutcome.NO_ANSWER
        except Exception as error:  # addresses may come from strangers, and hivemind's parser may raise any error
            logger.debug("cannot connect to %s: %r", peer[-8:], error)
            return outcome_of(str(error))

    # --- again ---

    async def _answer(self, request: bytes, caller: HivemindPeerID) -> bytes:
        """Answer a caller that had lost us. If we still have older connections to it, close all connections; say so."""
        peer = PeerID(caller.to_base58())
        infos = await (await self._daemon.p2p()).list_peers()
        addresses = [str(address) for info in infos if info.peer_id == caller for address in info.addrs]
        count = len(only_direct(addresses))
        if count > 1 and not self._core.is_fresh(peer, _now_s()):
            self._spawn(self._close_all(peer), f"close what {peer[-8:]} has left")
            return _CLOSES
        return b""

    async def _close_all(self, peer: PeerID) -> None:
        await asyncio.sleep(_AFTER_THE_REPLY_S / 2)
        self._core.lost(peer, _now_s(), pause_s=1.0)  # the caller will dial us
        await self.drop(peer)

    async def _say_again(self, peer: PeerID) -> None:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                client = (await self._daemon.p2p())._client
                answer = await client.call_unary_handler(hivemind_id(peer), self._again, b"")
        except (*_FAILURES, TimeoutError) as error:
            logger.debug("%s did not say whether it closes old connections: %r", peer[-8:], error)
            return
        if answer == _CLOSES:
            await asyncio.sleep(_AFTER_THE_REPLY_S)
            self._core.lost(peer, _now_s())
            await self.drop(peer)
            self._dial(peer)

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _ask_to_connect(p2p: Any, peer: PeerID, where: Sequence[str], patience_s: int) -> None:
    """Connect as hivemind's `connect` does, with a time limit for the daemon.

    Raises: P2PDaemonError; OSError.
    """
    reader, writer = await p2p._client.control.daemon_connector.open_connection()
    try:
        request = p2pd_pb2.ConnectRequest(
            peer=hivemind_id(peer).to_bytes(),
            addrs=[Multiaddr(place).to_bytes() for place in where],
            timeout=patience_s,
        )
        await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request))
        response = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, response)
    finally:
        writer.close()
    raise_if_failed(response)


def outcome_of(words: str) -> DialOutcome | None:
    """Return the outcome that a daemon's error about a dial describes. None: libp2p still pauses and did not dial."""
    if any(word in words for word in _NOT_DIALLED):
        return None
    is_refused = any(word in words for word in _REFUSED) and not any(word in words for word in _SILENT)
    return DialOutcome.REFUSED if is_refused else DialOutcome.NO_ANSWER


def _has_route(place: str) -> bool:
    """True if this machine has a route to a multiaddr. Without one a dial fails at once and delays the next dial."""
    match = _WHERE.match(place)
    if match is None:
        return True
    family = socket.AF_INET if match[1] == "4" else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((match[2], int(match[3]) or 1))
    except (OSError, OverflowError):
        return False
    return True


@lru_cache(maxsize=PEERS_MAX)
def hivemind_id(peer: PeerID) -> HivemindPeerID:
    """Return the peer's ID as hivemind's type."""
    return HivemindPeerID.from_base58(peer)


def _slept_s() -> float:
    """Return the seconds for which the machine was suspended since it booted; only differences are meaningful."""
    return time.clock_gettime(_BOOT_CLOCK) - time.clock_gettime(time.CLOCK_MONOTONIC)


def _now_s() -> float:
    return time.monotonic()
