import asyncio
import contextlib
import logging
import os
import signal
import time
from types import SimpleNamespace

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID as HivemindPeerID
from hivemind.utils.serializer import MSGPackSerializer

from shoal.protocol.errors import TransportError
from shoal.protocol.limits import KEY_BYTES_MAX, RECORD_BYTES_MAX
from shoal.protocol.live import directory as directory_module
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.loop import run
from shoal.protocol.live.record_store import KeyRule

pytestmark = pytest.mark.process


async def close(*pairs) -> None:
    for transport, directory in pairs:
        await directory.close()
        await transport.close()


async def joined(live_peer, num_peers: int, **options) -> list:
    """Peers that all joined by the first."""
    pairs = []
    for number in range(num_peers):
        initial_peers = pairs[0][0].addresses() if pairs else ()
        transport, _ = await live_peer(f"peer {number}", initial_peers=initial_peers)
        pairs.append((transport, await LiveDirectory.start(transport, **options)))
    return pairs


def test_a_directory_survives_the_daemon_under_it(live_peer, eventually):
    async def main():
        pairs = await joined(live_peer, 3)
        (_, first), (transport, second), (_, third) = pairs
        assert await second.store("key", "sub", b"before", expires_in_s=60)
        node_id = second._node.node_id
        os.kill(transport.daemon.process_id, signal.SIGKILL)
        await eventually(lambda: transport.daemon.restarts == 1)
        assert second._node.node_id == node_id
        assert await second.get("key") == {"sub": b"before"}
        assert second.num_neighbours > 0
        assert await second.store("key", "sub", b"after", expires_in_s=90)
        for directory in (first, second, third):
            assert await directory.get("key") == {"sub": b"after"}
        await close(*pairs)

    run(main())


def test_directories_that_began_apart_become_one(live_peer, eventually, monkeypatch):
    monkeypatch.setattr(directory_module, "_JOIN_AGAIN_S", 0.1)

    async def main():
        (one, _), (two, _) = await live_peer("one"), await live_peer("two")
        first, second = await LiveDirectory.start(one), await LiveDirectory.start(two)
        assert await first.store("key", "sub", b"value", expires_in_s=60)
        assert await second.get("key") == {}
        await two.introduce(one.peer_id, one.addresses())
        await eventually(lambda: second.num_neighbours == 1)
        assert await second.get("key") == {"sub": b"value"}
        await close((one, first), (two, second))

    run(main())


def test_a_directory_closes_though_a_cancellation_is_lost(live_peer, monkeypatch):
    """As `asyncio.wait_for`, with which hivemind waits, loses one that comes together with the reply."""
    monkeypatch.setattr(directory_module, "_JOIN_AGAIN_S", 0.01)

    async def main():
        transport, _ = await live_peer("one")
        directory = await LiveDirectory.start(transport)
        is_joining = asyncio.Event()

        async def join() -> int:
            is_joining.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60.0)
            return 0

        monkeypatch.setattr(directory, "join", join)
        await is_joining.wait()
        async with asyncio.timeout(10.0):
            await close((transport, directory))

    run(main())


def test_records_outlive_the_peer_that_stored_them(live_peer):
    async def main():
        first, second, third = await joined(live_peer, 3)
        assert await second[1].store("key", "sub", b"value", expires_in_s=60)
        await close(second)
        assert await first[1].get("key") == {"sub": b"value"}
        assert await third[1].get("key") == {"sub": b"value"}
        await close(first, third)

    run(main())


def test_a_stranger_cannot_replace_all_records_of_a_key(live_peer):
    async def main():
        first, second = await joined(live_peer, 2)
        assert await first[1].store("key", "sub", b"value", expires_in_s=60)
        stranger = second[1]._node
        stranger.protocol.record_validator = None
        assert not await stranger.store("run/key", b"mine", time.time() + 600, exclude_self=True)
        assert await first[1].get("key") == {"sub": b"value"}
        await close(first, second)

    run(main())


def test_what_the_run_does_not_accept_is_neither_kept_nor_read(live_peer):
    async def main():
        rule = KeyRule(accept=lambda subkey, value: value.startswith(subkey.encode()))
        first, second = await joined(live_peer, 2, accept={"key": rule})
        assert await first[1].store("key", "a", b"a is honest", expires_in_s=60)
        assert not await first[1].store("another key", "a", b"a is honest", expires_in_s=60)
        stranger = second[1]._node
        stranger.protocol.record_validator = None
        await stranger.store("run/key", b"forged", time.time() + 600, subkey="a")
        assert await first[1].get("key") == {"a": b"a is honest"}
        await close(first, second)

    run(main())


def test_a_key_that_a_stranger_floods_can_still_be_read(live_peer):
    async def main():
        host, stranger = await joined(live_peer, 2)
        assert await host[1].store("key", "host", b"the spec", expires_in_s=60)
        node = stranger[1]._node
        node.protocol.record_validator = None
        for start in range(0, 200, 50):
            records = range(start, start + 50)
            await node.store_many(
                ["run/key"] * 50,
                [bytes(RECORD_BYTES_MAX)] * 50,
                time.time() + 3600.0,
                subkeys=[f"{number}" for number in records],
                exclude_self=True,
            )
        await close(stranger)
        late, _ = await live_peer("late", initial_peers=host[0].addresses())
        directory = await LiveDirectory.start(late)
        found = await directory.get("key")
        assert found["host"] == b"the spec"
        assert 50 < len(found) <= KEY_BYTES_MAX / RECORD_BYTES_MAX
        await close((late, directory), host)

    run(main())


def test_what_a_stranger_wants_cached_hides_nothing(live_peer):
    async def main():
        host, stranger = await joined(live_peer, 2)
        assert await host[1].store("key", "host", b"the spec", expires_in_s=60)
        stored = await stranger[1]._node.protocol.call_store(
            HivemindPeerID.from_base58(host[0].peer_id),
            [DHTID.generate(source="run/key")],
            [MSGPackSerializer.dumps(b"mine")],
            time.time() + 3600.0,
            subkeys=["stranger"],
            in_cache=True,
        )
        assert stored == [False]
        await close(stranger)
        late, _ = await live_peer("late", initial_peers=host[0].addresses())
        directory = await LiveDirectory.start(late)
        assert await directory.get("key") == {"host": b"the spec"}
        await close((late, directory), host)

    run(main())


def test_two_runs_on_one_directory_do_not_meet(live_peer):
    async def main():
        one, _ = await live_peer("one", run="one")
        two, _ = await live_peer("two", run="two", initial_peers=one.addresses())
        first, second = await LiveDirectory.start(one), await LiveDirectory.start(two)
        assert second.num_neighbours == 1
        assert await first.store("key", "sub", b"one", expires_in_s=60)
        assert await second.get("key") == {}
        await close((one, first), (two, second))

    run(main())


@pytest.mark.parametrize(("shift_s", "complaint"), [(10.0, "10.0 s ahead of"), (-7.0, "7.0 s behind"), (1.0, None)])
def test_a_clock_that_is_off_is_named(live_peer, monkeypatch, caplog, shift_s, complaint):
    async def main():
        first, _ = await live_peer("a")
        directory = await LiveDirectory.start(first)
        monkeypatch.setattr(directory_module, "time", SimpleNamespace(time=lambda: time.time() + shift_s))
        second, _ = await live_peer("b", initial_peers=first.addresses())
        other = await LiveDirectory.start(second)
        await close((second, other), (first, directory))

    with caplog.at_level(logging.ERROR):
        run(main())
    lines = [record.getMessage() for record in caplog.records]
    if complaint is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(f"this machine's clock is {complaint} ")


def test_a_closed_directory_says_so(live_peer):
    async def main():
        ((transport, directory),) = await joined(live_peer, 1)
        await directory.close()
        await directory.close()
        with pytest.raises(TransportError, match="directory is closed"):
            await directory.get("key")
        await transport.close()
        with pytest.raises(TransportError, match="closed"):
            await directory.store("key", "sub", b"", expires_in_s=60)

    run(main())
