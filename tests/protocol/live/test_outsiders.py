"""What somebody without an invite learns of a real peer, on the wire: that a shoal is here, and no more."""

from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError, P2PHandlerError
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID as HivemindPeerID
from hivemind.proto import dht_pb2

from shoal.protocol.access import Gate
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, InviteKey
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.live import about
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.loop import run
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.messages import Ping
from shoal.protocol.ports import Priority

pytestmark = pytest.mark.process

RUN = "0123456789abcdef"
HOST = Identity(bytes(range(32)))
KEY = InviteKey.make(HOST, run=RUN)
ANYWHERE = ("/ip4/0.0.0.0/tcp/0",)


async def pong(source: PeerID, message: Ping) -> Ping:
    return message


async def up(
    folder: Path, identity: Identity, *, invited: bool = True, **options: Any
) -> tuple[LiveTransport, Endpoint]:
    key = KEY if invited else InviteKey.make(identity, run=RUN)
    members = Invite(PROTOCOL_VERSION, RUN, HOST.peer_id, (), key).members_for(identity.peer_id)
    transport = await LiveTransport.start(identity, members=members, state_dir=folder / identity.peer_id, **options)
    endpoint = Endpoint(identity, transport, run=RUN, gate=Gate(members, identity.peer_id))
    endpoint.on(Ping, pong)
    return transport, endpoint


def test_a_stranger_gets_no_answer_and_a_member_does(tmp_path: Path) -> None:
    async def main() -> None:
        host, _ = await up(tmp_path, HOST)
        directory = await LiveDirectory.start(host)
        where = {"initial_peers": host.addresses()}
        member, ours = await up(tmp_path, Identity.generate(), **where)
        stranger, theirs = await up(tmp_path, Identity.generate(), invited=False, **where)
        try:
            assert await ours.ask(HOST.peer_id, Ping(), Ping) == Ping()
            with pytest.raises(Unreachable, match="failed to answer"):
                await theirs.ask(HOST.peer_id, Ping(), Ping)
            with pytest.raises(Unreachable, match="instead of sending a hello"):
                await stranger.send(HOST.peer_id, b"", b"", priority=Priority.BULK)

            p2p = await stranger.daemon.p2p()
            find = DHTProtocol._get_handle_name(None, "rpc_find")
            target = HivemindPeerID.from_base58(HOST.peer_id)
            with pytest.raises(P2PHandlerError) as refused:
                await p2p.call_protobuf_handler(target, find, dht_pb2.FindRequest(), dht_pb2.FindResponse)
            assert RUN not in str(refused.value)
            assert HOST.peer_id not in str(refused.value)
            assert await (await LiveDirectory.start(member)).join() == 1, "a member is answered"

            told = (
                await about.ask_about(stranger.daemon, HOST.peer_id, me=stranger.peer_id, run="x", timeout_s=10)
            ).about
            assert told.protocol_version == PROTOCOL_VERSION
            assert not told.is_in_run
        finally:
            await directory.close()
            for transport in (stranger, member, host):
                await transport.close()

    run(main())


@pytest.mark.parametrize("looks_for_relays", [False, True])
def test_libp2ps_own_directory_answers_nobody(looks_for_relays: bool, tmp_path: Path) -> None:
    """It handed everybody's addresses to whoever asked. p2pd refuses to look for relays without one."""

    async def main() -> None:
        host, _ = await up(tmp_path, HOST)
        options: dict[str, Any] = {"initial_peers": host.addresses()}
        asked, _ = await up(
            tmp_path, Identity.generate(), **options, **({"listen": ANYWHERE} if looks_for_relays else {})
        )
        stranger, _ = await up(tmp_path, Identity.generate(), invited=False, initial_peers=asked.addresses())
        try:
            assert asked.peer_id in await stranger.connected()
            p2p = await stranger.daemon.p2p()
            for name in ("/ipfs/kad/1.0.0", "/ipfs/lan/kad/1.0.0"):
                with pytest.raises(P2PDaemonError, match="protocols not supported"):
                    await p2p.call_binary_stream_handler(HivemindPeerID.from_base58(asked.peer_id), name)
        finally:
            for transport in (stranger, asked, host):
                await transport.close()

    run(main())
