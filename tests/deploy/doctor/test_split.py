"""Two swarms that should be one."""

import asyncio
from collections.abc import Sequence

from shoal.deploy.doctor.diagnosis import split_of
from shoal.deploy.doctor.split_watch import LOOK_S, SplitWatch
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.messages import StatusRequest, SwarmStatus
from shoal.protocol.sim.loop import run
from statuses import peer_status, swarm_status

PEERS = [Identity(number.to_bytes(32, "big")).peer_id for number in range(20)]


def status(*members: int) -> SwarmStatus:
    peers = tuple(peer_status(PEERS[member]) for member in members)
    return swarm_status(coordinator=PEERS[members[0]], stages=((0, 1),), peers=peers, elapsed_s=1.0)


class Swarms:
    """Who answers what, and who is connected to us. Stands for the endpoint and the network."""

    peer_id = PEERS[0]

    def __init__(self) -> None:
        self.swarms: list[tuple[int, ...]] = [(0, 1, 2)]
        self.others: set[int] = set()
        self.near: set[int] = set()
        self.met: list[PeerID] = []
        self.asked: list[PeerID] = []
        self.said: list[str] = []

    def known(self) -> dict[PeerID, tuple[str, ...]]:
        return {PEERS[peer]: (f"/ip4/10.0.0.1/tcp/{peer + 1}/p2p/{PEERS[peer]}",) for peer in {0, 1, 2, *self.others}}

    async def connected(self) -> set[PeerID]:
        return {PEERS[peer] for peer in self.near}

    async def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        self.met.append(peer)

    async def own(self) -> SwarmStatus:
        return status(*self.swarms[0])

    async def ask(self, peer: PeerID, request: StatusRequest, reply: type[SwarmStatus]) -> SwarmStatus:
        self.asked.append(peer)
        for swarm in self.swarms:
            if PEERS.index(peer) in swarm:
                return status(*swarm)
        raise Unreachable(peer, "it is dead")

    def watch(self) -> SplitWatch:
        return SplitWatch(self, self, own_status=self.own, say=self.said.append)


def test_disjoint_members_are_two_swarms_and_a_common_one_makes_them_one() -> None:
    ours = status(0, 1)
    assert split_of([ours, status(2, 3)]) is not None
    assert split_of([ours, status(2, 1)]) is None  # one of them has not heard the news
    assert split_of([ours, status(0, 1), status(2, 3)]) is not None
    assert split_of([ours]) is None


def test_another_swarm_is_said_once_until_it_is_gone() -> None:
    swarms = Swarms()

    async def main() -> None:
        watching = asyncio.create_task(swarms.watch().run())
        await asyncio.sleep(1.5 * LOOK_S)
        assert swarms.said == []
        assert swarms.asked == []  # nobody is known whom our swarm does not name
        swarms.swarms.append((7, 8))
        swarms.others = {7}
        await asyncio.sleep(3 * LOOK_S)
        assert ["two swarms" in said for said in swarms.said] == [True]
        assert PEERS[7] in swarms.met
        swarms.swarms = [(0, 1, 2, 7, 8)]
        await asyncio.sleep(2 * LOOK_S)
        swarms.swarms = [(0, 1, 2), (7, 8)]
        await asyncio.sleep(2 * LOOK_S)
        assert len(swarms.said) == 2
        watching.cancel()

    run(main())


def test_the_dead_are_asked_in_turns_and_cost_little() -> None:
    swarms = Swarms()
    swarms.others = set(range(5, 17))

    async def main() -> None:
        watch = swarms.watch()
        for _ in range(3):
            assert await watch.look() is None
        assert sorted(swarms.asked) == sorted(PEERS[5:17])
        swarms.asked.clear()
        swarms.near = {10}
        await watch.look()
        assert swarms.asked[0] == PEERS[10]
        assert len(swarms.asked) == 4

    run(main())


def test_between_two_coordinators_nothing_is_said() -> None:
    swarms = Swarms()

    async def nobody() -> SwarmStatus:
        raise Unreachable(PEERS[0], "there is no coordinator")

    swarms.own = nobody
    assert run(swarms.watch().look()) is None
