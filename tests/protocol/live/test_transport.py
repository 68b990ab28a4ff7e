import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from open_gate import everybody

from shoal.protocol.errors import TransportError, Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.live import transport as transport_module
from shoal.protocol.live.daemon import _DetachedP2P
from shoal.protocol.live.lane_supply import LANES_FIRST
from shoal.protocol.live.loop import run
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.membership import Excluded
from shoal.protocol.ports import Priority

pytestmark = pytest.mark.process


async def introduce(a: LiveTransport, b: LiveTransport) -> None:
    await a.introduce(b.peer_id, b.addresses())
    await b.introduce(a.peer_id, a.addresses())


async def reach(transport: LiveTransport, peer: PeerID, request: bytes) -> bytes:
    """Call until somebody answers."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await transport.call(peer, request, timeout_s=30)
            except Unreachable:
                await asyncio.sleep(0.05)


def test_peers_of_another_run_are_refused_in_one_sentence(live_peer):
    async def main():
        a, _ = await live_peer("a", run="run one")
        b, heard = await live_peer("b", run="run two")
        await introduce(a, b)
        with pytest.raises(Unreachable, match="does not take part in this run, or speaks another version"):
            await a.call(b.peer_id, b"hello", timeout_s=30)
        with pytest.raises(Unreachable, match="does not take part in this run, or speaks another version"):
            await a.send(b.peer_id, b"", b"", priority=Priority.BULK)
        assert heard.calls == heard.frames == []
        await a.close()
        await b.close()

    run(main())


def test_peers_of_another_version_are_refused_in_one_sentence(live_peer, monkeypatch):
    async def main():
        a, _ = await live_peer("a")
        monkeypatch.setattr(transport_module, "PROTOCOL_VERSION", 999)
        b, _ = await live_peer("b")
        await introduce(a, b)
        with pytest.raises(Unreachable, match="speaks another version"):
            await a.call(b.peer_id, b"hello", timeout_s=30)
        await a.close()
        await b.close()

    run(main())


def test_a_dead_daemon_comes_back_as_the_same_peer(live_peer, eventually, caplog):
    async def main():
        a, heard_a = await live_peer("a")
        b, heard_b = await live_peer("b")
        told = asyncio.Event()

        async def on_restart():
            assert await b.call(a.peer_id, b"from the callback", timeout_s=30) == b"re: from the callback"
            told.set()

        b.daemon.on_restart.append(on_restart)
        await a.introduce(b.peer_id, b.addresses())
        await a.send(b.peer_id, b"before", b"", priority=Priority.BULK)
        await eventually(lambda: heard_b.frames == [b"before"])
        addresses, former = b.addresses(), b.daemon.process_id

        os.kill(former, signal.SIGKILL)
        async with asyncio.timeout(30):
            await told.wait()
        assert b.daemon.process_id != former
        assert b.addresses() == addresses
        assert await reach(a, b.peer_id, b"hello") == b"re: hello"
        await a.send(b.peer_id, b"after", b"", priority=Priority.BULK)
        await b.send(a.peer_id, b"back", b"", priority=Priority.BULK)
        await eventually(lambda: heard_b.frames == [b"before", b"after"] and heard_a.frames == [b"back"])
        await a.close()
        await b.close()

    with caplog.at_level(logging.ERROR):
        run(main())
    (line,) = [record.getMessage() for record in caplog.records]
    assert "ended with status -9; restarted as process" in line


def test_nobody_waits_for_a_daemon_that_died(live_peer, eventually):
    async def main():
        a, _ = await live_peer("a")
        b, heard = await live_peer("b")
        await introduce(a, b)
        call = asyncio.create_task(a.call(b.peer_id, b"wait", timeout_s=600))
        await a.send(b.peer_id, b"wait", bytes(STREAM_CREDIT_BYTES), priority=Priority.BULK)
        sends = [asyncio.create_task(a.send(b.peer_id, b"", b"", priority=Priority.BULK)) for _ in range(3)]
        await eventually(lambda: heard.calls == [b"wait"])
        os.kill(a.daemon.process_id, signal.SIGKILL)
        async with asyncio.timeout(30):
            outcomes = await asyncio.gather(call, *sends, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Unreachable] * 4
        heard.gate.set()
        await a.close()
        await b.close()

    run(main())


def test_a_daemon_that_hangs_is_replaced(live_peer, eventually, monkeypatch):
    monkeypatch.setattr("shoal.protocol.live.daemon._PULSE_S", 0.05)
    monkeypatch.setattr("shoal.protocol.live.daemon._PULSE_TIMEOUT_S", 0.5)
    monkeypatch.setattr("shoal.protocol.live.daemon._STOP_TIMEOUT_S", 0.2)

    async def main():
        a, _ = await live_peer("a")
        os.kill(a.daemon.process_id, signal.SIGSTOP)
        await eventually(lambda: a.daemon.restarts == 1)
        await a.close()

    run(main())


def test_a_port_in_use_is_one_clear_sentence(live_peer):
    async def main():
        a, _ = await live_peer("a")
        taken = a.addresses()[0].rpartition("/p2p/")[0]
        # libp2p would share the port without a word
        with pytest.raises(TransportError, match=r"^cannot listen on 127\.0\.0\.1 port \d+: address already in use$"):
            await live_peer("b", listen=(taken,))
        await a.close()
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            with pytest.raises(TransportError, match="address already in use"):
                await live_peer("c", listen=(f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}",))

    run(main())


def test_two_peers_cannot_share_a_state_folder(live_peer):
    async def main():
        a, _ = await live_peer("shared")
        with pytest.raises(TransportError, match="another peer runs with the state folder"):
            await live_peer("shared")
        await a.close()
        again, _ = await live_peer("shared")
        await again.close()

    run(main())


def test_an_initial_peer_that_is_down_keeps_nobody_out(live_peer):
    async def main():
        gone = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
        a, _ = await live_peer("a")
        b, _ = await live_peer("b", initial_peers=(gone, *a.addresses()))
        assert await b.call(a.peer_id, b"hello", timeout_s=30) == b"re: hello"
        await a.close()
        await b.close()

    run(main())


@pytest.mark.parametrize("order", [1, -1])
def test_all_addresses_of_an_initial_peer_are_tried(live_peer, order):
    async def main():
        a, _ = await live_peer("a")
        two = (f"/ip4/127.0.0.1/tcp/9/p2p/{a.peer_id}", *a.addresses())
        b, _ = await live_peer("b", initial_peers=two[::order])
        assert a.peer_id in await b.connected()
        assert a.addresses()[0] in b.known()[a.peer_id]
        await a.close()
        await b.close()

    run(main())


def test_an_initial_peer_that_keeps_silent_holds_nobody_up(live_peer):
    async def main():
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            mute = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{Identity.generate().peer_id}"
            a, _ = await live_peer("a")
            b, _ = await live_peer("b", initial_peers=(mute, *a.addresses()))
            assert a.peer_id in await b.connected()
            assert any(task.get_name() == "dial" for task in asyncio.all_tasks()), "it waited for the silent one"
            await b.close()
            assert not any(task.get_name() == "dial" for task in asyncio.all_tasks())
            await a.close()

    run(main())


@pytest.mark.parametrize("address", ["", "/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/1/p2p/QmNonsense", "/ip4/x/p2p/"])
def test_an_initial_peer_that_is_none_is_named(live_peer, address):
    async def main():
        with pytest.raises(TransportError, match="is not the address of a peer"):
            await live_peer("a", initial_peers=(address,))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_whoever_lost_everyone_finds_them_again(live_peer, monkeypatch):
    monkeypatch.setattr(transport_module, "_LONELY_S", 0.05)

    async def main():
        a, _ = await live_peer("a")
        b, _ = await live_peer("b", initial_peers=a.addresses())
        assert await b.connected() == {a.peer_id}
        p2p = await b.daemon.p2p()
        await p2p._client.disconnect((await p2p.list_peers())[0].peer_id)
        async with asyncio.timeout(30):
            while a.peer_id not in await b.connected():  # noqa: ASYNC110 - the daemon reports to nobody
                await asyncio.sleep(0.05)
        await a.close()
        await b.close()

    run(main())


def test_who_loses_everyone_warns_once(live_peer, monkeypatch, caplog):
    """Not at all if it never met anybody: whoever started it says so."""
    monkeypatch.setattr(transport_module, "_LONELY_S", 0.05)
    dials, met = [], set()

    async def looked(transport, look=transport_module.LiveTransport.connected):
        found = await look(transport)
        if found:
            met.add(transport.peer_id)
        return found

    async def counted(transport, dial=transport_module.LiveTransport._dial_everyone):
        reached = await dial(transport)
        dials.append(transport.peer_id)
        return reached

    monkeypatch.setattr(transport_module.LiveTransport, "connected", looked)
    monkeypatch.setattr(transport_module.LiveTransport, "_dial_everyone", counted)

    async def main():
        a, _ = await live_peer("a")
        b, _ = await live_peer("b", initial_peers=a.addresses())
        async with asyncio.timeout(30):
            while b.peer_id not in met:  # noqa: ASYNC110 - it looks by itself, every 0.05 s
                await asyncio.sleep(0.05)
            await a.close()
            c, _ = await live_peer("c", initial_peers=a.addresses())
            while dials.count(b.peer_id) < 5 or dials.count(c.peer_id) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await b.close()
        await c.close()

    run(main())
    assert [line.getMessage() for line in caplog.records if "can be reached now" in line.getMessage()] == [
        "none of the 1 known peers can be reached now"
    ]


def test_close_leaves_nothing_behind(live_peer, tmp_path):
    async def main():
        a, _ = await live_peer("a")
        b, _ = await live_peer("b")
        await introduce(a, b)
        await a.send(b.peer_id, b"", b"", priority=Priority.BULK)
        p2p = await a.daemon.p2p()
        sockets = [Path(at.value_for_protocol("unix")) for at in (p2p._daemon_listen_maddr, p2p._client_listen_maddr)]
        daemons = [psutil.Process(each.daemon.process_id) for each in (a, b)]
        assert all(path.exists() for path in sockets)
        await a.close()
        await b.close()
        assert not any(daemon.is_running() for daemon in daemons)
        assert not any(path.exists() for path in sockets)
        assert {path.name for path in (tmp_path / "a").iterdir()} == {"lock"}
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


@pytest.fixture
def far(monkeypatch):
    """Peers of this machine count as far ones."""
    monkeypatch.setattr(transport_module.LiveTransport, "_round_trip_s", lambda self, peer: 1.0)


V4, V6 = "/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize(("ours", "theirs"), [((V4,), (V4,)), ((V6,), (V6,)), ((V4, V6), (V6,))])
def test_frames_to_another_house_go_over_lanes_from_the_first_one_on(live_peer, eventually, ours, theirs):
    async def main():
        a, _ = await live_peer("a", listen=ours)
        b, heard = await live_peer("b", listen=theirs)
        await introduce(a, b)
        for number in range(5):
            await a.send(b.peer_id, b"%d" % number, bytes(1 << 20), priority=Priority.BULK)
        await eventually(lambda: len(heard.frames) == 5)
        assert heard.frames == [b"0", b"1", b"2", b"3", b"4"]
        (link,) = a._lane_supplies
        assert link.num_lanes == b._lane_door._num_lanes == LANES_FIRST
        assert link._lanes._next > 5 << 20, "all five went over lanes"
        port = b._lane_door.port
        await a.close()
        await eventually(lambda: b._lane_door._num_lanes == 0)
        await b.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1" if theirs == (V4,) else "::1", port))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


@pytest.mark.usefixtures("far")
def test_who_is_put_out_has_no_lanes_any_more(live_peer, eventually):
    async def main():
        a, _ = await live_peer("a")
        b, heard = await live_peer("b")
        await introduce(a, b)
        await a.send(b.peer_id, b"", b"", priority=Priority.BULK)
        await eventually(lambda: len(heard.frames) == 1 and b._lane_door._num_lanes == LANES_FIRST)
        (link,) = a._lane_supplies
        b.members.exclude(Excluded({a._identity.public_key}))
        await eventually(lambda: b._lane_door._num_lanes == a._lane_door._num_lanes == 0)
        assert await a._lane_door.dial(link, ("127.0.0.1",), 1) == 0
        await a.close()
        await b.close()

    run(main())


@pytest.mark.usefixtures("far")
def test_a_daemon_that_dies_takes_the_lanes_along_and_both_come_back(live_peer, eventually):
    async def main():
        a, _ = await live_peer("a")
        b, heard = await live_peer("b")
        await introduce(a, b)
        await a.send(b.peer_id, b"before", b"", priority=Priority.BULK)
        await eventually(lambda: heard.frames == [b"before"])
        os.kill(a.daemon.process_id, signal.SIGKILL)
        await eventually(lambda: b._lane_door._num_lanes == 0)
        await eventually(lambda: a.daemon.restarts == 1)
        await reach(a, b.peer_id, b"hello")
        await a.send(b.peer_id, b"after", b"", priority=Priority.BULK)
        await eventually(lambda: heard.frames == [b"before", b"after"])
        assert b._lane_door._num_lanes == LANES_FIRST
        await a.close()
        await b.close()

    run(main())


def test_peers_of_one_house_have_no_lanes(live_peer, eventually):
    async def main():
        a, _ = await live_peer("a")
        b, heard = await live_peer("b")
        await introduce(a, b)
        await a.send(b.peer_id, b"", bytes(1 << 20), priority=Priority.BULK)
        await eventually(lambda: len(heard.frames) == 1)
        assert not a._lane_supplies
        assert a._lane_door._num_lanes == b._lane_door._num_lanes == 0
        await a.close()
        await b.close()

    run(main())


@pytest.mark.parametrize("moment_s", [0.0, 0.02, 0.05, 0.1])
def test_a_close_in_the_middle_of_a_restart_leaves_nothing_behind(live_peer, tmp_path, moment_s):
    async def main():
        a, _ = await live_peer("a")
        former = a.daemon.process_id
        os.kill(former, signal.SIGKILL)
        await asyncio.sleep(moment_s)
        await a.close()
        assert psutil.Process().children() == []
        assert {path.name for path in (tmp_path / "a").iterdir()} == {"lock"}
        assert asyncio.all_tasks() == {asyncio.current_task()}
        with pytest.raises(Unreachable):
            await a.call(Identity.generate().peer_id, b"", timeout_s=30)

    run(main())


def test_a_start_that_fails_leaves_nothing_behind(live_peer, tmp_path, monkeypatch):
    async def main():
        with pytest.raises(TransportError, match=r"the network daemon did not start: .* protocol nonsense"):
            await live_peer("a", announce=("/ip4/127.0.0.1/nonsense/7",))
        last_words = ["sh", "-c", "echo first; echo out of luck >&2; exit 1"]
        monkeypatch.setattr(_DetachedP2P, "_make_process_args", lambda *_, **__: last_words)
        with pytest.raises(TransportError, match=r"^the network daemon did not start: .*out of luck$"):
            await live_peer("a")
        assert {path.name for path in (tmp_path / "a").iterdir()} == {"lock"}
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_ctrl_c_does_not_reach_the_daemon(live_peer):
    async def main():
        a, _ = await live_peer("a")
        assert os.getpgid(a.daemon.process_id) != os.getpgid(0)
        await a.close()

    run(main())


PEER = """
import asyncio, sys
from pathlib import Path
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.live.daemon import _DetachedP2P
from shoal.protocol.live.lane_supply import LANES_FIRST
from shoal.protocol.live.loop import run
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.membership import Members

async def main():
    members = Members("run", PeerID(""), is_open=True)
    transport = await LiveTransport.start(
        Identity.generate(), members=members, state_dir=Path(sys.argv[1]), use_relay=False
    )
    print(transport.addresses()[0], flush=True)
    await asyncio.Event().wait()

run(main())
"""


def test_an_announced_port_is_not_taken_for_the_one_that_the_system_chose(live_peer):
    async def main():
        a, _ = await live_peer("a", announce=("/ip4/127.0.0.1/tcp/4001",))
        assert a.daemon.listening == ("/ip4/127.0.0.1/tcp/0",)
        await a.close()

    run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="names that end with their process")
def test_a_copy_of_a_peers_folder_starts_no_second_peer(tmp_path):
    """Neither while it runs nor from a copy that was made while it did not."""

    async def main():
        identity = Identity.generate()
        first = await LiveTransport.start(identity, members=everybody("run"), state_dir=tmp_path / "a", use_relay=False)
        shutil.copytree(tmp_path / "a", tmp_path / "copy")
        daemon = first.daemon.process_id
        for name in ("copy", "older copy"):
            with pytest.raises(TransportError, match=f"runs on this machine already, as process {os.getpid()}, and"):
                await LiveTransport.start(identity, members=everybody("run"), state_dir=tmp_path / name)
        assert (first.daemon.process_id, first.daemon.restarts) == (daemon, 0)
        await first.close()
        again = await LiveTransport.start(identity, members=everybody("run"), state_dir=tmp_path / "copy")
        await again.close()

    run(main())


def test_a_killed_peer_starts_again_at_once_on_its_port_and_cleans_up(live_peer, tmp_path):
    killed = subprocess.Popen([sys.executable, "-c", PEER, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True)
    with killed:
        listen = killed.stdout.readline().strip().rpartition("/p2p/")[0]
        record = (tmp_path / "a" / "p2pd.json").read_text()
        killed.kill()

    async def main():
        a, _ = await live_peer("a", listen=(listen,))
        assert a.addresses()[0].startswith(listen)
        await a.close()

    run(main())
    assert not any(Path(word).exists() for word in record.split('"') if word.endswith(".sock"))
