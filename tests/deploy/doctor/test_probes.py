"""The doctor on real network daemons: each fault provoked, and named."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from open_gate import OpenGate

from shoal.deploy.doctor import probes
from shoal.deploy.doctor.diagnosis import Diagnosis, diagnose
from shoal.deploy.doctor.findings import Dial, Findings
from shoal.deploy.doctor.probes import examine_network, host_and_port
from shoal.deploy.run.run_file import DEMO_SPEC
from shoal.deploy.state.spec_record import SpecKeeper, seal_spec
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, InviteKey
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.live import about
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.loop import run
from shoal.protocol.live.tcp_queues import hosts_of
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.membership import Members
from shoal.protocol.messages import PeerStatus, StatusRequest, SwarmStatus
from shoal.protocol.spec import run_id
from shoal.protocol.toml.spec_file import load_spec
from statuses import swarm_status

pytestmark = pytest.mark.process

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
OWNER = Identity(bytes(32))
SPEC = load_spec(DEMO_SPEC)
RUN = run_id(SPEC, OWNER.peer_id)
KEY = InviteKey.make(OWNER, run=RUN)


async def looked(
    invite: Invite, *, listen: tuple[str, ...] = LOOPBACK, dial: Any = probes.dial, **options: Any
) -> Diagnosis:
    """By the network alone: torch's import tells nothing here."""
    with mock.patch.object(probes, "dial", dial):
        return diagnose(Findings(network=await examine_network(invite, listen=listen, **options), invite=invite))


def beside_a_peer(
    tmp_path: Path,
    test: Callable[[LiveTransport, Invite], Awaitable[None]],
    *,
    takes_part: str = RUN,
    keeps_spec: bool = True,
) -> None:
    """Run `test` beside a peer that takes part in a run, with an invite to `RUN`."""

    async def main() -> None:
        host = await LiveTransport.start(
            OWNER, members=Members(takes_part, OWNER.peer_id), state_dir=tmp_path / "host", listen=LOOPBACK
        )
        directory = await LiveDirectory.start(host)
        endpoint = Endpoint(OWNER, host, run=takes_part, gate=OpenGate(host.members))
        answers(endpoint, {OWNER.peer_id})
        record = seal_spec(OWNER, SPEC)
        keeper = SpecKeeper(directory, endpoint, (SPEC, record), OWNER.peer_id)
        keeping = asyncio.create_task(keeper.keep() if keeps_spec else asyncio.sleep(0))
        try:
            await test(host, Invite(PROTOCOL_VERSION, RUN, OWNER.peer_id, host.addresses(), KEY))
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await directory.close()
            await host.close()

    run(main())


def test_a_run_that_can_be_joined_has_nothing_wrong(tmp_path: Path) -> None:
    async def test(host: LiveTransport, invite: Invite) -> None:
        diagnosis = await looked(invite)
        assert diagnosis.problems == ()
        assert any(line.startswith("port: others can connect") for line in diagnosis.fine)
        assert any(line.startswith("clock: within") for line in diagnosis.fine)

    beside_a_peer(tmp_path, test)


def test_what_a_peer_says_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One daemon for several faults: each costs a second."""

    async def test(host: LiveTransport, invite: Invite) -> None:
        for ahead_s in (-60.0, 60.0):
            monkeypatch.setattr(host._about, "_wall_s", lambda ahead_s=ahead_s: about.time.time() - ahead_s)
            (problem,) = (await looked(invite)).problems
            assert problem.code == "clock"
            assert f"60.0 s {'ahead of' if ahead_s > 0 else 'behind'}" in problem.sentence
        monkeypatch.undo()

        monkeypatch.setattr(about, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
        (problem,) = (await looked(invite)).problems
        assert (problem.code, problem.side) == ("protocol-version", "you")
        monkeypatch.undo()

        async def no_way_back(host: str, port: int) -> bool:
            return False

        monkeypatch.setattr(about, "_answers", no_way_back)
        (problem,) = (await looked(invite)).problems
        assert (problem.code, problem.side) in (("nat-without-relay", "you"), ("port-closed", "you"))
        assert not problem.fatal

    beside_a_peer(tmp_path, test)


def test_a_run_whose_spec_nobody_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(host: LiveTransport, invite: Invite) -> None:
        (problem,) = (await looked(invite)).problems
        assert problem.code == "no-record"

    monkeypatch.setattr("shoal.deploy.doctor.probes._RECORD_S", 0.5)
    beside_a_peer(tmp_path, test, keeps_spec=False)


def test_another_run(tmp_path: Path) -> None:
    async def test(host: LiveTransport, invite: Invite) -> None:
        (problem,) = (await looked(invite)).problems
        assert problem.code == "wrong-run"
        assert host.run not in problem.sentence, "which one it is in is nobody's to know"

    beside_a_peer(tmp_path, test, takes_part="fedcba9876543210")


def test_two_swarms_of_one_run(tmp_path: Path) -> None:
    """Two peers of the run, each of which tells of a swarm without the other."""

    async def test(host: LiveTransport, invite: Invite) -> None:
        other = Identity(bytes([1]) * 32)
        transport = await LiveTransport.start(
            other, members=invite.members_for(other.peer_id), state_dir=tmp_path / "other", listen=LOOPBACK
        )
        endpoint = Endpoint(other, transport, run=RUN, gate=OpenGate(transport.members))
        try:
            both = invite.addresses + transport.addresses()
            named = msgspec.structs.replace(invite, addresses=both)
            for swarm, codes in (({OWNER.peer_id, other.peer_id}, []), ({other.peer_id}, ["two-swarms"])):
                answers(endpoint, swarm)
                diagnosis = await looked(named)
                assert [problem.code for problem in diagnosis.problems] == codes
        finally:
            await transport.close()

    beside_a_peer(tmp_path, test)


def answers(endpoint: Endpoint, members: set[PeerID]) -> None:
    """Let a peer tell of a swarm of these members, around itself."""
    head = PeerStatus(
        peer=endpoint.peer_id,
        name="",
        device="cpu",
        stage=0,
        version=1,
        synced=True,
        draining=False,
        seen_s_ago=0.0,
        forward_s=0.0,
        window=1,
    )
    status = swarm_status(
        run=RUN,
        name="small",
        coordinator=endpoint.peer_id,
        steps=2,
        stages=((0, 1),),
        peers=tuple(msgspec.structs.replace(head, peer=peer) for peer in sorted(members)),
        elapsed_s=1.0,
    )

    async def answer(source: PeerID, message: StatusRequest) -> SwarmStatus:
        return status

    endpoint.on(StatusRequest, answer)


def test_somebody_else_at_the_address(tmp_path: Path) -> None:
    async def test(host: LiveTransport, invite: Invite) -> None:
        stranger = Identity.generate().peer_id
        address = invite.addresses[0].replace(OWNER.peer_id, stranger)
        (problem,) = (await looked(Invite(PROTOCOL_VERSION, RUN, OWNER.peer_id, (address,)))).problems
        assert problem.code == "bootstrap-down"
        assert "somebody else answers" in problem.sentence

    beside_a_peer(tmp_path, test)


def at(place: str) -> Invite:
    return Invite(PROTOCOL_VERSION, RUN, OWNER.peer_id, (f"{place}/p2p/{OWNER.peer_id}",))


def test_nobody_at_the_address() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        (problem,) = run(looked(at(f"/ip4/127.0.0.1/tcp/{port}"))).problems
    assert problem.code == "bootstrap-down"
    assert f"127.0.0.1 port {port}" in problem.sentence


@pytest.mark.parametrize(
    ("place", "dial", "code"),
    [
        ("/dns4/train.example.org/tcp/4001", Dial.NO_NAME, "dns"),
        ("/ip4/84.12.33.7/tcp/4001", Dial.SILENT, "port-closed"),
        ("/ip4/192.168.7.7/tcp/4001", Dial.SILENT, "nat-without-relay"),
        ("/ip4/84.12.33.7/tcp/4001", Dial.NO_ROUTE, "no-route"),
    ],
)
def test_a_way_that_is_closed(place: str, dial: Dial, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dialled(host: str, port: int) -> Dial:
        return dial

    monkeypatch.setattr("shoal.deploy.doctor.local.own_addresses", lambda: ("192.168.1.2",))
    (problem,) = run(looked(at(place), dial=dialled)).problems
    assert problem.code == code


def test_no_network_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dialled(host: str, port: int) -> Dial:
        return Dial.NO_ROUTE

    monkeypatch.setattr("shoal.deploy.doctor.local.own_addresses", lambda: ())
    (problem,) = run(looked(at("/ip4/84.12.33.7/tcp/4001"), dial=dialled)).problems
    assert problem.code == "offline"


def test_a_port_of_ours_that_is_taken() -> None:
    async def dialled(host: str, port: int) -> Dial:
        return Dial.ANSWERS

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        looking = looked(at("/ip4/127.0.0.1/tcp/9"), listen=(f"/ip4/127.0.0.1/tcp/{port}",), dial=dialled)
        (problem,) = run(looking).problems
    assert problem.code == "network-daemon"
    assert "address already in use" in problem.sentence


def test_a_stranger_is_called_back_only_where_it_is_and_not_below_1024(tmp_path: Path) -> None:
    async def test(host: LiveTransport, invite: Invite) -> None:
        guest = await LiveTransport.start(
            Identity.generate(),
            members=Members("another", OWNER.peer_id),
            state_dir=tmp_path / "guest",
            initial_peers=host.addresses(),
        )
        try:
            _, port = host_and_port(guest.addresses()[0])
            for asked, answer in ((0, None), (22, None), (70_000, None), (port, True)):
                found = await about.ask_about(
                    guest.daemon, host.peer_id, me=guest.peer_id, run=RUN, port=asked, timeout_s=20
                )
                assert found.about.called_back is answer
                assert found.about.is_in_run
            p2p = await guest.daemon.p2p()
            peer = about.HivemindPeerID.from_base58(host.peer_id)
            for rubbish in (b"", b"{", b"x" * 5000, b'{"port": "x"}', b'{"port": 5000, "more": [[[1]]]}'):
                reply = await p2p._client.call_unary_handler(peer, about.ABOUT_NAME, rubbish)
                assert b'"is_in_run":false' in reply
                assert RUN.encode() not in reply
        finally:
            await guest.close()

    beside_a_peer(tmp_path, test)


@pytest.mark.parametrize("version", ["\x1b[2J", "x" * 65])
def test_what_a_stranger_calls_its_version_never_reaches_a_terminal(version: str, tmp_path: Path) -> None:
    async def test(host: LiveTransport, invite: Invite) -> None:
        host._about._shoal = version
        (problem,) = (await looked(invite)).problems
        assert problem.code == "mute"
        assert version not in problem.sentence

    beside_a_peer(tmp_path, test)


def test_a_peer_id_is_all_that_a_call_back_goes_by() -> None:
    peer = PeerID("12D3")
    assert hosts_of(["/ip4/84.12.33.7/tcp/50000"]) == ("84.12.33.7",)
    assert hosts_of([f"/ip4/84.12.33.7/tcp/1/p2p/{peer}/p2p-circuit", "/ip6/2001:db8::1/tcp/5"]) == ("2001:db8::1",)
    assert hosts_of(["/ip4/nonsense/tcp/1", "/unix/x"]) == ()
