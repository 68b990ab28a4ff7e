import asyncio

import msgspec
import pytest
from open_gate import OpenGate

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.envelope import seal, unseal
from shoal.protocol.errors import Refused, RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Claim, Done, Ping, PlanHead, ProbeChunk, ReducedChunk
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World

_NOT_UTF8 = b"\xc3("


def test_what_an_endpoint_no_longer_holds_can_die_and_what_came_in_its_place_stays() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        speaker, listener = (Endpoint(peer.identity, peer.transport, run="run", gate=OpenGate()) for peer in (a, b))
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        old, new = Ear(), Ear()
        old.install(listener)
        assert await speaker.ask(b.peer_id, Ping(), Ping) == Ping()
        listener.off(old.on_ping, old.on_chunk)
        with pytest.raises(Refused, match="Ping is not answered here"):
            await speaker.ask(b.peer_id, Ping(), Ping)
        await speaker.send(b.peer_id, ProbeChunk(nonce=0, echo=False), b"\0", priority=Priority.BULK)
        await asyncio.sleep(1.0)
        assert old.chunks == 0
        old.install(listener)
        new.install(listener)
        listener.off(old.on_ping, old.on_chunk)
        assert await speaker.ask(b.peer_id, Ping(), Ping) == Ping()
        await speaker.send(b.peer_id, ProbeChunk(nonce=0, echo=False), b"\0", priority=Priority.BULK)
        await asyncio.sleep(1.0)
        assert (old.chunks, new.chunks) == (0, 1)
        assert world.failures == []

    run(main())


def test_each_call_and_frame_of_a_member_is_heard() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        speaker, listener = (Endpoint(peer.identity, peer.transport, run="run", gate=OpenGate()) for peer in (a, b))
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        heard: list[PeerID] = []
        listener.on_heard = heard.append
        with pytest.raises(Refused):
            await speaker.ask(b.peer_id, Ping(), Ping)
        await speaker.send(b.peer_id, ProbeChunk(nonce=0, echo=False), b"\0", priority=Priority.BULK)
        await asyncio.sleep(1.0)
        assert heard == [a.peer_id, a.peer_id]

    run(main())


class Ear:
    def __init__(self) -> None:
        self.chunks = 0

    def install(self, endpoint: Endpoint) -> None:
        endpoint.on(Ping, self.on_ping)
        endpoint.on_frame(ProbeChunk, self.on_chunk)

    async def on_ping(self, source: PeerID, ping: Ping) -> Ping:
        return ping

    async def on_chunk(self, source: PeerID, meta: ProbeChunk, payload: Payload) -> None:
        self.chunks += 1


def test_a_string_that_is_not_utf8_is_the_senders_fault() -> None:
    """msgspec reports it by an error of its own kind, which once went past every check of what strangers send."""

    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        speaker, listener = (Endpoint(peer.identity, peer.transport, run="run", gate=OpenGate()) for peer in (a, b))

        async def on_ping(source: str, ping: Ping) -> Ping:
            return ping

        listener.on(Ping, on_ping)
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        body = msgspec.msgpack.encode({"type": "Ping", "xy": b""}).replace(b"xy", _NOT_UTF8)
        sealed = seal(a.identity, "call", run="run", term=0, sequence=0, body=body)
        reply = await a.transport.call(b.peer_id, sealed, timeout_s=1.0)
        answer = unseal(reply, "reply", run="run", source=b.peer_id)
        assert b"does not know" in answer.body
        assert world.failures == []
        with pytest.raises(RemoteError):
            unseal(sealed.replace(b"run", _NOT_UTF8 + b"x"), "call", run="run", source=a.peer_id)
        record = seal(a.identity, "record", run="run", term=0, sequence=1, body=body)
        with pytest.raises(RemoteError):
            listener.open_record(record, source=a.peer_id)
        with pytest.raises(Refused):
            await speaker.ask(b.peer_id, Ping(pad=b""), Ping)  # sequence 0 again

    run(main())


def test_what_concerns_training_is_refused_from_who_trains_by_another_revision_and_other_calls_are_answered() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        speaker, listener = (Endpoint(peer.identity, peer.transport, run="run", gate=OpenGate()) for peer in (a, b))
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        heard: list[object] = []

        async def on_claim(source: PeerID, claim: Claim) -> Done:
            heard.append(claim)
            return Done()

        async def on_part(source: PeerID, meta: ReducedChunk, payload: Payload) -> None:
            heard.append(meta)

        async def on_ping(source: PeerID, ping: Ping) -> Ping:
            return ping

        listener.on(Claim, on_claim)
        listener.on(Ping, on_ping)
        listener.on_frame(ReducedChunk, on_part)
        claim, part = Claim(count=1), ReducedChunk(stage=0, step=1, start=0, size=1, form="fp32")
        for speakers, listeners in ((1, 0), (0, 1), (2, 1)):
            speaker.revision, listener.revision = speakers, listeners
            assert await speaker.ask(b.peer_id, Ping(), Ping) == Ping()
            with pytest.raises(Refused, match=f"trains by revision {listeners}, not {speakers}"):
                await speaker.ask(b.peer_id, claim, Done)
            await speaker.send(b.peer_id, part, b"\0", priority=Priority.BULK)
            await asyncio.sleep(1.0)
        assert heard == []
        listener.revision = 2
        await speaker.ask(b.peer_id, claim, Done)
        await speaker.send(b.peer_id, part, b"\0", priority=Priority.BULK)
        await asyncio.sleep(1.0)
        assert len(heard) == 2
        assert world.failures == []

    run(main())


def test_a_peer_that_a_later_start_speaks_for_is_displaced_and_the_later_one_is_not() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        first, later = (
            Endpoint(a.identity, peer.transport, run="run", gate=OpenGate(), first_sequence=started)
            for peer, started in ((a, 1_000_000), (b, 2_000_000))
        )
        head = PlanHead(term=1, sequence=1, digest="", coordinator=a.peer_id, addresses=())
        for endpoint in (first, later):
            endpoint.open_record(first.seal_record(head), source=a.peer_id)
        assert (first.is_displaced, later.is_displaced) == (False, False)
        for endpoint in (first, later):
            endpoint.open_record(later.seal_record(head), source=a.peer_id)
        assert (first.is_displaced, later.is_displaced) == (True, False)

    run(main())
