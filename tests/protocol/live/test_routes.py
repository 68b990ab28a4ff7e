"""Which way to a peer: what the daemon has, what dialling brings, and who carries."""

import asyncio
import contextlib

import pytest

from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import Identity
from shoal.protocol.limits import CARRIERS_ASKED_MAX
from shoal.protocol.live import routes as routes_module
from shoal.protocol.live.routes import NotCarried, Routes

ME, PEER, *CARRIERS = (Identity(bytes([number]) * 32).peer_id for number in range(1, 20))
ADDRESS = "/ip4/20.0.1.10/tcp/4001"
CIRCUIT = f"/ip4/20.0.1.10/tcp/4001/p2p/{CARRIERS[0]}/p2p-circuit"


class Network:
    """What a transport has for its routes, as a test wants it."""

    def __init__(self, *carriers):
        self.connections = {carrier: [ADDRESS] for carrier in carriers}
        self.answers = dict.fromkeys(carriers, True)
        self.dialled, self.asked, self.direct = [], [], []
        self.dial_s, self.dial_brings = 0.0, None
        self.routes = Routes(ME, connections=self._list, dial=self._dial, ask=self._ask, on_direct=self.direct.append)

    async def _list(self):
        return dict(self.connections)

    async def _dial(self, peer):
        self.dialled.append(peer)
        await asyncio.sleep(self.dial_s)
        if self.dial_brings is not None:
            self.connections[peer] = [self.dial_brings]
        return self.dial_brings is not None

    async def _ask(self, carrier, peer, purpose):
        self.asked.append(carrier)
        answer = self.answers[carrier]
        if answer == "silent":
            await asyncio.sleep(3600)
        if answer is not True:
            raise NotCarried(answer)
        return carrier, purpose  # stands for the stream


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(routes_module, "DIRECT_S", 0.1)
    monkeypatch.setattr(routes_module, "_LOOK_S", 0.02)
    monkeypatch.setattr(routes_module, "_DIAL_AGAIN_S", (0.1, 0.2))
    monkeypatch.setattr(routes_module, "_ASK_NEXT_S", 0.05)


def run(main, *carriers):
    async def around():
        network = Network(*carriers)
        await main(network, network.routes)
        await network.routes.close()

    asyncio.run(around())


def test_a_connection_that_is_there_is_taken_without_dialling():
    async def main(network, routes):
        network.connections[PEER] = [ADDRESS]
        assert await routes.is_direct(PEER)
        assert not network.dialled

    run(main, CARRIERS[0])


def test_what_can_be_dialled_is_not_carried():
    async def main(network, routes):
        network.dial_brings = ADDRESS
        assert await routes.is_direct(PEER)
        assert network.dialled == [PEER]

    run(main, CARRIERS[0])


def test_a_dial_that_takes_long_is_not_waited_for_where_somebody_may_carry(fast):
    async def main(network, routes):
        network.dial_s = 3600
        assert await asyncio.gather(routes.is_direct(PEER), routes.is_direct(PEER)) == [False, False]
        assert network.dialled == [PEER]
        assert await routes.carry(PEER, "frames") == (CARRIERS[0], (CARRIERS[0], "frames"))

    run(main, CARRIERS[0])


def test_where_nobody_may_carry_the_daemon_tries_and_says_why():
    async def main(network, routes):
        assert await routes.is_direct(PEER)

    run(main)


def test_a_connection_over_the_relay_of_libp2p_is_none(fast):
    async def main(network, routes):
        network.connections[PEER] = [CIRCUIT]
        network.dial_brings = CIRCUIT
        assert not await routes.is_direct(PEER)
        network.connections = {PEER: [CIRCUIT], CARRIERS[0]: [CIRCUIT]}
        with pytest.raises(Unreachable, match="no peer that is connected to us could carry"):
            await routes.carry(PEER, "frames")

    run(main, CARRIERS[0])


def test_an_introduction_in_vain_spares_the_next_one_the_dialling():
    async def main(network, routes):
        await routes.introduced(PEER)
        assert not await routes.is_direct(PEER)
        assert network.dialled == [PEER]

    run(main, CARRIERS[0])


def test_a_direct_way_is_looked_for_and_taken(fast, eventually):
    async def main(network, routes):
        assert not await routes.is_direct(PEER)
        await eventually(lambda: len(network.dialled) >= 3)
        assert not network.direct
        network.dial_brings = ADDRESS
        await eventually(lambda: network.direct == [PEER])
        assert await routes.is_direct(PEER)

    run(main, CARRIERS[0])


def test_a_peer_that_dials_us_is_reached_directly(fast, eventually):
    async def main(network, routes):
        assert not await routes.is_direct(PEER)
        network.connections[PEER] = [ADDRESS]
        await eventually(lambda: network.direct == [PEER])

    run(main, CARRIERS[0])


def test_after_a_failure_the_connection_is_looked_for_again(fast):
    async def main(network, routes):
        network.connections[PEER] = [ADDRESS]
        assert await routes.is_direct(PEER)
        del network.connections[PEER]
        assert await routes.is_direct(PEER)
        routes.failed(PEER)
        assert not await routes.is_direct(PEER)

    run(main, CARRIERS[0])


def test_whoever_comes_over_a_carrier_is_answered_over_one_and_dialled_before_long(fast, eventually):
    async def main(network, routes):
        routes.comes_over(PEER)
        assert not await routes.is_direct(PEER)
        await eventually(lambda: PEER in network.dialled)

    run(main, CARRIERS[0])


def test_of_two_who_hear_where_the_other_is_seen_one_dials_after_the_other(fast, eventually, monkeypatch):
    monkeypatch.setattr(routes_module, "_DIAL_AGAIN_S", (3600.0,))
    monkeypatch.setattr(routes_module, "_DIALS_SECOND_S", 0.5)

    async def main(network, routes):
        dialled = []
        there = Network(CARRIERS[0]).routes
        there._me, other = PEER, PEER
        for end, whom in ((routes, other), (there, ME)):

            async def dial(peer, whom=whom):
                dialled.append((whom, asyncio.get_running_loop().time()))
                return False

            end._dial = dial
            end.seen(whom)
        await eventually(lambda: len(dialled) == 2)
        (first, first_s), (_, second_s) = dialled
        assert first == min(ME, PEER), "the greater of the two dials first"
        assert second_s - first_s > 0.3
        await there.close()

    run(main, CARRIERS[0])


def test_the_next_carrier_is_asked_when_one_refuses_or_says_nothing(fast):
    async def main(network, routes):
        order = routes._in_order(PEER, network.connections)
        network.answers[order[0]] = "it carries 128 streams, its limit"
        network.answers[order[1]] = "silent"
        carrier, _ = await routes.carry(PEER, "calls")
        assert carrier == order[2]
        assert network.asked == order[:3]

    run(main, *CARRIERS[:5])


def test_when_all_refuse_the_reason_is_said_and_they_are_left_alone_for_a_while(fast):
    async def main(network, routes):
        for carrier in network.answers:
            network.answers[carrier] = "it has no connection with the other end"
        assert not await routes.is_direct(PEER)
        with pytest.raises(Unreachable, match="does not carry: it has no connection with the other end") as found:
            await routes.carry(PEER, "calls")
        assert found.value.is_silence, "what carriers say is nothing that its process has said"
        assert len(network.asked) == CARRIERS_ASKED_MAX
        assert await routes.is_direct(PEER), "the daemon says what it says"
        await routes.introduced(PEER)
        assert not await routes.is_direct(PEER), "something is new"

    run(main, *CARRIERS)


def test_a_carrier_whose_stream_broke_is_asked_last(fast):
    async def main(network, routes):
        first = routes._in_order(PEER, network.connections)[0]
        routes.shun(first)
        assert routes._in_order(PEER, network.connections)[-1] == first

    run(main, *CARRIERS[:3])


def test_both_ends_begin_with_the_same_carrier_and_pairs_with_different_ones():
    async def main(network, routes):
        there = Routes(PEER, connections=network._list, dial=network._dial, ask=network._ask, on_direct=lambda _: None)
        assert routes._in_order(PEER, network.connections) == there._in_order(ME, network.connections)
        others = [Identity(bytes([number]) * 32).peer_id for number in range(100, 130)]
        first = [routes._in_order(other, network.connections)[0] for other in others]
        assert {first.count(carrier) > 0 for carrier in CARRIERS[:3]} == {True}

    run(main, *CARRIERS[:3])


def test_who_gives_up_asking_leaves_no_stream_behind(fast):
    async def main(network, routes):
        network.answers[CARRIERS[0]] = "silent"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await routes.carry(PEER, "calls")
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "ask a carrier"]

    run(main, CARRIERS[0])
