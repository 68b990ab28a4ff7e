import msgspec
import pytest

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.envelope import seal, unseal
from shoal.protocol.errors import Refused, RemoteError
from shoal.protocol.messages import Ping
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World

_NOT_UTF8 = b"\xc3("


def test_a_string_that_is_not_utf8_is_the_senders_fault() -> None:
    """msgspec reports it by an error of its own kind, which once went past every check of what strangers send."""

    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        speaker, listener = (Endpoint(peer.identity, peer.transport, run="run") for peer in (a, b))

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
