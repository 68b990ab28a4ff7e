"""Keeps on disk the peers met in a run: a restart then finds a peer even if the invite's addresses are dead.

The file is `RUN/known_peers.json` in the peer's folder: newest first, bounded, replaced as a whole. If an address now
belongs to another peer, libp2p's handshake fails, which does no harm.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from shoal.deploy.state import places
from shoal.protocol.durable import replace_file
from shoal.protocol.identity import PeerID
from shoal.protocol.invite import Invite, split_address, worth_telling
from shoal.protocol.limits import ADDRESSES_MAX
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.ports import Clock, Disk

if TYPE_CHECKING:
    from shoal.protocol.live.transport import LiveTransport

logger = logging.getLogger(__name__)

FILE_NAME = "known_peers.json"
KEPT_MAX = 64
TRIED_MAX = 16
"""The most known peers to dial: if none of the 16 that were seen last is up, the whole run is likely down."""


class KnownPeer(msgspec.Struct, frozen=True):
    peer: PeerID
    addresses: tuple[str, ...]
    """The peer's multiaddrs with `/p2p/…`, as it announced them."""
    seen_s: float
    """When this peer was last connected to that one, in seconds since 1970."""


class _File(msgspec.Struct, frozen=True):
    peers: tuple[KnownPeer, ...] = ()


class KnownPeers:
    """The file of peers met in one run. Calls block on the disk."""

    def __init__(self, disk: Disk, run: str) -> None:
        self._disk = disk
        self._path = PurePosixPath(run, FILE_NAME)

    def read(self) -> tuple[KnownPeer, ...]:
        """Return the known peers, newest first; none if the file is missing or damaged, which is logged."""
        try:
            return msgspec.json.decode(self._disk.read(self._path), type=_File).peers
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("%s cannot be read and is not used: %s", self._disk.where(self._path), error)
        return ()

    def note(self, seen: Mapping[PeerID, Sequence[str]], *, now_s: float) -> None:
        """Write the peers `seen`, connected now, and their addresses to the file. Raises: OSError: the disk fails."""
        content = msgspec.json.encode(_File(merge(self.read(), seen, now_s=now_s)))
        replace_file(self._disk, self._path, msgspec.json.format(content))


def all_known(root: Path, run: str) -> tuple[str, ...]:
    """Return the addresses of the `TRIED_MAX` peers of the run that this user's peers met last, newest first."""
    paths = [*root.glob(f"*/*/{run}/{FILE_NAME}"), *root.glob(f"*/*/*/{run}/{FILE_NAME}")]
    files = (KnownPeers(LiveDisk(path.parent.parent), run) for path in paths)
    known = sorted((peer for file in files for peer in file.read()), key=lambda peer: -peer.seen_s)
    return tuple(dict.fromkeys(address for peer in known[:TRIED_MAX] for address in peer.addresses))


def ways_to(invite: Invite) -> tuple[str, ...]:
    """Return addresses for a command to dial: the invite's, then those of peers that this user's peers met last."""
    return tuple(dict.fromkeys((*invite.addresses, *all_known(places.state_root(), invite.run))))


def merge(known: Sequence[KnownPeer], seen: Mapping[PeerID, Sequence[str]], *, now_s: float) -> tuple[KnownPeer, ...]:
    """Return the peers `seen` now, then those of `known` seen in the last 30 days, newest first, KEPT_MAX at most."""
    fresh = [KnownPeer(peer, tuple(seen[peer])[:ADDRESSES_MAX], now_s) for peer in sorted(seen) if seen[peer]]
    former = [peer for peer in known if peer.peer not in seen and now_s - peer.seen_s < 30 * 24 * 3600.0]
    former.sort(key=lambda peer: (-peer.seen_s, peer.peer))
    return (*fresh, *former)[:KEPT_MAX]


def whom_to_try(invited: Sequence[str], known: Sequence[KnownPeer], *, me: PeerID) -> tuple[str, ...]:
    """Return the addresses to dial: the invite's, then those of the `TRIED_MAX` peers seen last, but none of `me`."""
    remembered = [address for peer in known[:TRIED_MAX] for address in peer.addresses]
    return tuple(address for address in dict.fromkeys((*invited, *remembered)) if split_address(address)[1] != me)


def whom_to_name(own: Sequence[str], others: Mapping[PeerID, Sequence[str]], *, num_peers: int) -> tuple[str, ...]:
    """Return addresses for an invite that names up to `num_peers` peers: our own, and one of each other peer.

    Peers that are reachable from farther away come first. A peer with only a loopback address is left out unless our
    address is a loopback address too.
    """
    ours = worth_telling(own)
    best = {peer: worth_telling(addresses)[:1] for peer, addresses in sorted(others.items())}
    ranked = worth_telling((*ours[:1], *(address for told in best.values() for address in told)))
    guests = [address for address in ranked if address not in ours][: max(num_peers - 1, 0)]
    return (*ours[: max(ADDRESSES_MAX - len(guests), 1)], *guests)[:ADDRESSES_MAX]


async def keep(
    file: KnownPeers,
    transport: "LiveTransport",
    clock: Clock,
    *,
    run_blocking: Callable[[Callable[[], object]], Awaitable[object]],
) -> None:
    """Note in the file, until cancelled, which peers are connected. A disk failure is only logged."""
    written: dict[PeerID, Sequence[str]] = {}
    written_s = clock.now_s()
    while True:
        places, connected = transport.known(), await transport.connected()
        seen = {peer: places[peer] for peer in connected if peer in places}
        if seen and (seen != written or clock.now_s() - written_s >= 300.0):  # the set of peers changes rarely
            now_s = clock.wall_s()
            try:
                await run_blocking(lambda seen=seen, now_s=now_s: file.note(seen, now_s=now_s))  # type: ignore[misc]
                written, written_s = dict(seen), clock.now_s()
            except OSError as error:
                logger.warning("the peers of the run could not be written down: %s", error)
        await asyncio.sleep(5.0)
