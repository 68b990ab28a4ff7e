"""Two peers that cannot dial each other, and whoever carries between them: real daemons on loopback.

Neither of the two knows an address of the other, so that only a peer with whom both are connected can bring them
together.
"""

import asyncio
import time

import pytest

from shoal.protocol.errors import Unreachable
from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.live.loop import run
from shoal.protocol.live.throttle import Throttle
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.membership import Excluded
from shoal.protocol.ports import Priority
from shoal.protocol.token_bucket import RateLimits

pytestmark = pytest.mark.process

MIB = 2**20


@pytest.fixture
def hidden(live_peer, monkeypatch):
    """Start two peers that know no address of each other, and others whom both know: (a, heard by a), (b, heard by b),
    carriers. Whoever starts them closes them."""

    async def start(num_carriers: int, *, relay_bytes_per_s: float = 1e9, is_hidden_for_good: bool = True, **options):
        found = await asyncio.gather(
            live_peer("a", **options),
            live_peer("b", **options),
            *(
                live_peer(f"c{number}", throttle=Throttle(RateLimits(relay_bytes_per_s=relay_bytes_per_s)))
                for number in range(num_carriers)
            ),
        )
        a, b, *carriers = found
        hides = {a[0].peer_id: b[0].peer_id, b[0].peer_id: a[0].peer_id}
        for peer, _ in (a, b):
            monkeypatch.setattr(peer, "_remember", forgetful(peer, hides[peer.peer_id]))
            if is_hidden_for_good:
                monkeypatch.setattr(peer._carried, "_seen", lambda *_: None)
            for carrier, _ in carriers:
                await peer.introduce(carrier.peer_id, carrier.addresses())
        return a, b, [carrier for carrier, _ in carriers]

    return start


def forgetful(transport: LiveTransport, hidden):
    """Remember everybody's addresses but those of `hidden`, which its own hello brings."""
    remember = transport._remember
    return lambda peer, addresses: None if peer == hidden else remember(peer, addresses)


async def close(*transports: LiveTransport) -> None:
    await asyncio.gather(*(transport.close() for transport in transports))


def carrying(carriers):
    return [carrier for carrier in carriers if carrier._carrier._carried]


def test_calls_and_frames_go_over_a_third_peer_and_directly_once_there_is_a_way(hidden, eventually):
    async def main():
        (a, heard_a), (b, heard_b), (c,) = await hidden(1)
        assert await a.call(b.peer_id, b"hello", timeout_s=30) == b"re: hello"
        assert await b.call(a.peer_id, b"back", timeout_s=30) == b"re: back"
        for number in range(8):
            await a.send(b.peer_id, b"%d" % number, bytes(4 * MIB), priority=Priority.BULK)
        await b.send(a.peer_id, b"back", b"x", priority=Priority.BULK)
        await eventually(lambda: len(heard_b.frames) == 8 and heard_a.frames == [b"back"])
        assert heard_b.frames == [b"%d" % number for number in range(8)]
        assert a._send_queues[b.peer_id].via == c.peer_id
        assert c._carrier.carried_bytes > 32 * MIB

        await c.call(b.peer_id, b"hello", timeout_s=30)  # the carrier's own are not in the way
        await a.daemon._p2p._client.connect(b.daemon._p2p.peer_id, b.daemon.visible)  # as a punched hole would
        await eventually(lambda: a._send_queues[b.peer_id].via is None)
        before = c._carrier.carried_bytes
        await a.send(b.peer_id, b"directly", bytes(MIB), priority=Priority.BULK)
        assert await a.call(b.peer_id, b"again", timeout_s=30) == b"re: again"
        await eventually(lambda: heard_b.frames[8:] == [b"directly"])
        assert c._carrier.carried_bytes < before + 100_000
        await close(a, b, c)

    run(main())


def test_frames_that_a_receiver_does_not_handle_hold_their_sender(hidden, eventually):
    async def main():
        (a, _), (b, heard), (c,) = await hidden(1)
        sends = [
            asyncio.create_task(a.send(b.peer_id, b"wait", bytes(16 * MIB), priority=Priority.BULK)) for _ in range(6)
        ]
        await eventually(lambda: sum(send.done() for send in sends) == 3)
        await asyncio.sleep(0.3)
        assert sum(send.done() for send in sends) == 3, "the fourth is more than the credit"
        assert c._carrier.carried_bytes < STREAM_CREDIT_BYTES
        heard.gate.set()
        await asyncio.gather(*sends)
        await eventually(lambda: len(heard.frames) == 6)
        await close(a, b, c)

    run(main())


def test_when_a_carrier_dies_another_takes_over(hidden, eventually):
    async def main():
        (a, _), (b, heard), carriers = await hidden(2)
        await a.call(b.peer_id, b"hello", timeout_s=30)
        await a.send(b.peer_id, b"before", b"", priority=Priority.BULK)
        await eventually(lambda: heard.frames == [b"before"])
        (dead,) = carrying(carriers)
        began_s = time.monotonic()
        await dead.close()
        while True:  # as a driver does
            try:
                await a.call(b.peer_id, b"after", timeout_s=5)
                await a.send(b.peer_id, b"after", b"", priority=Priority.BULK)
                break
            except Unreachable:
                await asyncio.sleep(0.05)
        await eventually(lambda: heard.frames == [b"before", b"after"])
        assert time.monotonic() - began_s < 20.0  # it takes a second on an idle machine
        (other,) = [carrier for carrier in carriers if carrier is not dead]
        assert a._send_queues[b.peer_id].via == other.peer_id
        await close(a, b, other)

    run(main())


def test_who_lends_nothing_carries_nothing_and_the_reason_is_said(hidden):
    async def main():
        (a, _), (b, _), (c,) = await hidden(1, relay_bytes_per_s=0.0)
        with pytest.raises(Unreachable, match="does not carry: it is no carrier"):
            await a.call(b.peer_id, b"hello", timeout_s=30)
        with pytest.raises(Unreachable) as again:  # nobody is asked so soon again: it is as if nobody could carry
            await a.call(b.peer_id, b"hello", timeout_s=30)
        assert "carry" not in str(again.value)
        await close(a, b, c)

    run(main())


def test_a_peer_that_is_put_out_loses_what_is_carried(hidden, eventually):
    async def main():
        (a, _), (b, heard), (c,) = await hidden(1)
        await a.call(b.peer_id, b"hello", timeout_s=30)
        await a.send(b.peer_id, b"", b"", priority=Priority.BULK)
        await eventually(lambda: len(heard.frames) == 1 and len(c._carrier._carried) == 2)
        c.members.exclude(Excluded({a._identity.public_key}))
        await eventually(lambda: len(c._carrier._carried) == 0)
        b.members.exclude(Excluded({a._identity.public_key}))
        with pytest.raises(Unreachable):
            await a.call(b.peer_id, b"hello", timeout_s=30)
        await close(a, b, c)

    run(main())


def test_both_dial_where_the_carrier_sees_the_other(hidden, eventually, monkeypatch):
    monkeypatch.setattr("shoal.protocol.live.routes._DIAL_AGAIN_S", (0.2,))

    async def main():
        (a, _), (b, heard), (c,) = await hidden(1, is_hidden_for_good=False)
        await a.send(b.peer_id, b"over the carrier", b"", priority=Priority.BULK)
        queue = a._send_queues[b.peer_id]
        await eventually(lambda: heard.frames == [b"over the carrier"] and queue.via is None)
        await a.send(b.peer_id, b"directly", b"", priority=Priority.BULK)
        await eventually(lambda: heard.frames == [b"over the carrier", b"directly"])
        assert queue.via is None
        await close(a, b, c)

    run(main())
