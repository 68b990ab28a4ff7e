"""Whom a peer remembers, and that no damage to the file keeps it out of the run."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.deploy.state import known_peers
from shoal.deploy.state.known_peers import (
    KEPT_MAX,
    TRIED_MAX,
    KnownPeer,
    KnownPeers,
    keep,
    merge,
    whom_to_name,
    whom_to_try,
)
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.sim.disk import PowerCut, SimDisk
from shoal.protocol.sim.loop import run

PEERS = [Identity(number.to_bytes(32, "big")).peer_id for number in range(KEPT_MAX + 10)]
DAY_S = 24 * 3600.0


def at(peer: int, where: str = "/ip4/84.12.33.7/tcp/4001") -> str:
    return f"{where}/p2p/{PEERS[peer]}"


def seen(*peers: int) -> dict[PeerID, tuple[str, ...]]:
    return {PEERS[peer]: (at(peer),) for peer in peers}


def test_what_is_written_is_read_back_newest_first(tmp_path: Path) -> None:
    file = KnownPeers(LiveDisk(tmp_path), "run")
    assert file.read() == ()
    file.note(seen(1, 2), now_s=100.0)
    file.note(seen(2, 3), now_s=200.0)
    assert {PEERS.index(peer.peer): peer.seen_s for peer in file.read()} == {2: 200.0, 3: 200.0, 1: 100.0}
    assert file.read()[-1] == KnownPeer(PEERS[1], (at(1),), 100.0)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [known_peers.FILE_NAME]


@pytest.mark.parametrize("content", [b"", b"{", b'{"peers": 3}', b"\xff\xfe", b'{"peers": [{"peer": 1}]}'])
def test_a_damaged_file_is_nobody_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / known_peers.FILE_NAME).write_bytes(content)
    file = KnownPeers(LiveDisk(tmp_path), "run")
    assert file.read() == ()
    file.note(seen(1), now_s=1.0)
    assert [peer.peer for peer in file.read()] == [PEERS[1]]


@pytest.mark.parametrize("seed", range(8))
def test_a_power_cut_leaves_the_old_or_the_new(seed: int) -> None:
    for after in range(12):
        disk = SimDisk(random.Random(seed))
        file = KnownPeers(disk, "run")
        file.note(seen(1), now_s=1.0)
        disk.cut_power(after=after)
        try:
            file.note(seen(2), now_s=2.0)
        except PowerCut:
            file = KnownPeers(disk.crash(), "run")
        else:
            break
        assert [PEERS.index(peer.peer) for peer in file.read()] in ([1], [2, 1])
    else:
        pytest.fail("the cut came before the end every time")


def test_the_many_and_the_old_are_forgotten() -> None:
    crowd = merge((), seen(*range(KEPT_MAX + 5)), now_s=10.0)
    assert len(crowd) == KEPT_MAX
    later = merge(crowd, seen(KEPT_MAX + 6), now_s=10.0 + 29 * DAY_S)
    assert later[0].peer == PEERS[KEPT_MAX + 6]
    assert len(later) == KEPT_MAX
    assert [peer.peer for peer in merge(later, seen(1), now_s=10.0 + 31 * DAY_S)] == [PEERS[1], PEERS[KEPT_MAX + 6]]


def test_the_invites_addresses_come_first_and_we_do_not_dial_ourselves() -> None:
    known = [KnownPeer(PEERS[peer], (at(peer), at(peer, "/ip4/10.0.0.1/tcp/1")), 1.0) for peer in range(30)]
    tried = whom_to_try([at(5), at(40)], known, me=PEERS[3])
    assert tried[:2] == (at(5), at(40))
    assert len(set(tried)) == len(tried)
    assert not any(PEERS[3] in address for address in tried)
    assert len({address.rpartition("/")[2] for address in tried}) == TRIED_MAX  # 16 known but us, and the invite's 40


def test_an_invite_names_ours_and_one_address_each_of_others() -> None:
    own = [at(0, "/ip4/127.0.0.1/tcp/1"), at(0, "/ip4/192.168.1.2/tcp/1")]
    others = {
        PEERS[1]: [at(1, "/ip4/127.0.0.1/tcp/2")],
        PEERS[2]: [at(2, "/ip4/192.168.1.3/tcp/2")],
        PEERS[3]: [at(3, "/ip4/127.0.0.1/tcp/2"), at(3)],
    }
    assert whom_to_name(own, others, num_peers=3) == (own[1], at(3), others[PEERS[2]][0])
    assert whom_to_name(own, others, num_peers=1) == (own[1],)
    assert whom_to_name(own[:1], {PEERS[1]: others[PEERS[1]]}, num_peers=3) == (own[0], others[PEERS[1]][0])
    many = {PEERS[peer]: [at(peer)] for peer in range(1, 20)}
    assert len(whom_to_name(own, many, num_peers=20)) == 8


class Crowd:
    def __init__(self) -> None:
        self.places: dict[PeerID, tuple[str, ...]] = {}
        self.there: set[PeerID] = set()

    def known(self) -> dict[PeerID, tuple[str, ...]]:
        return self.places

    async def connected(self) -> set[PeerID]:
        return self.there


class LoopTime:
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    wall_s = now_s


async def inline(work: Callable[[], object]) -> object:
    return work()


def test_who_is_connected_is_kept_and_a_full_disk_is_survived() -> None:
    disk, crowd = SimDisk(random.Random(0)), Crowd()
    file = KnownPeers(disk, "run")

    async def main() -> None:
        clock = LoopTime()
        keeping = asyncio.create_task(keep(file, crowd, clock, run_blocking=inline))
        await asyncio.sleep(6)
        assert file.read() == ()
        crowd.places, crowd.there = {**seen(1, 2), PEERS[3]: (at(3),)}, {PEERS[1], PEERS[4]}
        await asyncio.sleep(6)
        assert [peer.peer for peer in file.read()] == [PEERS[1]]  # 2 and 3 are only heard of, where 4 is nobody knows
        disk.limit(0)
        crowd.there = {PEERS[1], PEERS[2]}
        await asyncio.sleep(6)
        disk.limit(None)
        await asyncio.sleep(6)
        assert {peer.peer for peer in file.read()} == {PEERS[1], PEERS[2]}
        first_s = file.read()[0].seen_s
        await asyncio.sleep(400)
        assert file.read()[0].seen_s > first_s
        keeping.cancel()

    run(main())
