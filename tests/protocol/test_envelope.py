"""What vouches for an envelope: a signature, or a checksum where the connection has proved who speaks."""

import msgspec
import pytest
from open_gate import OpenGate

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.envelope import CHECKSUM_BYTES, SIGNATURE_BYTES, Domain, Envelope, seal, unseal
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.messages import Ping
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World

ALICE, MALLORY = Identity(bytes(31) + b"a"), Identity(bytes(31) + b"m")
DIRECT: list[Domain] = ["call", "reply"]
HANDED_ON: list[Domain] = ["record", "plan", "mandate", "hello"]


def sealed(domain: Domain, *, by: Identity = ALICE, body: bytes = b"body") -> bytes:
    return seal(by, domain, run="run", term=1, sequence=2, body=body)


def changed(data: bytes, **fields: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(msgspec.msgpack.decode(data, type=Envelope), **fields))


@pytest.mark.parametrize("domain", [*DIRECT, *HANDED_ON])
def test_what_is_sealed_is_opened_again(domain: Domain) -> None:
    opened = unseal(sealed(domain), domain, run="run", source=ALICE.peer_id)
    assert (opened.sender, opened.term, opened.sequence, opened.body) == (ALICE.peer_id, 1, 2, b"body")
    assert len(opened.proof) == (CHECKSUM_BYTES if domain in DIRECT else SIGNATURE_BYTES)


@pytest.mark.parametrize("domain", DIRECT)
@pytest.mark.parametrize("relayed", [False, True])
def test_nobody_speaks_to_us_in_the_name_of_another(domain: Domain, relayed: bool) -> None:
    """The transport says that it is Mallory; a checksum anybody can make."""
    with pytest.raises(RemoteError, match="in the name of") as caught:
        unseal(sealed(domain), domain, run="run", source=MALLORY.peer_id, relayed=relayed)
    assert caught.value.peer_id == MALLORY.peer_id


@pytest.mark.parametrize("domain", HANDED_ON)
def test_what_third_parties_are_shown_needs_a_signature(domain: Domain) -> None:
    for other in DIRECT:
        proof = msgspec.msgpack.decode(sealed(other), type=Envelope).proof
        with pytest.raises(RemoteError, match="signature"):
            unseal(changed(sealed(domain), proof=proof), domain, run="run", source=ALICE.peer_id)
    forged = changed(sealed(domain, by=MALLORY), sender=ALICE.peer_id)
    with pytest.raises(RemoteError, match="signature"):
        unseal(forged, domain, run="run", source=ALICE.peer_id, relayed=True)


@pytest.mark.parametrize("made_as", [*DIRECT, *HANDED_ON])
@pytest.mark.parametrize("opened_as", [*DIRECT, *HANDED_ON])
def test_what_is_made_for_one_purpose_serves_no_other(made_as: Domain, opened_as: Domain) -> None:
    if made_as != opened_as:
        with pytest.raises(RemoteError, match=r"wrong checksum|invalid signature"):
            unseal(sealed(made_as), opened_as, run="run", source=ALICE.peer_id)


@pytest.mark.parametrize(
    "fields", [{"term": 2}, {"sequence": 3}, {"body": b"bodY"}, {"proof": b""}, {"proof": bytes(8)}]
)
@pytest.mark.parametrize("domain", [*DIRECT, *HANDED_ON])
def test_damage_is_found(domain: Domain, fields: dict[str, object]) -> None:
    with pytest.raises(RemoteError, match=r"wrong checksum|invalid signature"):
        unseal(changed(sealed(domain), **fields), domain, run="run", source=ALICE.peer_id)


def test_a_call_in_the_name_of_another_reaches_no_handler() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05), acquainted=True)
        alice, mallory, listener = (world.add_peer(name) for name in ("alice", "mallory", "listener"))
        heard: list[PeerID] = []

        async def on_ping(source: PeerID, ping: Ping) -> Ping:
            heard.append(source)
            return ping

        endpoint = Endpoint(listener.identity, listener.transport, run="run", gate=OpenGate())
        endpoint.on(Ping, on_ping)
        request = seal(alice.identity, "call", run="run", term=0, sequence=1, body=msgspec.msgpack.encode(Ping()))
        raw = await mallory.transport.call(listener.peer_id, request, timeout_s=1.0)
        assert b"in the name of" in unseal(raw, "reply", run="run", source=listener.peer_id).body
        assert heard == []
        await alice.transport.call(listener.peer_id, request, timeout_s=1.0)
        assert heard == [alice.peer_id]
        raw = await alice.transport.call(listener.peer_id, request, timeout_s=1.0)
        assert b"copy of its state folder" in unseal(raw, "reply", run="run", source=listener.peer_id).body
        assert heard == [alice.peer_id]

    run(main())
