import asyncio
from types import SimpleNamespace

import pytest

from shoal.protocol import reconnection
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import Identity
from shoal.protocol.live import redial
from shoal.protocol.live.loop import run
from shoal.protocol.live.redial import Redialer
from shoal.protocol.live.throttle import Throttle
from shoal.protocol.reconnection import DialOutcome, Todo, Way
from shoal.protocol.token_bucket import RateLimits

BACKOFF = "failed to dial 12D3: all dials failed\n  * [/ip4/20.0.2.10/tcp/4001] dial backoff"
REFUSED = "* [/ip4/127.0.0.1/tcp/4001] dial tcp4 127.0.0.1:4001: connect: connection refused"
SILENT = "* [/ip4/20.0.2.10/tcp/4001] dial tcp4 0.0.0.0:4001->20.0.2.10:4001: i/o timeout"
BOTH_OPENED = "* [/ip4/20.0.2.10/tcp/4001] failed to negotiate security protocol: noise: message is too short"


async def three(live_peer, *, carrier=""):
    """Of a plan; the third is there so that nobody is alone: who is alone dials everybody again in any case."""
    lends = {carrier: {"throttle": Throttle(RateLimits(relay_bytes_per_s=1e9))}}
    peers = [(await live_peer(name, **lends.get(name, {})))[0] for name in "abc"]
    for peer in peers:
        for other in peers:
            await peer.introduce(other.peer_id, other.addresses())
    return peers


async def until_connected(peer, other):
    async with asyncio.timeout(30):
        while other.peer_id not in await peer.connected():  # noqa: ASYNC110 - the daemon wakes nobody
            await asyncio.sleep(0.02)


async def close(*peers):
    await asyncio.gather(*(peer.close() for peer in peers))


@pytest.mark.process
def test_a_member_of_the_plan_that_is_lost_is_connected_again_though_nobody_calls_it(live_peer):
    async def main():
        a, b, c = await three(live_peer)
        a.want([a.peer_id, b.peer_id, c.peer_id])
        await (await b.daemon.p2p())._client.disconnect(redial.hivemind_id(a.peer_id))
        await until_connected(a, b)
        assert await a.call(b.peer_id, b"hello", timeout_s=30) == b"re: hello"
        await close(a, b, c)

    run(main())


@pytest.mark.process
def test_a_call_over_a_connection_that_we_close_as_dead_is_unanswered_and_not_refused(live_peer):
    async def main():
        a, b, c = await three(live_peer)
        a.want([b.peer_id])
        waiting = asyncio.create_task(a.call(b.peer_id, b"wait", timeout_s=600.0))
        await asyncio.sleep(0.5)
        a._redialer._core.lost(b.peer_id, redial._now_s())
        await a._redialer.drop(b.peer_id)
        with pytest.raises(Unreachable, match="nothing came back") as found:
            await waiting  # at once, and not when its time is up
        assert found.value.is_silence
        assert await a.call(b.peer_id, b"hello", timeout_s=30) == b"re: hello"
        await close(a, b, c)

    run(main())


@pytest.mark.process
def test_a_member_whose_process_is_gone_is_refused_at_once(live_peer, eventually):
    async def main():
        a, b, c = await three(live_peer)
        a.want([b.peer_id, c.peer_id])
        await b.close()
        await eventually(lambda: a._redialer._core.is_absent(b.peer_id))
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(Unreachable, match="none of its addresses answers"):
            await a.call(b.peer_id, b"hello", timeout_s=30)
        assert asyncio.get_running_loop().time() - began_s < 10  # it did not wait for its time to be up
        await close(a, c)

    run(main())


@pytest.mark.process
def test_whoever_comes_back_has_us_close_what_it_left_behind(live_peer, eventually, monkeypatch):
    async def main():
        a, b, c = await three(live_peer)
        # b does not look for a, and so cannot find by itself that a is lost, after which it would close nothing.
        a.want([a.peer_id, b.peer_id, c.peer_id])
        await until_connected(a, b)
        # As if b still had the connection from before, which cannot be made on one machine.
        monkeypatch.setattr(redial, "only_direct", lambda addresses: (*addresses, "the old one"))
        dropped = b._redialer.drops(a.peer_id)
        a._redialer._core.lost(b.peer_id, redial._now_s())
        await a._redialer.drop(b.peer_id)
        await eventually(lambda: b._redialer.drops(a.peer_id) > dropped)
        monkeypatch.undo()
        await until_connected(a, b)
        await close(a, b, c)

    run(main())


@pytest.mark.process
def test_whoever_has_something_carried_to_us_has_lost_us_and_is_dialled_again(live_peer, eventually, monkeypatch):
    async def main():
        monkeypatch.setattr(reconnection, "FRESH_S", 0.0)
        a, b, c = await three(live_peer, carrier="c")
        a.want([a.peer_id, b.peer_id, c.peer_id])
        await eventually(lambda: b.peer_id in a._redialer._core._unchanged)  # a has seen that it is connected
        dropped = a._redialer.drops(b.peer_id)
        # As if the network daemon of b had no connection with a any more, and that of a did not know it.
        assert await b._carried_calls.call(a.peer_id, b"hello") == b"re: hello"
        assert a._redialer.drops(b.peer_id) == dropped + 1
        await eventually(lambda: not a._redialer._core.is_absent(b.peer_id))
        await until_connected(a, b)
        assert await a.call(b.peer_id, b"hello", timeout_s=30) == b"re: hello"
        await close(a, b, c)

    run(main())


def test_nothing_is_dialled_where_there_is_no_way():
    assert redial._has_route("/ip4/127.0.0.1/tcp/4001")
    assert redial._has_route("/dns4/example.org/tcp/4001")
    assert not redial._has_route("/ip4/255.255.255.255/tcp/4001")


def test_the_kernel_is_asked_only_about_connections_that_leave_this_machine(monkeypatch):
    near, far = (Identity(bytes([number] * 32)).peer_id for number in (1, 2))
    places = {near: ["/ip4/127.0.0.1/tcp/4001", "/ip6/::1/tcp/4001"]}
    asked, told, found = [], [], {"192.0.2.7 4001": {"socket": Way(is_owed=False, silent_s=9.0, local="192.0.2.1")}}
    monkeypatch.setattr(redial, "ways_of", lambda process_id: asked.append(process_id) or found)

    class Daemon:
        process_id, visible = 7, ()

        async def list_peers(self):
            return [SimpleNamespace(peer_id=redial.hivemind_id(peer), addrs=at) for peer, at in places.items()]

    async def main():
        daemon = Daemon()
        redialer = Redialer(daemon, me=near, addresses=lambda peer: (), known=lambda: (), again="again")
        redialer._core = SimpleNamespace(look=lambda connections, *_, **__: told.append(connections) or Todo())
        await redialer._look(daemon, stood_still_s=9.0, was_suspended=False)
        assert not asked
        assert [way.silent_s for way in told[-1][near].values()] == [0.0, 0.0], "they are alive"
        places[far] = ["/ip4/192.0.2.7/tcp/4001", "/ip4/192.0.2.8/tcp/4001/p2p/QmRelay/p2p-circuit"]
        await redialer._look(daemon, stood_still_s=9.0, was_suspended=False)
        assert asked == [7]
        assert told[-1][far] == found["192.0.2.7 4001"] | {places[far][1]: None}
        await redialer.close()

    run(main())


@pytest.mark.process
def test_the_redialer_ends_with_its_transport(live_peer):
    async def main():
        a, _ = await live_peer("a")
        assert isinstance(a._redialer, Redialer)
        await a.close()
        assert not [task for task in asyncio.all_tasks() if "stay connected" in task.get_name()]

    run(main())


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        (REFUSED, DialOutcome.REFUSED),
        ("* [/ip4/20.0.2.10/tcp/4001] peer id mismatch: expected 12D3, got 12D4", DialOutcome.REFUSED),
        (SILENT, DialOutcome.NO_ANSWER),
        (f"{REFUSED}\n{SILENT}", DialOutcome.NO_ANSWER),
        ("failed to dial: context deadline exceeded", DialOutcome.NO_ANSWER),
        (BOTH_OPENED, DialOutcome.NO_ANSWER),
        (BACKOFF, None),
        (f"{REFUSED}\n{BACKOFF}", None),
    ],
)
def test_what_the_daemon_says_of_a_dial(words, outcome):
    assert redial.outcome_of(words) is outcome
