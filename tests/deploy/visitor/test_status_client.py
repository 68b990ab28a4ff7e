"""`shoal status` with an invite whose peers are gone, on a machine that has met others of the run."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from open_gate import OpenGate, everybody

from shoal.deploy.state import places
from shoal.deploy.state.known_peers import KnownPeers, all_known, ways_to
from shoal.deploy.visitor.entrance import sweep
from shoal.deploy.visitor.status import ask_swarm
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, Refused
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, make_invite
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.live.loop import run
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.messages import StatusRequest, SwarmStatus
from statuses import swarm_status

RUN = "0123456789abcdef"
GONE = Identity(bytes(32)).peer_id
INVITE = Invite(PROTOCOL_VERSION, RUN, GONE, (f"/ip4/127.0.0.1/tcp/9/p2p/{GONE}",))


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_ways_are_the_invites_and_those_of_whom_any_peer_here_has_met() -> None:
    assert ways_to(INVITE) == INVITE.addresses
    others = [Identity(bytes([number]) * 32).peer_id for number in (1, 2, 3)]
    at = [f"/ip4/10.0.0.1/tcp/4001/p2p/{peer}" for peer in others]
    host, guest = places.state_root() / "hosts" / "small", places.state_root() / "runs" / RUN / "peer-1"
    KnownPeers(LiveDisk(host), RUN).note({others[0]: at[:1], GONE: INVITE.addresses}, now_s=1.0)
    KnownPeers(LiveDisk(guest), RUN).note({others[1]: at[1:2]}, now_s=2.0)
    KnownPeers(LiveDisk(guest), "another").note({others[2]: at[2:]}, now_s=3.0)
    assert ways_to(INVITE)[:2] == (*INVITE.addresses, at[1])
    assert set(ways_to(INVITE)) == {*INVITE.addresses, at[0], at[1]}
    assert all_known(places.state_root(), "another") == tuple(at[2:])


@pytest.mark.process
def test_somebody_else_of_the_run_answers(tmp_path: Path) -> None:
    identity = Identity.generate()

    async def main() -> None:
        peer = await LiveTransport.start(identity, members=everybody(RUN), state_dir=tmp_path / "peer")
        endpoint = Endpoint(identity, peer, run=RUN, gate=OpenGate())
        asked: list[PeerID] = []

        async def answer(source: PeerID, message: StatusRequest) -> SwarmStatus:
            asked.append(source)
            raise Refused(identity.peer_id, "there is no coordinator yet")

        endpoint.on(StatusRequest, answer)
        try:
            with pytest.raises(LocalError, match="unreachable"):
                await ask_swarm(INVITE)
            folder = places.state_root() / "runs" / RUN / "peer-1"
            KnownPeers(LiveDisk(folder), RUN).note({identity.peer_id: peer.addresses()}, now_s=1.0)
            with pytest.raises(LocalError, match="there is no coordinator yet"):
                await ask_swarm(INVITE)
            assert len(asked) == 1
        finally:
            await peer.close()

    run(main())


@pytest.mark.process
def test_a_watch_that_is_ended_leaves_no_socket_and_what_a_killed_one_leaves_is_swept(tmp_path: Path) -> None:
    identity = Identity.generate()
    note = places.state_root() / "visits" / "visit-1" / "p2pd.json"

    async def ended_by(how: signal.Signals, invite: str) -> list[Path]:
        """Returns: the sockets of a watch that has been ended."""
        command = (str(Path(sys.executable).with_name("shoal")), "status", invite, "--watch", "--json")
        watch = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert watch.stdout is not None
        assert b"1000" in await watch.stdout.readline()
        sockets = [Path(path) for path in json.loads(note.read_text())["sockets"]]
        assert all(path.exists() for path in sockets)
        watch.send_signal(how)
        await watch.wait()
        return sockets

    async def main() -> None:
        peer = await LiveTransport.start(identity, members=everybody(RUN), state_dir=tmp_path / "peer")
        endpoint = Endpoint(identity, peer, run=RUN, gate=OpenGate())

        async def answer(source: PeerID, message: StatusRequest) -> SwarmStatus:
            return swarm_status(coordinator=identity.peer_id, stages=((0, 1),), peers=(), steps=1000, elapsed_s=1.0)

        endpoint.on(StatusRequest, answer)
        invite = make_invite(RUN, identity.peer_id, peer.addresses())
        try:
            assert not any(path.exists() for path in await ended_by(signal.SIGTERM, invite))
            left = await ended_by(signal.SIGKILL, invite)
            assert any(path.exists() for path in left)
            await sweep()
            assert not any(path.exists() for path in left)
            assert not note.exists()
        finally:
            await endpoint.transport.close()

    run(main())
